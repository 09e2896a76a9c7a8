"""Streaming DiLoCo beside a restatement of all ranks in NumPy, bit for bit."""

import numpy as np
import pytest
from mpi4py import MPI
from restated import averaged
from support import refused

import mpiagg
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
LENGTHS = [200, 1, 99, 30]
PARTS = {1: [[0, 1, 2, 3]], 2: [[0], [1, 2, 3]], 3: [[0], [1], [2, 3]], 5: [[], [0], [], [1, 2], [3]]}
"""Which tensors are in which of so many fragments: where the middle of a tensor lies."""


def noise(rank, step=0, dtype=np.float64):
    return np.random.default_rng([rank, step]).standard_normal(sum(LENGTHS)).astype(dtype)


def split(vector):
    """Return a vector's values as tensors."""
    parts = np.split(vector, np.cumsum(LENGTHS)[:-1])
    shapes = [(10, 20), (), (99,), (5, 6)]
    return [part.reshape(shape).copy() for part, shape in zip(parts, shapes, strict=True)]


def joined(tensors):
    return np.concatenate([x.ravel() for x in tensors])


def add(tensors, vector):
    for tensor, change in zip(tensors, split(vector), strict=True):
        np.add(tensor, change, out=tensor)


class Everyone:
    """Streaming DiLoCo as its paper has it (algorithm 2), of all ranks at once: x[rank] is a vector."""

    def __init__(self, weights, *, period, fragments, delay, mixing, rate, momentum, wire, feedback):
        self.x, self.period, self.delay, self.mixing = [x.copy() for x in weights], period, delay, mixing
        self.rate, self.momentum, self.wire = rate, momentum, wire
        stops = np.cumsum(LENGTHS)
        numbers = [np.arange(stop - length, stop) for stop, length in zip(stops, LENGTHS, strict=True)]
        self.parts = [np.concatenate([np.empty(0, int), *(numbers[i] for i in part)]) for part in PARTS[fragments]]
        self.offsets = [int(period * place / fragments) for place in range(fragments)]
        self.anchor = averaged(self.x)
        self.velocity = np.zeros_like(self.anchor)
        self.left = [[np.zeros_like(x[part]) for x in weights] if feedback else None for part in self.parts]
        self.under_way = {}
        self.x = [self.anchor.copy() for _ in self.x]

    def step(self, t):
        """Go on from the inner step of call t."""
        for place, (part, offset) in enumerate(zip(self.parts, self.offsets, strict=True)):
            if t > 1 and (t - offset) % self.period == 0:
                deltas = [self.anchor[part] - x[part] for x in self.x]
                self.under_way[place] = t, averaged(deltas, self.wire, self.left[place])
            if place in self.under_way and self.under_way[place][0] + self.delay == t:
                _, delta = self.under_way.pop(place)
                velocity = self.momentum * self.velocity[part] + delta
                anchor = self.anchor[part] - self.rate * delta
                if self.momentum:
                    anchor -= self.rate * self.momentum * velocity
                self.velocity[part], self.anchor[part] = velocity, anchor
                for x in self.x:
                    x[part] = anchor + self.mixing * (x[part] - anchor) if self.mixing else anchor


HOW = {"period": 6, "fragments": 3, "delay": 2, "mixing": 0.5, "rate": 0.4, "momentum": 0.9, "wire": "u4"}
CASES = [
    {**HOW, "feedback": False},
    {**HOW, "feedback": True},
    {**HOW, "wire": "u2", "feedback": True, "fragments": 5},
    {**HOW, "wire": None, "feedback": False, "delay": 5, "fragments": 2},
    {**HOW, "wire": None, "feedback": False, "delay": 0, "mixing": 0.25},
    {**HOW, "wire": "u8", "feedback": True, "fragments": 1, "momentum": 0.0, "rate": 1.0, "mixing": 0.0},
    {**HOW, "period": 1, "fragments": 2, "delay": 0, "feedback": False},
]


def made(how):
    names = {"rate": "outer_learning_rate", "momentum": "outer_momentum", "feedback": "error_feedback"}
    return mpiagg.LocalSGD(algorithm="direct", **{names.get(key, key): value for key, value in how.items()})


def restated(how, dtype=np.float64):
    return Everyone([noise(rank, 0, dtype) for rank in range(SIZE)], **how)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("how", CASES)
def test_it_is_its_restatement_bit_for_bit(how, dtype):
    everyone, mine = restated(how, dtype), split(noise(RANK, 0, dtype))
    with made(how) as aggregation:
        for t in range(1, 20):
            if t > 1:
                everyone.x = [x + noise(rank, t, dtype) for rank, x in enumerate(everyone.x)]
                add(mine, noise(RANK, t, dtype))
            aggregation.aggregate(mine)
            everyone.step(t)
            assert joined(mine).tobytes() == everyone.x[RANK].tobytes(), t
            fragments = aggregation._entries[0].memory.fragments  # a state would wait for what is under way
            anchors = [anchor for fragment in fragments for anchor in fragment.anchors]
            assert np.concatenate(anchors).tobytes() == everyone.anchor.tobytes(), t


