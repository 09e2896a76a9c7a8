"""What goes wrong on one rank is an error on all, and nobody waits in vain."""

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI
from support import refused
from torch import nn
from torch_models import MEAN, good_step, model, one_pass

import mpiagg

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
ODD = SIZE // 2
"""The rank where something is wrong."""


def raised(error, words, call, *arguments):
    """Show that the odd rank raises this, and the others that it has."""
    if RANK == ODD:
        refused(error, words, call, *arguments)
    else:
        refused(mpiagg.MismatchError, f"rank {ODD} raised {error.__name__}.*", call, *arguments)


# -- modules


def with_other_shape(_):
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))


def frozen(module):
    module[0].bias.requires_grad_(requires_grad=False)
    return module


def with_buffer(module):
    module.register_buffer("more", torch.zeros(1))
    return module


def renamed(module):
    return nn.ModuleDict({"a": module[0], "b": module[1]})


@pytest.mark.parametrize("change", [with_other_shape, frozen, with_buffer, renamed, lambda module: module.double()])
def test_modules_that_differ_are_refused(change):
    module = change(model()) if RANK == ODD else model()
    if SIZE > 1:
        refused(mpiagg.MismatchError, "ranks disagree", mpiagg.DDP, module)
    else:
        mpiagg.DDP(module).free()


def test_overlap_must_be_the_same():
    if SIZE > 1:
        refused(mpiagg.MismatchError, "ranks disagree", lambda: mpiagg.DDP(model(), overlap=RANK != ODD))


class Expanded(nn.Module):
    """A layer with one more tensor."""

    def __init__(self, given):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        if isinstance(given, nn.Parameter):
            self.given = given
        else:
            self.register_buffer("given", given)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")  # of torch 2.1
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: nn.Linear(2, 2, device="meta"), TypeError, "weight must be a dense tensor on the CPU.* on meta"),
        (lambda: nn.ParameterList([torch.eye(2).to_sparse()]), TypeError, "0 must be a dense tensor.*sparse"),
        (lambda: nn.LazyLinear(3), ValueError, "weight is not initialised"),
        (lambda: Expanded(nn.Parameter(torch.ones(1).expand(4))), ValueError, "given is expanded"),
        (lambda: Expanded(torch.ones(1, 3).expand(2, 3)), ValueError, "given is expanded"),
    ],
    ids=["device", "sparse", "lazy", "expanded parameter", "expanded buffer"],
)
def test_modules_that_cannot_be_trained_are_refused(make, error, words):
    refused(error, words, lambda: mpiagg.DDP(make()))
    raised(error, words, lambda: mpiagg.DDP(make() if RANK == ODD else model()))


def test_bfloat16_needs_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    refused(TypeError, "need the package ml_dtypes", lambda: mpiagg.DDP(model().bfloat16()))


# -- gradients


class Rows(nn.Module):
    """An embedding that DDP cannot tell has sparse gradients."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.ones(4, 2))
        self.is_sparse = RANK == ODD

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.rows, sparse=self.is_sparse)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_sparse_gradient_is_refused(overlap):
    module = nn.Sequential(Rows(), nn.Linear(2, 2))
    with mpiagg.DDP(module, bucket_bytes=0, overlap=overlap) as ddp:
        for train in (ddp, module):
            loss = train(torch.tensor([1, 2])).sum()
            step = loss.backward if train is ddp else ddp.sync_gradients
            if train is module:
                loss.backward()
            raised(TypeError, "the gradient of parameter 0.rows must be a dense tensor", step)
        module[0].is_sparse = False
        good_step(ddp)


def test_a_second_backward_pass_before_sync_is_refused():
    with mpiagg.DDP(model(), bucket_bytes=0) as ddp:
        for _ in range(2):
            one_pass(ddp.module)
            if RANK == ODD:
                one_pass(ddp.module)
            raised(mpiagg.PlanError, "a gradient twice before sync_gradients.*no_sync", ddp.sync_gradients)
            good_step(ddp)


def test_without_hooks_backward_passes_add_up():
    with mpiagg.DDP(model(), overlap=False) as ddp:
        one_pass(ddp.module)
        sum((parameter * RANK).sum() for parameter in ddp.parameters()).backward()
        ddp.sync_gradients()
        assert all((parameter.grad == 2 * MEAN).all() for parameter in ddp.parameters())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_does_not_step_before_sync(make, overlap):
    module = model()
    optimizer = make(module.parameters(), lr=0.1)
    with mpiagg.DDP(module, overlap=overlap) as ddp:
        before = [x.detach().clone() for x in module.parameters()]
        one_pass(module)
        refused(mpiagg.PlanError, "that sync_gradients\\(\\) has not aggregated", optimizer.step)
        assert all(map(torch.equal, module.parameters(), before))
        ddp.sync_gradients()
        optimizer.step()
        assert not any(map(torch.equal, module.parameters(), before)) or SIZE == 1  # where the mean is zero
        good_step(ddp)
    one_pass(module)
    optimizer.step()  # nobody aggregates any more


def test_an_optimizer_steps_without_gradients():
    module = model()
    with mpiagg.DDP(module) as ddp:
        with ddp.no_sync():
            one_pass(module)
        module.zero_grad(set_to_none=True)  # which are given up
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        good_step(ddp)


def test_a_ddp_that_is_lost_keeps_nobody_from_steps():
    module = model()
    ddp = mpiagg.DDP(module, overlap=False)
    lost = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert lost() is None
    one_pass(module)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    COMM.Barrier()


@pytest.mark.parametrize("overlap", [True, False])
def test_an_optimizer_steps_on_what_is_not_to_be_aggregated(overlap):
    module, other = model(), model()
    with mpiagg.DDP(module, overlap=overlap) as ddp:
        with ddp.no_sync():
            one_pass(module)
            torch.optim.SGD(module.parameters(), lr=0.1).step()  # on purpose, on this rank alone
        one_pass(other)
        torch.optim.SGD(other.parameters(), lr=0.1).step()  # of another module
        ddp.sync_gradients()


class Fault(torch.autograd.Function):
    """Raises in the middle of the backward pass of one rank."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        if RANK == ODD:
            raise ArithmeticError("in the middle")
        return gradient


