"""torch.distributed with the backend mpiagg: its collectives, messages and groups, and what torch builds on them."""

import os
import threading
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel
from mpi4py import MPI
from torch.distributed import fsdp
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import mpiagg
import mpiagg.torch

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.usefixtures("process_group"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.complex64, torch.complex128),
]


def there_if(condition):
    """Return what leaves a test out, unless torch has what it needs."""
    return lambda test: test if condition else None


def home():
    """Return torch's default device: tests/gpu runs these tests with another."""
    return torch.empty(0).device


def drawn(draw, shape, seed, **how):
    """Return random numbers that are the same on every device."""
    return draw(size=shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu", **how).to(home())


def numbers(rank, dtype=torch.float32, shape=(3, 4)):
    """Return a rank's numbers, small enough that every dtype adds up those of all ranks without rounding."""
    return drawn(torch.randint, shape, rank, low=0, high=5).to(dtype)


def of_all(dtype=torch.float32, shape=(3, 4)):
    return torch.stack([numbers(rank, dtype, shape) for rank in range(SIZE)])


def test_it_is_started_once():
    with pytest.raises(ValueError, match="started already"):
        mpiagg.torch.init_process_group()
    with pytest.raises(TypeError, match="timedelta"):
        mpiagg.torch.init_process_group(timeout=3)


def test_the_environment_is_as_torchrun_sets_it():
    assert dist.get_backend() == mpiagg.torch.BACKEND
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, SIZE)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(RANK), str(SIZE))
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["NODE_RANK"]) == (
        *(str(RANK), str(SIZE), "0"),
    )
    assert int(os.environ["MASTER_PORT"]) > 0


@pytest.mark.filterwarnings(
    "ignore:(Dynamo does not know|Graph break due to unsupported):UserWarning"
)  # torch's own options
def test_compiled_programs_call_every_collective():
    def program(x):
        dist.broadcast(x, 0)
        dist.barrier()
        dist.all_reduce(x, async_op=True).wait()
        dist.reduce(x, 0)
        out = torch.empty_like(x)
        dist.scatter(out, [x * rank for rank in range(SIZE)] if RANK == 0 else None)
        return out + 1

    found = torch.compile(program, backend="aot_eager")(torch.full((2,), RANK + 1.0))
    assert found.tolist() == [RANK * SIZE * SIZE + 1.0] * 2


def test_joined_ranks_divide_by_those_that_have_batches():
    weight = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(weight.weight)
    model = DistributedDataParallel(weight)
    seen = []
    with model.join(divide_by_initial_world_size=False):
        for _ in range(RANK + 1):
            model.zero_grad()
            model(torch.full((1, 1), RANK + 1.0)).sum().backward()
            seen.append(model.module.weight.grad.item())
    # In step t those of rank t and above have a batch.
    assert seen == [(t + 1 + SIZE) / 2 for t in range(RANK + 1)]


def test_lists_of_another_length_are_refused():
    one = torch.ones(1)
    for call in (
        lambda: dist.all_gather([one.clone() for _ in range(SIZE + 1)], one),
        lambda: dist.all_to_all([one.clone() for _ in range(SIZE + 1)], [one] * (SIZE + 1)),
        lambda: dist.reduce_scatter(one.clone(), [one] * (SIZE + 1)),
    ):
        with pytest.raises((ValueError, RuntimeError), match=f"{SIZE + 1} tensors are not one for each of {SIZE}"):
            call()
    for call in (
        lambda: dist.all_gather_into_tensor(torch.ones(SIZE + 1), one),
        lambda: dist.reduce_scatter_tensor(one, torch.ones(SIZE + 1)),
    ):
        with pytest.raises((ValueError, RuntimeError), match=f"{SIZE} parts of 1 numbers make no tensor of {SIZE + 1}"):
            call()


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_of_every_dtype(dtype):
    tensor, wanted = numbers(RANK, dtype), of_all(dtype).sum(0).to(dtype)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, wanted)
    strided = torch.zeros(3, 8, dtype=dtype)[:, ::2]
    strided.copy_(numbers(RANK, dtype))
    dist.all_reduce(strided)
    assert torch.equal(strided, wanted)
    scalar = numbers(RANK, dtype, ())
    dist.all_reduce(scalar)
    assert torch.equal(scalar, of_all(dtype, ()).sum(0).to(dtype))


