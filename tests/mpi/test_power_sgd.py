"""PowerSGD beside a restatement of all ranks in NumPy."""

import hashlib
import tracemalloc

import ml_dtypes  # noqa: F401 - makes bfloat16 a name that NumPy knows
import numpy as np
import pytest
from mpi4py import MPI
from support import resnet18

import mpiagg

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()

SHAPES = [(6, 3, 2, 2), (8,), (10, 6), (6, 12), (1, 9), (9, 1), (), (0, 4), (10, 6), (5, 0, 2), (3, 4)]
"""Convolution, bias, linear layers of which two have one shape, and edges; the fourth is as the first, as a matrix."""

STEPS = 5


def gradients(step, rank=RANK, shapes=SHAPES, dtype=np.float64):
    random = np.random.default_rng([step, rank])
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def everyones(step, shapes=SHAPES, dtype=np.float64):
    return [gradients(step, rank, shapes, dtype) for rank in range(SIZE)]


def matrices(shapes, rank):
    """Return what is compressed if all matrices are, in the order in which queries are drawn."""
    found = {}
    for index, shape in enumerate(shapes):
        if len(shape) > 1 and 0 not in shape:
            n, m = shape[0], int(np.prod(shape[1:]))
            found.setdefault((n, m), []).append((index, n, m, min(n, m, rank)))
    return [each for same in found.values() for each in same]


class Restated:
    """The mathematics: a mean matrix D becomes its projection on the columns of D Q, found here by an SVD."""

    def __init__(self, shapes, rank, error_feedback, *, reuse, seed=1):
        self.shapes, self.matrices = shapes, matrices(shapes, rank)
        self.local, self.reuse = error_feedback == "local", reuse
        self.random = np.random.default_rng([seed, 0])
        self.errors = [{index: 0 for index, *_ in self.matrices} for _ in range(SIZE)]
        self.queries = {}

    def step(self, everyone):
        """Return the result of all ranks."""
        mean = [np.mean(each, axis=0) for each in zip(*everyone, strict=True)]
        if not (self.reuse and self.queries):
            self.queries = {index: self.random.standard_normal((k, m)).T for index, _, m, k in self.matrices}
        for index, n, m, k in self.matrices:
            inputs = [own[index].reshape(n, m) + error[index] for own, error in zip(everyone, self.errors, strict=True)]
            d = np.mean(inputs, axis=0)
            space = np.linalg.svd(d @ self.queries[index])[0][:, :k]
            project = space @ space.T
            self.queries[index] = d.T @ space
            for error, own in zip(self.errors, inputs, strict=True):
                error[index] = own - project @ (own if self.local else d)
            mean[index] = (project @ d).reshape(self.shapes[index])
        return mean


def close(arrays, expected, tolerance):
    for array, wanted in zip(arrays, expected, strict=True):
        assert array.shape == wanted.shape
        assert np.abs(array - wanted).max(initial=0) <= tolerance * np.abs(wanted).max(initial=1)


def same_everywhere(arrays):
    digest = hashlib.sha256(b"".join(x.tobytes() for x in arrays)).digest()
    assert set(COMM.allgather(digest)) == {digest}


def kept(power, memory=0):
    return power.state_dict()["memories"][memory]["state"]


# -- what it computes


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("error_feedback", ["local", "aggregated"])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_it_is_its_restatement(rank, error_feedback, reuse):
    restated = Restated(SHAPES, rank, error_feedback, reuse=reuse)
    with mpiagg.PowerSGD(None, rank, reuse, min_compression_rate=0, error_feedback=error_feedback) as power:
        for step in range(STEPS):
            mine = gradients(step)
            mine[2] = np.asfortranarray(mine[2])
            power.aggregate(mine)
            same_everywhere(mine)
            close(mine, restated.step(everyones(step)), 1e-10)
        errors = np.concatenate([x.ravel() for x in kept(power)["errors"]])
        close([errors], [np.concatenate([error.ravel() for error in restated.errors[RANK].values()])], 1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 2**-10), ("bfloat16", 2**-7)])
