"""Buckets are launched while the backward pass runs: when, in which order, and what happens to gradients meanwhile."""

import pytest
import torch
from mpi4py import MPI

import mpiagg

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
MEAN = (SIZE - 1) / 2


class Scales(torch.nn.Module):
    """Parameters whose gradients are what they are multiplied by, and come in a given order."""

    def __init__(self, count=6):
        super().__init__()
        self.scales = torch.nn.ParameterList([torch.ones(3) for _ in range(count)])

    def forward(self, factors):
        """Multiply; the gradient of the last of ``factors``, a dict of parameter to factor, comes first."""
        return sum((self.scales[index] * factor).sum() for index, factor in factors.items())


def turned(by, count=6):
    return {(index + by) % count: float(RANK + index) for index in range(count)}


class Record:
    """Notes in which order gradients come, and buckets start."""

    def __init__(self, ddp, module):
        self.came, self.started = [], []
        for index, parameter in enumerate(module.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self.came.append(index))
        flights = ddp._steps.launcher._flights
        flights[:] = [Noted(number, flight, self.started) for number, flight in enumerate(flights)]


class Noted:
    """What aggregates a bucket, which notes when it is started, be it to be waited for later or at once."""

    def __init__(self, number, flight, started):
        self.number, self.flight, self.started = number, flight, started
        self.test, self.wait = flight.test, flight.wait

    def start(self):
        self.started.append(number := self.number)
        self.flight.start()
        return number

    def __call__(self):
        self.started.append(self.number)
        self.flight()


@pytest.mark.parametrize("cap", [0, 24])
@pytest.mark.parametrize("make", [mpiagg.AllReduce, lambda: mpiagg.AllReduce(algorithm="native")])
def test_buckets_start_in_one_order_whatever_order_gradients_come_in(make, cap):
    module = Scales()
    with make() as aggregation, mpiagg.DDP(module, aggregation=aggregation, bucket_bytes=cap) as ddp:
        record = Record(ddp, module)
        for step in range(3):
            module.zero_grad()
            factors = turned(by=2 * RANK + step)
            ddp(factors).backward()
            ddp.sync_gradients()
            total = COMM.allgather(factors)
            for index, scale in enumerate(module.scales):
                assert (scale.grad == torch.tensor(sum(each[index] for each in total) / SIZE)).all()
        buckets = 6 if cap == 0 else 3
        assert record.started == 3 * list(range(buckets))
        orders = COMM.allgather(tuple(record.came))
        assert len(set(orders)) == min(SIZE, 3)


def test_a_bucket_is_on_its_way_as_soon_as_it_and_those_before_it_are_full():
    module = Scales(4)
    with mpiagg.DDP(module, bucket_bytes=24) as ddp:
        record = Record(ddp, module)
        started = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: started.append(len(record.started)))
        # Bucket 0 holds parameters 3 and 2, bucket 1 holds 1 and 0.
        ddp({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}).backward()
        assert record.came == [3, 2, 1, 0]
        assert started == [0, 1, 1, 1]  # the last has nothing to hide behind, and waits for the step's end
        ddp.sync_gradients()
        ddp({3: 1.0, 2: 1.0, 1: 1.0, 0: 1.0}).backward()
        assert started[4:] == [2, 2, 2, 2]
        ddp.sync_gradients()
        # A parameter without gradient holds back its bucket, and those after it.
        ddp({0: 1.0, 1: 1.0, 2: 1.0}).backward()
        assert started[8:] == [4, 4, 4]
        ddp.sync_gradients()
        assert record.started == [0, 1] * 3


def test_the_first_bucket_has_one_mebibyte():
    module = torch.nn.ParameterList([torch.zeros(2**17) for _ in range(6)])  # half a mebibyte each
    with mpiagg.DDP(module) as ddp:
        assert [list(bucket.views) for bucket in ddp._steps._buckets] == [[5, 4], [3, 2, 1, 0]]


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_live_in_the_buckets(to_none):
    module = Scales()
    with mpiagg.DDP(module, bucket_bytes=24) as ddp:
        places = [view.__array_interface__["data"][0] for view in ddp.gradient_views()]
        for _ in range(2):
            module(turned(0)).backward()
            assert all(scale.grad is None for scale in module.scales)
            ddp.sync_gradients()
            assert [scale.grad.data_ptr() for scale in module.scales] == places
            module.zero_grad(set_to_none=to_none)