OPS = {
    dist.ReduceOp.SUM: lambda x: x.sum(0),
    dist.ReduceOp.PRODUCT: lambda x: x.prod(0),
    dist.ReduceOp.MIN: lambda x: x.amin(0),
    dist.ReduceOp.MAX: lambda x: x.amax(0),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_ops(op, dtype):
    wanted = OPS[op](of_all(dtype)).to(dtype)
    tensor = numbers(RANK, dtype)
    dist.all_reduce(tensor, op)
    assert torch.equal(tensor, wanted)
    for root in sorted({0, SIZE - 1}):
        tensor = numbers(RANK, dtype)
        dist.reduce(tensor, root, op)
        assert torch.equal(tensor, wanted if root == RANK else numbers(RANK, dtype))
    whole = of_all(dtype).roll(RANK, 0).contiguous()
    part = torch.empty(3, 4, dtype=dtype)
    dist.reduce_scatter_tensor(part, whole, op)
    stacked = torch.stack([of_all(dtype).roll(rank, 0)[RANK] for rank in range(SIZE)])
    assert torch.equal(part, OPS[op](stacked).to(dtype))


@pytest.mark.parametrize(
    ("op", "fold"),
    [
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ],
)
def test_bits(op, fold):
    tensor, wanted = numbers(RANK, torch.int64), numbers(0, torch.int64)
    for rank in range(1, SIZE):
        wanted = fold(wanted, numbers(rank, torch.int64))
    dist.all_reduce(tensor, op)
    assert torch.equal(tensor, wanted)


def test_averages_are_torchs():
    tensor = numbers(RANK)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert torch.allclose(tensor, of_all().mean(0))
    tensor = numbers(RANK, torch.int32) - 4
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    sums = (of_all(torch.int32) - 4).sum(0)
    assert torch.equal(tensor, torch.div(sums, SIZE, rounding_mode="trunc").to(torch.int32))
    tensor = numbers(RANK)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    assert torch.equal(tensor, of_all().sum(0) * 0.5)


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN])
def test_booleans(op):
    flags = torch.tensor([rank % 2 == 0 for rank in range(SIZE)] + [True, False])
    tensor = torch.stack([flags.roll(rank) for rank in range(SIZE)])[RANK]
    together = torch.stack([flags.roll(rank) for rank in range(SIZE)])
    dist.all_reduce(tensor, op)
    either = op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
    assert torch.equal(tensor, together.any(0) if either else together.all(0))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool])
def test_what_is_moved(dtype):
    own, whole = numbers(RANK, dtype), of_all(dtype)
    found = [torch.empty_like(own) for _ in range(SIZE)]
    dist.all_gather(found, own)
    assert torch.equal(torch.stack(found), whole)
    gathered = torch.empty(SIZE * 3, 4, dtype=dtype)
    dist.all_gather_into_tensor(gathered, own)
    assert torch.equal(gathered.view(SIZE, 3, 4), whole)
    gathered.zero_()
    gathered[3 * RANK : 3 * RANK + 3] = own
    dist.all_gather_into_tensor(gathered, gathered[3 * RANK : 3 * RANK + 3])  # as FSDP2 does
    assert torch.equal(gathered.view(SIZE, 3, 4), whole)
    for root in sorted({0, SIZE - 1}):
        copy = own.clone()
        dist.broadcast(copy, root)
        assert torch.equal(copy, numbers(root, dtype))
        dist.gather(own, found if root == RANK else None, dst=root)
        assert root != RANK or torch.equal(torch.stack(found), whole)
        parts = list(whole * 1 if dtype != torch.bool else whole) if root == RANK else None
        dist.scatter(copy, parts, src=root)
        assert torch.equal(copy, own)
    out = torch.empty(SIZE * 2, 4, dtype=dtype)
    dist.all_to_all_single(out, torch.cat([numbers(RANK + 10 * to, dtype, (2, 4)) for to in range(SIZE)]))
    assert torch.equal(out, torch.cat([numbers(source + 10 * RANK, dtype, (2, 4)) for source in range(SIZE)]))


