"""MuLoCo beside a restatement of all ranks in NumPy, bit for bit: Muon inside, DiLoCo with few bits around it."""

import math

import numpy as np
import pytest
from mpi4py import MPI
from restated import averaged

import mpiagg
from mpiagg.optimizers import SGD, Muon

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
SHAPES = [(12, 8), (8, 20)]
PERIOD, RATE, MOMENTUM, INNER = 4, 0.7, 0.6, 0.02


def weights():
    random = np.random.default_rng(3)
    return [random.standard_normal(shape) for shape in SHAPES]


def slopes(rank, step, x):
    """The gradients of half of the square distance from a point that changes with the rank and the step."""
    random = np.random.default_rng([rank, step])
    return [each - 0.1 * random.standard_normal(each.shape) - 1 for each in x]


def muon(x, velocity, gradient):
    """Step a matrix as the paper of Muon has it (algorithm 2), with Nesterov's momentum of 0.95."""
    velocity += (gradient - velocity) * (1 - 0.95)
    looked_ahead = gradient + (velocity - gradient) * 0.95
    turned = looked_ahead.shape[0] > looked_ahead.shape[1]
    step = looked_ahead.T if turned else looked_ahead
    step = step / np.sqrt((step * step).sum())
    for _ in range(5):
        square = step @ step.T
        step = 3.4445 * step + (-4.7750 * square + 2.0315 * (square @ square)) @ step
    x -= (step.T if turned else step) * (INNER * math.sqrt(max(1, x.shape[0] / x.shape[1])))


class Everyone:
    """MuLoCo as its paper has it (algorithm 1): each rank's matrices, and the common point as a vector."""

    def __init__(self, wire):
        self.x = [weights() for _ in range(SIZE)]
        self.velocities = [[np.zeros(shape) for shape in SHAPES] for _ in range(SIZE)]
        self.wire, self.anchor, self.outer = wire, None, 0.0
        self.left = [np.zeros(sum(map(math.prod, SHAPES))) for _ in range(SIZE)]

    def step(self, t):
        for rank, x in enumerate(self.x):
            for each, velocity, gradient in zip(x, self.velocities[rank], slopes(rank, t, x), strict=True):
                muon(each, velocity, gradient)
        vectors = [np.concatenate([each.ravel() for each in x]) for x in self.x]
        if t == 1:
            self.anchor = averaged(vectors)
        elif t % PERIOD == 0:
            mean = averaged([self.anchor - x for x in vectors], self.wire, self.left)
            self.outer = MOMENTUM * self.outer + mean
            self.anchor = self.anchor - RATE * mean - RATE * MOMENTUM * self.outer
        else:
            return
        cut = math.prod(SHAPES[0])
        for x in self.x:
            x[0][...], x[1][...] = self.anchor[:cut].reshape(SHAPES[0]), self.anchor[cut:].reshape(SHAPES[1])


def run(wire, optimizer, steps, everyone=None):
    mine = weights()
    with mpiagg.LocalSGD(
        period=PERIOD,
        outer_learning_rate=RATE,
        outer_momentum=MOMENTUM,
        wire=wire,
        error_feedback=True,
        algorithm="direct",
    ) as aggregation:
        for t in range(1, steps + 1):
            optimizer.step(mine, slopes(RANK, t, mine))
            aggregation.aggregate(mine)
            if everyone is not None:
                everyone.step(t)
                for x, wanted in zip(mine, everyone.x[RANK], strict=True):
                    assert x.tobytes() == wanted.tobytes(), t
    return mine


@pytest.mark.parametrize("wire", ["u2", "u4", "u8"])
def test_it_is_its_restatement_bit_for_bit(wire):
    run(wire, Muon(lr=INNER), 17, Everyone(wire))


def test_another_inner_optimizer_would_be_found():
    with pytest.raises(AssertionError):
        run("u2", SGD(lr=INNER), 3, Everyone("u2"))


def test_it_comes_near_to_the_optimum_in_two_bits():
    before = max(np.abs(x - 1).max() for x in weights())
    after = max(np.abs(x - 1).mean() for x in run("u2", Muon(lr=INNER), 400))
    assert after < 0.1 * before
