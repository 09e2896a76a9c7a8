"""Horovod's interface: collectives under names, process sets, join, the optimizer, states that are kept."""

import copy

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpiagg.horovod.torch as hvd

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("horovod")]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    torch.uint8,
]


def several(test):
    """Leave a test out where there is one rank."""
    return test if SIZE > 1 else None


@pytest.fixture(scope="module")
def horovod():
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.rank()
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


def numbers(rank, dtype=torch.float32, shape=(5, 4)):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def of_all(dtype=torch.float32, shape=(5, 4)):
    return torch.stack([numbers(rank, dtype, shape) for rank in range(SIZE)])


def test_who_is_who():
    assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (RANK, SIZE, 0, 1)
    assert hvd.is_initialized()
    assert hvd.is_homogeneous()
    assert hvd.mpi_built()
    assert not hvd.nccl_built()


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce(dtype):
    mine, every = numbers(RANK, dtype), of_all(dtype)
    total = every.sum(0).to(dtype)
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), total)
    assert torch.equal(hvd.allreduce(mine, average=False), total)
    mean = total / SIZE if dtype.is_floating_point else torch.div(total, SIZE, rounding_mode="trunc")
    torch.testing.assert_close(hvd.allreduce(mine), mean.to(dtype))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Min), every.amin(0))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Max), every.amax(0))
    assert torch.equal(
        hvd.allreduce(mine, op=hvd.Product), every.double().prod(0).to(dtype)
    )  # torch 2.1 has no product of float16
    assert torch.equal(mine, numbers(RANK, dtype))
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    assert torch.equal(mine, total)
    strided = torch.zeros(5, 8, dtype=dtype)[:, ::2].copy_(numbers(RANK, dtype))
    hvd.allreduce_(strided, op=hvd.Sum)
    assert torch.equal(strided, total)
    twice = hvd.allreduce(numbers(RANK, dtype), op=hvd.Sum, prescale_factor=2, postscale_factor=3)
    assert torch.equal(twice, 6 * total)


@pytest.mark.parametrize("name", [name for name in ("uint8", "uint16", "uint32", "uint64") if hasattr(torch, name)])
def test_averages_of_unsigned_integers(name):
    mine = torch.from_numpy(np.array([200, 7 + RANK, 0], name))
    sums = [200 * SIZE % (256 if name == "uint8" else 2**16), 7 * SIZE + sum(range(SIZE)), 0]
    assert hvd.allreduce(mine).tolist() == [value // SIZE for value in sums]


def test_grouped_all_reduce_of_several_dtypes():
    dtypes = [torch.float32, torch.int64, torch.float32, torch.float16]
    results = hvd.grouped_allreduce([numbers(RANK, dtype) for dtype in dtypes], op=hvd.Sum)
    for result, dtype in zip(results, dtypes, strict=True):
        assert torch.equal(result, of_all(dtype).sum(0).to(dtype))
    mine = [numbers(RANK), numbers(RANK, torch.float64, (2, 3))]
    assert hvd.grouped_allreduce_(mine, op=hvd.Sum) is mine
    assert torch.equal(mine[1], of_all(torch.float64, (2, 3)).sum(0))


def test_compression_and_adasum():
    mine = numbers(RANK)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.none):
        assert torch.equal(hvd.allreduce(mine, op=hvd.Sum, compression=compression), of_all().sum(0))
    # What is the same on all ranks counts once, and what is orthogonal is added up.
    torch.testing.assert_close(hvd.allreduce(torch.arange(3.0), op=hvd.Adasum), torch.arange(3.0))
    own = torch.eye(SIZE)[RANK]
    assert torch.equal(hvd.allreduce(own, op=hvd.Adasum), torch.ones(SIZE))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool])
