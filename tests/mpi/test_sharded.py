"""Sharded training of arrays: the result of DDP and the plain optimizer, with a part of the memory."""

import contextlib
import math

import numpy as np
import pytest
from mpi4py import MPI
from support import refused

import mpiagg
from mpiagg import optimizers
from mpiagg.common.arguments import NODES
from mpiagg.plans.background import InBackground
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()

SHAPES = [(4, 8), (8,), (7, 3), (), (1,), (300,), (0, 2), (5, 5)]
"""No number of ranks but 1 divides what they have together."""

MAKE = {
    "sgd": lambda: optimizers.SGD(0.1, 0.9),
    "adam": lambda: optimizers.Adam(1e-2, weight_decay=0.1),
    "adamw": lambda: optimizers.AdamW(1e-2),
    "lamb": lambda: optimizers.LAMB(1e-2),
    "muon": lambda: optimizers.Muon(1e-2),
}
STORED = {"stage 1": (1, True), "stage 2": (2, True), "once on a node": (3, True), "divided": (3, False)}
STEPS = 4


def start(dtype=np.float64, seed=3):
    random = np.random.default_rng(seed)
    return [np.asarray(random.standard_normal(shape)).astype(dtype) for shape in SHAPES]


def gradients(step, rank=RANK, dtype=np.float64):
    random = np.random.default_rng([step, rank])
    return [np.asarray(random.standard_normal(shape)).astype(dtype) for shape in SHAPES]


def plain(optimizer, algorithm="direct", steps=STEPS, dtype=np.float64, **keywords):
    """Return what DDP and an optimizer on every rank make of the weights."""
    weights = start(dtype)
    with (
        mpiagg.AllReduce(algorithm=algorithm, **keywords) as agg,
        mpiagg.DDP(weights, aggregation=agg, bucket_bytes=600) as ddp,
    ):
        for step in range(steps):
            given = gradients(step, dtype=dtype)
            ddp.sync_gradients(given)
            optimizer.step(weights, given)
    return weights


def sharded(optimizer, stored, **keywords):
    stage, share = STORED[stored]
    given = {"bucket_bytes": 600, "algorithm": "direct", **keywords}
    return mpiagg.Sharded(start(), optimizer, stage=stage, share=share, **given)


def whole(training):
    found = training.weights()
    assert list(found) == [str(i) for i in range(len(SHAPES))]
    return list(found.values())


def equal(one, other):
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", MAKE)
def test_the_result_is_that_of_ddp(name, stored):
    expected = plain(MAKE[name]())
    with sharded(MAKE[name](), stored) as training:
        for step in range(STEPS):
            assert training.step(gradients(step)) is None
        found = whole(training)
    if name == "lamb":  # whose norms are added up over the ranks
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
    else:
        assert equal(found, expected)
    assert not equal(found, start())


