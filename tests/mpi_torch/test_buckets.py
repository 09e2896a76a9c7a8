"""Buckets of torch's own DDP in memory that the ranks share."""

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import mpiagg
import mpiagg.torch
from mpiagg.transport import NOWHERE, channel_of

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()


@pytest.fixture(autouse=True)
def group():
    mpiagg.torch.init_process_group()
    yield dist.group.WORLD
    dist.destroy_process_group()


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 7)).double()


def inputs(step):
    return torch.randn(5, 20, generator=torch.Generator().manual_seed(100 * step + RANK), dtype=torch.float64)


def train(*models, steps=4):
    """Train models by one loss; return their gradients of each step."""
    found = []
    for step in range(steps):
        for model in models:
            model.zero_grad()
        sum(model(inputs(step)).square().mean() for model in models).backward()
        found.append([x.grad.clone() for model in models for x in model.parameters()])
        with torch.no_grad():
            for model in models:
                for x in model.parameters():
                    x.sub_(x.grad, alpha=0.1)
    return found


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("cap", [0.001, 25])
def test_gradients_are_those_of_buckets_of_torchs_own(view, cap):
    settings = {"bucket_cap_mb": cap, "gradient_as_bucket_view": view}
    plain, shared = (DistributedDataParallel(network(), **settings) for _ in range(2))
    mpiagg.torch.share_buckets(shared)
    for expected, got in zip(train(plain), train(shared), strict=True):
        for x, y in zip(expected, got, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-15)


def test_two_models_of_one_loss_have_buckets_of_their_own():
    plain, shared = ([DistributedDataParallel(network()) for _ in range(2)] for _ in range(2))
    for model in shared:
        mpiagg.torch.share_buckets(model)
    for expected, got in zip(train(*plain), train(*shared), strict=True):
        for x, y in zip(expected, got, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-15)


def test_what_is_reduced_lies_in_shared_memory(group, monkeypatch):
    seen = []
    monkeypatch.setattr(type(group), "allreduce", watching(type(group).allreduce, seen))
    plain, shared = (DistributedDataParallel(network()) for _ in range(2))
    mpiagg.torch.share_buckets(shared)
    for model, there in ((plain, False), (shared, SIZE > 1)):
        seen.clear()
        train(model, steps=2)
        assert seen
        assert {channel_of(group.comm).memory.host.position(x) != NOWHERE for x in seen} == {there}


def watching(method, seen):
    def allreduce(self, tensors, *given, **named):
        seen.extend(x.numpy() for x in (tensors if isinstance(tensors, list) else [tensors]))
        return method(self, tensors, *given, **named)

    return allreduce


def test_what_it_is_not_for_is_refused():
    with pytest.raises(TypeError, match="not of a Sequential"):
        mpiagg.torch.share_buckets(network())
    other = DistributedDataParallel(network(), process_group=dist.new_group(backend="gloo"))
    with pytest.raises(TypeError, match="not of the backend 'mpiagg'"):
        mpiagg.torch.share_buckets(other)
    model = DistributedDataParallel(network())
    mpiagg.torch.share_buckets(model)
    with pytest.raises(RuntimeError, match="hook"):
        mpiagg.torch.share_buckets(model)