def test_what_is_moved(dtype):
    mine = [numbers(rank, dtype, (rank + 1, 3)) for rank in range(SIZE)]
    assert torch.equal(hvd.allgather(mine[RANK]), torch.cat(mine))
    first, second = hvd.grouped_allgather([mine[RANK], mine[RANK]])
    assert torch.equal(first, second)
    for root in range(SIZE):
        own = numbers(RANK, dtype)
        assert torch.equal(hvd.broadcast(own, root), numbers(root, dtype))
        assert torch.equal(own, numbers(RANK, dtype))
        assert hvd.broadcast_(own, root) is own
        assert torch.equal(own, numbers(root, dtype))
    equal = torch.cat([torch.full((2, 3), to).to(dtype) for to in range(SIZE)])
    assert torch.equal(hvd.alltoall(equal), torch.full((2 * SIZE, 3), RANK).to(dtype))
    rows = torch.cat([torch.full((RANK + 1, 3), to).to(dtype) for to in range(SIZE)])
    got, counts = hvd.alltoall(rows, torch.tensor([RANK + 1] * SIZE, dtype=torch.int32))
    assert counts.dtype == torch.int32
    assert counts.tolist() == [rank + 1 for rank in range(SIZE)]
    assert torch.equal(got, torch.full((sum(counts), 3), RANK).to(dtype))


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_reduce_scatter(rows):
    shape = (rows, 3)
    part = torch.tensor_split(of_all(torch.float64, shape).sum(0), SIZE)[RANK]
    mine = numbers(RANK, torch.float64, shape)
    assert torch.equal(hvd.reducescatter(mine, op=hvd.Sum), part)
    torch.testing.assert_close(hvd.reducescatter(mine), part / SIZE)
    torch.testing.assert_close(hvd.grouped_reducescatter([mine, mine], op=hvd.Sum, postscale_factor=0.5)[1], part / 2)


def test_orders_may_differ():
    names = [f"op {i}" for i in range(7)]
    order = names[RANK:] + names[:RANK]
    handles = {name: hvd.allreduce_async(torch.full((3,), float(name[3:])), name=name, op=hvd.Sum) for name in order}
    for name in names:
        assert torch.equal(hvd.synchronize(handles[name]), torch.full((3,), float(name[3:]) * SIZE))
    assert hvd.synchronize(handles[names[0]]) is None


@several
@pytest.mark.parametrize(
    "call",
    [
        lambda: hvd.allreduce(torch.zeros(3 + RANK), name="wrong"),
        lambda: hvd.allreduce(torch.zeros(3, dtype=DTYPES[RANK % 2]), name="wrong"),
        lambda: hvd.allreduce(torch.zeros(3), name="wrong", op=hvd.Sum if RANK else hvd.Average),
        lambda: hvd.allgather(torch.zeros(2, 3 + RANK), name="wrong"),
        lambda: hvd.broadcast(torch.zeros(2), RANK, name="wrong"),
        lambda: hvd.broadcast(torch.zeros(2 + RANK), 0, name="wrong"),
        lambda: hvd.alltoall(torch.zeros(SIZE, 2 + RANK), name="wrong"),
        lambda: hvd.reducescatter(torch.zeros(SIZE + RANK), name="wrong"),
        lambda: hvd.allreduce(torch.zeros(3)) if RANK else hvd.allreduce(torch.zeros(4)),
    ],
)
def test_disagreement_is_an_error_on_every_rank_and_the_job_goes_on(call):
    with pytest.raises(hvd.HorovodInternalError, match="disagree"):
        call()
    assert torch.equal(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(SIZE)))


@several
def test_a_name_is_in_use_once():
    for first in (True, False):
        if (RANK == 0) is first:
            kept = hvd.allreduce_async(torch.ones(2), name="twice")
            if first:  # while the other ranks have not asked for it
                with pytest.raises(ValueError, match="Duplicate tensor name"):
                    hvd.allreduce_async(torch.ones(2), name="twice")
        hvd.barrier()
    assert torch.equal(hvd.synchronize(kept), torch.ones(2))


def test_tensors_that_are_not_contiguous():
    x = torch.arange(4.0 * SIZE).reshape(2 * SIZE, 2)[:, 0]
    assert torch.equal(hvd.allgather(x), x.repeat(SIZE))
    rows = x.repeat_interleave(2)[::2]
    assert torch.equal(hvd.alltoall(rows), x[2 * RANK : 2 * RANK + 2].repeat(SIZE))
    assert torch.equal(hvd.allreduce(rows, op=hvd.Adasum), x) or SIZE & (SIZE - 1)
    given = torch.zeros(SIZE, 3, requires_grad=True)
    hvd.alltoall(given).sum().backward()
    assert (given.grad == 1).all()


def test_results_are_tensors_of_their_own():
    given = [torch.ones(3, requires_grad=True), torch.ones(4, requires_grad=True)]
    found = hvd.grouped_allreduce(given, op=hvd.Sum)
    found[0].add_(1)
    assert found[0].untyped_storage().nbytes() == 12
    with torch.inference_mode():
        assert (hvd.allreduce_(torch.ones(3), op=hvd.Sum, prescale_factor=0.5) == SIZE / 2).all()