def test_lengths_may_differ():
    found = [torch.empty(rank + 1, 2) for rank in range(SIZE)]
    dist.all_gather(found, torch.full((RANK + 1, 2), float(RANK)))
    assert all((part == rank).all() for rank, part in enumerate(found))
    part = torch.empty(RANK + 1)
    dist.reduce_scatter(part, [torch.full((rank + 1,), float(rank)) for rank in range(SIZE)], dist.ReduceOp.AVG)
    assert (part == RANK).all()
    sent, received = [(RANK + to) % 3 for to in range(SIZE)], [(source + RANK) % 3 for source in range(SIZE)]
    x = torch.cat([torch.full((count, 2), 10.0 * RANK + to) for to, count in enumerate(sent)])
    out = torch.empty(sum(received), 2)
    dist.all_to_all_single(out, x, received, sent)
    wanted = [torch.full((count, 2), 10.0 * source + RANK) for source, count in enumerate(received)]
    assert torch.equal(out, torch.cat(wanted))
    into = [torch.empty(count, 2) for count in received]
    dist.all_to_all(into, list(x.split(sent)))
    assert all(map(torch.equal, into, wanted))
    to_first = [torch.full((2,), float(RANK))] + [torch.empty(0)] * (SIZE - 1)
    into = [torch.empty(2 if RANK == 0 else 0) for _ in range(SIZE)]
    dist.all_to_all(into, to_first)
    assert RANK or [each.tolist() for each in into] == [[rank, rank] for rank in range(SIZE)]


def sparse(rank):
    return torch.sparse_coo_tensor([[rank, rank + 1, rank]], [1.0, 2.0, 4.0], (SIZE + 1,), check_invariants=True)


def test_sparse_tensors_are_added_up():
    own = sparse(RANK)
    dist.all_reduce(own)
    assert own.is_sparse
    assert torch.equal(own.to_dense(), sum(sparse(rank).to_dense() for rank in range(SIZE)))


def test_work_goes_on_by_itself_and_in_order():
    tensors = [numbers(RANK + 7 * which, shape=(5000,)) for which in range(10)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.all_reduce(late := numbers(RANK))  # waits for its turn
    assert torch.equal(late, of_all().sum(0))
    for which, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.get_future().wait()[0] is tensor
        assert torch.equal(tensor, sum(numbers(rank + 7 * which, shape=(5000,)) for rank in range(SIZE)))


def test_threads_wait_for_one_another():
    """Two threads have blocking calls while a rank is late. The calls are alike, in whatever order they are made."""
    sums, go = [torch.full((3,), float(RANK)) for _ in range(2)], torch.zeros(1)

    def add_up(tensor):
        dist.all_reduce(tensor)

    if RANK == SIZE - 1:
        for rank in range(SIZE - 1):
            dist.recv(go, rank)
    threads = [threading.Thread(target=add_up, args=(each,)) for each in sums]
    for thread in threads:
        thread.start()
        time.sleep(0.05)  # by then it is most likely in its call
    if RANK < SIZE - 1:
        dist.send(go, SIZE - 1)
    for thread in threads:
        thread.join()
    assert all(each.tolist() == [SIZE * (SIZE - 1) / 2] * 3 for each in sums)
    dist.barrier()


def test_futures_run_what_comes_after():
    tensor = torch.ones(3)
    future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 10)
    assert torch.equal(future.wait(), torch.full((3,), 10.0 * SIZE))


def test_what_comes_after_work_may_wait_for_more():
    here = home()  # of this thread: what comes after is run by another
    first = dist.all_reduce(torch.ones(200_000), async_op=True).get_future()
    second = first.then(lambda _: dist.all_reduce(torch.ones(3, device=here), async_op=True).get_future().wait()[0])
    third = second.then(lambda done: dist.all_reduce(done.value(), async_op=True).get_future().wait()[0])
    assert torch.equal(third.wait(), torch.full((3,), float(SIZE**2)))


def test_methods_take_a_root_and_an_op_in_place_of_options():
    group = dist.group.WORLD
    tensor = numbers(RANK)
    group.allreduce([tensor], dist.ReduceOp.MAX).wait()
    assert torch.equal(tensor, of_all().amax(0))
    group.allreduce(tensor := numbers(RANK)).wait()
    assert torch.equal(tensor, of_all().sum(0))
    group.broadcast(tensor := numbers(RANK), SIZE - 1).wait()
    assert torch.equal(tensor, numbers(SIZE - 1))
    group.reduce(tensor := numbers(RANK), 0, dist.ReduceOp.MIN).wait()
    assert torch.equal(tensor, of_all().amin(0) if RANK == 0 else numbers(RANK))
    found = [torch.empty(3, 4) for _ in range(SIZE)]
    group.gather(found, numbers(RANK), 0, timedelta(seconds=20)).wait()
    assert RANK or torch.equal(torch.stack(found), of_all())
    group.scatter(tensor := torch.empty(3, 4), list(of_all()), SIZE - 1).wait()
    assert torch.equal(tensor, numbers(RANK))
    group.reduce_scatter(tensor, list(of_all()), dist.ReduceOp.SUM).wait()
    assert torch.equal(tensor, numbers(RANK) * SIZE)
    for wrong in ("sum", 1.5):
        with pytest.raises(TypeError, match="options, or a root, an op and a timeout"):
            group.allreduce([tensor], wrong)
    assert "rank" in repr(group)


