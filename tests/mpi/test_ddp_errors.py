"""What DDP refuses, on every rank and with nothing touched."""

from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI
from support import refused

import mpiagg

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
MEAN = (SIZE - 1) / 2

SHAPES = [(4, 8), (8,), (8, 3), (3,)]


def arrays(dtype=np.float64):
    return [np.zeros(shape, dtype) for shape in SHAPES]


@pytest.mark.parametrize(
    ("module", "keywords", "error", "words"),
    [
        (None, {}, TypeError, "a module is"),
        ([np.zeros(2), "w"], {}, TypeError, "parameter 1, a str"),
        ([np.zeros(2, int)], {}, TypeError, "not for integers"),
        ([np.zeros(2)], {"bucket_bytes": -1}, ValueError, "bucket_bytes must be"),
        ([np.zeros(2)], {"bucket_bytes": 1e6}, ValueError, "bucket_bytes must be"),
        ([np.zeros(2)], {"aggregation": "ring"}, TypeError, "must be an mpiagg.Aggregation, not str"),
    ],
)
def test_bad_arguments_are_refused(module, keywords, error, words):
    refused(error, words, mpiagg.DDP, module, **keywords)


def test_aggregations_of_weights_are_refused():
    with mpiagg.Decentralized() as gossip:
        refused(ValueError, "Decentralized is meant for weights", mpiagg.DDP, arrays(), aggregation=gossip)


def test_the_aggregation_must_have_the_same_ranks():
    with mpiagg.AllReduce(MPI.COMM_SELF) as alone:
        if SIZE > 1:
            refused(ValueError, "another communicator", mpiagg.DDP, arrays(), COMM, alone)
        with mpiagg.DDP(arrays(), aggregation=alone) as ddp:
            assert ddp.comm == MPI.COMM_SELF


@pytest.mark.parametrize(
    "build",
    [
        lambda odd: {"module": arrays()[: 4 - odd]},
        lambda odd: {"module": arrays(np.float32 if odd else np.float64)},
        lambda odd: {"module": [np.zeros((2, 3) if odd else (3, 2))]},
        lambda odd: {"module": arrays(), "bucket_bytes": 100 + odd},
        lambda odd: {
            "module": SimpleNamespace(
                parameters=lambda: [np.zeros(2)], named_parameters=lambda: [("a" if odd else "b", None)]
            )
        },
    ],
    ids=["count", "dtype", "shape", "cap", "name"],
)
def test_a_layout_that_differs_is_an_error_on_all_ranks(build):
    odd_one = SIZE // 2
    if SIZE > 1:
        words = f"ranks disagree: .*rank {odd_one}" if SIZE > 2 else "ranks disagree"
        refused(mpiagg.MismatchError, words, mpiagg.DDP, **build(odd_one == RANK))
    else:
        mpiagg.DDP(**build(True)).free()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (np.zeros((3, 1)), ValueError),
        (np.zeros(3, np.float32), TypeError),
        (np.zeros(3, object), TypeError),
        (np.broadcast_to(1.0, 3), ValueError),
        ("gradient", TypeError),
    ],
)
def test_a_bad_gradient_on_one_rank_is_an_error_on_all(fault, error):
    good = [np.full(shape, float(RANK)) for shape in SHAPES]
    odd_one = SIZE - 1
    with mpiagg.DDP(arrays()) as ddp:
        bad = [*good[:3], fault] if odd_one == RANK else good
        expected, words = (error, "gradient 3") if odd_one == RANK else (mpiagg.MismatchError, f"rank {odd_one} raised")
        refused(expected, words, ddp.sync_gradients, bad)
        refused(expected, words, ddp.overlapped_sync_gradients, bad)
        assert all((x == RANK).all() for x in good)
        assert not any(view.any() for view in ddp.gradient_views())
        ddp.sync_gradients(good)
        assert all((x == MEAN).all() for x in good)


@pytest.mark.parametrize("gradients", [[], [np.zeros(3)] * 5, (None,) * 4, np.zeros(4)], ids=str)
def test_the_gradients_are_a_list_for_all_parameters(gradients):
    with mpiagg.DDP(arrays()) as ddp:
        refused(ValueError, "gradients must be a list", ddp.sync_gradients, gradients)


def test_what_is_freed_is_not_used():
    ddp = mpiagg.DDP(arrays())
    ddp.free()
    ddp.free()
    for method in (ddp.sync_gradients, ddp.overlapped_sync_gradients, ddp.broadcast_parameters):
        refused(mpiagg.PlanError, "DDP is freed", method)


def test_gradients_in_the_places_of_others_are_refused():
    with mpiagg.DDP([np.zeros(2), np.zeros(2)]) as ddp:
        first, second = ddp.gradient_views()
        first[:], second[:] = 1, 2
        refused(ValueError, "gradient 0 lies in a bucket", ddp.sync_gradients, [second, first])
        assert [first.tolist(), second.tolist()] == [[1, 1], [2, 2]]
        ddp.sync_gradients([first, second])
