"""An aggregation on the all-reduce of torch.distributed, beside the same on ours."""

import os

import numpy as np
import pytest
import torch.distributed
from mpi4py import MPI

import mpiagg
from mpiagg.aggregation import backends

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("process_group")]

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    """Let torch.distributed have the ranks of this job."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks are on one machine, whatever it calls itself
    path = COMM.bcast(str(tmp_path_factory.mktemp("gloo") / "store") if RANK == 0 else None)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=RANK, world_size=SIZE)
    yield
    COMM.Barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("op", ["avg", "sum", "min", "max"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_it_is_what_ours_is(op, by_layer):
    random = np.random.default_rng(RANK)
    tensors = [random.standard_normal((5, 7)), random.standard_normal(3).astype(np.float32), np.ones(4, np.float16)]
    wanted = [x.copy() for x in tensors]
    with mpiagg.AllReduce(op=op, by_layer=by_layer) as ours:
        ours.aggregate(wanted)
    with mpiagg.AllReduce(op=op, by_layer=by_layer, backend=backends.torch_distributed()) as theirs:
        for x, y in zip(tensors, wanted, strict=True):
            before = x.copy()
            theirs.aggregate([x])
            np.testing.assert_allclose(x, y, rtol=1e-6 if x.dtype == np.float32 else 1e-14)
            x[...] = before
        theirs.aggregate(tensors)
    for x, y in zip(tensors, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6 if x.dtype == np.float32 else 1e-14)


def test_denominators_hold():
    gradient = np.full(6, 8.0, np.float32)
    with mpiagg.AllReduce(denom=4 * SIZE, divide_before=True, backend=backends.torch_distributed()) as aggregation:
        aggregation.aggregate([gradient])
    assert gradient.tolist() == [2.0] * 6


def test_ddp_on_torch_distributed():
    gradients = [np.full((3, 4), RANK + 1.0), np.full(5, 2.0 * RANK)]
    with (
        mpiagg.AllReduce(backend=backends.torch_distributed()) as aggregation,
        mpiagg.DDP([np.zeros((3, 4)), np.zeros(5)], aggregation=aggregation) as ddp,
    ):
        ddp.sync_gradients(gradients)
    assert np.allclose(gradients[0], (SIZE + 1) / 2)
    assert np.allclose(gradients[1], SIZE - 1)
