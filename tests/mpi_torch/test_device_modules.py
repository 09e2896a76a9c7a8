"""DDP of modules on a device, through the stand-in: what a step asks of torch, of the device and of Python."""

import pytest
import standin
import torch
import torch_on_standin
from mpi4py import MPI

import mpiagg
from mpiagg.ddp import hooks
from mpiagg.plans import background
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
PARAMETERS, ELEMENTS = 160, 3000
CAP = 40 * 4 * ELEMENTS
"""Forty parameters."""
MEAN = (SIZE + 1) / 2


@pytest.fixture
def comm():
    duplicate = COMM.Dup()
    yield duplicate
    channel_of(duplicate).free()
    duplicate.Free()


@pytest.fixture
def made(comm, monkeypatch):
    """Torch's side of the stand-in, to which messages do not reach."""
    channel_of(comm).aware = False
    with torch_on_standin.installed(monkeypatch) as made, standin.watch(device_messages=False):
        yield made


class Many(torch.nn.Module):
    """As many parameters as a ResNet-50 has, of which each has the gradient ``factor``."""

    def __init__(self, count=PARAMETERS):
        super().__init__()
        self.many = torch.nn.ParameterList(torch.zeros(ELEMENTS) for _ in range(count))

    def forward(self, factor):
        return sum((each * factor).sum() for each in self.many)


def zero(module, *, to_none):
    for each in module.parameters():
        if to_none:
            each.grad = None
        else:
            each.grad.zero_()


def holds(module, value):
    return all((each.grad == value).all() for each in module.parameters())


@pytest.mark.parametrize("to_none", [True, False])
def test_what_a_step_of_160_parameters_costs(comm, made, to_none):
    model = Many()
    with mpiagg.DDP(model, comm, bucket_bytes=CAP) as ddp:
        buckets = len(ddp._steps._buckets)
        for step in range(3):
            if step:
                zero(model, to_none=to_none)
            loss = ddp(RANK + 1.0 + step)
            made.counts.clear()
            standin.LOG.clear()
            with torch_on_standin.calls_counted() as calls:
                loss.backward()
            assert holds(model, MEAN + step)
    log, counts = standin.LOG.counts(), made.counts
    # torch copies the gradients of a bucket together, and none that is in its place: before, one by one.
    assert counts == ({"copies": buckets, "copied": PARAMETERS} if to_none else {})
    assert log["out"] == log["in"] == log["on"] == 0
    # One kernel a bucket, which folds; alone a rank divides by one.
    assert (log["fold"], log["kernel"]) == ((buckets, 0) if SIZE > 1 else (0, buckets))
    # A bucket follows torch, its plan the bucket, and what the plan asks follows that: before, 168.
    assert log["wait"] <= 4 * buckets
    assert log["done"] + log["synchronise"] <= 4 * buckets
    # Functions of Python that are called for each parameter: before 28, without those of torch's and CuPy's streams.
    # Those in which plans are waited for are left out: how often depends on the other ranks.
    each = {
        (file, name): count // PARAMETERS
        for (file, name), count in calls.items()
        if "/ddp/" in file or "weakref" in file or "/site-packages/torch/" in file
    }
    assert sum(each.values()) <= 15, {called: count for called, count in each.items() if count}
    # Nothing is brought forward here where a thread does that: before, three tests a parameter.
    assert background.threads_allowed()
    assert not [name for (file, name) in calls if file.endswith("launching.py") and name == "drive"]


def test_hooks_bring_plans_forward_where_no_thread_may(comm, made, monkeypatch):
    del made
    monkeypatch.setattr(hooks, "threads_allowed", lambda: False)
    model = Many()
    with mpiagg.DDP(model, comm, bucket_bytes=CAP) as ddp:
        loss = ddp(RANK + 1.0)
        with torch_on_standin.calls_counted() as calls:
            loss.backward()
        assert holds(model, MEAN)
    driven = [count for (file, name), count in calls.items() if file.endswith("launching.py") and name == "drive"]
    assert driven == [PARAMETERS]


def test_gradients_of_several_streams_are_copied_and_waited_for_where_they_come_from(comm, made):
    model, of_stream = Many(12), {}
    for index, each in enumerate(model.many):

        def turn(_, index=index):
            made.stream = 4096 * (index % 3)

        each.register_hook(turn)
    with mpiagg.DDP(model, comm, bucket_bytes=4 * 4 * ELEMENTS) as ddp:
        for step in range(3):
            zero(model, to_none=True)
            made.copied.clear()
            standin.LOG.clear()
            ddp(RANK + 1.0 + step).backward()
            assert holds(model, MEAN + step)
            of_stream = {pointer: stream for stream, pointers in made.copied for pointer in pointers}
            wanted = {each.grad.data_ptr(): 4096 * (index % 3) for index, each in enumerate(model.many)}
            assert of_stream == wanted
            followed = {entry.name for entry in standin.LOG.of("wait")}
            assert followed >= {0, *(made.made(4096 * number).number for number in (1, 2))}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cap", [0, 5 * 4 * ELEMENTS, 25 * 2**20])
def test_gradients_that_are_missing_or_add_up(comm, made, overlap, cap):
    del made
    model = Many(12)

    def loss(factor, used):
        return sum((each * factor).sum() for each in list(model.many)[:used])

    with mpiagg.DDP(model, comm, bucket_bytes=cap, overlap=overlap, find_unused_parameters=True) as ddp:
        for step in range(2):
            zero(model, to_none=True)
            with ddp.no_sync():
                loss(1.0, 12).backward()
            loss(RANK + step + 1.0, 12 if RANK else 6).backward()
            ddp.sync_gradients()
            for index, each in enumerate(model.many):
                mine = [rank + step + 1.0 for rank in range(SIZE) if rank or index < 6]
                assert (each.grad == (SIZE + sum(mine)) / SIZE).all()
            zero(model, to_none=True)
            loss(RANK + 1.0, 3).backward()
            ddp.sync_gradients()
            assert [each.grad is None for each in model.many] == [False] * 3 + [True] * 9
            assert all((each.grad == MEAN).all() for each in list(model.many)[:3])


def test_a_gradient_that_comes_twice_is_a_fault_on_all_and_the_next_step_is_good(comm, made):
    del made
    model = Many(5)
    with mpiagg.DDP(model, comm, bucket_bytes=2 * 4 * ELEMENTS) as ddp:
        for twice in (True, False):
            zero(model, to_none=True)
            for _ in range(2 if twice and RANK == 0 else 1):
                sum((each * (RANK + 1.0)).sum() for each in model.many).backward()
            if twice:
                with pytest.raises(mpiagg.PlanError if RANK == 0 else mpiagg.MismatchError):
                    ddp.sync_gradients()
            else:
                ddp.sync_gradients()
        assert holds(model, MEAN)
