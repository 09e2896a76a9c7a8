"""What AllReduce and ParameterServer refuse, on every rank and with nothing touched."""

import numpy as np
import pytest
from mpi4py import MPI
from support import refused

import mpiagg

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"op": "median"}, "unknown op 'median'; known: sum, avg, min, max"),
        ({"op": "prod"}, "unknown op"),
        ({"op": None}, "unknown op"),
        ({"op": MPI.SUM}, "unknown op"),
        ({"denom": 0}, "denom must be"),
        ({"denom": 0.0}, "denom must be"),
        ({"denom": float("nan")}, "denom must be"),
        ({"denom": float("inf")}, "denom must be"),
        ({"denom": np.ones(2)}, "denom must be"),
        ({"denom": "2"}, "denom must be"),
        ({"denom": True}, "denom must be"),
        ({"denom": 2, "op": "sum"}, "are for op 'avg'"),
        ({"divide_before": True, "op": "max"}, "are for op 'avg'"),
        ({"algorithm": "magic"}, "unknown algorithm 'magic'; known:.*ring"),
        ({"wire": "fp8"}, "unknown wire 'fp8'; known: fp16, bf16, u8, u4, u2, exact, or None"),
    ],
)
def test_bad_arguments_are_refused_at_construction(arguments, words):
    refused(ValueError, words, mpiagg.AllReduce, **arguments)


@pytest.mark.parametrize("root", [-1, SIZE, 1.0, True, None])
def test_the_root_must_be_a_rank(root):
    refused(ValueError, "root must be a rank", mpiagg.ParameterServer, root=root)


@pytest.mark.parametrize(
    "arguments",
    [{"denom": 1 + RANK}, {"op": "sum" if RANK else "avg"}, {"divide_before": RANK > 0}, {"reproducible": RANK > 0}],
)
def test_ranks_must_agree_on_the_arguments(arguments):
    if SIZE == 1:
        mpiagg.AllReduce(**arguments).free()
    else:
        refused(mpiagg.MismatchError, "ranks disagree", mpiagg.AllReduce, **arguments)


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ([np.arange(3)], TypeError, "op 'avg' is not for integers"),
        ([np.zeros(2), np.array([None, 1])], TypeError, "object"),
        ([np.zeros(2), [1.0]], TypeError, "tensor 1 must be a NumPy array, not list"),
        (np.zeros(2), TypeError, "a list of arrays"),
        ([np.zeros(2), np.broadcast_to(1.0, 3)], ValueError, "tensor 1 is read-only"),
    ],
)
@pytest.mark.parametrize("make", [mpiagg.AllReduce, mpiagg.ParameterServer])
def test_bad_tensors_are_refused_and_nothing_is_touched(make, tensors, error, words):
    first = np.array(tensors[0])
    with make() as aggregation:
        refused(error, words, aggregation.aggregate, tensors)
        refused(error, words, aggregation.aggregate, tensors)
        assert np.array(tensors[0]).tolist() == first.tolist()
        assert aggregation.bytes_sent == 0


@pytest.mark.parametrize("make", [mpiagg.AllReduce, mpiagg.ParameterServer])
@pytest.mark.parametrize(
    "other",
    [
        lambda: [np.full(3, 5.0)],
        lambda: [np.full(3, 5.0), np.full((1, 2), 5.0)],
        lambda: [np.full(3, 5.0), np.full(2, 5.0, np.float32)],
        lambda: [np.full(2, 5.0), np.full(3, 5.0)],
        list,
    ],
    ids=["count", "shape", "dtype", "order", "nothing"],
)
def test_layouts_must_be_the_same_on_all_ranks(make, other):
    odd_one = SIZE - 1
    with make() as aggregation:
        tensors = [np.full(3, 5.0), np.full(2, 5.0)]
        mine = other() if odd_one == RANK and SIZE > 1 else tensors
        if SIZE > 1:
            for method in (aggregation.aggregate, getattr(aggregation, "reduce_gradients", aggregation.aggregate)):
                refused(mpiagg.MismatchError, f"rank {odd_one}: .*tensors", method, mine)
        assert all((x == 5.0).all() for x in mine)
        # A refused layout is not remembered, and the ranks are still together.
        tensors[0][...] = RANK
        aggregation.aggregate(tensors)
        assert tensors[0].tolist() == [(SIZE - 1) / 2] * 3


def test_a_fault_on_one_rank_is_an_error_on_all():
    tensors = [np.full(3, 5.0)]
    tensors[0].flags.writeable = RANK != 0
    error, words = (ValueError, "read-only") if RANK == 0 else (mpiagg.MismatchError, "rank 0 raised ValueError")
    with mpiagg.AllReduce() as aggregation:
        refused(error, words, aggregation.aggregate, tensors)
        refused(error, words, aggregation.aggregate_init, tensors)
    assert tensors[0].tolist() == [5.0] * 3


@pytest.mark.parametrize("make", [mpiagg.AllReduce, mpiagg.ParameterServer])
def test_what_is_freed_is_not_used(make):
    aggregation = make()
    x = np.full(3, 5.0)
    aggregation.aggregate([x])
    aggregation.free()
    aggregation.free()
    refused(mpiagg.PlanError, f"{make.__name__} is freed", aggregation.aggregate, [x])
    refused(mpiagg.PlanError, f"{make.__name__} is freed", aggregation.aggregate_init, [x])


def test_what_one_rank_cannot_take_is_an_error_on_all():
    denom = 10**400 if RANK == 0 else 2.0
    refused(
        ValueError if RANK == 0 else mpiagg.MismatchError,
        "denom must be a finite number",
        mpiagg.AllReduce,
        denom=denom,
    )