def test_tensors_can_be_resized_afterwards():
    for dtype in (torch.float32, torch.bfloat16):
        tensor, other = torch.ones(4, dtype=dtype), torch.ones(4 * SIZE, dtype=dtype)
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(other, tensor)
        tensor.untyped_storage().resize_(0)
        other.resize_(100)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="of one dtype, not of"):
        dist.all_gather_into_tensor(torch.zeros(4 * SIZE, dtype=torch.uint8), torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="must not be expanded"):
        dist.all_reduce(torch.ones(1).expand(4))
    with pytest.raises(TypeError, match=r"is of torch.float8_e4m3fn, which NumPy has not"):
        dist.all_reduce(torch.ones(1).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="must not be expanded"):
        dist.group.WORLD.recv([torch.ones(1).expand(4)], 0, 0)
    with pytest.raises(ValueError, match="the splits"):
        dist.distributed_c10d._get_default_group().alltoall_base(torch.zeros(3), torch.zeros(3), [9], [9])
    with pytest.raises(ValueError, match="the ranks of this group are"):
        dist.group.WORLD.send([torch.ones(1)], SIZE, 0)
    with pytest.raises(ValueError, match="tag"):
        dist.group.WORLD.send([torch.ones(1)], 0, 2**20)
    dist.all_reduce(tensor := torch.ones(2))
    assert (tensor == SIZE).all()


def test_values_of_views_are_reduced():
    base = torch.tensor([1.0 + 2.0j, 3.0 - 1.0j])
    negative, conjugate = base.conj().imag, base.conj()
    group = dist.group.WORLD
    group.allreduce([negative]).wait()
    assert torch.equal(negative.resolve_neg(), torch.tensor([-2.0, 1.0]) * SIZE)
    base = torch.tensor([1.0 + 2.0j, 3.0 - 1.0j])
    conjugate = base.conj()
    group.allreduce([conjugate]).wait()
    assert torch.equal(conjugate.resolve_conj(), torch.tensor([1.0 - 2.0j, 3.0 + 1.0j]) * SIZE)


def test_parts_of_other_lengths_are_reduced_as_others_are():
    for dtype, op, value in ((torch.float16, dist.ReduceOp.AVG, 40000.0), (torch.bool, dist.ReduceOp.SUM, True)):
        part = torch.zeros(RANK + 1, dtype=dtype)
        dist.reduce_scatter(part, [torch.full((rank + 1,), value, dtype=dtype) for rank in range(SIZE)], op)
        assert (part == value).all()
    part = torch.zeros(2, dtype=torch.int32)
    dist.reduce_scatter(part, [torch.full((2,), 4, dtype=torch.int32)] * SIZE, dist._make_nccl_premul_sum(0.5))
    assert (part == 2 * SIZE).all()


def test_errors_are_raised_by_wait():
    work = dist.all_reduce(torch.ones(3, dtype=torch.complex64), dist.ReduceOp.SUM, async_op=True)
    work.wait()
    group = dist.distributed_c10d._get_default_group()
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    if hasattr(options, "asyncOp"):  # torch 2.7 and those before it do not say who waits, and all calls are taken so
        options.asyncOp = True
    work = group.allreduce([torch.ones(3, dtype=torch.complex64)], options)
    with pytest.raises(TypeError, match="complex"):
        work.wait()
    assert not work.is_success()
    with pytest.raises(Exception, match="complex"):
        work.get_future().wait()
    dist.all_reduce(tensor := torch.ones(2))  # the group goes on
    assert (tensor == SIZE).all()


def test_messages():
    to, source = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for length in (1, 300_000):
        got = torch.empty(length, dtype=torch.bfloat16)
        if SIZE > 1:
            works = [dist.isend(torch.full((length,), RANK, dtype=torch.bfloat16), to), dist.irecv(got, source)]
            for work in works:
                work.wait()
            assert (got == source).all()
            turned = torch.empty(3, 4).t().requires_grad_()
            works = [dist.isend(numbers(RANK, shape=(4, 3)), to), dist.irecv(turned, source)]
            for work in works:
                work.wait()
            assert torch.equal(turned, numbers(source, shape=(4, 3)))
        others = [rank for rank in range(SIZE) if rank != RANK]
        into = {rank: torch.empty(2, length)[:, ::1] for rank in others}
        ops = [
            *(dist.P2POp(dist.isend, torch.full((2, length), float(RANK)), rank, tag=3) for rank in others),
            *(dist.P2POp(dist.irecv, into[rank], rank, tag=3) for rank in others),
        ]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        assert all((tensor == rank).all() for rank, tensor in into.items())
    if SIZE > 1:
        future = dist.irecv(got := torch.empty(3), source).get_future()
        dist.send(torch.full((3,), float(RANK)), to)
        assert future.wait()[0] is got
        assert (got == source).all()
    if RANK:
        dist.send(torch.tensor([float(RANK)]), 0)
    else:
        came = []
        for _ in range(SIZE - 1):
            value = torch.empty(1)
            assert dist.recv(value) == value.item()
            came.append(value.item())
        assert sorted(came) == list(range(1, SIZE))