@several
def test_factors_that_are_no_numbers():
    with pytest.raises(hvd.HorovodInternalError, match="postscale"):
        hvd.allreduce(torch.ones(2), postscale_factor=float("nan") if RANK else 1.0)
    hvd.barrier()


def test_bad_splits():
    for splits in ([1] * SIZE, torch.ones(SIZE), [3 * SIZE] + [0] * SIZE):
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(torch.zeros(3 * SIZE, 2), splits)
    with pytest.raises(ValueError, match="at least one dimension"):
        hvd.allgather(torch.tensor(1.0))


@several
def test_join_with_uneven_batches():
    for step in range(RANK + 1):
        here = SIZE - step
        assert torch.equal(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(here)))
        assert len(hvd.allgather(torch.ones(2, 3))) == 2 * here
        assert hvd.allgather_object("x" * RANK) == ["x" * rank for rank in range(step, SIZE)]
    assert hvd.join() == SIZE - 1
    assert torch.equal(hvd.allreduce(torch.ones(1)), torch.ones(1))
    if RANK:
        with pytest.raises(hvd.HorovodInternalError, match="join"):
            hvd.broadcast(torch.ones(2), 0)
    hvd.join()


@several
def test_gradients_of_rows_where_ranks_have_joined():
    if RANK:
        x = torch.ones(RANK, 2, requires_grad=True)
        rows = hvd.allgather(x)
        (rows * torch.arange(float(len(rows)))[:, None]).sum().backward()
        start = sum(range(1, RANK))
        wanted = torch.arange(float(start), start + RANK)[:, None].expand(RANK, 2) * (SIZE - 1) / SIZE
        torch.testing.assert_close(x.grad, wanted)
        for call in (hvd.alltoall, hvd.reducescatter):
            with pytest.raises(hvd.HorovodInternalError, match="does not go on"):
                call(torch.ones(SIZE, 2))
    hvd.join()


def test_objects_do_not_go_by_the_default_device():
    with torch.device("meta"):
        assert hvd.broadcast_object({"of": RANK}, 0) == {"of": 0}
        assert hvd.allgather_object(RANK) == list(range(SIZE))


def test_batch_normalisation_may_be_changed_in_place():
    x = numbers(RANK, torch.float64, (4, 2)).requires_grad_()
    net = torch.nn.Sequential(hvd.SyncBatchNorm(2, affine=False).double(), torch.nn.ReLU(inplace=True))
    net(x).square().sum().backward()
    whole = torch.cat([numbers(rank, torch.float64, (4, 2)) for rank in range(SIZE)]).requires_grad_()
    alone = torch.nn.Sequential(torch.nn.BatchNorm1d(2, affine=False).double(), torch.nn.ReLU())
    alone(whole).square().sum().backward()
    torch.testing.assert_close(x.grad, whole.grad[4 * RANK : 4 * RANK + 4])


def test_join_leaves_what_other_sets_have_under_way():
    if SIZE > 2:
        pair = hvd.add_process_set([0, 1])
        asked = [hvd.allreduce_async(torch.ones(1), op=hvd.Sum, process_set=pair)] if RANK == 0 else []
        hvd.allreduce(torch.ones(1))
        hvd.join()
        if RANK < 2:
            while len(asked) < 2:
                asked.append(hvd.allreduce_async(torch.full((1,), 3.0 ** len(asked)), op=hvd.Sum, process_set=pair))
            assert [hvd.synchronize(each).item() for each in asked] == [2, 6]
        hvd.remove_process_set(pair)


def test_join_ends_what_a_rank_has_asked_for_before():
    pending = []
    if RANK == 0:
        pending = [hvd.allreduce_async(torch.full((3,), x), op=hvd.Sum, name=f"before join {x}") for x in (1.0, 2.0)]
        refused = hvd.broadcast_async(torch.ones(2), root_rank=SIZE - 1, name="broadcast before join")
    hvd.join()
    assert [hvd.poll(each) for each in pending] == [True] * len(pending)
    for x, each in enumerate(pending, 1):
        assert torch.equal(hvd.synchronize(each), torch.full((3,), float(x)))
    if RANK == 0 and SIZE > 1:
        with pytest.raises(hvd.HorovodInternalError, match="join"):
            hvd.synchronize(refused)
    assert torch.equal(hvd.allreduce(torch.ones(1)), torch.ones(1))


