"""Horovod's interface: results that may be changed, what is refused, and the names of modules."""

import importlib
import pickle

import pytest
import torch
from mpi4py import MPI

import mpiagg.horovod.torch as hvd

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("horovod")]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1


@pytest.fixture(scope="module")
def horovod():
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


CALLS = {
    "sum": lambda x: hvd.allreduce(x, op=hvd.Sum),
    "average": hvd.allreduce,
    "scaled": lambda x: hvd.allreduce(x, prescale_factor=2.0, postscale_factor=0.5),
    "adasum": lambda x: hvd.allreduce(x, op=hvd.Adasum),
    "grouped": lambda x: hvd.grouped_allreduce([x, x])[0],
    "fp16": lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16),
    "allgather": hvd.allgather,
    "broadcast": lambda x: hvd.broadcast(x, 0),
    "alltoall": hvd.alltoall,
    "reducescatter": hvd.reducescatter,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strided", [False, True])
def test_results_can_be_changed_in_place(call, dtype, strided):
    x = torch.ones(SIZE, 4, dtype=dtype)
    x = (x[:, ::2] if strided else x).requires_grad_()
    wanted = call(x).detach() * 2
    y = call(x)
    assert not y._is_view()
    y.mul_(2)
    assert torch.equal(y, wanted)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert (x.detach() == 1).all()


def test_a_result_has_the_shape_and_only_its_own_memory():
    x = torch.ones(3, 5)
    for found in (hvd.allreduce(x), hvd.synchronize(hvd.allreduce_async(x)), hvd.allreduce(torch.ones(5, 3).t())):
        assert found.shape == x.shape
        assert found.untyped_storage().nbytes() == x.nbytes
    assert hvd.allreduce(torch.ones(()), op=hvd.Sum).shape == ()
    assert hvd.allreduce(torch.ones(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("given", [5.0, [1.0, 2.0], None])
def test_what_is_no_tensor_is_refused(given):
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        hvd.allreduce_async(given)
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        hvd.allreduce(given)


def test_objects_that_cannot_be_pickled():
    for call in (lambda x: hvd.broadcast_object(x, LAST), hvd.allgather_object):
        if RANK == LAST:
            with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
                call(lambda: 0)
        else:
            with pytest.raises(hvd.HorovodInternalError, match=f"cannot be pickled: {LAST}$"):
                call(RANK)
    # What is no root's is not pickled, and the job goes on.
    assert hvd.broadcast_object(RANK if RANK == LAST else (lambda: 0), LAST) == LAST
    assert hvd.allgather_object(RANK) == list(range(SIZE))


def test_objects_of_a_process_set_that_cannot_be_pickled():
    if SIZE < 3:
        return
    last = hvd.add_process_set([1, LAST])
    if last.included():
        with pytest.raises(Exception, match="pickle" if RANK == LAST else f"cannot be pickled: {LAST}$"):
            hvd.allgather_object((lambda: 0) if RANK == LAST else RANK, process_set=last)
    hvd.remove_process_set(last)


def test_sparse_tensors_are_refused_by_what_takes_dense_ones():
    x = torch.eye(SIZE).to_sparse()
    calls = [*(CALLS[name] for name in CALLS if name != "adasum"), lambda x: hvd.broadcast_(x, 0), hvd.allreduce_]
    calls += [hvd.allgather_async, hvd.reducescatter_async, hvd.alltoall_async, lambda x: hvd.broadcast_async(x, 0)]
    for call in calls:
        with pytest.raises(ValueError, match="sparse_allreduce_async"):
            call(x)
    assert hvd.allgather(torch.ones(1)).tolist() == [1.0] * SIZE  # nothing was sent


def test_results_are_those_of_horovods_handles():
    rows, received = hvd.synchronize(hvd.alltoall_async(torch.full((SIZE,), float(RANK))))
    assert rows.tolist() == list(range(SIZE))
    assert received.tolist() == [1] * SIZE
    handle = hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), name="callable", op=hvd.Sum)
    assert handle().to_dense().tolist() == [[SIZE, 0], [0, SIZE]]


def test_optimizers_refuse_what_horovods_do():
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for words, given in {
        "backward_passes_per_step must be > 0": {"backward_passes_per_step": 0},
        "groups must consist of": {"groups": [["weight"]]},
    }.items():
        with pytest.raises(ValueError, match=words):
            hvd.DistributedOptimizer(optimizer, module.named_parameters(), **given)
    adasum = hvd.DistributedOptimizer(optimizer, module.named_parameters(), op=hvd.Adasum, backward_passes_per_step=2)
    assert adasum.backward_passes_per_step == 2
    if SIZE > 1:
        with pytest.raises(AssertionError, match="not supported when using Adasum"), adasum.skip_synchronize():
            pass


def test_a_process_set_knows_its_ranks_before_it_is_added():
    made = hvd.ProcessSet(rank for rank in range(1))
    assert made.ranks == [0]
    assert made.included() == (RANK == 0)
    assert made.size() is None
    with pytest.raises(ValueError, match="a rank twice"):
        hvd.ProcessSet(iter([0, 0]))


MODULES = {
    "mpi_ops": ["init", "shutdown", "rank", "local_rank", "is_homogeneous", "nccl_built", "Average", "Product"],
    "elastic.sampler": ["ElasticSampler"],
    "elastic.state": ["TorchState", "ObjectState", "State"],
    "functions": ["broadcast_object"],
    "compression": ["Compression"],
}


@pytest.mark.parametrize("module", MODULES)
def test_modules_have_the_names_of_horovods(module):
    found = importlib.import_module(f"mpiagg.horovod.torch.{module}")
    for name in [*MODULES[module], *getattr(found, "__all__", ())]:
        assert getattr(found, name) is getattr(hvd.elastic if module.startswith("elastic") else hvd, name)
    collectives = {name for name in hvd.__all__ if name.rstrip("_").endswith(("_async", "reduce", "gather", "scatter"))}
    if module == "mpi_ops":
        assert {*collectives, "alltoall", "broadcast", "broadcast_"} <= set(found.__all__)
