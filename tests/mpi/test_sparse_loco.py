"""SparseLoCo beside a restatement of all ranks in NumPy, bit for bit."""

import numpy as np
import pytest
from mpi4py import MPI
from restated import averaged, through
from support import refused

import mpiagg
from mpiagg.aggregation import sparse_loco

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
SHAPES = [(30, 40), (), (7,), (0, 3), (600,)]
LENGTHS = [1200, 1, 7, 0, 600]


def noise(rank, step=0, dtype=np.float64):
    return np.random.default_rng([rank, step]).standard_normal(sum(LENGTHS)).astype(dtype)


def split(vector):
    parts = np.split(vector, np.cumsum(LENGTHS)[:-1])
    return [part.reshape(shape).copy() for part, shape in zip(parts, SHAPES, strict=True)]


def joined(tensors):
    return np.concatenate([x.ravel() for x in tensors])


def add(tensors, vector):
    for tensor, change in zip(tensors, split(vector), strict=True):
        np.add(tensor, change, out=tensor)


def chosen(kept, chunk, ratio):
    """Return the coordinates of the largest values of each chunk of each tensor."""
    places = []
    for stop, length in zip(np.cumsum(LENGTHS), LENGTHS, strict=True):
        for start in range(stop - length, stop, chunk):
            part = np.abs(kept[start : min(start + chunk, stop)])
            k = int(np.ceil(ratio * len(part)))
            places += sorted(start + np.argsort(-part, kind="stable")[:k])
    return np.array(places, int)


class Everyone:
    """SparseLoCo as its paper has it (algorithm 1), of all ranks at once."""

    def __init__(self, weights, *, period, ratio, chunk, decay, rate, wire):
        self.period, self.ratio, self.chunk, self.decay, self.rate, self.wire = period, ratio, chunk, decay, rate, wire
        self.anchor = averaged(weights)
        self.x = [self.anchor.copy() for _ in weights]
        self.kept = [np.zeros_like(x) for x in weights]

    def step(self, t):
        if t == 1 or t % self.period:
            return
        total = np.zeros_like(self.anchor)
        for rank, x in enumerate(self.x):
            self.kept[rank] = self.decay * self.kept[rank] + (self.anchor - x)
            places = chosen(self.kept[rank], self.chunk, self.ratio)
            sent = self.kept[rank][places]
            sent = sent if self.wire is None else through(self.wire, sent)
            self.kept[rank][places] -= sent
            total[places] += sent
        self.anchor = self.anchor - self.rate * (total / self.anchor.dtype.type(len(self.x)))
        self.x = [self.anchor.copy() for _ in self.x]


HOW = {"period": 3, "ratio": 0.05, "chunk": 64, "decay": 0.95, "rate": 1.0, "wire": "u2"}
CASES = [
    HOW,
    {**HOW, "wire": None},
    {**HOW, "wire": "u4", "rate": 0.7, "period": 1},
    {**HOW, "chunk": 4096, "decay": 1},
]


def made(how, **more):
    return mpiagg.SparseLoCo(**{{"rate": "outer_learning_rate"}.get(key, key): x for key, x in how.items()}, **more)


@pytest.mark.parametrize("together", [200, sparse_loco.VALUES])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("how", CASES)
def test_it_is_its_restatement_bit_for_bit(how, dtype, together, monkeypatch):
    monkeypatch.setattr(sparse_loco, "VALUES", together)
    everyone, mine = Everyone([noise(rank, 0, dtype) for rank in range(SIZE)], **how), split(noise(RANK, 0, dtype))
    with made(how) as aggregation:
        aggregation._weights.algorithm = "direct"  # the first average, in the order that is restated
        for t in range(1, 11):
            if t > 1:
                everyone.x = [x + noise(rank, t, dtype) for rank, x in enumerate(everyone.x)]
                add(mine, noise(RANK, t, dtype))
            aggregation.aggregate(mine)
            everyone.step(t)
            assert joined(mine).tobytes() == everyone.x[RANK].tobytes(), t
        (kept,) = aggregation.state_dict()["memories"][0]["state"]["residuals"]
        assert kept.tobytes() == everyone.kept[RANK].tobytes()