def test_a_later_group_receives_nothing_of_an_earlier_one():
    for value in (1.0, 2.0):
        group, got = dist.new_group(), torch.full((3,), value)
        if RANK == 0 and SIZE > 1:
            dist.send(got, 1, group=group)
        if RANK == 1 and value > 1:  # the first time it does not receive what was sent
            dist.recv(got.zero_(), 0, group=group)
        dist.destroy_process_group(group)
        assert (got == value).all()


def test_objects():
    found = [None] * SIZE
    dist.all_gather_object(found, {"rank": RANK, "more": "x" * RANK})
    assert found == [{"rank": rank, "more": "x" * rank} for rank in range(SIZE)]
    both = ["a", 2] if RANK == SIZE - 1 else [None, None]
    dist.broadcast_object_list(both, src=SIZE - 1)
    assert both == ["a", 2]
    one = [None]
    dist.scatter_object_list(one, list(range(SIZE)) if RANK == 0 else None)
    assert one == [RANK]


def test_groups_may_overlap():
    groups = {}
    for first in range(SIZE):
        for last in range(first, SIZE):
            ranks = list(range(first, last + 1))
            groups[first, last] = dist.new_group(ranks)
    for (first, last), group in groups.items():
        if first <= RANK <= last:
            dist.all_reduce(tensor := torch.tensor([float(RANK)]), group=group)
            assert tensor.item() == sum(range(first, last + 1))
            assert dist.get_group_rank(group, RANK) == RANK - first
    for group in groups.values():
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_a_group_is_split():
    others = list(range(SIZE))[1:]
    mine = [0] if RANK == 0 else others[::-1]
    part = dist.group.WORLD.split_group(mine, timedelta(seconds=20), group_name=f"split {mine}", group_desc="part")
    assert (part.rank(), part.size()) == (mine.index(RANK), len(mine))
    assert (part.getGroupName(), part.getGroupDesc()) == (f"split {mine}", "part")
    part.allreduce(tensor := torch.tensor([float(RANK)])).wait()
    assert tensor.item() == sum(mine)
    assert SIZE == 1 or dist.group.WORLD.split_group([(RANK + 1) % SIZE]) is None
    part.shutdown()


# Before torch 2.15, which has this name, it splits no group without a GPU.
@there_if(hasattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS"))
def test_torch_splits_a_group():
    parts = [[0], list(range(SIZE))[:0:-1]] if SIZE > 1 else [[0]]
    group = dist.split_group(split_ranks=parts)
    mine = parts[RANK > 0]
    assert dist.get_process_group_ranks(group) == mine
    assert dist.get_rank(group) == mine.index(RANK)
    dist.all_reduce(tensor := torch.tensor([float(RANK)]), group=group)
    assert tensor.item() == sum(mine)
    dist.broadcast(tensor, mine[0], group=group)
    dist.destroy_process_group(group)
    alone = dist.split_group(split_ranks=[[SIZE - 1]])
    assert (alone is dist.GroupMember.NON_GROUP_MEMBER) == (RANK < SIZE - 1)
    if RANK == SIZE - 1:
        dist.destroy_process_group(alone)


# Before torch 2.14, which has this name no more, there is one for Gloo alone.
@there_if(not hasattr(dist.ProcessGroup, "_set_sequence_number_for_group"))
def test_torch_has_a_monitored_barrier():
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    if SIZE > 1:
        words = f"Rank {SIZE - 1} failed to pass monitoredBarrier|Rank {RANK} successfully reached monitoredBarrier"
        if RANK < SIZE - 1:
            with pytest.raises(RuntimeError, match=words):
                dist.monitored_barrier(timeout=timedelta(seconds=0.3))
    dist.barrier()


def test_ranks_of_another_job_are_refused():
    class Store:
        def set(self, *_):
            pass

        def get(self, _):
            return b"0"

    class Asked:
        store, group_rank, group_size, group_id, timeout = Store(), 0, 2, "other", timedelta(seconds=1)

    with pytest.raises(ValueError, match="start the program by mpiexec or srun"):
        mpiagg.torch.ProcessGroup.create(Asked)


LATE = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(3), group=group),
    "broadcast": lambda group: dist.broadcast(torch.ones(3), 1, group=group),
    "all_gather": lambda group: dist.all_gather([torch.ones(3)] * SIZE, torch.ones(3), group=group),
    "reduce_scatter": lambda group: dist.reduce_scatter(torch.ones(1), [torch.ones(1)] * SIZE, group=group),
    "all_to_all": lambda group: dist.all_to_all_single(torch.ones(2 * SIZE), torch.ones(2 * SIZE), group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "recv": lambda group: dist.recv(torch.empty(1), 1, group=group),
    "later": lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(),
}


