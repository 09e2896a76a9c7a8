"""Ranks with uneven numbers of batches, on arrays."""

import numpy as np
import pytest
from mpi4py import MPI
from support import refused

import mpiagg

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
MEAN = (SIZE - 1) / 2
ODD = SIZE // 2
"""The rank where something is wrong."""

SHAPES = [(4,), (2, 3), ()]


def gradients(value):
    return [np.full(shape, float(value)) for shape in SHAPES]


def train(ddp, weights, steps, method="sync_gradients", **keywords):
    """Take steps down by gradients that are this rank's number more than the step's."""
    with ddp.join(**keywords):
        for step in range(steps):
            mine = gradients(RANK + step)
            getattr(ddp, method)(mine)
            for x, gradient in zip(weights, mine, strict=True):
                np.subtract(x, gradient, out=x)


def counts(pattern):
    return [pattern[rank % len(pattern)] for rank in range(SIZE)]


@pytest.mark.parametrize("method", ["sync_gradients", "overlapped_sync_gradients"])
@pytest.mark.parametrize("divide_by_initial_size", [True, False])
@pytest.mark.parametrize("pattern", [[3], [0], [1, 3], [4, 0, 2], [0, 1, 2, 5]], ids=str)
def test_ranks_without_batches_count_as_zeros_or_not_at_all(pattern, divide_by_initial_size, method):
    steps = counts(pattern)
    weights = gradients(RANK)
    with mpiagg.DDP(weights, bucket_bytes=40) as ddp:
        ddp.broadcast_parameters()
        train(ddp, weights, steps[RANK], method, divide_by_initial_size=divide_by_initial_size)
        wanted = 0.0
        for step in range(max(steps)):
            active = [rank for rank in range(SIZE) if steps[rank] > step]
            wanted -= sum(rank + step for rank in active) / (SIZE if divide_by_initial_size else len(active))
        for x in weights:
            np.testing.assert_allclose(x, wanted, rtol=1e-14)
        everyone = COMM.allgather([x.tobytes() for x in weights])
        assert everyone == [everyone[0]] * SIZE
        # The join is over: nobody is asked any more, and averages are over all.
        mine = gradients(RANK)
        ddp.sync_gradients(mine)
        assert all((x == MEAN).all() for x in mine)


def test_what_a_rank_has_done_last_is_what_all_get():
    weights = gradients(0)
    with mpiagg.DDP(weights) as ddp, ddp.join():
        for step in range(2 + (ODD == RANK)):
            ddp.sync_gradients(gradients(0))
            for x in weights:
                x[...] = 10 * RANK + step
    assert all((x == 10 * ODD + 2).all() for x in weights)


def test_gradients_add_up_inside_no_sync():
    with mpiagg.DDP(gradients(0)) as ddp, ddp.join(divide_by_initial_size=False):
        for _ in range(1 + (RANK == 0)):
            mine = gradients(RANK)
            with ddp.no_sync():
                ddp.sync_gradients(mine)
            assert all((x == RANK).all() for x in mine)
            ddp.sync_gradients(mine)
        assert all((x == (0 if RANK == 0 else MEAN)).all() for x in mine)


def test_other_aggregations_and_dtypes():
    weights = [np.zeros(3, np.float16), np.zeros(3, np.complex64), np.zeros(3, np.float32)]
    for make in (mpiagg.ParameterServer, lambda: mpiagg.AllReduce(algorithm="native")):
        with make() as aggregation, mpiagg.DDP(weights, aggregation=aggregation) as ddp:
            with ddp.join(divide_by_initial_size=False):
                if RANK == ODD:
                    mine = [np.full_like(x, 6) for x in weights]
                    ddp.sync_gradients(mine)
                    # The sum over all ranks, divided by their number, and by the share of the active ones.
                    for x in mine:
                        np.testing.assert_allclose(x, 6, rtol=2e-3)
            assert not any(x.any() for x in weights)
    with mpiagg.AllReduce(op="sum") as aggregation, mpiagg.DDP(weights, aggregation=aggregation) as ddp, ddp.join():
        if RANK == ODD:
            mine = [np.full_like(x, 6) for x in weights]
            ddp.sync_gradients(mine)
            assert all((x == 6).all() for x in mine)