@pytest.mark.parametrize(
    "wrong", [{"ratio": 0.1}, {"chunk": 65}, {"decay": 0.9}, {"rate": 0.99}, {"wire": "u4"}, {"period": 2}]
)
def test_the_restatement_would_find_a_fault(wrong):
    good, bad = (Everyone([noise(rank) for rank in range(3)], **how) for how in (HOW, {**HOW, **wrong}))
    for t in range(1, 8):
        for everyone in (good, bad):
            everyone.x = [x + noise(rank, t) for rank, x in enumerate(everyone.x)]
            everyone.step(t)
    assert np.abs(good.anchor - bad.anchor).max() > 1e-3


def test_what_it_sends():
    x = np.zeros(2**16, np.float32)
    with mpiagg.SparseLoCo(period=2) as aggregation:
        aggregation.aggregate([x])
        before = aggregation.bytes_sent
        aggregation.aggregate([x])
        chosen_values = 2**16 // 32
        assert aggregation.bytes_sent - before == (SIZE - 1) * chosen_values * (7 + 2.25) / 8


def test_training_finds_the_optimum_of_all():
    target = noise(RANK, 99)
    optimum = COMM.allreduce(target) / SIZE
    x = [noise(RANK, 98)]
    with mpiagg.SparseLoCo(period=4, ratio=0.2, chunk=64) as aggregation:
        for _ in range(800):
            x[0] -= 0.01 * (x[0] - target)
            aggregation.aggregate(x)
    assert np.sqrt(np.mean((x[0] - optimum) ** 2)) < 0.1 * np.sqrt(np.mean(optimum**2))


@pytest.mark.parametrize("more", [{}, {"fragments": 2, "delay": 2, "mixing": 0.5}])
@pytest.mark.parametrize("stop", [2, 4, 5])
def test_a_saved_state_goes_on_with_the_same_bits(stop, more):
    def some_steps(aggregation, mine, steps):
        for step in steps:
            add(mine, noise(RANK, step))
            aggregation.aggregate(mine)

    straight, resumed = split(noise(RANK)), split(noise(RANK))
    with made(HOW, **more) as aggregation:
        some_steps(aggregation, straight, range(12))
    with made(HOW, **more) as aggregation:
        some_steps(aggregation, resumed, range(stop))
        state = aggregation.state_dict()
    with made(HOW, **more) as aggregation:
        aggregation.load_state_dict(state)
        some_steps(aggregation, resumed, range(stop, 12))
    assert joined(resumed).tobytes() == joined(straight).tobytes()


def test_what_is_not_finite_is_not_remembered():
    x = np.ones(1000)
    with mpiagg.SparseLoCo(period=1) as aggregation:
        aggregation.aggregate([x])
        x[3] = np.nan if RANK == 0 else 2
        aggregation.aggregate([x])
        assert np.isnan(x[3])
        (kept,) = aggregation.state_dict()["memories"][0]["state"]["residuals"]
        assert np.isfinite(kept).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ratio": 0}, "ratio must be"),
        ({"chunk": 0}, "chunk must be"),
        ({"decay": 1.1}, "decay must be"),
        ({"wire": "exact"}, "for sums, not for single values"),
        ({"wire": "u3"}, "unknown wire 'u3'"),
        ({"period": 0}, "period must be"),
        ({"delay": 30}, "delay must be"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    refused(ValueError, words, mpiagg.SparseLoCo, **arguments)


@pytest.mark.parametrize(
    "arguments", [{"ratio": 0.1 + RANK / 8}, {"decay": 1 - RANK / 8}, {"wire": "u2" if RANK else None}]
)
def test_ranks_must_agree_on_the_arguments(arguments):
    if SIZE > 1:
        refused(mpiagg.MismatchError, "ranks disagree", mpiagg.SparseLoCo, **arguments)


def test_other_numbers_are_refused():
    mine = [np.full(3, RANK)]
    with mpiagg.SparseLoCo() as aggregation:
        refused(TypeError, "not for", aggregation.aggregate, mine)
    assert mine[0].tolist() == [RANK] * 3


@pytest.mark.parametrize("wire", ["fp16", "bf16", "u2"])
def test_infinite_values_are_sent_whatever_numpy_is_to_raise(wire):
    x = np.ones(100)
    with np.errstate(invalid="raise"), mpiagg.SparseLoCo(period=1, wire=wire) as aggregation:
        aggregation.aggregate([x])
        if RANK == SIZE - 1:
            x[3] = np.inf
        aggregation.aggregate([x])
    assert not np.isfinite(x[3])
