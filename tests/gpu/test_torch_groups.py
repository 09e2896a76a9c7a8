"""torch.distributed on tensors of one GPU that all ranks share: what holds on the CPU, and streams.

test_gpu_ranks.py starts the ranks, where torch knows the GPU.
"""

import kernel_checks as checks
import pytest

checks.gpu()
pytest.register_assert_rewrite("mpi_torch.test_process_group")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch knows no GPU", allow_module_level=True)

from mpi_torch.conftest import process_group  # noqa: E402, F401 - torch is there; a fixture
from mpi_torch.test_process_group import *  # noqa: E402, F403 - the tests
from mpi_torch.test_process_group import RANK, SIZE, dist  # noqa: E402 - torch is there

from mpiagg.ddp.torch_streams import present_source  # noqa: E402 - likewise

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.gpu,
    pytest.mark.usefixtures("process_group", "default_device"),
    pytest.mark.filterwarnings("default"),
]

SLEEP = 50_000_000
"""Clocks of the GPU: some 30 milliseconds."""


@pytest.fixture
def default_device():
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("length", [7, 300_000])
def test_calls_follow_the_stream_in_which_they_are_made(later, length):
    side = torch.cuda.Stream()
    tensor, gathered = torch.full((length,), -1.0), torch.empty(SIZE * length)
    out = torch.full((SIZE * length,), -1.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        tensor.fill_(RANK + 1.0)
        works = [dist.all_reduce(tensor, async_op=later)]
        works.append(dist.all_gather_into_tensor(gathered, tensor, async_op=later))
        works.append(dist.all_to_all_single(out, gathered, async_op=later))
    for work in works if later else []:
        work.wait()
    # In the default stream, which has nothing to wait for: the calls are done when they return, or wait() does.
    total = SIZE * (SIZE + 1) / 2
    assert all((each == total).all().item() for each in (tensor, gathered, out))


def test_work_does_not_wait_for_what_the_stream_is_asked_for_later(barrier):
    if SIZE > 3:
        return  # four processes on one GPU have been seen to wait: which of their streams share a queue is the driver's
    tensor = torch.ones(300_000)
    dist.all_reduce(tensor.clone())  # loads what it needs, for which the device would be waited for
    work = dist.all_reduce(tensor, async_op=True)
    with present_source(torch.cuda.current_device()).inside():
        barrier.close()
    work.wait()
    assert not torch.cuda.current_stream().query()
    barrier.open()
    assert (tensor == SIZE).all()


def test_messages_follow_the_stream_in_which_they_are_sent():
    if SIZE == 1:
        return
    to, source = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    side, tensor, into = torch.cuda.Stream(), torch.zeros(5000), torch.full((5000,), -1.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        tensor.fill_(float(RANK))
        works = [dist.isend(tensor, to), dist.irecv(into, source)]
    for work in works:
        work.wait()
    assert (into == source).all()