@pytest.mark.parametrize(("op", "divide_by_initial_size"), [("min", True), ("max", False), ("sum", False)])
def test_aggregations_in_which_zeros_count_are_refused(op, divide_by_initial_size):
    def join():
        with ddp.join(divide_by_initial_size=divide_by_initial_size):
            pytest.fail("it was not refused")

    with mpiagg.AllReduce(op=op) as aggregation, mpiagg.DDP(gradients(0), aggregation=aggregation) as ddp:
        refused(ValueError, f"with op '{op}'", join)


def test_hidden_sums_and_other_denominators_are_refused():
    for make in (
        lambda: mpiagg.ErrorFeedback(mpiagg.AllReduce(op="sum", wire="u8")),
        lambda: mpiagg.AllReduce(denom=SIZE + 1),
    ):
        with make() as aggregation, mpiagg.DDP([np.zeros(3)], aggregation=aggregation) as ddp:
            block = ddp.join(divide_by_initial_size=False)
            refused(ValueError, "cannot be left out of an aggregation", block.__enter__)


def test_bad_joins():
    def nested():
        with ddp.join(), ddp.join():
            pytest.fail("it was not refused")

    def differing():
        with ddp.join(divide_by_initial_size=RANK == ODD):
            pass

    with mpiagg.DDP(gradients(0)) as ddp:
        opened = len(ddp._channel.open)
        refused(mpiagg.PlanError, "a join already", nested)
        if SIZE > 1:
            refused(mpiagg.MismatchError, "ranks disagree", differing)
        with ddp.join():
            pass
        assert len(ddp._channel.open) == opened
    refused(mpiagg.PlanError, "DDP is freed", nested)


# -- errors


def raised(error, words, call, *arguments):
    """Show that the odd rank raises this, and the others that it has."""
    if RANK == ODD:
        refused(error, words, call, *arguments)
    else:
        refused(mpiagg.MismatchError, f"rank {ODD} raised {error.__name__}.*{words}", call, *arguments)


@pytest.mark.parametrize("others", [0, 1, 5])
def test_an_error_on_one_rank_reaches_all(others):
    def fail():
        with ddp.join():
            for step in range(5 if RANK == ODD else others):
                if step == 2 and RANK == ODD:
                    raise ArithmeticError("no luck")
                ddp.sync_gradients(gradients(RANK))

    with mpiagg.DDP(gradients(0)) as ddp:
        raised(ArithmeticError, "no luck", fail)
        ddp.sync_gradients(gradients(RANK))


def test_every_rank_raises_its_own_error():
    def fail():
        with ddp.join():
            raise ArithmeticError(f"rank {RANK} has no luck")

    with mpiagg.DDP(gradients(0)) as ddp:
        refused(ArithmeticError, f"rank {RANK} has no luck", fail)
        ddp.sync_gradients(gradients(RANK))


@pytest.mark.parametrize("others", [0, 3])
def test_a_bad_gradient_ends_the_join_on_all(others):
    def fail():
        with ddp.join():
            for _ in range(3 if RANK == ODD else others):
                ddp.sync_gradients([] if RANK == ODD else gradients(RANK))

    with mpiagg.DDP(gradients(0)) as ddp:
        raised(ValueError, "gradients must be a list", fail)
        ddp.sync_gradients(gradients(RANK))


def test_after_an_error_there_are_no_more_steps():
    def go_on():
        with ddp.join():
            with pytest.raises((ValueError, mpiagg.MismatchError)):
                ddp.sync_gradients([] if RANK == ODD else gradients(RANK))
            ddp.sync_gradients(gradients(RANK))

    with mpiagg.DDP(gradients(0)) as ddp:
        refused(mpiagg.PlanError, "ended the join", go_on)
        ddp.sync_gradients(gradients(RANK))
