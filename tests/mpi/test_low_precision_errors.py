"""The states of low-precision decentralized averaging, and what it refuses."""

import numpy as np
import pytest
from low_precision import neighbors_agree, noise, replicas_of
from mpi4py import MPI
from support import refused

import mpiagg

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()


# -- saving


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_saved_state_goes_on_with_the_same_bits(stop):
    def some_steps(aggregation, mine, steps):
        for step in steps:
            for tensor in mine:
                np.add(tensor, noise(RANK, step, tensor.size), out=tensor)
            aggregation.aggregate(mine)

    straight, resumed = ([noise(RANK, length=length) for length in (7, 300)] for _ in range(2))
    with mpiagg.LowPrecisionDecentralized(communication_interval=2) as aggregation:
        some_steps(aggregation, straight, range(9))
    with mpiagg.LowPrecisionDecentralized(communication_interval=2) as aggregation:
        some_steps(aggregation, resumed, range(stop))
        state = aggregation.state_dict()
    with mpiagg.LowPrecisionDecentralized(communication_interval=2) as aggregation:
        aggregation.load_state_dict(state)
        some_steps(aggregation, resumed, range(stop, 9))
        assert neighbors_agree(aggregation)
        # Going back also takes the neighbors' replicas back.
        if stop:
            aggregation.load_state_dict(state)
            some_steps(aggregation, [x.copy() for x in resumed], range(2))
            assert neighbors_agree(aggregation)
    assert [x.tobytes() for x in resumed] == [x.tobytes() for x in straight]


def state_with(**changes):
    good = {"calls": 2, "replicas": [np.zeros(3)]}
    return {"memories": [{"layout": "1 tensors: float64 (3,)", "state": {**good, **changes}}]}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "keys"),
        (state_with(more=1), "keys"),
        (state_with(calls=-1), "calls must be"),
        (state_with(calls=None), "calls must be"),
        (state_with(replicas=[]), "replicas must be 1 tensors: float64"),
        (state_with(replicas=[np.zeros(4)]), r"not 1 tensors: float64 \(4,\)"),
        (state_with(replicas=[np.zeros(3, np.float32)]), "not 1 tensors: float32"),
        (state_with(replicas=3), "replicas must be"),
    ],
)
def test_a_state_of_something_else_is_refused(state, words):
    with mpiagg.LowPrecisionDecentralized() as aggregation:
        mine = [np.full(3, float(RANK))]
        aggregation.aggregate(mine)
        before = replicas_of(aggregation)[0].copy()
        refused(ValueError, words, aggregation.load_state_dict, state)
        assert replicas_of(aggregation)[0].tobytes() == before.tobytes()
        aggregation.load_state_dict(state_with())
        if SIZE > 1:
            refused(mpiagg.MismatchError, "calls 7", aggregation.load_state_dict, state_with(calls=7 - (RANK > 0)))


# -- errors


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("first", [True, False])
def test_what_is_not_finite_is_refused_and_changes_nothing(bad, first):
    mine = [noise(RANK, length=5), noise(RANK, length=7, dtype=np.float64)]
    culprit = SIZE - 1
    with mpiagg.LowPrecisionDecentralized() as aggregation:
        if not first:
            aggregation.aggregate(mine)
        good = [x.copy() for x in mine]
        mine[1][3] = bad if culprit == RANK else mine[1][3]
        before = [x.tobytes() for x in mine]
        kept = [rows.tobytes() for rows in replicas_of(aggregation)]
        error, words = (ValueError, "NaN or infinity") if culprit == RANK else (mpiagg.MismatchError, "NaN or infinity")
        refused(error, words, aggregation.aggregate, mine)
        assert [x.tobytes() for x in mine] == before
        assert first or [rows.tobytes() for rows in replicas_of(aggregation)] == kept
        aggregation.aggregate(good)
        assert all(np.isfinite(x).all() for x in good)
        assert neighbors_agree(aggregation)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"codec": "u1"}, "unknown codec 'u1'; known: fp16, bf16, u8, u4, u2$"),
        ({"codec": None}, "unknown codec None"),
        ({"codec": ["u8"]}, "unknown codec"),
        ({"communication_interval": 0}, "communication_interval must be"),
        ({"communication_interval": 1.5}, "communication_interval must be"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    refused(ValueError, words, mpiagg.LowPrecisionDecentralized, **arguments)


def test_ranks_must_agree():
    if SIZE > 1:
        for arguments in ({"hierarchical": RANK == 0}, {"communication_interval": 1 + RANK}):
            refused(mpiagg.MismatchError, "ranks disagree", mpiagg.LowPrecisionDecentralized, **arguments)
        with mpiagg.LowPrecisionDecentralized() as aggregation:
            refused(mpiagg.MismatchError, r"rank 0: .*\(4,\)", aggregation.aggregate, [np.zeros(3 + (RANK == 0))])


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64])
def test_other_numbers_are_refused(dtype):
    mine = [np.ones(3), np.ones(3, dtype)]
    with mpiagg.LowPrecisionDecentralized() as aggregation:
        refused(TypeError, "real floating-point", aggregation.aggregate, mine)


def test_it_is_for_weights_and_not_used_when_freed():
    aggregation = mpiagg.LowPrecisionDecentralized()
    refused(ValueError, "meant for weights", mpiagg.DDP, [np.zeros(2)], aggregation=aggregation)
    aggregation.free()
    refused(mpiagg.PlanError, "LowPrecisionDecentralized is freed", aggregation.aggregate, [np.zeros(1)])
