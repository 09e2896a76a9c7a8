"""What PowerSGD keeps from step to step, with DDP too, and what it refuses."""

import numpy as np
import pytest
from mpi4py import MPI
from support import refused

import mpiagg

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()


def gradients(step, shapes):
    random = np.random.default_rng([step, RANK])
    return [random.standard_normal(shape) for shape in shapes]


def bits_of(arrays):
    return b"".join(x.tobytes() for x in arrays)


# -- what is kept


@pytest.mark.parametrize("stop", [0, 1, 3])
@pytest.mark.parametrize("reuse", [True, False])
def test_a_saved_state_goes_on_with_the_same_bits(stop, reuse):
    lists, arguments = ([(9, 12), (7,)], [(12, 9), (9, 12)]), {"rank": 2, "reuse_query": reuse, "start_after": 2}
    with mpiagg.PowerSGD(**arguments) as power, mpiagg.PowerSGD(**arguments) as first:
        for step in range(6):
            straight = [gradients(step, shapes) for shapes in lists]
            for mine in straight:
                power.aggregate(mine)
            if step < stop:
                for shapes in lists:
                    first.aggregate(gradients(step, shapes))
        state = first.state_dict()
        wanted = power.state_dict()
        for step in range(stop):  # what is done later must not reach into the state
            first.aggregate(gradients(step, lists[0]))
    with mpiagg.PowerSGD(**arguments) as used, mpiagg.PowerSGD(**arguments) as new:
        for shapes in lists[: 2 if stop else 0]:
            used.aggregate(gradients(9, shapes))
        for power in (used, new):
            power.load_state_dict(state)
            for step in range(stop, 6):
                resumed = [gradients(step, shapes) for shapes in lists]
                for mine in resumed:
                    power.aggregate(mine)
            assert [bits_of(mine) for mine in resumed] == [bits_of(mine) for mine in straight]
            assert plain(power.state_dict()) == plain(wanted)