def faulty_pass(module):
    module.zero_grad()
    x = module[0](torch.ones(1, 2))
    module[1](Fault.apply(x)).sum().backward()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_backward_pass_that_fails_on_one_rank_keeps_nobody_waiting(overlap):
    with mpiagg.DDP(model(), bucket_bytes=0, overlap=overlap) as ddp:
        if RANK == ODD:
            with pytest.raises(ArithmeticError):
                faulty_pass(ddp.module)
        else:
            faulty_pass(ddp.module)
        ddp.sync_gradients()
        assert (ddp.module[1].bias.grad == 1).all()  # all ranks had reached it
        if SIZE > 1:
            torch.testing.assert_close(ddp.module[1].bias.grad, torch.ones(2))
            first = COMM.allgather(ddp.module[0].weight.grad.tolist())
            assert first == [first[0]] * SIZE
        else:
            assert ddp.module[0].weight.grad is None
        good_step(ddp)


def test_gradients_are_not_given_where_hooks_take_them():
    with mpiagg.DDP(model()) as ddp:
        refused(ValueError, "taken from the parameters", ddp.sync_gradients, [None] * 4)
        raised(ValueError, "taken from the parameters", ddp.sync_gradients, [None] * 4 if RANK == ODD else None)
        good_step(ddp)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_parameter_that_comes_to_require_a_gradient_is_noticed(overlap):
    module = frozen(model())
    with mpiagg.DDP(module, overlap=overlap) as ddp:
        module[0].bias.requires_grad_()
        one_pass(module)
        refused(ValueError, "0.bias has come to require a gradient", ddp.sync_gradients)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_parameter_of_another_dtype_is_noticed(overlap):
    module = model()
    with mpiagg.DDP(module, overlap=overlap) as ddp:
        if RANK == ODD:
            module.double()
        one_pass(module)
        raised(ValueError, "0.weight has become torch.float64; change dtypes by DDP.to", ddp.sync_gradients)
        module.float()
        good_step(ddp)


# -- joining


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("where", ["before", "in", "after"])
def test_an_error_inside_join_reaches_all_ranks(where, overlap):
    """One rank fails in its second step; rank 0 has no batches, and the others many."""

    def train(ddp):
        with ddp.join():
            for step in range(0 if RANK == 0 != ODD else 9):
                failing = step == 1 and RANK == ODD
                if failing and where == "before":
                    raise ArithmeticError("in the middle")
                (faulty_pass if step == 1 and where == "in" else one_pass)(ddp.module)
                if failing and where == "after":
                    raise ArithmeticError("in the middle")
                ddp.sync_gradients()

    with mpiagg.DDP(model(), bucket_bytes=0, overlap=overlap) as ddp:
        raised(ArithmeticError, "in the middle", train, ddp)
        good_step(ddp)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_refused_gradient_ends_the_join(overlap):
    def train(ddp):
        with ddp.join():
            for _ in range(2):
                ddp.module.zero_grad()
                ddp.module(torch.tensor([1, 2])).sum().backward()
                if RANK == ODD:
                    with pytest.raises(TypeError, match="dense"):
                        ddp.sync_gradients()
                else:
                    with pytest.raises(mpiagg.MismatchError):
                        ddp.sync_gradients()
                ddp.sync_gradients()

    module = nn.Sequential(Rows(), nn.Linear(2, 2))
    with mpiagg.DDP(module, overlap=overlap) as ddp:
        refused(mpiagg.PlanError, "ended the join", train, ddp)
        module[0].is_sparse = False
        good_step(ddp)


