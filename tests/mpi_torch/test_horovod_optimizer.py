"""Horovod's interface: training where a step has failed, or a rank has no gradient, or another kind of it."""

import copy
import gc
from functools import partial

import pytest
import torch
from mpi4py import MPI
from torch.autograd import grad

import mpiagg.horovod.torch as hvd
from mpiagg.horovod.torch import handles

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("horovod")]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def several(test):
    """Leave a test out where there is one rank."""
    return test if SIZE > 1 else None


@pytest.fixture(scope="module")
def horovod():
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


def model_of(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()


def equal_on_all(model):
    """Whether the parameters of a model are the same on all ranks."""
    rows = hvd.allgather(torch.cat([x.detach().reshape(-1) for x in model.parameters()])[None])
    return bool((rows == rows[0]).all())


@several
@pytest.mark.parametrize("options", [{}, {"num_groups": 2}, {"backward_passes_per_step": 2}])
@pytest.mark.parametrize("unused", [False, True])
def test_training_goes_on_after_an_error_between_backward_and_step(options, unused):
    model, failed = model_of(RANK), []
    passes = options.get("backward_passes_per_step", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    state = hvd.elastic.TorchState(model, optimizer, epoch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < 4:
            optimizer.zero_grad()
            for _ in range(passes):
                # A rank may have used one layer only, so that it has started less than others.
                result = model[2](torch.ones(4).double()) if unused and RANK else model(torch.ones(3).double())
                result.sum().backward()
                if state.epoch == 2 and not failed:
                    failed.append(state.epoch)
                    hvd.allreduce(torch.ones(1 + RANK), name="fails")
            optimizer.step()
            state.epoch += 1
            state.commit()
        return state.epoch

    assert train(state) == 4
    assert failed == [2]
    assert equal_on_all(model)
    if unused:
        return
    alone = model_of(0)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(4):
        plain.zero_grad()
        for _ in range(passes):
            alone(torch.ones(3).double()).sum().backward()
        plain.step()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@several
def test_after_a_failed_step_nothing_is_under_way():
    before = set(handles._UNDER_WAY)
    model = torch.nn.ParameterList([torch.ones(3), torch.ones(2 + RANK), torch.ones(3)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    for _ in range(2):
        sum(x.sum() for x in model).backward()
        with pytest.raises(hvd.HorovodInternalError, match="disagree"):
            optimizer.step()
        assert set(handles._UNDER_WAY) == before
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
@pytest.mark.parametrize("more", [{}, {"sparse_as_dense": True}, {"compression": hvd.Compression.fp16}])
def test_a_rank_whose_batch_has_no_index_of_a_sparse_table(kind, more):
    if kind is torch.optim.SparseAdam and "sparse_as_dense" in more:
        more = {}  # it takes sparse gradients only
    table = torch.nn.Embedding(6, 2, sparse=True).double()
    torch.nn.init.ones_(table.weight)
    whole = copy.deepcopy(table)
    optimizer = hvd.DistributedOptimizer(kind(table.parameters(), lr=1.0), table.named_parameters(), **more)
    plain = kind(whole.parameters(), lr=1.0)
    for step in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        if (RANK + step) % 2 == 0:
            table(torch.tensor([RANK, 5])).sum().backward()
        for rank in range(step % 2, SIZE, 2):
            (whole(torch.tensor([rank, 5])).sum() / SIZE).backward()
        if whole.weight.grad is not None:
            optimizer.step()
            plain.step()
        else:
            assert SIZE == 1
    torch.testing.assert_close(table.weight, whole.weight)
    assert equal_on_all(table)


def test_sparse_gradients_that_travel_dense_are_sparse_in_the_step():
    table = torch.nn.Embedding(6, 2, sparse=True).double()
    optimizer = torch.optim.SparseAdam(table.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, table.named_parameters(), sparse_as_dense=True)
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([RANK, 5])).sum().backward()
        optimizer.step()
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense()[5].tolist() == [1.0, 1.0]


class Counted(hvd.Compression.none):
    """Tells how often it was asked."""

    asked = 0

    @classmethod
    def compress(cls, tensor):
        cls.asked += 1
        return tensor, None


@several
def test_adasum_travels_compressed():
    weight = torch.nn.Parameter(torch.ones(2))
    how = {"op": hvd.Adasum, "compression": Counted}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), [("weight", weight)], **how)
    weight.sum().backward()
    optimizer.step()
    assert Counted.asked == 1
    torch.testing.assert_close(weight.detach(), torch.full((2,), 0.5))


@several
def test_sparse_and_dense_gradients_of_one_parameter_are_told_apart():
    weight = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("table", weight)])
    torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=RANK == 0).sum().backward()
    with pytest.raises(hvd.HorovodInternalError, match=r"disagree on 'allreduce.table'.*sparse_as_dense=True"):
        optimizer.step()