def test_process_sets():
    with pytest.raises(ValueError, match="same ranks"):
        hvd.add_process_set(range(SIZE))
    first = hvd.add_process_set([SIZE - 1]) if SIZE > 1 else None
    if first is None:
        return
    assert hvd.get_process_set_ids_and_ranks()[first.process_set_id] == [SIZE - 1]
    assert first.included() == (RANK == SIZE - 1)
    assert first.size() == 1
    if first.included():
        assert first.rank() == 0
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first) == 1
        assert hvd.broadcast(torch.ones(1), SIZE - 1, process_set=first) == 1
    else:
        with pytest.raises(ValueError, match="does not include"):
            hvd.allreduce(torch.ones(1), process_set=first)
    assert hvd.remove_process_set(first)
    assert first.process_set_id is None
    assert not hvd.remove_process_set(hvd.global_process_set)


def test_gradients():
    def gradient(call, shape=(SIZE, 2)):
        x = torch.ones(shape, requires_grad=True)
        result = call(x)
        result.backward(torch.ones_like(result))
        return x.grad

    assert torch.equal(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)), torch.full((SIZE, 2), float(SIZE)))
    assert torch.equal(gradient(hvd.allreduce), torch.ones(SIZE, 2))
    assert torch.equal(gradient(lambda x: hvd.grouped_allreduce([x, x])[0]), torch.ones(SIZE, 2))
    assert torch.equal(gradient(hvd.allgather, (RANK + 1, 2)), torch.ones(RANK + 1, 2))
    assert torch.equal(gradient(lambda x: hvd.broadcast(x, 0)), torch.full((SIZE, 2), float(RANK == 0)))
    assert torch.equal(gradient(hvd.alltoall), torch.ones(SIZE, 2))
    assert torch.equal(gradient(lambda x: hvd.alltoall(x, [1] * SIZE)[0]), torch.ones(SIZE, 2))
    assert torch.equal(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum)), torch.full((SIZE, 2), float(SIZE)))
    assert torch.equal(gradient(hvd.reducescatter), torch.ones(SIZE, 2))


def test_objects():
    assert hvd.broadcast_object({"rank": RANK}, SIZE - 1) == {"rank": SIZE - 1}
    assert hvd.allgather_object("x" * RANK) == ["x" * rank for rank in range(SIZE)]


def model_of(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()


BATCH = torch.randn(4 * SIZE, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.Adam, {}),
        (torch.optim.SGD, {"gradient_predivide_factor": 2.0}),
        (torch.optim.SGD, {"num_groups": 2}),
        (torch.optim.SGD, {"groups": "lists"}),
        (torch.optim.SGD, {"backward_passes_per_step": 2}),
    ],
)
def test_the_optimizer_equals_one_process(kind, options):
    alone, model = model_of(0), model_of(RANK)
    plain, passes = kind(alone.parameters(), lr=0.1), options.get("backward_passes_per_step", 1)
    if options.get("groups"):
        options = {"groups": [[model[0].weight, model[2].weight]]}
    optimizer = hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), model.named_parameters(), **options)
    assert isinstance(optimizer, kind)
    hvd.broadcast_parameters(model.state_dict(), 0)
    for step in range(4):
        plain.zero_grad()
        optimizer.zero_grad()
        for _ in range(passes):
            alone(BATCH).square().mean().backward()
            model(BATCH[4 * RANK : 4 * RANK + 4]).square().mean().backward()
        if step % 2:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        plain.step()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense):
    table = torch.nn.Embedding(6, 2, sparse=True).double()
    torch.nn.init.ones_(table.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), sparse_as_dense=as_dense
    )
    table(torch.tensor([RANK, 5])).sum().backward()
    optimizer.step()
    wanted = torch.ones(6, 2, dtype=torch.float64)
    wanted[:SIZE] -= 1 / SIZE
    wanted[5] -= 1
    torch.testing.assert_close(table.weight.detach(), wanted)


def test_sums_of_sparse_tensors_are_operations_as_others():
    handle = hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), "polled", hvd.Average)
    while not hvd.poll(handle):
        pass
    assert torch.equal(hvd.synchronize(handle).to_dense(), torch.eye(3))
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(ValueError, match="op must be Average or Sum"):
            hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), "refused", op)
    other = hvd.sparse_allreduce_async(torch.eye(2 + (RANK == 0)).to_sparse(), "other", hvd.Sum)
    if SIZE == 1:
        assert torch.equal(hvd.synchronize(other).to_dense(), torch.eye(3))
    else:
        with pytest.raises(hvd.HorovodInternalError, match=r"'other' have different shapes: \[\[3, 3\], \[2, 2\]"):
            hvd.synchronize(other)