WRONG = {"period": 5, "fragments": 2, "delay": 1, "mixing": 0.4, "rate": 0.41, "momentum": 0.8, "wire": "u2"}


@pytest.mark.parametrize("name", WRONG)
def test_the_restatement_would_find_a_fault(name):
    how = {**HOW, "feedback": True}
    good, bad = restated(how), restated({**how, name: WRONG[name]})
    for t in range(1, 15):
        for everyone in (good, bad):
            everyone.x = [x + noise(rank, t) for rank, x in enumerate(everyone.x)]
            everyone.step(t)
    assert np.abs(good.anchor - bad.anchor).max() > 1e-3


def test_a_step_sends_a_part_at_most():
    """A fragment's bytes at a time, all of them in a period."""
    before = set(channel_of(COMM).open)
    with made({**HOW, "wire": None, "delay": 0}) as aggregation, mpiagg.AllReduce(algorithm="direct") as whole:
        mine = split(noise(RANK))
        whole.aggregate([joined(mine)])
        aggregation.aggregate(mine)
        sent = [aggregation.bytes_sent]
        for _ in range(12):
            aggregation.aggregate(mine)
            sent.append(aggregation.bytes_sent)
        steps, wanted = COMM.allreduce(np.diff(sent)), COMM.allreduce(whole.bytes_sent)
        assert steps[-6:].sum() == steps[:6].sum() == wanted
        assert steps.max() < wanted * 0.7 or SIZE == 1
    assert set(channel_of(COMM).open) == before


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("feedback", [False, True])
def test_a_saved_state_goes_on_with_the_same_bits_also_while_an_average_is_under_way(stop, feedback):
    def some_steps(aggregation, mine, steps):
        for step in steps:
            add(mine, noise(RANK, step))
            aggregation.aggregate(mine)

    how = {**HOW, "delay": 3, "feedback": feedback}
    straight, resumed = split(noise(RANK)), split(noise(RANK))
    with made(how) as aggregation:
        some_steps(aggregation, straight, range(16))
    with made(how) as aggregation:
        some_steps(aggregation, resumed, range(stop))
        state = aggregation.state_dict()
        some_steps(aggregation, [x.copy() for x in resumed], range(3))
    with made(how) as aggregation:
        if stop % 2:  # what is under way then is given up
            some_steps(aggregation, split(noise(RANK)), range(stop + 1))
        aggregation.load_state_dict(state)
        some_steps(aggregation, resumed, range(stop, 16))
    assert joined(resumed).tobytes() == joined(straight).tobytes()


def test_it_is_freed_while_an_average_is_under_way():
    before = set(channel_of(COMM).open)
    aggregation = made({**HOW, "feedback": False, "fragments": 1})
    for _ in range(6):
        aggregation.aggregate(split(noise(RANK)))
    assert any(entry.memory._under_way(6, 0) for entry in aggregation._entries)
    aggregation.free()
    assert set(channel_of(COMM).open) == before


def test_plans_of_lists_go_on_beside_other_calls():
    how = {**HOW, "feedback": False}
    everyone, mine = restated(how), split(noise(RANK))
    with made(how) as aggregation, aggregation.aggregate_init(mine) as plan:
        for t in range(1, 14):
            if t > 1:
                everyone.x = [x + rank for rank, x in enumerate(everyone.x)]
                add(mine, np.full(sum(LENGTHS), float(RANK)))
            plan()
            everyone.step(t)
            assert mpiagg.allreduce(np.ones(1000), "sum")[0] == SIZE
            assert joined(mine).tobytes() == everyone.x[RANK].tobytes(), t


def test_half_precision_is_mixed_in_float32():
    mine = [np.full(3, 256, np.float16)]
    with mpiagg.LocalSGD(period=2, mixing=0.5, outer_learning_rate=0.5) as aggregation:
        aggregation.aggregate(mine)
        mine[0] += np.float16(8)
        aggregation.aggregate(mine)
    assert mine[0].tolist() == [262] * 3  # the anchor is 260, the weights are 264


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fragments": 0}, "fragments must be"),
        ({"delay": 8}, "delay must be an integer from 0 to 7"),
        ({"mixing": 1}, "mixing must be"),
        ({"error_feedback": 1}, "error_feedback must be"),
        ({"error_feedback": True}, "with a wire that rounds"),
        ({"error_feedback": True, "wire": "exact"}, "with a wire that rounds"),
        ({"error_feedback": True, "wire": "bf16"}, "algorithm 'direct', not 'auto'"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    refused((ValueError, TypeError), words, mpiagg.LocalSGD, **arguments)


@pytest.mark.parametrize("arguments", [{"fragments": 1 + RANK}, {"delay": RANK}, {"mixing": RANK / 16}])
def test_ranks_must_agree_on_the_arguments(arguments):
    if SIZE > 1:
        refused(mpiagg.MismatchError, "ranks disagree", mpiagg.LocalSGD, **arguments)