@pytest.mark.parametrize("stored", STORED)
def test_a_ring_adds_up_in_another_order(stored):
    expected = plain(MAKE["adam"](), "ring")
    with sharded(MAKE["adam"](), stored, algorithm="ring") as training:
        for step in range(STEPS):
            training.step(gradients(step))
        for x, y in zip(whole(training), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@pytest.fixture(params=[(SIZE,), (1,) * SIZE], ids=["one node", "a node for each rank"])
def on_nodes(request, comm, monkeypatch):
    """A communicator whose ranks take themselves to be on so many nodes."""
    monkeypatch.setenv(NODES, ",".join(map(str, request.param)))
    return comm


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("wait", [True, False])
def test_parameters_may_arrive_later(stored, prefetch, wait, on_nodes):
    expected = plain(MAKE["adamw"]())
    with sharded(MAKE["adamw"](), stored, prefetch=prefetch, comm=on_nodes) as training:
        arrays = training.module
        for step in range(STEPS):
            training.step(gradients(step), wait=wait)
        for name, part in training.state_dict()["tensors"].items():  # this rank's, which are there
            assert np.array_equal(part["values"], expected[int(name)].reshape(-1)[part["start"] : part["stop"]])
        if not wait:
            training.wait()
        assert arrays is None or equal(arrays, expected)
        assert equal(whole(training), expected)


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_on_its_way_arrives_before_it_is_used(stage):
    expected = plain(MAKE["sgd"](), steps=1)
    given = {"bucket_bytes": 600, "algorithm": "direct", "stage": stage}
    with mpiagg.Sharded(start(), MAKE["sgd"](), layers=[[7], [0, 1, 2, 3, 4, 5, 6]], **given) as training:
        training.step(gradients(0), wait=False)
        for layer, found in training.in_order():
            assert equal(found, [expected[index] for index in training.layers[layer]])
    weights = start()
    training = mpiagg.Sharded(weights, MAKE["sgd"](), **given)
    training.step(gradients(0), wait=False)
    training.free()
    assert equal(weights, expected)
    refused(mpiagg.PlanError, "freed", training.wait)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("bucket_bytes", [0, 2**20])
def test_any_units_give_the_same(stored, bucket_bytes):
    expected = plain(MAKE["adamw"]())
    with sharded(MAKE["adamw"](), stored, bucket_bytes=bucket_bytes, algorithm="auto", split="tensors") as training:
        for step in range(STEPS):
            training.step(gradients(step))
        for x, y in zip(whole(training), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_callers_arrays_are_trained_in_place(stage):
    mine = start(seed=3 + RANK)  # rank 0's are given to all
    mine[0] = np.asfortranarray(mine[0])
    mine[2] = mine[2].view(np.matrix) if RANK == 0 else mine[2]
    kept = list(mine)
    with mpiagg.Sharded(mine, MAKE["sgd"](), stage=stage, bucket_bytes=600, algorithm="direct") as training:
        for step in range(STEPS):
            training.step(gradients(step))
        assert all(x is y for x, y in zip(mine, kept, strict=True))
        assert equal(mine, plain(MAKE["sgd"]()))


def test_sums_and_other_divisors():
    expected = plain(MAKE["sgd"](), op="sum")
    for keywords in ({"op": "sum"}, {"denom": 1}):
        with sharded(MAKE["sgd"](), "stage 2", **keywords) as training:
            for step in range(STEPS):
                training.step(gradients(step))
            assert equal(whole(training), expected)


@pytest.mark.parametrize("stored", STORED)
def test_gradients_are_clipped_by_the_norm_of_all(stored):
    weights, optimizer = start(), MAKE["adamw"]()
    with sharded(MAKE["adamw"](), stored, clip_norm=0.5) as training:
        for step in range(STEPS):
            mean = [sum(x) / SIZE for x in zip(*(gradients(step, rank) for rank in range(SIZE)), strict=True)]
            norm = np.sqrt(sum((g * g).sum() for g in mean))
            assert norm > 0.5
            np.testing.assert_allclose(training.step(gradients(step)), norm, rtol=1e-12)
            optimizer.step(weights, [np.asarray(g * (0.5 / (norm + 1e-6))) for g in mean])
        for x, y in zip(whole(training), weights, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def test_without_a_limit_the_norm_is_only_computed():
    found, (training, other) = [], (sharded(MAKE["adamw"](), "stage 2", clip_norm=clip) for clip in (math.inf, None))
    with training, other:
        for step in range(STEPS):
            found.append(training.step(gradients(step)))
            other.step(gradients(step))
        assert all(np.array_equal(x, y) for x, y in zip(whole(training), whole(other), strict=True))
    assert all(0 < norm < math.inf for norm in found)


def test_a_gradient_that_is_no_number_is_not_hidden_by_clipping():
    """As with torch.nn.utils.clip_grad_norm_."""
    with sharded(MAKE["sgd"](), "stage 2", clip_norm=1.0) as training:
        given = gradients(0)
        given[0][...] = np.nan
        assert np.isnan(training.step(given))
        assert all(np.isnan(x).all() for x in whole(training))


@pytest.mark.filterwarnings("error")
def test_a_norm_beyond_the_dtype_is_the_same_on_all_ranks():
    """It overflows on the rank with that part alone, where a warning may be an error."""
    with mpiagg.Sharded([np.zeros(2 * SIZE)], optimizers.SGD(lr=0.1), clip_norm=1.0) as training:
        given = np.zeros(2 * SIZE)
        given[0] = 1e200 * SIZE
        assert training.step([given]) == math.inf


@pytest.mark.parametrize("stored", STORED)
def test_missing_gradients(stored):
    """Missing on some ranks they are zeros; missing on all, the tensor and its state stay as they are."""
    weights, optimizer = start(), MAKE["adam"]()
    with sharded(MAKE["adam"](), stored) as training:
        for step in range(STEPS):
            given = gradients(step)
            given[0] = None if RANK else given[0]
            given[2] = None if step == 1 else given[2]
            training.step(given)
            mean = [
                sum(x if i or not rank else x * 0 for rank, x in enumerate(each)) / SIZE
                for i, each in enumerate(zip(*(gradients(step, rank) for rank in range(SIZE)), strict=True))
            ]
            optimizer.step(weights, [None if i == 2 and step == 1 else np.asarray(g) for i, g in enumerate(mean)])
        for x, y in zip(whole(training), weights, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half_precision_is_trained_in_float32(stored, half):
    half = np.dtype(half) if half == "float16" else np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    stage, share = STORED[stored]
    masters, optimizer = [np.asarray(x.astype(np.float32)) for x in start(half)], MAKE["adamw"]()
    with mpiagg.Sharded(
        start(half), MAKE["adamw"](), stage=stage, share=share, master_dtype=np.float32, algorithm="direct"
    ) as training:
        for step in range(STEPS):
            given = gradients(step, dtype=half)
            training.step(given)
            each = [gradients(step, rank, half) for rank in range(SIZE)]
            mean = [sum(np.float32(x) for x in xs) / np.float32(SIZE) for xs in zip(*each, strict=True)]
            optimizer.step(masters, [np.asarray(g, np.float32) for g in mean])
        for x, y in zip(whole(training), masters, strict=True):
            assert x.dtype == half
            assert x.tobytes() == y.astype(half).tobytes()


# -- memory


@pytest.mark.parametrize("stored", STORED)
def test_a_rank_has_its_part_of_everything(stored):
    shapes = [(1000,), (500, 3), (7,), (2000,)]
    weights = [np.zeros(shape, np.float32) for shape in shapes]
    nbytes, longest = sum(x.nbytes for x in weights), 8000
    stage, share = STORED[stored]
    comm = COMM.Dup()  # on which no other training has memory
    with mpiagg.Sharded(
        weights, optimizers.Adam(), comm=comm, stage=stage, share=share, bucket_bytes=longest, prefetch=0
    ) as training:
        training.step([np.ones(shape, np.float32) for shape in shapes])
        held, part, spare = training.memory(), nbytes / SIZE, 4 * 4
    assert held["state"] <= 2 * (part + spare)
    assert held["gradients"] <= part + spare
    assert held["buckets"] == (nbytes if stage == 1 else longest)
    wanted = {"stage 1": longest, "stage 2": longest, "divided": part + spare + longest, "once on a node": part + spare}
    together = channel_of(COMM).node.size == SIZE
    assert not channel_of(comm).memory.host._common  # which a node has once is given back
    comm.Free()
    assert held["parameters"] <= wanted[stored if together or stored != "once on a node" else "divided"]


@pytest.mark.parametrize("stored", STORED)
def test_a_step_allocates_blocks_alone(stored, repeated_peak):
    """Whatever the length of the parameters: here 4 MiB, of which each rank updates its part."""
    stage, share = STORED[stored]
    weights, given = ([np.ones(2**19) for _ in range(2)] for _ in range(2))
    with mpiagg.Sharded(weights, optimizers.AdamW(), stage=stage, share=share, clip_norm=1.0) as training:
        training.step(given)
        assert repeated_peak(lambda: training.step(given)) < 2**21


def test_a_node_has_the_parameters_once(comm):
    """What one rank writes to its part, others see, where all are on one node."""
    with sharded(optimizers.SGD(1.0), "once on a node") as training:
        with training.gathered(0) as before:
            held = before[0]
            old = held.copy()
            comm.Barrier()
        training.step([np.ones(shape) for shape in SHAPES])
        np.testing.assert_array_equal(held, old - (channel_of(COMM).node.size == SIZE))


# -- layers


@pytest.mark.parametrize("stored", STORED)
def test_gradients_are_given_layer_by_layer(stored):
    expected = plain(MAKE["adamw"]())
    layers = [[0, 1], [2, 3, 4], [5], [6, 7]]
    with sharded(MAKE["adamw"](), stored, layers=layers) as training:
        assert training.layers == layers
        for step in range(STEPS):
            given = gradients(step)
            seen = []
            for layer, weights in training.in_order():
                assert [x.shape for x in weights] == [SHAPES[i] for i in layers[layer]]
                seen.append(layer)
            assert seen == [0, 1, 2, 3]
            for layer, weights in training.in_order(reverse=True):
                assert [x.shape for x in weights] == [SHAPES[i] for i in layers[layer]]
                if layer:
                    training.reduce(layer, [given[i] for i in layers[layer]])
            training.step([*given[:2], *[None] * 6])
        assert equal(whole(training), expected)


@pytest.mark.parametrize("stored", STORED)
def test_who_has_timed_out_can_go_on(stored, monkeypatch):
    expected, wait, late = plain(MAKE["adamw"]()), InBackground.wait, 0

    def waited(flight, *given):
        nonlocal late
        late -= 1
        if late == 0:
            raise mpiagg.StallError("that was too long")
        return wait(flight, *given)

    monkeypatch.setattr(InBackground, "wait", waited)
    layers = [[0, 1], [2, 3, 4], [5], [6, 7]]
    with sharded(MAKE["adamw"](), stored, layers=layers) as training:
        for step in range(STEPS):
            given = gradients(step)
            for layer in (3, 2, 1):
                training.reduce(layer, [given[i] for i in layers[layer]])
            late, last = 1, [*given[:2], *[None] * 6]
            refused(mpiagg.StallError, "too long", training.step, last)
            training.step(None if training.stage == 1 else last, wait=False)  # which had no room yet for the last layer
            late = 1
            with contextlib.suppress(mpiagg.StallError):  # perhaps nothing is on its way
                training.wait()
            late = 0
        assert equal(whole(training), expected)


@pytest.mark.parametrize("stored", STORED)
def test_layers_hold_what_training_has_made_of_them(stored):
    with sharded(optimizers.SGD(0.5), stored, layers=[[1, 0], [2, 3, 4, 5, 6, 7]]) as training:
        for _ in range(2):
            with training.gathered(0) as (first, second), training.gathered(1) as others:
                assert first.shape == SHAPES[0]
                assert second.shape == SHAPES[1]
                assert len(others) == 6
            training.step([np.ones(shape) for shape in SHAPES])
        with training.gathered(0) as (first, _):
            np.testing.assert_array_equal(first, start()[0] - 0.5 - 0.5)
            assert first.flags.writeable == (training.stage < 3)
        refused(ValueError, "layer must be from 0 to 1", training.gathered(2).__enter__)


def test_more_layers_than_there_is_room_for_are_refused():
    with sharded(optimizers.SGD(0.5), "divided", layers=[[i] for i in range(8)], prefetch=0) as training:
        with training.gathered(0):
            refused(mpiagg.PlanError, "at the same time", training.gathered(1).__enter__)
        with training.gathered(1) as (second,):
            np.testing.assert_array_equal(second, start()[1])


def test_a_layer_is_gathered_as_a_whole():
    """Of whatever length, and of several dtypes, also where there is room for one layer at a time."""
    weights = [np.full(200_000, float(i), "f4" if i % 3 else "f8") for i in range(6)]
    layers = [[0, 1, 2], [3, 4, 5]]
    with mpiagg.Sharded(
        weights, optimizers.SGD(1.0), stage=3, share=False, prefetch=0, layers=layers, bucket_bytes=0
    ) as training:
        for layer, found in training.in_order():
            assert [x.dtype for x in found] == [weights[i].dtype for i in layers[layer]]
            assert all((x == i).all() for i, x in zip(layers[layer], found, strict=True))


def test_a_layer_stays_until_its_last_use_ends():
    with sharded(optimizers.SGD(0.5), "divided", layers=[[i] for i in range(8)], prefetch=0) as training:
        with training.gathered(0) as (first,):
            with training.gathered(0):
                pass
            refused(mpiagg.PlanError, "at the same time", training.gathered(1).__enter__)
            refused(mpiagg.PlanError, "at the same time", training.weights)
            np.testing.assert_array_equal(first, start()[0])
        assert equal(whole(training), start())


def test_a_layer_that_finds_no_room_keeps_none():
    weights = [np.ones(3), np.ones(3, np.float32), np.ones(4, np.float32), np.ones(3), np.ones(3, np.float32)]
    layers = [[0, 1], [2], [3, 4]]
    with mpiagg.Sharded(weights, MAKE["sgd"](), stage=3, share=False, layers=layers, prefetch=0) as training:
        with training.gathered(1):  # layer 2 has room for its float64, and none for its float32
            refused(mpiagg.PlanError, "at the same time", training.gathered(2).__enter__)
        with training.gathered(0) as (double, single):
            np.testing.assert_array_equal([*double, *single], np.ones(6))


def test_views_of_buckets_need_no_copy():
    expected = plain(MAKE["sgd"]())
    with sharded(MAKE["sgd"](), "stage 1") as training:
        views = training.gradient_views()
        for step in range(STEPS):
            for view, gradient in zip(views, gradients(step), strict=True):
                view[...] = gradient
            training.step(views)
        assert equal(whole(training), expected)
    with sharded(MAKE["sgd"](), "stage 2") as training:
        refused(mpiagg.PlanError, "no place of their own", training.gradient_views)


# -- errors


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("error", "words", "spoil"),
    [
        (TypeError, "gradient 1 must be a NumPy array", lambda g: [g[0], "no", *g[2:]]),
        (TypeError, "gradient 1 has dtype", lambda g: [g[0], g[1].astype(np.float32), *g[2:]]),
        (ValueError, "gradient 1 has shape", lambda g: [g[0], g[1][1:], *g[2:]]),
        (ValueError, "one for each of 8", lambda g: g[1:]),
        (ValueError, "are missing", lambda _: None),
    ],
)
def test_a_bad_gradient_of_one_rank_is_an_error_on_all(stored, error, words, spoil):
    with sharded(MAKE["adam"](), stored) as training:
        training.step(gradients(0), wait=False)
        before = whole(training)
        given, other = gradients(1), (mpiagg.MismatchError, "rank 0 raised")
        refused(*((error, words) if RANK == 0 else other), training.step, spoil(given) if RANK == 0 else given)
        assert equal(whole(training), before)
        for step in range(1, STEPS):
            training.step(gradients(step))
        assert equal(whole(training), plain(MAKE["adam"]()))


def test_an_optimizer_that_raises_on_one_rank_is_an_error_on_all():
    with sharded(MAKE["lamb"](), "stage 2") as training, np.errstate(over="raise"):
        given = gradients(0)
        given[0][0, 0] = 1e300  # of which the one rank that has that part takes the square
        before = whole(training)
        with pytest.raises((FloatingPointError, mpiagg.MismatchError), match="overflow") as caught:
            training.step(given)
        assert COMM.allreduce(caught.errisinstance(FloatingPointError)) == 1
        assert equal(whole(training)[:1], before[:1])


@pytest.mark.parametrize("kind", [optimizers.SGD, optimizers.LAMB])
def test_a_state_that_one_rank_cannot_make_is_an_error_on_all(kind):
    class Short(kind):
        def new_state(self, values):
            if RANK == 0 and values.size:
                raise MemoryError("too long")
            return super().new_state(values)

    with sharded(Short(0.1), "stage 1") as training:
        error = MemoryError if RANK == 0 else mpiagg.MismatchError
        refused(error, "too long", training.step, gradients(0))


def test_a_matrix_that_one_rank_cannot_step_is_an_error_on_all():
    with sharded(optimizers.Muon(others=optimizers.LAMB()), "stage 1") as training, np.errstate(over="raise"):
        given = gradients(0)
        given[0][...] = 1e200
        with pytest.raises((FloatingPointError, mpiagg.MismatchError), match="overflow") as caught:
            training.step(given)
        assert COMM.allreduce(caught.errisinstance(FloatingPointError)) == 1


def test_layers_out_of_turn_are_an_error_of_the_step():
    with sharded(MAKE["sgd"](), "stage 2", layers=[[0, 1, 2, 3], [4, 5, 6, 7]]) as training:
        training.reduce(0, gradients(0)[:4])
        refused(ValueError, "not the turn of layer 0", training.step, gradients(0))
        training.reduce(1, gradients(0)[:4])
        refused(ValueError, "has shape", training.step, [*gradients(0)[:4], *[None] * 4])
        training.reduce(1, gradients(0)[4:])
        refused(ValueError, "given twice", training.step, gradients(0))
        training.reduce(5, [])
        refused(ValueError, "not the turn of layer 5", training.step, gradients(0))
        training.reduce(1, None if RANK == 0 else gradients(0)[4:])
        error = (ValueError, "gradients of layer 1") if RANK == 0 else (mpiagg.MismatchError, "rank 0 raised")
        refused(*error, training.step, [*gradients(0)[:4], *[None] * 4])
        for step in range(STEPS):
            training.reduce(1, gradients(step)[4:])
            training.reduce(0, gradients(step)[:4])
            training.step()
        assert equal(whole(training), plain(MAKE["sgd"]()))


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (TypeError, "a list of arrays", {"module": np.zeros(3)}),
        (TypeError, "a list of arrays", {"module": []}),
        (TypeError, "parameter 0 must be a NumPy array", {"module": [3]}),
        (TypeError, "parameter 0 must be a NumPy array", {"module": [np.ma.zeros(3)]}),
        (TypeError, "real numbers", {"module": [np.zeros(3, np.int32)]}),
        (TypeError, "real numbers", {"module": [np.zeros(3, np.complex64)]}),
        (ValueError, "share memory", {"module": [np.zeros(3)] * 2}),
        (TypeError, "must be one of mpiagg.optimizers", {"optimizer": "adam"}),
        (ValueError, "stage must be", {"stage": 4}),
        (ValueError, "bucket_bytes must be", {"bucket_bytes": -1}),
        (ValueError, "prefetch must be", {"prefetch": -1}),
        (ValueError, "unknown op", {"op": "max"}),
        (ValueError, "denom is for op", {"op": "sum", "denom": 2}),
        (ValueError, "clip_norm must be", {"clip_norm": 0}),
        (ValueError, "share must be", {"share": "no"}),
        (TypeError, "master_dtype must be", {"master_dtype": np.float16}),
        (ValueError, "unknown split", {"split": "rows"}),
        (ValueError, "needs whole tensors", {"optimizer": optimizers.Muon(), "split": "elements"}),
        (ValueError, "layers must be", {"layers": [[0], [0]]}),
        (ValueError, "unknown algorithm", {"algorithm": "nonsense"}),
    ],
)
def test_bad_arguments(error, words, arguments):
    given = {"module": start(), "optimizer": optimizers.SGD(0.1), **arguments}
    refused(error, words, lambda: mpiagg.Sharded(**given))


@pytest.mark.parametrize(
    "arguments",
    [{"stage": 1 + RANK % 2}, {"optimizer": optimizers.SGD(0.1 + RANK)}, {"module": start()[: 7 + (RANK == 0)]}],
)
def test_ranks_that_disagree(arguments):
    given = {"module": start(), "optimizer": optimizers.SGD(0.1), **arguments}
    if SIZE > 1:  # one rank agrees with itself
        refused(mpiagg.MismatchError, "ranks disagree", lambda: mpiagg.Sharded(**given))


def test_it_is_freed_once():
    training = sharded(MAKE["sgd"](), "once on a node")
    training.free()
    training.free()
    refused(mpiagg.PlanError, "is freed", training.step, gradients(0))
    refused(mpiagg.PlanError, "is freed", training.weights)
    refused(mpiagg.PlanError, "is freed", training.memory)
    refused(mpiagg.PlanError, "is freed", training.gradient_views)


# -- states


@pytest.mark.parametrize("stored", STORED)
def test_training_goes_on_from_a_checkpoint(stored, tmp_path):
    folder = COMM.bcast(str(tmp_path / "saved"))
    with sharded(MAKE["adamw"](), stored) as training:
        for step in range(2):
            training.step(gradients(step))
        mpiagg.save_checkpoint(folder, {"training": training.state_dict()})
    with sharded(optimizers.AdamW(0.5), stored) as training:
        training.load_state_dict(mpiagg.load_checkpoint(folder)["training"])
        for step in range(2, STEPS):
            training.step(gradients(step))
        assert equal(whole(training), plain(MAKE["adamw"]()))
    COMM.Barrier()


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_stays_as_it_was_while_training_goes_on(name, stored, steps):
    with sharded(MAKE[name](), stored) as training:
        for step in range(steps):
            training.step(gradients(step))
        state = training.state_dict()
        for step in range(steps, STEPS):
            training.step(gradients(step))
        wanted = whole(training)
        training.load_state_dict(state)
        for step in range(steps, STEPS):
            training.step(gradients(step))
        assert equal(whole(training), wanted)


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0)])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_says_whether_there_is_a_momentum(before, after, steps):
    with (
        sharded(optimizers.SGD(0.1, before), "stage 2") as training,
        sharded(optimizers.SGD(0.1, after), "stage 2") as other,
    ):
        for step in range(steps):
            training.step(gradients(step))
            other.step(gradients(step))
        other.load_state_dict(training.state_dict())
        for step in range(steps, 2 + steps):
            training.step(gradients(step))
            other.step(gradients(step))
        assert equal(whole(other), whole(training))