@pytest.mark.parametrize("call", LATE)
def test_a_call_that_takes_too_long_is_told_in_torchs_words(call):
    if SIZE == 1:
        return
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if RANK == 0:
        with pytest.raises(dist.DistBackendError, match=" Timed out "):
            LATE[call](group)
    dist.barrier()
    if RANK == 1 and call == "recv":
        dist.send(torch.ones(1), 0, group=group)


def test_a_monitored_barrier_names_who_has_not_come():
    group = dist.new_group()
    group.monitored_barrier(timedelta(seconds=60))
    if SIZE > 1:
        if RANK == 0:
            with pytest.raises(RuntimeError, match=f"Rank {SIZE - 1} failed to pass monitoredBarrier in 300 ms"):
                group.monitored_barrier(timedelta(seconds=0.3))
        elif RANK < SIZE - 1:
            with pytest.raises(RuntimeError, match=f"Rank {RANK} successfully reached monitoredBarrier"):
                group.monitored_barrier(timedelta(seconds=0.3))
    dist.barrier()


def test_nobody_passes_a_monitored_barrier_without_time():
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="monitoredBarrier") if SIZE > 1 else nullcontext():
        group.monitored_barrier(timedelta(0))
    group.monitored_barrier(timedelta(seconds=60))


def test_a_rank_that_is_late_to_a_monitored_barrier_is_told_and_the_next_one_is_right():
    group = dist.new_group()
    if RANK == 0 and SIZE > 1:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass"):
            group.monitored_barrier(timedelta(seconds=0.1))
    dist.barrier()
    if RANK > 0:
        with pytest.raises(RuntimeError, match=f"Rank {RANK} successfully reached monitoredBarrier"):
            group.monitored_barrier(timedelta(seconds=0.1))
    dist.barrier()
    group.monitored_barrier(timedelta(seconds=60))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int16])
def test_averages_of_integers_round_toward_zero(dtype):
    tensor = torch.tensor([7 + RANK, 3], dtype=torch.int64).to(dtype)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.tolist() == [(7 * SIZE + sum(range(SIZE))) // SIZE, 3]


def test_functional_collectives():
    group = dist.group.WORLD
    assert torch.equal(all_reduce(numbers(RANK), "sum", group) + 0, of_all().sum(0))
    assert torch.equal(all_gather_tensor(numbers(RANK), 0, group) + 0, of_all().reshape(-1, 4))


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()


def batch(rank):
    return drawn(torch.randn, (4, 8), rank, dtype=torch.float64)


def trained(network, batches, steps=4, wrap=lambda network: network):
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    run = wrap(network)
    for _ in range(steps):
        optimizer.zero_grad()
        (sum(run(each).square().mean() for each in batches) / len(batches)).backward()
        optimizer.step()
    return network


def test_torchs_ddp_trains_as_one_process():
    wanted = trained(model(), [batch(rank) for rank in range(SIZE)])
    found = trained(model(), [batch(RANK)], wrap=lambda network: DistributedDataParallel(network, bucket_cap_mb=0.001))
    for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-9, rtol=0)