def test_without_hooks_gradients_live_in_the_buckets_too():
    module = Scales()
    with mpiagg.DDP(module, overlap=False) as ddp:
        places = [view.__array_interface__["data"][0] for view in ddp.gradient_views()]
        module(turned(0)).backward()
        assert (module.scales[2].grad == RANK + 2).all()
        ddp.sync_gradients()
        assert [scale.grad.data_ptr() for scale in module.scales] == places
        given = [None, *(scale.grad.numpy().copy() for scale in module.scales[1:])]
        ddp.overlapped_sync_gradients(given)
        assert given[0] is None
        assert (given[1] == MEAN + 1).all()


def test_nothing_that_is_done_before_sync_reaches_what_is_on_its_way():
    module = Scales()
    with mpiagg.DDP(module, bucket_bytes=0) as ddp:
        module(turned(0)).backward()
        module.zero_grad(set_to_none=False)
        module.zero_grad()
        ddp.sync_gradients()
        assert [scale.grad.tolist() for scale in module.scales] == [[MEAN + index] * 3 for index in range(6)]


def test_equal_buckets_are_not_exchanged():
    module = Scales(8)
    with mpiagg.DDP(module, bucket_bytes=0) as ddp:
        for step in range(20):
            module.zero_grad()
            ddp({index: float(100 * step + 10 * index + RANK) for index in range(8)}).backward()
            ddp.sync_gradients()
            assert [scale.grad[0].item() for scale in module.scales] == [
                100 * step + 10 * index + MEAN for index in range(8)
            ]


def test_a_gradient_that_nobody_has_stays_missing_and_one_that_some_have_comes_to_all():
    module = Scales(3)
    with mpiagg.DDP(module, bucket_bytes=24) as ddp:
        for turn in range(2):
            module.zero_grad()
            ddp({0: 1.0, 1: 1.0} if turn % SIZE == RANK else {0: 1.0}).backward()
            ddp.sync_gradients()
            assert (module.scales[0].grad == 1).all()
            torch.testing.assert_close(module.scales[1].grad, torch.full((3,), 1 / SIZE))
            assert module.scales[2].grad is None


def test_a_gradient_of_an_earlier_pass_alone_is_sent_too():
    module = Scales(2)
    with mpiagg.DDP(module, bucket_bytes=0) as ddp:
        with ddp.no_sync():
            module({1: float(RANK)}).backward()
        module({0: float(RANK)}).backward()
        ddp.sync_gradients()
        assert all((scale.grad == MEAN).all() for scale in module.scales)


def test_a_step_without_backward_pass():
    module = Scales(2)
    with mpiagg.DDP(module) as ddp:
        if RANK == 0:
            module({1: 1.0}).backward()
        ddp.sync_gradients()
        assert module.scales[0].grad is None
        torch.testing.assert_close(module.scales[1].grad, torch.full((3,), 1 / SIZE))


def test_freed_ddp_leaves_the_module_alone():
    module = Scales(2)
    opened = set()
    for _ in range(2):
        with mpiagg.DDP(module) as ddp:
            ddp(turned(0, 2)).backward()
            ddp.sync_gradients()
        opened.add(len(ddp._channel.open))
    assert len(opened) == 1
    module.zero_grad()
    module(turned(0, 2)).backward()
    assert (module.scales[1].grad == RANK + 1).all()


def test_everything_is_broadcast_in_place():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Embedding(2, 2))
    module[2].requires_grad_(requires_grad=False)
    module.register_buffer("mask", torch.full((5,), bool(RANK)))
    module.register_buffer("hidden", torch.full((2, 2), float(RANK)).t(), persistent=False)
    with torch.no_grad():
        for tensor in [*module.parameters(), module[1].running_mean, module[1].running_var]:
            tensor.fill_(RANK)
    for _ in range(RANK + 1):
        module[1].num_batches_tracked += 1
    before = {name: (x, x.data_ptr()) for name, x in [*module.named_parameters(), *module.named_buffers()]}
    with mpiagg.DDP(module, init_sync=False) as ddp:
        for root in {SIZE - 1, 0}:
            ddp.broadcast_parameters(root)
            assert all((x == root).all() for x in module.parameters())
            assert (module[1].running_mean == root).all()
            assert (module.hidden == root).all()
            assert module[1].num_batches_tracked == root + 1
            assert (module.mask == bool(root)).all()
            with torch.no_grad():
                module[0].weight.fill_(RANK)
                module[1].running_mean.fill_(RANK)
                module[1].num_batches_tracked.fill_(RANK + 1)
                module.hidden.fill_(RANK)
                module.mask.fill_(bool(RANK))
                for x in module.parameters():
                    x.fill_(RANK)
    after = {name: (x, x.data_ptr()) for name, x in [*module.named_parameters(), *module.named_buffers()]}
    assert all(after[name][0] is x and after[name][1] == place for name, (x, place) in before.items())
    assert not module[2].weight.requires_grad
    assert module[0].weight.requires_grad
