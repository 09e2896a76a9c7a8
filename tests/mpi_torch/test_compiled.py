"""DDP under ``torch.compile``: the module is compiled, and what DDP does around it is left alone."""

import copy

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch._dynamo.utils import counters

import mpiagg

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.usefixtures("process_group"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning:torch"),
]

RANK = MPI.COMM_WORLD.Get_rank()
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
"""torch 2.6 forgets gradients of parameters that are thawed, if a module is compiled, also without DDP."""


def net():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def trained(ddp, call, change):
    """Return the parameters and buffers after some steps, in the midst of which the first layer changes."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    batches = torch.Generator().manual_seed(RANK)
    for step in range(6):
        if step == 3:
            ddp.module[0].requires_grad_(change == "thawed")
        optimizer.zero_grad()
        call(torch.randn(5, 3, generator=batches)).square().mean().backward()
        optimizer.step()
    return [x.detach().numpy() for x in ddp.state_dict().values()]


@pytest.mark.filterwarnings("error:Dynamo does not know:UserWarning")
@pytest.mark.parametrize("change", ["frozen"] if OLD else ["frozen", "thawed"])
def test_it_trains_as_it_does_when_it_is_not_compiled(change):
    torch.manual_seed(0)
    plain = net()
    plain[0].requires_grad_(change == "frozen")
    torch._dynamo.reset()
    counters.clear()
    found = []
    for module, compiles in ((copy.deepcopy(plain), False), (plain, True)):
        ddp = mpiagg.DDP(module)
        found.append(trained(ddp, torch.compile(ddp, backend="aot_eager") if compiles else ddp, change))
        ddp.free()
    for eager, compiled in zip(*found, strict=True):
        np.testing.assert_allclose(compiled, eager, rtol=1e-5, atol=1e-6)
    # The module, before and after the change, and what lies around it: nothing of collectives, nothing at every step.
    assert counters["stats"]["unique_graphs"] <= 4


class Grows(nn.Module):
    """A module that resizes a buffer, as those do that observe values to quantise them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.full((1,), RANK + 1.0))

    def forward(self, x):
        self.seen.resize_(self.seen.numel() + 1)[-1] = RANK
        return self.layer(x)


def test_buffers_can_be_resized():
    ddp = mpiagg.DDP(Grows())
    assert ddp.seen.tolist() == [1]
    for length in (2, 3):
        ddp(torch.ones(1, 3)).sum().backward()
        assert len(ddp.seen) == length
    ddp.broadcast_parameters(root=0)
    assert ddp.seen.tolist() == [1, 0, 0]
    ddp.seen.resize_(7)
    ddp.free()
