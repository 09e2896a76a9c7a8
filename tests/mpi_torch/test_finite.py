"""NaN and infinity in the gradients of modules, found while buckets are on their way."""

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch_models import MEAN, good_step, model

import mpiagg

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
ODD = SIZE // 2
"""A rank where something is wrong."""


def message_of(ddp):
    """Return the message of the error that a step ends with, the same on all ranks."""
    with pytest.raises(mpiagg.NonFiniteError) as raised:
        ddp.sync_gradients()
    messages = COMM.allgather(str(raised.value))
    assert messages == [messages[0]] * SIZE
    return messages[0]


def bad_pass(module, bad):
    """Compute gradients that are all 1 but for those in a dict of parameter to value."""
    module.zero_grad()
    sum((x * bad.get(name, 1.0)).sum() for name, x in module.named_parameters() if x.requires_grad).backward()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cap", [0, 24, 2**20])
def test_all_ranks_learn_of_what_is_bad_on_any_and_go_on(cap, overlap):
    module = model()
    module[0].bias.requires_grad_(requires_grad=False)  # names are those of the parameters that are trained
    with mpiagg.DDP(module, bucket_bytes=cap, overlap=overlap, check_finite=True) as ddp:
        bad = {ODD: {"1.bias": np.inf}, SIZE - 1: {"0.weight": np.nan, "1.bias": -np.inf}}
        for _ in range(2):
            bad_pass(module, bad.get(RANK, {}))
            told = message_of(ddp)
            weight = "parameter 0 ('0.weight', float32 (3, 2)): 6 NaN, 0 Inf of 6"
            bias = "parameter 2 ('1.bias', float32 (2,)): 0 NaN, 2 Inf of 2"
            ranks = [f"rank {ODD}: {bias}"] * (ODD != SIZE - 1) + [f"rank {SIZE - 1}: {weight}, {bias}"]
            assert told == f"gradients are not finite: {'; '.join(ranks)}"
            if overlap:
                assert all(parameter.grad is None for parameter in module.parameters())
            else:
                assert module[1].bias.grad.isinf().all() == (RANK in bad)
            bad_pass(module, dict.fromkeys(["0.weight", "1.weight", "1.bias"], float(RANK)))
            ddp.sync_gradients()
            assert all((x.grad == MEAN).all() for x in module.parameters() if x.requires_grad)


def test_gradients_that_no_hook_has_brought_are_checked():
    """They are of batches before the last, which has not reached their parameters."""
    module = model()
    with mpiagg.DDP(module, bucket_bytes=0, check_finite=True) as ddp:
        with ddp.no_sync():
            bad_pass(module, {"0.weight": np.nan} if RANK == ODD else {})
        module[1].bias.sum().backward()
        assert message_of(ddp).startswith(f"gradients are not finite: rank {ODD}: parameter 0 ('0.weight', ")
        good_step(ddp)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_sum_that_overflows_is_reported(overlap):
    module = model().half()
    with (
        mpiagg.AllReduce(op="sum") as total,
        mpiagg.DDP(module, aggregation=total, bucket_bytes=0, overlap=overlap, check_finite=True) as ddp,
    ):
        if SIZE > 1:
            bad_pass(module, {"1.weight": 60_000})
            told = message_of(ddp)
            assert told.startswith(
                "overflow: the gradients of all ranks were finite, but their sum by AllReduce is not"
            )
            assert told.endswith("parameter 2 ('1.weight', float16 (2, 3)): 0 NaN, 6 Inf of 6")
        bad_pass(module, {})
        ddp.sync_gradients()
        assert all((x.grad == SIZE).all() for x in module.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda: mpiagg.ErrorFeedback(mpiagg.AllReduce(wire="u8")),
        lambda: mpiagg.PowerSGD(min_compression_rate=0),
        *(lambda how=how: mpiagg.Sparsified(ratio=0.3, selection=how) for how in ("topk", "randomk", "blockk")),
    ],
    ids=["feedback", "powersgd", "topk", "randomk", "blockk"],
)
def test_no_aggregation_remembers_what_is_bad(make):
    module = model()
    with make() as aggregation, mpiagg.DDP(module, aggregation=aggregation, check_finite=True) as ddp:
        for value in (1.0, np.nan, 1.0, np.inf, 1.0):
            bad_pass(module, {"0.weight": value, "1.bias": value} if RANK == ODD else {})
            if np.isfinite(value):
                ddp.sync_gradients()
                assert all(x.grad.isfinite().all() for x in module.parameters())
            else:
                message_of(ddp)
        kept = repr(aggregation.state_dict())
        assert "nan" not in kept
        assert "inf" not in kept


def test_it_ends_a_join_on_all_ranks():
    def train(ddp):
        with ddp.join():
            for _ in range(0 if RANK == 0 != ODD else 2):
                bad_pass(ddp.module, {"0.bias": np.nan} if RANK == ODD else {})
                ddp.sync_gradients()

    with mpiagg.DDP(model(), check_finite=True) as ddp:
        with pytest.raises(mpiagg.NonFiniteError, match=f"rank {ODD}: parameter 1 .'0.bias'"):
            train(ddp)
        good_step(ddp)


def test_without_the_check_all_ranks_get_it():
    module = nn.Linear(2, 2)
    with mpiagg.DDP(module) as ddp:
        bad_pass(module, {"bias": np.nan} if RANK == ODD else {})
        ddp.sync_gradients()
        assert module.bias.grad.isnan().all()
        assert torch.equal(module.weight.grad, torch.ones(2, 2))