def test_an_early_fault_does_not_outlive_its_step():
    def train(ddp):
        with ddp.join():
            one_pass(ddp.module)
            one_pass(ddp.module)
            raise ArithmeticError("no luck")

    with mpiagg.DDP(model()) as ddp:
        refused(ArithmeticError, "no luck", train, ddp)
        ddp.module.zero_grad()
        ddp.sync_gradients()
        good_step(ddp)


def test_a_backward_pass_without_sync_at_the_end_of_join_is_noticed():
    def train(ddp):
        with ddp.join():
            one_pass(ddp.module)
            if RANK != ODD:
                ddp.sync_gradients()

    with mpiagg.DDP(model()) as ddp:
        raised(mpiagg.PlanError, "not followed by sync_gradients", train, ddp)
        good_step(ddp)


# -- the interface


def test_the_module_is_moved_and_buckets_are_laid_out_again():
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=1)
    with mpiagg.DDP(module, bucket_bytes=24) as ddp:
        good_step(ddp)
        views = ddp.gradient_views()
        assert ddp.to("cpu") is ddp
        assert all(x is y for x, y in zip(views, ddp.gradient_views(), strict=True))
        opened = len(ddp._channel.open)
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            assert ddp.to(dtype) is ddp
            assert all((parameter.grad == MEAN).all() for parameter in module.parameters())
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
            good_step(ddp)
            optimizer.step()
            assert all((x == -MEAN).all() and x.dtype == dtype for x in module.parameters())
            assert {view.dtype.name for view in ddp.gradient_views()} == {str(dtype).removeprefix("torch.")}
        assert len(ddp._channel.open) == opened
        for arguments in (("meta",), (torch.device("meta"),), (torch.zeros(1, device="meta"),)):
            refused(TypeError, "CUDA devices, not on meta", ddp.to, *arguments)
        with pytest.raises(TypeError, match="meta"):
            ddp.to(device="meta")
        raised(TypeError, "on the CPU", ddp.to, "meta" if RANK == ODD else "cpu")
        if SIZE > 1:
            refused(mpiagg.MismatchError, "ranks disagree", ddp.to, torch.float64 if RANK == ODD else torch.float32)
        good_step(ddp)
        one_pass(module)
        refused(mpiagg.PlanError, "not followed by sync_gradients", ddp.to, torch.float64)
        ddp.sync_gradients()


def test_what_a_training_loop_asks_of_its_module():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    x = torch.rand(4, 2)
    with mpiagg.DDP(module) as ddp:
        assert ddp.eval() is ddp
        assert not module.training
        assert not ddp.training
        assert torch.equal(ddp(x), module(x))
        assert torch.equal(ddp.forward(x), module(x))
        assert ddp.train() is ddp
        assert module[1].training
        assert all(x is y for x, y in zip(ddp.parameters(), module.parameters(), strict=True))
        assert [name for name, _ in ddp.named_parameters()] == [f"module.{x}" for x, _ in module.named_parameters()]
        state = {name: x.clone() for name, x in ddp.state_dict().items()}
        assert list(state) == [f"module.{name}" for name in module.state_dict()]
        before = list(module.parameters())
        with torch.no_grad():
            module[0].weight.fill_(7)
        assert not any(ddp.load_state_dict(state))
        assert torch.equal(module[0].weight, state["module.0.weight"])
        assert all(x is y for x, y in zip(before, module.parameters(), strict=True))
        del state["module.0.bias"]
        with pytest.raises(RuntimeError, match="Missing key"):
            ddp.load_state_dict(state)
        assert ddp.load_state_dict(state, strict=False).missing_keys == ["module.0.bias"]


@pytest.mark.parametrize("level", ["SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"])
def test_gradients_of_a_gpu_need_an_mpi_that_their_thread_may_call(level, monkeypatch):
    from mpiagg.ddp.torch_streams import require_threads

    monkeypatch.setattr(MPI, "Query_thread", lambda: getattr(MPI, f"THREAD_{level}"))
    here, there = SimpleNamespace(is_cuda=False), SimpleNamespace(is_cuda=True)
    require_threads([here])
    if level in {"SERIALIZED", "MULTIPLE"}:
        require_threads([here, there])
    else:
        with pytest.raises(mpiagg.PlanError, match=r"a thread of its own.*needs MPI.THREAD_SERIALIZED"):
            require_threads([here, there])