def plain(state):
    """Return a state with bytes for arrays, and show that it has no other objects."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    assert type(state) in (int, str, np.ndarray)
    return state.tobytes() if isinstance(state, np.ndarray) else state


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("step"), "keys"),
        (lambda state: state.update(more=1), "keys"),
        (lambda state: state.update(step=-1), "step must be"),
        (lambda state: state.update(random={"bit_generator": "MT19937"}), "random is not the state"),
        (lambda state: state.update(random=3), "random is not the state"),
        (lambda state: state["random"].update(uinteger=2**70), "random is not the state"),
        (lambda state: state["random"].update(state=np.ones(3)), "random is not the state"),
        (lambda state: state.update(errors=[]), "errors must be 1 tensors"),
        (lambda state: state.update(errors=3), "errors must be 1 tensors"),
        (lambda state: state.update(queries=[np.zeros((1, 12, 1))]), "queries must be 1 tensors"),
        (lambda state: state.update(queries=[np.zeros((1, 12, 2), np.float32)]), "queries must be 1 tensors"),
    ],
)
def test_a_state_of_something_else_is_refused(change, words):
    with mpiagg.PowerSGD(rank=2, min_compression_rate=0) as power:
        power.aggregate(gradients(0, [(9, 12)]))
        before = plain(power.state_dict())
        state = power.state_dict()
        change(state["memories"][0]["state"])
        refused(ValueError, words, power.load_state_dict, state)
        assert plain(power.state_dict()) == before


@pytest.mark.parametrize("what", ["step", "queries", "random"])
def test_ranks_must_load_states_of_one_moment(what):
    if SIZE > 1:
        with mpiagg.PowerSGD(min_compression_rate=0) as power, mpiagg.PowerSGD(min_compression_rate=0) as new:
            power.aggregate(gradients(0, [(9, 12)]))
            before = plain(power.state_dict())
            state = power.state_dict()
            if RANK == SIZE - 1:
                own = state["memories"][0]["state"]
                own["step"] += what == "step"
                own["queries"][0] += what == "queries"
                own["random"]["state"]["state"] += what == "random"
            refused(mpiagg.MismatchError, "ranks disagree: .*step .*, queries", power.load_state_dict, state)
            assert plain(power.state_dict()) == before
            new.load_state_dict(state)
            refused(mpiagg.MismatchError, "ranks disagree", new.aggregate, gradients(0, [(9, 12)]))


# -- with DDP


@pytest.mark.parametrize("bucket_bytes", [0, 4000])
def test_overlapped_has_the_bits_of_one_by_one(bucket_bytes):
    shapes = [(17, 30), (5,), (), (0, 2), (200, 50), (9,), (17, 30), (8, 3, 3, 3)]
    dtypes = [np.float32] * 5 + [np.float64, np.float16, np.float32]
    powers = [mpiagg.PowerSGD(rank=2, start_after=1, error_feedback=kind) for kind in ("local",) * 2 + ("aggregated",)]
    modules = [[np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)] for _ in powers]
    ddps = [
        mpiagg.DDP(module, aggregation=power, bucket_bytes=bucket_bytes)
        for module, power in zip(modules, powers, strict=True)
    ]
    assert len(powers[0].state_dict()["memories"]) >= 4
    for step in range(4):
        one, other, third = (
            [x.astype(dtype) for x, dtype in zip(gradients(step, shapes), dtypes, strict=True)] for _ in ddps
        )
        ddps[0].sync_gradients(one)
        ddps[1].overlapped_sync_gradients(other)
        ddps[2].overlapped_sync_gradients(third)
        assert bits_of(one) == bits_of(other)
        assert len(set(COMM.allgather(bits_of(one + third)))) == 1
        assert (one[4].tobytes() == third[4].tobytes()) == (step < 2 or SIZE == 1)
    assert powers[0].bytes_sent == powers[1].bytes_sent
    for ddp, power in zip(ddps, powers, strict=True):
        ddp.free()
        power.free()


# -- errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 0}, "rank must be"),
        ({"rank": 1.0}, "rank must be"),
        ({"rank": True}, "rank must be"),
        ({"start_after": -1}, "start_after must be"),
        ({"seed": -1}, "seed must be"),
        ({"seed": None}, "seed must be"),
        ({"min_compression_rate": -0.5}, "min_compression_rate must be"),
        ({"min_compression_rate": np.nan}, "min_compression_rate must be"),
        ({"min_compression_rate": 10**400}, "min_compression_rate must be"),
        ({"min_compression_rate": "2"}, "min_compression_rate must be"),
        ({"min_compression_rate": True}, "min_compression_rate must be"),
        ({"error_feedback": "none"}, "unknown error_feedback 'none'; known: local, aggregated"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    refused(ValueError, words, mpiagg.PowerSGD, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rank": 1 + (RANK == 0)},
        {"reuse_query": RANK == 0},
        {"start_after": RANK},
        {"min_compression_rate": 1 + RANK},
        {"error_feedback": "local" if RANK else "aggregated"},
        {"seed": RANK},
    ],
)
def test_ranks_must_agree_on_the_arguments(arguments):
    if SIZE > 1:
        refused(mpiagg.MismatchError, "ranks disagree", mpiagg.PowerSGD, **arguments)


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, np.longdouble])
def test_only_real_numbers_of_usual_precision_are_taken(dtype):
    mine = [np.full((8, 8), 1.0 * RANK), np.full((8, 8), RANK, dtype)]
    with mpiagg.PowerSGD() as power:
        refused(TypeError, f"float64, not for {np.dtype(dtype)}", power.aggregate, mine)
        refused(TypeError, f"float64, not for {np.dtype(dtype)}", power.aggregate_init, mine)
        assert power.state_dict() == {"memories": []}
    assert (mine[0] == RANK).all()


def test_layouts_must_be_the_same_on_all_ranks():
    mine = [np.full((3 + (RANK == 0 and SIZE > 1), 9), 1.0 * RANK)]
    with mpiagg.PowerSGD() as power:
        if SIZE > 1:
            refused(mpiagg.MismatchError, r"rank 0: .*\(4, 9\)", power.aggregate, mine)
        assert (mine[0] == RANK).all()


def test_it_is_for_gradients_and_not_used_when_freed():
    assert mpiagg.PowerSGD.aggregates == "gradients"
    power = mpiagg.PowerSGD()
    plan = power.aggregate_init([np.ones((8, 8))])
    power.free()
    refused(mpiagg.PlanError, "PowerSGD is freed", power.aggregate, [np.ones((8, 8))])
    refused(mpiagg.PlanError, "freed", plan)