def test_half_precision_is_computed_in_float32(dtype, tolerance):
    restated = Restated(SHAPES, 2, "local", reuse=False)
    restated.random = Float32(restated.random)
    with mpiagg.PowerSGD(rank=2, reuse_query=False, min_compression_rate=0) as power:
        for step in range(STEPS):
            mine = gradients(step, dtype=dtype)
            power.aggregate(mine)
            assert {x.dtype for x in mine} == {np.dtype(dtype)}
            same_everywhere(mine)
            everyone = [[x.astype(np.float64) for x in own] for own in everyones(step, dtype=dtype)]
            close([x.astype(np.float64) for x in mine], restated.step(everyone), tolerance)
        assert all(x.dtype == np.float32 for name in ("errors", "queries") for x in kept(power)[name])


class Float32:
    """Draws as for float32."""

    def __init__(self, random):
        self.random = random

    def standard_normal(self, shape):
        return self.random.standard_normal(shape, np.float32)


def test_dtypes_do_not_meddle():
    together = [x for dtype in (np.float64, np.float16, np.float32) for x in gradients(0, dtype=dtype)]
    with mpiagg.PowerSGD(rank=2, reuse_query=False) as power, mpiagg.PowerSGD(rank=2, reuse_query=False) as other:
        power.aggregate(together)
        alone = gradients(0)
        other.aggregate(alone)
        for x, y in zip(together[: len(SHAPES)], alone, strict=True):
            assert x.tobytes() == y.tobytes()
        same_everywhere(together)
        assert len({x.dtype for x in kept(power)["errors"]}) == 2


def test_a_mean_of_low_rank_is_exact_whatever_the_ranks_have():
    random = np.random.default_rng(3)
    mean = random.standard_normal((9, 3)) @ random.standard_normal((3, 12))
    noises = random.standard_normal((SIZE, 9, 12))
    noises -= noises.mean(axis=0)
    for rank, exact in [(2, False), (3, True), (5, True)]:
        mine = [mean + noises[RANK]]
        with mpiagg.PowerSGD(rank=rank, min_compression_rate=0) as power:
            power.aggregate(mine)
        assert (np.abs(mine[0] - mean).max() < 1e-12) == exact


def test_what_saves_too_little_and_what_is_no_matrix_is_averaged():
    with mpiagg.PowerSGD(min_compression_rate=1e9) as power:
        mine = gradients(0)
        power.aggregate(mine)
        close(mine, [np.mean(each, axis=0) for each in zip(*everyones(0), strict=True)], 1e-14)
        assert kept(power)["errors"] == []
        power.aggregate([])


def test_nothing_is_lost_and_both_kinds_of_errors_have_one_mean():
    shape, given, received, errors = (9, 12), 0, {}, {}
    kinds = ("local", "aggregated")
    powers = {kind: mpiagg.PowerSGD(rank=2, min_compression_rate=0, error_feedback=kind) for kind in kinds}
    for step in range(STEPS):
        given = given + np.mean([own[0] for own in everyones(step, [shape])], axis=0)
        for kind in kinds:
            mine = gradients(step, shapes=[shape])
            powers[kind].aggregate(mine)
            received[kind] = received.get(kind, 0) + mine[0]
            errors[kind] = COMM.allreduce(kept(powers[kind])["errors"][0][0]) / SIZE
            close([received[kind] + errors[kind]], [given], 1e-13)
        close([errors["local"]], [errors["aggregated"]], 1e-13)
    for power in powers.values():
        power.free()


def test_a_layer_without_gradients_comes_back():
    late = np.vstack([np.zeros((2, 8)), np.ones((4, 8))])
    with mpiagg.PowerSGD(min_compression_rate=0) as power:
        for _ in range(3):
            mine = [np.zeros((6, 8))]
            power.aggregate(mine)
            assert not mine[0].any()
        mine = [late * (RANK + 1)]
        power.aggregate(mine)
        close(mine, [late * (SIZE + 1) / 2], 1e-12)