def test_a_gradient_of_batch_normalisation_has_no_gradient():
    layer = hvd.SyncBatchNorm(2).double()
    for weight in (1.0, torch.linspace(0, 1, 8, dtype=torch.float64).reshape(4, 2)):
        x = torch.arange(8.0, dtype=torch.float64).reshape(4, 2).add(RANK).square().requires_grad_()
        (first,) = grad((layer(x) * weight).sum(), x, create_graph=True)
        assert first.requires_grad
        if SIZE > 1:
            with pytest.raises(RuntimeError, match="differentiate twice"):
                first.square().sum().backward()
        else:
            first.square().sum().backward()
            assert x.grad is not None


@pytest.mark.parametrize("again", ["broadcast", "load"])
def test_hooks_of_steps_run_once(again):
    model, counts = model_of(0), []
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    optimizer.register_step_pre_hook(lambda *_: counts.append("before"))
    optimizer.register_step_post_hook(lambda *_: counts.append("after"))
    optimizer.step()
    assert counts == ["before", "after"]
    for _ in range(2):
        if again == "broadcast":
            hvd.broadcast_optimizer_state(optimizer, 0)
        else:
            optimizer.load_state_dict(optimizer.state_dict())
        counts.clear()
        optimizer.step()
        assert counts == ["before", "after"]


def test_a_model_is_wrapped_again_when_its_first_optimizer_is_gone():
    model = model_of(RANK)
    hvd.broadcast_parameters(model.state_dict(), 0)
    for _ in range(2):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 3), RANK + 1.0, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        del optimizer
        gc.collect()
    assert equal_on_all(model)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.SparseAdam])
def test_a_new_optimizer_has_gradients_of_zeros_when_its_state_was_broadcast(kind):
    first, *others = model_of(RANK).parameters()
    first.requires_grad_(False)
    optimizer = kind([first, *others], lr=0.1 * (RANK + 1))
    before = [x.detach().clone() for x in others]
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert first.grad is None
    assert all(x.grad.is_sparse is (kind is torch.optim.SparseAdam) and not x.grad.to_dense().any() for x in others)
    assert all(map(torch.equal, others, before))


@several
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_parameters_that_are_added_later_are_trained_together(op):
    model = model_of(0)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model[0].named_parameters(), op=op)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((3,), float(RANK)).double()).square().sum().backward()
        optimizer.step()
    assert equal_on_all(model)


@several
@pytest.mark.parametrize("passes", [1, 2])
def test_parameters_that_are_unfrozen_later_are_trained_together(passes):
    model, alone = model_of(0), model_of(0)
    for each in (model, alone):
        each[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=passes)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(5):
        if step == 2:
            for each in (model, alone):
                each[0].requires_grad_(requires_grad=True)
        optimizer.zero_grad()
        plain.zero_grad()
        for turn in range(passes):
            model(torch.full((3,), RANK + turn + 1.0).double()).square().sum().backward()
            for rank in range(SIZE):
                (alone(torch.full((3,), rank + turn + 1.0).double()).square().sum() / SIZE).backward()
        optimizer.step()
        plain.step()
    for own, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own, expected)
    assert equal_on_all(model)


@pytest.mark.parametrize("make", [partial(torch.optim.SGD, lr=0.1), partial(torch.optim.LBFGS, lr=0.1, max_iter=3)])
def test_the_gradients_of_a_closure_are_averaged(make):
    model, alone = model_of(0), model_of(0)
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
    plain = make(alone.parameters())
    rows = torch.linspace(-1, 1, 3 * SIZE, dtype=torch.float64).reshape(SIZE, 3)

    def loss_of(optimizer, model, rows):
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        return loss

    for step in range(3):
        if step == 1:
            model(rows[RANK : RANK + 1]).sum().backward()  # is under way when the step begins
        optimizer.step(partial(loss_of, optimizer, model, rows[RANK : RANK + 1]))
        plain.step(partial(loss_of, plain, alone, rows))
    assert equal_on_all(model)
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_an_unknown_op_is_refused_when_the_optimizer_is_made():
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="op must be Average"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=9)
