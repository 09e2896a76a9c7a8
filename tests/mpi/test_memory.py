"""What all aggregations that remember have in common."""

import gc
import weakref

import numpy as np
import pytest
from mpi4py import MPI
from support import refused

import mpiagg

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()

MAKERS = {
    "error feedback": lambda: mpiagg.ErrorFeedback(mpiagg.AllReduce(wire="u8")),
    "sparsified": lambda: mpiagg.Sparsified(ratio=0.2),
    "power sgd": lambda: mpiagg.PowerSGD(rank=1),
    "low precision": mpiagg.LowPrecisionDecentralized,
    "demo": mpiagg.DeMo,
    "local sgd": lambda: mpiagg.LocalSGD(period=1),
    "sparse loco": lambda: mpiagg.SparseLoCo(period=1),
}


@pytest.fixture(params=MAKERS)
def aggregation(request):
    made = MAKERS[request.param]()
    yield made
    made.free()


def noise(step, shape=(6, 5)):
    return np.random.default_rng([RANK, step]).standard_normal(shape)


def plans(aggregation):
    return len(aggregation._channel.open)


def test_a_memory_goes_with_its_plan(aggregation):
    x = noise(0)
    aggregation.aggregate_init([x]).free()
    with aggregation.aggregate_init([x]) as plan:
        plan()
    aggregation.state_dict()
    before = plans(aggregation)  # what is kept for a layout is there now
    for step in range(5):
        x = noise(step)
        with aggregation.aggregate_init([x]) as plan:
            plan()
            assert len(aggregation.state_dict()["memories"]) == 1
    assert aggregation.state_dict()["memories"] == []
    assert plans(aggregation) == before


def test_what_is_freed_has_no_state(aggregation):
    aggregation.aggregate([noise(0)])
    saved = aggregation.state_dict()
    aggregation.free()
    refused(mpiagg.PlanError, f"{type(aggregation).__name__} is freed", aggregation.state_dict)
    refused(mpiagg.PlanError, f"{type(aggregation).__name__} is freed", aggregation.load_state_dict, saved)


def test_a_new_ddp_on_an_old_aggregation_goes_on_from_its_own_state(aggregation):
    if aggregation.aggregates == "weights":
        refused(ValueError, "meant for weights", mpiagg.DDP, [np.zeros(3)], aggregation=aggregation)
        return
    states, results = [], []
    for saved in (None, 0):
        with mpiagg.DDP([np.zeros((6, 5)), np.zeros(4)], aggregation=aggregation, bucket_bytes=0) as ddp:
            if saved is not None:
                aggregation.load_state_dict(states[saved])
            gradients = [noise(0), noise(1, 4)]
            for _ in range(2):
                ddp.sync_gradients(gradients)
            states.append(aggregation.state_dict())
            results.append(gradients)
    assert [len(state["memories"]) for state in states] == [2, 2]


def test_plans_are_counted(aggregation):
    x, y = noise(0), noise(0)
    aggregation.aggregate([x])
    alone = aggregation.bytes_sent
    with aggregation.aggregate_init([y]) as plan:
        plan()
    assert aggregation.bytes_sent == 2 * alone
    assert (alone > 0) == (SIZE > 1)


def test_states_are_nobody_elses(aggregation):
    aggregation.aggregate([noise(0)])
    saved = aggregation.state_dict()
    fresh = {"memories": [dict(each) for each in saved["memories"]]}
    with type(aggregation)(*made_from(aggregation)) as other:
        other.load_state_dict(fresh)
        fresh["memories"][0]["state"] = {}
        told = other.state_dict()
        told["memories"][0]["state"] = {}
        other.aggregate([noise(1)])
        aggregation.aggregate([noise(1)])
        assert repr(other.state_dict()) == repr(aggregation.state_dict())


def made_from(aggregation):
    """The arguments that make another like it."""
    if isinstance(aggregation, mpiagg.ErrorFeedback):
        return (aggregation.reduction,)
    if isinstance(aggregation, mpiagg.Sparsified):
        return (None, aggregation.ratio)
    return (None, aggregation.period) if isinstance(aggregation, mpiagg.LocalSGD | mpiagg.SparseLoCo) else ()


def test_a_refused_resume_leaves_nothing_behind(aggregation):
    aggregation.aggregate([noise(0)])
    saved = aggregation.state_dict()
    with type(aggregation)(*made_from(aggregation)) as other:
        other.load_state_dict(saved)
        before = plans(other)
        for _ in range(3):
            refused(ValueError, "the memory is of", other.aggregate, [noise(0, 7)])
        assert plans(other) == before


def test_the_users_arrays_are_let_go(aggregation):
    x = noise(0)
    seen = weakref.ref(x)
    aggregation.aggregate([x])
    del x
    gc.collect()
    assert seen() is None


def test_a_read_only_array_on_one_rank_is_refused(aggregation):
    if not isinstance(aggregation, mpiagg.LowPrecisionDecentralized):
        return  # the others have no message in which a rank could say so
    aggregation.aggregate([noise(0)])
    x = noise(1)
    x.flags.writeable = RANK != 0
    before = x.copy()
    error, words = (ValueError, "read-only") if RANK == 0 else (mpiagg.MismatchError, "rank 0 raised ValueError")
    refused(error, words, aggregation.aggregate, [x])
    assert (x == before).all()


def test_counters_are_copied():
    with mpiagg.Decentralized() as gossip:
        count = np.array(3)
        gossip.load_state_dict({"calls": count, "communications": count})
        gossip.aggregate([noise(0)])
        assert gossip.state_dict() == {"calls": 4, "communications": 4}
        assert count == 3


def test_a_backend_that_fails_can_be_asked_again():
    asked = []

    def flaky(vector, op):
        asked.append(op)
        if len(asked) == 1:
            raise OSError("no link")
        vector *= SIZE

    with mpiagg.AllReduce(backend=flaky) as aggregation:
        x = np.ones(3)
        refused(OSError, "no link", aggregation.aggregate, [x])
        aggregation.aggregate([x])
        assert x.tolist() == [1.0] * 3


def test_a_plan_that_an_error_has_left_in_the_middle_is_not_done():
    class Failing(mpiagg.Aggregation):
        def aggregate(self, tensors):
            del tensors
            raise OSError("no luck")

    with mpiagg.AllReduce() as reduction, Failing() as failing:
        del reduction
        plan = failing.aggregate_init([np.zeros(3)])
        for _ in range(2):  # without messages it can run again, and fail again
            refused(OSError, "no luck", plan.start)
            assert plan.test()
        plan.free()