def test_torchs_ddp_with_a_hook_that_waits():
    """PowerSGD's hook asks for more collectives when the first is done, and waits for them."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    run = DistributedDataParallel(torch.nn.Linear(16, 16))
    run.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        run.zero_grad()
        run(drawn(torch.randn, (2, 16), SIZE * step + RANK)).square().sum().backward()
    gradients = [torch.empty(16, 16) for _ in range(SIZE)]
    dist.all_gather(gradients, run.module.weight.grad)
    assert all(torch.equal(each, gradients[0]) for each in gradients)


@there_if(hasattr(dist, "init_device_mesh"))  # FSDP of torch 2.1 needs a GPU
@pytest.mark.filterwarnings("ignore:FSDP is switching")  # of one rank
def test_fsdp1_trains_as_one_process():
    wanted = trained(model(), [batch(rank) for rank in range(SIZE)])
    sharded = FullyShardedDataParallel(model(), device_id=home(), use_orig_params=True)
    trained(sharded, [batch(RANK)])
    with FullyShardedDataParallel.summon_full_params(sharded):
        for one, other in zip(sharded.parameters(), wanted.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-9, rtol=0)


def dtensor_warns(test):
    """Let DTensor warn of itself: that of torch 2.6 of random numbers on the CPU, that of 2.7 of its fake tensors."""
    for words in ("DTensor random operators", "Deallocating Tensor that still"):
        test = pytest.mark.filterwarnings(f"ignore:{words}:UserWarning")(test)
    return test


@there_if(hasattr(torch.distributed, "tensor") and hasattr(torch.distributed.tensor, "DTensor"))  # from torch 2.5 on
@dtensor_warns
def test_tensor_parallel_is_as_one_process():
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh(home().type, (SIZE,))

    def layers():
        torch.manual_seed(5)  # as many in between as can be divided by up to 4 ranks
        return torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 2)).double()

    wanted, x = layers(), batch(7)
    parts = parallelize_module(layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert torch.allclose(parts(x), wanted(x), atol=1e-12)
    assert torch.allclose(distribute_tensor(x, mesh, [Shard(0)]).full_tensor(), x)


ALLOCATES = hasattr(getattr(fsdp, "FSDPModule", None), "set_allocate_memory_from_process_group_for_comm")
"""Whether FSDP2 can take memory of a process group: torch 2.7 cannot, 2.10 can."""


@there_if(hasattr(fsdp, "fully_shard") and hasattr(torch.cpu.Stream, "record_event"))  # before torch 2.7 it needs a GPU
@dtensor_warns
@pytest.mark.parametrize("registered", [False, True] if ALLOCATES else [False])
def test_fsdp2_trains_as_one_process(registered):
    wanted = trained(model(), [batch(rank) for rank in range(SIZE)])
    sharded, mesh = model(), dist.init_device_mesh(home().type, (SIZE,))
    for module in (sharded[0], sharded[2], sharded):
        fsdp.fully_shard(module, mesh=mesh)
        if registered:
            module.set_allocate_memory_from_process_group_for_comm(True)
    trained(sharded, [batch(RANK)])
    for one, other in zip(sharded.parameters(), wanted.parameters(), strict=True):
        assert torch.allclose(one.full_tensor(), other, atol=1e-9, rtol=0)


def test_tensors_of_other_lengths_are_refused():
    group = dist.new_group([RANK], use_local_synchronization=True)
    few, many = torch.zeros(2), torch.ones(3)
    for call in (
        lambda: dist.gather(many, [few], group=group, dst=RANK),
        lambda: dist.scatter(few, [many], group=group, src=RANK),
        lambda: dist.reduce_scatter(few, [many], group=group),
    ):
        with pytest.raises(ValueError, match="numbers, not"):
            call()
    assert not few.any()
    dist.destroy_process_group(group)


def test_a_group_that_was_destroyed_is_told_of():
    group = dist.new_group(list(range(SIZE)), backend="mpiagg")
    backend = group._get_backend(torch.device("cpu"))
    dist.destroy_process_group(group)
    for call in (lambda: backend.allreduce([torch.ones(1)]).wait(), lambda: backend.send([torch.ones(1)], 0)):
        with pytest.raises(dist.DistBackendError, match=r"process group .* was destroyed"):
            call()


def test_ranks_destroy_a_group_also_after_an_error_of_one():
    """Who has found its argument wrong waits there for the others, who wait for it in the call."""
    group = dist.new_group(list(range(SIZE)), timeout=timedelta(seconds=0.5))
    parts = [torch.zeros(2 + (RANK == 0)) for _ in range(SIZE)] if RANK == 0 else None
    with pytest.raises(ValueError if RANK == 0 else (dist.DistBackendError, mpiagg.MismatchError)):
        dist.scatter(torch.zeros(2), parts, src=0, group=group)
    dist.destroy_process_group(group)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x == SIZE


def test_a_group_is_not_destroyed_without_a_rank():
    group = dist.new_group(list(range(SIZE)), timeout=timedelta(seconds=0.2))
    if RANK < SIZE - 1:
        with pytest.raises(dist.DistBackendError, match="Timed out"):
            dist.destroy_process_group(group)
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(dist.DistBackendError, match="Timed out") if SIZE > 1 else nullcontext():
            dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "other", [torch.eye(4).to_sparse(), torch.eye(3).to_sparse(1), torch.zeros(3, 3, 1).to_sparse()], ids=str
)
def test_sparse_tensors_of_different_shapes_are_told_of(other):
    if SIZE == 1:
        return
    x = torch.eye(3).to_sparse() if RANK else other
    with pytest.raises(mpiagg.MismatchError, match="sparse tensors of different shapes"):
        dist.all_reduce(x)


def test_sparse_tensors_are_not_scaled():
    for op, dtype in ((dist._make_nccl_premul_sum(0.5), torch.float32), (dist.ReduceOp.AVG, torch.int64)):
        x = torch.eye(2, dtype=dtype).to_sparse()
        with pytest.raises(ValueError, match="by SUM alone"):
            dist.all_reduce(x, op)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_are_refused_where_they_are_only_moved():
    if SIZE == 1:
        return
    x = torch.eye(2).to_sparse()
    for call in (
        lambda: dist.broadcast(x, 0),
        lambda: dist.reduce(x, 0),
        lambda: dist.all_gather([x.clone() for _ in range(SIZE)], x),
        lambda: dist.send(x, 1 - RANK % 2),
        lambda: dist.all_reduce(torch.eye(2).to_sparse_csr()),
    ):
        with pytest.raises(ValueError, match=r"takes sparse ones in all_reduce alone, of torch\.sparse_coo, by SUM"):
            call()


def test_outputs_that_autograd_watches():
    with torch.inference_mode():
        whole, sparse = torch.full((4,), RANK), torch.eye(2).to_sparse()
        dist.all_reduce(whole, dist.ReduceOp.AVG, async_op=True).wait()
        dist.all_reduce(sparse, async_op=True).wait()
    assert whole.tolist() == [sum(range(SIZE)) // SIZE] * 4
    assert torch.equal(sparse.to_dense(), SIZE * torch.eye(2))
    output = torch.zeros(RANK + 1, requires_grad=True)
    dist.reduce_scatter(output, [torch.ones(rank + 1) for rank in range(SIZE)])
    assert output.tolist() == [SIZE] * (RANK + 1)


def test_a_future_of_a_message_that_does_not_come_is_an_error():
    if SIZE == 1:
        return
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    if RANK == 0:
        tensor = torch.zeros(3)
        work = dist.irecv(tensor, 1, group=group)
        with pytest.raises(RuntimeError, match="Timed out"):
            work.get_future().wait()
    dist.barrier()
    if RANK == 1:
        dist.send(torch.ones(3), 0, group=group)
    if RANK == 0:
        work.wait(timedelta(minutes=1))
        assert tensor.tolist() == [1] * 3
        assert torch.equal(work.get_future().wait()[0], tensor)
    dist.barrier()


def test_messages_beyond_what_the_mpi_library_counts(monkeypatch):
    """Cut into pieces of seven bytes, as those of 2 GiB are into pieces of one."""
    monkeypatch.setattr("mpiagg.torch.group.LONGEST", 7)
    to, source = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for length in (7, 8, 14, 100):
        got = torch.zeros(length, dtype=torch.uint8)
        works = [dist.isend(torch.arange(length, dtype=torch.uint8) + RANK, to), dist.irecv(got, source)]
        for work in works:
            work.wait()
        assert torch.equal(got, torch.arange(length, dtype=torch.uint8) + source)


def test_many_futures_of_messages_hold_nothing_up():
    if SIZE == 1:
        return
    group = dist.new_group([0, 1])
    if RANK < 2:
        tensors, futures = torch.zeros(300, 1), []
        if RANK == 0:
            futures = [dist.irecv(x, 1, group=group, tag=tag).get_future() for tag, x in enumerate(tensors)]
        total = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait()[0]
        assert total.tolist() == [2] * 3
        if RANK == 1:  # only now
            for tag in range(300):
                dist.send(torch.full((1,), float(tag)), 0, group=group, tag=tag)
        for future in futures:
            future.wait()
        assert RANK or tensors.flatten().tolist() == list(range(300))
    dist.barrier()


def test_a_message_that_is_too_long_is_an_error():
    if SIZE == 1:
        return
    if RANK == 0:
        work = dist.irecv(torch.zeros(1), 1)
        with pytest.raises(RuntimeError):
            work.get_future().wait()
        with pytest.raises(RuntimeError):
            work.wait()
    elif RANK == 1:
        dist.send(torch.ones(300), 0)
    dist.barrier()