def test_ranks_that_load_other_learning_rates_disagree():
    with sharded(MAKE["adam"](), "stage 2") as training:
        state = training.state_dict()
        state["optimizer"]["lr"] = 0.5 + RANK
        if SIZE > 1:
            refused(mpiagg.MismatchError, "ranks disagree", training.load_state_dict, state)
            assert training.optimizer.lr == MAKE["adam"]().lr


def by_halves():
    """Return a communicator of some of the ranks, or of others for the rest; there is a number of them less."""
    return COMM.Split(RANK < (SIZE + 1) // 2, RANK)


@pytest.mark.parametrize("name", ["adam", "muon"])
@pytest.mark.parametrize("stored", STORED)
def test_a_checkpoint_is_for_any_number_of_ranks_stage_and_units(stored, name, tmp_path):
    folder = COMM.bcast(str(tmp_path / "saved"))
    with sharded(MAKE[name](), stored) as training:
        for step in range(2):
            training.step(gradients(step))
        mpiagg.save_checkpoint(folder, training.state_dict())
        saved = whole(training)
    few = by_halves()
    other = {"stage 1": "once on a node", "stage 2": "divided", "once on a node": "stage 2", "divided": "stage 1"}
    stage, share = STORED[other[stored]]
    keywords = {"bucket_bytes": 0} if few.size != SIZE else {}  # what one rank has saved is enough as it was divided
    with mpiagg.Sharded(
        start(seed=9), MAKE[name](), stage=stage, share=share, comm=few, **{"bucket_bytes": 600, **keywords}
    ) as training:
        training.load_state_dict(mpiagg.load_checkpoint(folder, few))
        assert equal(whole(training), saved)
        state = training.state_dict()["tensors"]
        mine = {key: each for key, each in state.items() if each["stop"] > each["start"]}
        assert all(int(each["kept"]["step"]) == 2 for each in mine.values())
        alone, optimizer = start(), MAKE[name]()
        for step in range(2):
            each = [gradients(step, rank) for rank in range(SIZE)]
            optimizer.step(alone, [np.asarray(sum(x) / SIZE) for x in zip(*each, strict=True)])
        given = gradients(7, rank=0)
        training.step(given)
        optimizer.step(alone, given)
        for x, y in zip(whole(training), alone, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
    few.Free()
    COMM.Barrier()


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    with sharded(MAKE["adam"](), "stage 2") as training:
        training.step(gradients(0))
        before, state = whole(training), training.state_dict()
        named = {**state["tensors"], "0": {**state["tensors"]["0"], "shape": [8, 4]}}
        unknown = {
            key: {**each, "kept": {**each["kept"], "more": each["values"]}} for key, each in state["tensors"].items()
        }
        short = {
            key: {**each, "kept": {name: x[1:] if np.ndim(x) else x for name, x in each["kept"].items()}}
            for key, each in state["tensors"].items()
        }
        number = {key: {**each, "kept": 1.5} for key, each in state["tensors"].items()}
        lacking = {key: {**each, "stop": each["start"]} for key, each in state["tensors"].items()}
        for wrong, words in [
            ({}, "a state has the keys"),
            ({**state, "tensors": {}}, "is not of the tensors"),
            ({**state, "ranks": 0}, "ranks of the state"),
            ({**state, "tensors": named}, "has shape"),
            ({**state, "tensors": lacking}, "lacks elements"),
            ({**state, "tensors": unknown}, "the state has .*more"),
            ({**state, "tensors": number}, "must be a dict"),
            ({**state, "tensors": short}, "real numbers"),
            ({**state, "optimizer": optimizers.SGD(0.1).hyperparameters()}, "the state is not one of Adam"),
        ]:
            refused(ValueError, words, training.load_state_dict, wrong)
        assert equal(whole(training), before)
        given = {**state, "optimizer": {**state["optimizer"], "lr": 0.7}}
        one = {} if RANK == 0 else given
        error = (ValueError, "has the keys") if RANK == 0 else (mpiagg.MismatchError, "rank 0 raised")
        refused(*error, training.load_state_dict, one)
        assert training.optimizer.lr == state["optimizer"]["lr"]  # also where it was good