def test_one_rank_with_nan_makes_all_skip_and_go_on():
    with mpiagg.PowerSGD(min_compression_rate=0) as power:
        mine = [np.ones((4, 6)), np.ones((6, 4))]
        if RANK == SIZE - 1:
            mine[0][1, 1] = np.nan
        power.aggregate(mine)
        assert np.isnan(mine[0]).any()
        close(mine[1:], [np.ones((6, 4))], 1e-14)
        mine = [np.ones((4, 6)), np.ones((6, 4))]
        power.aggregate(mine)
        close(mine, [np.ones((4, 6)), np.ones((6, 4))], 1e-14)


# -- when


@pytest.mark.parametrize("start_after", [0, 1, 3])
def test_the_first_steps_are_plain_averages(start_after):
    restated = Restated(SHAPES, 2, "local", reuse=True)
    with mpiagg.PowerSGD(rank=2, start_after=start_after, min_compression_rate=0) as power:
        for step in range(start_after + 2):
            mine = gradients(step)
            power.aggregate(mine)
            plain = step < start_after
            wanted = [np.mean(each, axis=0) for each in zip(*everyones(step), strict=True)]
            close(mine, wanted if plain else restated.step(everyones(step)), 1e-13 if plain else 1e-10)
            same_everywhere(mine)
            assert kept(power)["step"] == step + 1
            assert any(x.any() for x in kept(power)["errors"]) == (not plain)


# -- what it costs


def sent_by_allreduce(*vectors):
    total = 0
    for vector in vectors:
        with mpiagg.allreduce_init(vector, "avg", out=vector) as plan:
            total += plan.sent_bytes
    return total


@pytest.mark.few_ranks
def test_what_is_sent_for_a_resnet_is_what_the_paper_says():
    mine = [np.ones(shape, np.float32) for shape in resnet18()]
    numbers = sum(x.size for x in mine)
    with mpiagg.PowerSGD() as power:
        power.aggregate(mine)
        q = sum(x.size for x in kept(power)["queries"])
        p = sum(x.shape[0] * x.shape[1] for x in kept(power)["errors"]) + sum(x.size for x in mine if x.ndim == 1)
        assert round(numbers / (p + q), 1) == 243.3
        sent = sent_by_allreduce(np.zeros(p, np.float32), np.zeros(q, np.float32))
        assert power.bytes_sent == sent
    if SIZE == 2:
        assert round(4 * numbers / sent, 1) == 243.3
    assert all(1 - 1e-5 < x.min() <= x.max() < 1 + 1e-5 for x in mine)


def test_plain_steps_send_everything_and_the_others_little():
    with mpiagg.PowerSGD(start_after=2, min_compression_rate=2) as power:
        sent = []
        for step in range(4):
            power.aggregate(gradients(step, shapes=[(40, 60), (7,)]))
            sent.append(power.bytes_sent)
    plain = sent_by_allreduce(np.zeros(40 * 60 + 7))
    low_rank = sent_by_allreduce(np.zeros(40 + 7), np.zeros(60))
    assert sent == [plain, 2 * plain, 2 * plain + low_rank, 2 * plain + 2 * low_rank]


def test_known_tensors_allocate_nothing_big_and_open_nothing():
    with mpiagg.PowerSGD(rank=2, error_feedback="aggregated") as power:
        mine = [np.ones((400, 500), np.float32), np.ones((400, 500), np.float32)]
        power.aggregate(mine)
        opened = set(power._channel.open)
        tracemalloc.start()
        power.aggregate(mine)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < mine[0].nbytes / 4
        assert set(power._channel.open) == opened


def test_random_numbers_are_its_own():
    np.random.seed(3)  # noqa: NPY002 - the global state is what must not change
    before = np.random.get_state()[1].tobytes()  # noqa: NPY002 - as above
    results = []
    for seed in (1, 1, 2):
        with mpiagg.PowerSGD(reuse_query=False, seed=seed) as power:
            mine = gradients(0, shapes=[(30, 40)])
            power.aggregate(mine)
            results.append(mine[0].tobytes())
    assert results[0] == results[1] != results[2]
    assert np.random.get_state()[1].tobytes() == before  # noqa: NPY002 - as above
