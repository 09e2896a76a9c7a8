"""Sparsified aggregation beside a restatement of all ranks in NumPy."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpiagg
from mpiagg.aggregation import exchanges
from mpiagg.aggregation.selection import random_block, random_k
from mpiagg.arrays import HOST, Coordinates

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()

SHAPES = [(7, 2), (5,), (), (0, 3), (9,)]
WAYS = {
    "topk": {"ratio": 0.3},
    "randomk": {"ratio": 0.3, "selection": "randomk", "seed": 5},
    "blockk": {"ratio": 0.3, "selection": "blockk", "seed": 5},
    "threshold": {"selection": "threshold", "threshold": 3},
}
each_way = pytest.mark.parametrize("way", WAYS)


def make(way, **more):
    return mpiagg.Sparsified(**{**WAYS[way], **more})


def whole(rank, step, dtypes):
    """Small whole numbers: every order of adding them gives one sum."""
    random = np.random.default_rng([rank, step])
    return [np.asarray(random.integers(-4, 5, shape)).astype(dtype) for dtype in dtypes for shape in SHAPES]


def noise(rank, step, dtypes):
    random = np.random.default_rng([rank, step])
    return [np.asarray(3 * random.standard_normal(shape)).astype(dtype) for dtype in dtypes for shape in SHAPES]


def working(dtype):
    return np.float32 if dtype.name in ("float16", "bfloat16") else dtype


class Restated:
    """All ranks at once, tensor by tensor: what each keeps, and what all get."""

    def __init__(self, way, place=0, op="avg", momentum=0.0):
        self.way, self.place, self.op, self.step, self.kept = way, place, op, 0, None
        self.momentum, self.velocities = momentum, None

    def chosen(self, values, random):
        how = WAYS[self.way]
        magnitudes = np.abs(values)
        if self.way == "threshold":
            return np.flatnonzero(magnitudes >= how["threshold"])
        k = max(1, math.ceil(how["ratio"] * len(values)))
        if self.way == "topk":
            return np.argsort(-magnitudes, kind="stable")[:k]
        if self.way == "randomk":
            return random_k(len(values), k, random)
        return random_block(len(values), k, random)[0] + np.arange(k)

    def aggregate(self, everyone):
        """Return the tensors that all ranks have after a step."""
        work = [working(x.dtype) for x in everyone[0]]
        if self.kept is None:
            self.kept, self.velocities = (
                [[np.zeros(x.size, w) for x, w in zip(everyone[0], work, strict=True)] for _ in everyone]
                for _ in range(2)
            )
        after = [np.zeros(x.size, w) for x, w in zip(everyone[0], work, strict=True)]
        dtypes = list(dict.fromkeys(x.dtype for x in everyone[0]))
        for rank, tensors in enumerate(everyone):
            salt = rank if self.way == "blockk" else 0
            randoms = {
                dtype: np.random.default_rng([WAYS[self.way].get("seed", 0), self.place, number, salt, self.step])
                for number, dtype in enumerate(dtypes)
            }
            for x, kept, velocity, result in zip(tensors, self.kept[rank], self.velocities[rank], after, strict=True):
                velocity *= self.momentum  # noqa: PLW2901 - in place
                np.add(velocity, x.ravel(), out=velocity, casting="unsafe")
                np.add(kept, velocity, out=kept)
                if x.size:
                    chosen = self.chosen(kept, randoms[x.dtype])
                    result[chosen] += kept[chosen]
                    kept[chosen] = velocity[chosen] = 0
        self.step += 1
        divisor = len(everyone) if self.op == "avg" else 1
        return [
            (result / result.dtype.type(divisor)).reshape(x.shape).astype(x.dtype)
            for x, result in zip(everyone[0], after, strict=True)
        ]


def same(arrays, expected):
    for array, wanted in zip(arrays, expected, strict=True):
        assert array.dtype == wanted.dtype
        assert array.shape == wanted.shape
        assert array.tobytes() == wanted.tobytes()


def kept_of(aggregation, place=0):
    return aggregation.state_dict()["memories"][place]["state"]["kept"]


def train(aggregation, restated, steps, draw, dtypes):
    for step in steps:
        everyone = [draw(rank, step, dtypes) for rank in range(SIZE)]
        mine = [x.copy() for x in everyone[RANK]]
        aggregation.aggregate(mine)
        same(mine, restated.aggregate(everyone))


# -- what comes out


@each_way
@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize(
    "dtypes", [[np.float32], [np.float16, np.float64, ml_dtypes.bfloat16, np.float32]], ids=["one", "mixed"]
)
def test_whole_numbers_are_as_restated(way, op, dtypes):
    restated = Restated(way, op=op)
    with make(way, op=op) as aggregation:
        train(aggregation, restated, range(5), whole, dtypes)
        kept = kept_of(aggregation)
        assert [x.dtype for x in kept] == [working(np.dtype(dtype)) for dtype in dtypes]
        same([np.concatenate(kept)], [np.concatenate(restated.kept[RANK])])


@each_way
@pytest.mark.parametrize("momentum", [0.5, 0.75])
@pytest.mark.parametrize("dtypes", [[np.float64], [np.float16, np.float64]], ids=["one", "mixed"])
def test_momentum_is_corrected_and_masked(way, momentum, dtypes):
    """What is sent has been accelerated where it was kept, and is without velocity then: momentum of whole numbers."""
    restated = Restated(way, momentum=momentum)
    with make(way, momentum=momentum) as aggregation:
        train(aggregation, restated, range(6), whole, dtypes)
        velocities = aggregation.state_dict()["memories"][0]["state"]["velocities"]
        same([np.concatenate(velocities)], [np.concatenate(restated.velocities[RANK])])
    without = Restated(way)
    for step in range(6):
        without.aggregate([whole(rank, step, dtypes) for rank in range(SIZE)])
    assert np.abs(np.concatenate(without.kept[RANK]) - np.concatenate(restated.kept[RANK])).max() > 0.1


def test_with_a_ratio_of_one_momentum_is_masked_away():
    """All is sent each time: so nothing has any velocity, and gradients come out as they are."""
    mine = [np.full((2, 3), float(RANK))]
    with mpiagg.Sparsified(ratio=1, momentum=0.9) as aggregation:
        for _ in range(3):
            mine[0][...] = RANK
            aggregation.aggregate(mine)
            assert (mine[0] == (SIZE - 1) / 2).all()


@pytest.mark.parametrize("way", ["topk", "blockk", "threshold"])
@pytest.mark.parametrize("dtypes", [[np.float64], [np.float16, np.complex64]], ids=["float64", "mixed"])
def test_values_are_added_in_the_order_of_the_ranks(way, dtypes):
    with make(way) as aggregation:
        train(aggregation, Restated(way), range(4), noise, dtypes)


def test_random_coordinates_are_reduced_to_the_same_bits_everywhere():
    restated = Restated("randomk")
    with make("randomk") as aggregation:
        for step in range(4):
            everyone = [noise(rank, step, [np.float32]) for rank in range(SIZE)]
            mine = [x.copy() for x in everyone[RANK]]
            aggregation.aggregate(mine)
            for array, wanted in zip(mine, restated.aggregate(everyone), strict=True):
                assert np.allclose(array, wanted, rtol=1e-6, atol=1e-6)
            bits = b"".join(x.tobytes() for x in mine)
            assert set(COMM.allgather(bits)) == {bits}


@each_way
def test_long_tensors_and_lists_of_several_layouts(way):
    everyone = [[np.random.default_rng(rank).integers(-4, 5, 100_003).astype(np.float32)] for rank in range(SIZE)]
    long, short = Restated(way), Restated(way, place=1)
    with make(way) as aggregation:
        for step in range(2):
            mine = [x.copy() for x in everyone[RANK]]
            aggregation.aggregate(mine)
            same(mine, long.aggregate(everyone))
            train(aggregation, short, [step], whole, [np.float32])


@each_way
def test_tensors_that_are_not_contiguous_are_written_in_place(way):
    base = np.zeros((14, 4))
    mine = [base[::2, ::2], np.asfortranarray(whole(RANK, 1, [np.float64])[0])]
    mine[0][...] = whole(RANK, 0, [np.float64])[0]
    everyone = [[whole(rank, step, [np.float64])[0] for step in (0, 1)] for rank in range(SIZE)]
    with make(way) as aggregation:
        aggregation.aggregate(mine)
    same(mine, Restated(way).aggregate(everyone))
    assert not base[1::2].any()
    assert not base[:, 1::2].any()


def test_everything_is_sent_with_a_ratio_of_one():
    mine = [np.full((2, 3), float(RANK))]
    with mpiagg.Sparsified(ratio=1) as aggregation:
        aggregation.aggregate(mine)
        assert (mine[0] == (SIZE - 1) / 2).all()
        assert not kept_of(aggregation)[0].any()


@each_way
def test_no_tensors_and_empty_ones_are_nothing_to_send(way):
    with make(way) as aggregation:
        for _ in range(2):
            aggregation.aggregate([])
            aggregation.aggregate([np.zeros((0, 3)), np.zeros(0)])
        # The counts of the empty ones are sent all the same.
        counts = 2 * 8 * SIZE * (SIZE - 1) if way == "threshold" else 0
        assert COMM.allreduce(aggregation.bytes_sent) == counts


# -- what is kept


@each_way
@settings(derandomize=True, database=None, deadline=None, max_examples=8)
@given(seed=st.integers(0, 2**32), shapes=st.lists(st.sampled_from([*SHAPES, (3,), (2, 2, 2)]), max_size=4))
def test_what_is_sent_and_what_is_kept_make_up_what_came_in(way, seed, shapes):
    random = np.random.default_rng([seed, RANK])
    length = sum(math.prod(shape) for shape in shapes)
    came, went = np.zeros(length), np.zeros(length)
    with make(way) as aggregation:
        for _ in range(5):
            # Multiples of the number of ranks: their average is exact.
            mine = [np.asarray(SIZE * random.integers(-5, 6, shape), float) for shape in shapes]
            came += np.concatenate([np.zeros(0), *map(np.ravel, mine)])
            aggregation.aggregate(mine)
            went += SIZE * np.concatenate([np.zeros(0), *map(np.ravel, mine)])
        kept = np.concatenate([np.zeros(0), *kept_of(aggregation)])
        assert np.array_equal(COMM.allreduce(came - kept), went)


@pytest.mark.parametrize("way", ["topk", "randomk", "blockk"])
def test_every_coordinate_has_its_turn(way):
    with make(way, ratio=0.4) as aggregation:
        aggregation.aggregate([np.arange(1.0, 8), np.full((7, 2), 3.0)])
        assert kept_of(aggregation)[0].any()
        for _ in range(40):
            aggregation.aggregate([np.zeros(7), np.zeros((7, 2))])
        assert not kept_of(aggregation)[0].any()


def test_half_precision_is_kept_in_single():
    with mpiagg.Sparsified(ratio=0.5) as aggregation:
        aggregation.aggregate([np.array([2, 1], np.float16)])
        aggregation.aggregate([np.array([2, 2**-12], np.float16)])
        assert kept_of(aggregation)[0].tolist() == [0, 1 + 2**-12]


def test_what_is_not_a_number_is_sent_at_once():
    for way in ("topk", "threshold"):
        mine = [np.array([1.0, np.nan, 2.0])]
        with make(way, **({"ratio": 0.3} if way == "topk" else {})) as aggregation:
            aggregation.aggregate(mine)
            assert np.isnan(mine[0]).tolist() == [False, True, False]
            assert np.isfinite(kept_of(aggregation)[0]).all()


def slope(x, rank, step):
    """The gradient of |x - 1/2|^2 / 2, with noise on one coordinate that alternates and is larger than all of it."""
    gradient = x - 0.5
    gradient[0] += 1.2 * (-1) ** (step + rank)
    return gradient


def test_training_converges_with_the_memory_and_not_without():
    x, without = np.zeros(8), np.zeros(8)
    with mpiagg.Sparsified(ratio=1 / 8) as aggregation:
        for step in range(200):
            gradient = slope(x, RANK, step)
            aggregation.aggregate([gradient])
            x -= 0.05 * gradient
            for rank in range(SIZE):
                gradient = slope(without, rank, step)
                gradient[np.abs(gradient) < np.abs(gradient).max()] = 0
                without -= 0.05 * gradient / SIZE
    assert np.abs(x - 0.5).max() < 0.15
    assert (without[1:] == 0).all()


# -- what it costs


def total_sent(way):
    """Return what all ranks together send of vectors of 30 and 9 elements, of which rank r has r of 3 and more."""
    mine = [np.zeros(30, np.float32), np.ones(9, np.float32)]
    mine[0][:RANK] = 5
    with make(way) as aggregation:
        aggregation.aggregate(mine)
        return COMM.allreduce(aggregation.bytes_sent)


def coded(*counts):
    """Return the bytes of messages of so many coordinates of 39, and of as many float32, each padded to 8 bytes."""
    return sum(-(-Coordinates(HOST, count, 39).nbytes // 8) * 8 + -(-4 * count // 8) * 8 for count in counts)


def test_bytes_are_those_of_the_wire():
    k = 9 + 3
    assert total_sent("topk") == SIZE * (SIZE - 1) * coded(k)
    assert total_sent("blockk") == SIZE * (SIZE - 1) * (8 + 4 * k)
    with mpiagg.allreduce_init(np.zeros(k, np.float32), algorithm="recursive_doubling") as plan:
        assert total_sent("randomk") == COMM.allreduce(plan.sent_bytes)
    # Each rank's count, and as many pairs, reach all others; rank 0 has none.
    assert total_sent("threshold") == (SIZE - 1) * (8 * SIZE + coded(*range(SIZE)))


def test_ranks_may_have_nothing_to_send():
    with make("threshold") as aggregation:
        for sender in [*range(SIZE), None]:
            mine = [np.full(5, 4.0 if sender == RANK else 0.0)]
            before = aggregation.bytes_sent
            aggregation.aggregate(mine)
            assert mine[0].tolist() == [0.0 if sender is None else 4 / SIZE] * 5
            sent = COMM.allreduce(aggregation.bytes_sent - before)
            assert sent == (SIZE - 1) * (8 * SIZE + (8 + 5 * 8 if sender is not None else 0))


@each_way
def test_known_tensors_build_nothing_that_stays(way, monkeypatch):
    programs = []

    def bind(*arguments, **how):
        programs.append(real(*arguments, **how))
        return programs[-1]

    real = exchanges.bind_operation
    with make(way) as aggregation:
        aggregation.aggregate(whole(RANK, 0, [np.float32]))
        monkeypatch.setattr(exchanges, "bind_operation", bind)
        opened = set(aggregation._channel.open)
        for step in range(3):
            aggregation.aggregate(whole(RANK, step, [np.float32]))
        assert set(aggregation._channel.open) == opened
    assert len(programs) == (3 if way == "threshold" else 0)
    assert not any(release.__self__ for program in programs for release in program.releases)
