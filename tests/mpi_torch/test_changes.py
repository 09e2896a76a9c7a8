"""Modules that are not what they were when DDP was made, or that somebody else has a hand in."""

import pytest
import torch
from mpi4py import MPI
from support import refused
from torch import nn
from torch_models import good_step, model, one_pass

import mpiagg
from mpiagg import MismatchError, PlanError

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_module_in_another_ddp_is_refused(overlap):
    module = model()
    with mpiagg.DDP(module) as ddp:
        refused(ValueError, r"trains 0.weight; free\(\) that first", mpiagg.DDP, module, overlap=overlap)
        good_step(ddp)
    with mpiagg.DDP(module, overlap=overlap) as ddp:
        good_step(ddp)
    # Without hooks nobody takes gradients away from anybody.
    with mpiagg.DDP(module, overlap=False) as ddp, mpiagg.DDP(module, overlap=False):
        good_step(ddp)


def replace_layer(module):
    module[1] = nn.Linear(3, 2)


def add_layer(module):
    module.append(nn.Linear(2, 2))


def assign(module):
    module.load_state_dict({name: x.clone() for name, x in module.state_dict().items()}, assign=True)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("change", [replace_layer, add_layer, assign])
def test_a_parameter_that_was_replaced_is_noticed(change, overlap):
    module = model()
    with mpiagg.DDP(module, overlap=overlap) as ddp:
        good_step(ddp)
        change(module)
        one_pass(module)
        refused(ValueError, r"free\(\) DDP and make it again", ddp.sync_gradients)


def test_parameters_that_were_all_replaced_are_noticed_by_the_backward_pass():
    with mpiagg.DDP(model()) as ddp:
        x = torch.randn(3, 2, requires_grad=True)
        for _ in range(2):
            torch.autograd.grad(ddp(x).sum(), x)
            ddp(x).sum().backward()
        ddp.load_state_dict({name: value.clone() for name, value in ddp.state_dict().items()}, assign=True)
        refused(ValueError, r"free\(\) DDP and make it again", ddp(x).sum().backward)


def test_a_pass_inside_no_sync_after_one_on_its_way_is_refused():
    module = model()
    with mpiagg.DDP(module) as ddp:
        one_pass(module)
        with ddp.no_sync():
            one_pass(module)
        refused(mpiagg.PlanError, "got a gradient twice before sync", ddp.sync_gradients)
        good_step(ddp)


def test_a_gradient_that_somebody_else_takes_is_noticed():
    module = model()
    handle = module[1].bias.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
    with mpiagg.DDP(module) as ddp:
        one_pass(module)
        refused(mpiagg.PlanError, "another hook has taken it away", ddp.sync_gradients)
        handle.remove()
        good_step(ddp)


@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_that_cannot_be_laid_out_again_stay(overlap):
    module = model()
    with mpiagg.DDP(module, overlap=overlap) as ddp:
        good_step(ddp)
        module[0].bias.requires_grad_(requires_grad=False)
        module.register_buffer("rows", torch.zeros(1).expand(3))
        refused(ValueError, "rows is expanded", ddp, torch.ones(1, 2))
        del module.rows
        module[0].bias.requires_grad_()
        good_step(ddp)


def test_buckets_stay_where_a_rank_has_gradients_under_way():
    module = model()
    with mpiagg.DDP(module) as ddp:
        if RANK == 0:
            one_pass(module)
        module[0].bias.requires_grad_(requires_grad=False)
        refused(PlanError if RANK == 0 else MismatchError, r"sync_gradients\(\)", ddp, torch.ones(1, 2))
        module[0].bias.requires_grad_()
        ddp.sync_gradients()
        good_step(ddp)