def test_what_the_optimizer_refuses():
    model = model_of(0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    with pytest.raises(ValueError, match="not named"):
        hvd.DistributedOptimizer(plain, named[:1])
    with pytest.raises(ValueError, match="unique"):
        hvd.DistributedOptimizer(plain, [("same", p) for _, p in named])
    with pytest.raises(ValueError, match="predivide"):
        hvd.DistributedOptimizer(plain, named, op=hvd.Sum, gradient_predivide_factor=2.0)
    optimizer = hvd.DistributedOptimizer(plain)
    if SIZE > 1:
        model(BATCH).sum().backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="backward_passes_per_step"):
            model(BATCH).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


@several
def test_parameters_without_a_gradient_on_a_rank():
    model = model_of(0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    before = copy.deepcopy(model.state_dict())
    (model[2](torch.ones(4).double()) if RANK else model(BATCH)).sum().backward()
    optimizer.step()
    assert not torch.equal(before["0.weight"], model[0].weight)
    assert len({x.numpy().tobytes() for x in hvd.allgather(model[0].weight.detach()[None])}) == 1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_state_of_an_optimizer(kind):
    model = model_of(0)
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1 * (RANK + 1), **more)
    if RANK == 0:
        model(BATCH).sum().backward()
        optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, 0)
    states = hvd.allgather_object(optimizer.state_dict())
    assert states[-1]["param_groups"][0]["lr"] == 0.1
    assert len({str(each) for each in states}) == 1


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_normalisation_equals_one_process(momentum):
    whole = torch.randn(3 * SIZE, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 + 1
    weight = torch.linspace(0, 1, whole.numel(), dtype=torch.float64).view_as(whole)
    mine, one = hvd.SyncBatchNorm(2, momentum=momentum).double(), torch.nn.BatchNorm1d(2, momentum=momentum).double()
    rows = slice(3 * RANK, 3 * RANK + 3)
    x, y = whole[rows].clone().requires_grad_(), whole.clone().requires_grad_()
    got, wanted = mine(x), one(y)
    torch.testing.assert_close(got, wanted[rows])
    (got * weight[rows]).sum().backward()
    (wanted * weight).sum().backward()
    torch.testing.assert_close(x.grad, y.grad[rows])
    torch.testing.assert_close(hvd.allreduce(mine.weight.grad, op=hvd.Sum), one.weight.grad)
    torch.testing.assert_close(hvd.allreduce(mine.bias.grad, op=hvd.Sum), one.bias.grad)
    torch.testing.assert_close(mine.running_mean, one.running_mean)
    torch.testing.assert_close(mine.running_var, one.running_var)
    torch.testing.assert_close(mine.eval()(x), one.eval()(y)[rows])


def test_training_goes_on_from_what_was_kept():
    model = model_of(RANK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = hvd.elastic.TorchState(model, optimizer, step=0, sampler=hvd.elastic.ElasticSampler(range(4 * SIZE)))
    resets = []
    state.register_reset_callbacks([lambda: resets.append(state.step)])

    @hvd.elastic.run
    def train(state):
        while state.step < 4:
            state.step += 1
            if state.step == 3 and not resets and SIZE > 1:
                hvd.allreduce(torch.ones(1 + RANK), name="fails")
            if state.step == 2:
                state.sampler.record_batch(0, 2)
                state.commit()
        return state.step

    assert train(state) == 4
    assert resets == ([2] if SIZE > 1 else [])
    state.sync()
    assert state.sampler.processed_num == 2 * SIZE
    assert len(list(state.sampler)) == 2
    weights = hvd.allgather(model[0].weight.detach()[None])
    assert all(torch.equal(x, weights[0]) for x in weights)


def test_what_is_not_there_says_what_to_do():
    with pytest.raises(ImportError, match=r"docs/horovod\.md"):
        import mpiagg.horovod.tensorflow
    with pytest.raises(ImportError, match="mpiexec"):
        import mpiagg.horovod.runner  # noqa: F401 - to import it is the test
    with pytest.raises(NotImplementedError, match="trace"):
        hvd.start_timeline("file")
