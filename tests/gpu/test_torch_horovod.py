"""Horovod's interface on tensors of one GPU that all ranks share.

test_gpu_ranks.py starts the ranks, where torch knows the GPU.
"""

import kernel_checks as checks
import pytest
from mpi4py import MPI

checks.gpu()
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch knows no GPU", allow_module_level=True)

import mpiagg.horovod.torch as hvd  # noqa: E402 - torch is there

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.gpu,
    pytest.mark.usefixtures("horovod"),
    pytest.mark.filterwarnings("default"),
]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
TOTAL = SIZE * (SIZE + 1) / 2


@pytest.fixture(scope="module")
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def filled(value, *shape, dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype, device="cuda")


def holds(tensor, value):
    return tensor.is_cuda and bool((tensor == value).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("length", [7, 300_000])
def test_collectives(dtype, length):
    own = filled(RANK + 1, length, dtype=dtype)
    assert holds(hvd.allreduce(own, op=hvd.Sum), TOTAL)
    assert all(holds(x, TOTAL) for x in hvd.grouped_allreduce([own, own[:3]], op=hvd.Sum))
    assert holds(hvd.broadcast(own, SIZE - 1), SIZE)
    gathered = hvd.allgather(filled(RANK, RANK + 1, 3, dtype=dtype))
    assert gathered[:, 0].tolist() == [rank for rank in range(SIZE) for _ in range(rank + 1)]
    assert holds(hvd.reducescatter(filled(RANK + 1, SIZE, length, dtype=dtype), op=hvd.Sum), TOTAL)
    swapped, counts = hvd.alltoall(filled(RANK, SIZE, 2, dtype=dtype), splits=torch.ones(SIZE, dtype=torch.int32))
    assert (swapped[:, 0].tolist(), counts.tolist()) == (list(range(SIZE)), [1] * SIZE)
    hvd.allreduce_(own, op=hvd.Sum)
    assert holds(own, TOTAL)


def test_operations_follow_the_stream_in_which_they_are_asked_for():
    own, side = filled(-1.0, 300_000), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        own.fill_(RANK + 1.0)
        handle = hvd.allreduce_async_(own, op=hvd.Sum)
    hvd.synchronize(handle)
    assert holds(own, TOTAL)


def test_sparse_tensors_are_added_up():
    own = torch.eye(SIZE, device="cuda")[RANK : RANK + 1].to_sparse()
    total = hvd.synchronize(hvd.sparse_allreduce_async(own, "sparse", hvd.Sum))
    assert holds(total.to_dense(), 1)


def test_a_rank_that_has_joined_takes_part():
    for _ in range(RANK + 1):
        last = hvd.allreduce(filled(1.0, 5), op=hvd.Sum)
    assert last.is_cuda
    assert hvd.join() in range(SIZE)


def test_devices_that_differ_are_told():
    if SIZE > 1:
        with pytest.raises(hvd.HorovodInternalError, match=r"device 'cpu' and 'cuda'|device 'cuda' and 'cpu'"):
            hvd.allreduce(torch.ones(3, device="cuda" if RANK else "cpu"), name="unlike")


def test_ranks_train_like_one():
    def model():
        torch.manual_seed(3)
        return torch.nn.Linear(8, 4, dtype=torch.float64, device="cuda")

    torch.manual_seed(5)
    batches = torch.randn(SIZE, 6, 8, dtype=torch.float64).cuda()
    own, alone = model(), model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(own.parameters(), 0.1), named_parameters=own.named_parameters()
    )
    hvd.broadcast_parameters(own.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    plain = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        own(batches[RANK]).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        alone(batches.reshape(-1, 8)).square().mean().backward()
        plain.step()
    for one, other in zip(own.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
