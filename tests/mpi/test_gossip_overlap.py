"""Weights that are mixed in the background, between start and wait, for every aggregation that can do so."""

import time

import numpy as np
import pytest
from mpi4py import MPI
from support import refused

import mpiagg
from mpiagg.aggregation import decentralized, mixing
from mpiagg.aggregation.gossip import ring
from mpiagg.plans.background import threads_allowed

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
NODES = tuple(tuple(range(start, min(start + 2, SIZE))) for start in range(0, SIZE, 2))


def neighbors(**arguments):
    return mpiagg.NeighborAverage(neighbors=ring(RANK, SIZE), **arguments)


def peers(peer_selection, *, hierarchical=False):
    def make(**arguments):
        return mpiagg.Decentralized(peer_selection=peer_selection, hierarchical=hierarchical, **arguments)

    return make


FORMS = {
    "neighbors": neighbors,
    "shift_one": peers("shift_one"),
    "exponential": peers("one_peer_exponential"),
    "all": peers("all"),
    "pairs of nodes": peers("shift_one", hierarchical=True),
    "nodes": peers("one_peer_exponential", hierarchical=True),
    "all nodes": peers("all", hierarchical=True),
}


@pytest.fixture(autouse=True)
def two_ranks_a_node(monkeypatch):
    monkeypatch.setattr(decentralized, "nodes_of", lambda _: NODES)


@pytest.fixture(params=FORMS)
def make(request):
    return FORMS[request.param]


def weights_of(rank):
    rng = np.random.default_rng(rank)
    return [
        rng.standard_normal((30, 40)).astype(np.float32),
        rng.standard_normal(11),
        rng.standard_normal(3).astype(np.float16),
        rng.standard_normal(12_000).astype(np.float32),
    ]


def copies(arrays):
    return [x.copy() for x in arrays]


def bits(arrays):
    return [x.tobytes() for x in arrays]


def plans_of(gossip):
    return [plan for packing in gossip._packings.values() for plan in packing._plans.values()]


def test_it_is_the_synchronous_form_with_a_step_in_between(make):
    """x' = avg(x) - lr g(x), with the gradient of half the squared distance to this rank's own target."""
    target, rate = weights_of(100 + RANK), 0.125
    together, plain = weights_of(RANK), weights_of(RANK)
    with make() as background, make() as synchronous:
        for _ in range(SIZE + 1):
            background.start(together)
            gradients = [x - y for x, y in zip(together, target, strict=True)]
            background.wait()
            expected = [x - y for x, y in zip(plain, target, strict=True)]
            synchronous.aggregate(plain)
            for x, slope in [*zip(together, gradients, strict=True), *zip(plain, expected, strict=True)]:
                np.subtract(x, np.asarray(rate, x.dtype) * slope, out=x)
            assert bits(together) == bits(plain)
        assert background.bytes_sent == synchronous.bytes_sent
        assert background.state_dict() == synchronous.state_dict()


def test_weights_stay_as_they_are_until_waited_for(make):
    mine, before = weights_of(RANK), bits(weights_of(RANK))
    places = [x.ctypes.data for x in mine]
    with make() as gossip:
        gossip.start(mine)
        COMM.Barrier()
        assert bits(mine) == before
        gossip.wait()
        assert any(COMM.allgather(bits(mine) != before)) == (SIZE > 1)
    assert [x.ctypes.data for x in mine] == places


def test_what_is_written_between_is_lost(make):
    mine, plain = weights_of(RANK), weights_of(RANK)
    with make() as gossip:
        gossip.start(mine)
        for x in mine:
            x.fill(np.nan)
        gossip.wait()
    with make() as gossip:
        gossip.aggregate(plain)
    assert bits(mine) == bits(plain)


def test_the_communicator_can_be_used_between(make):
    mine, plain = weights_of(RANK), weights_of(RANK)
    with make() as gossip, make() as other, mpiagg.AllReduce(op="sum") as gradients:
        for step in range(2):
            gossip.start(mine)
            slope = [np.full(10_000, RANK + step, np.float32), np.ones(5)]
            gradients.aggregate(slope)
            assert (slope[0] == SIZE * step + SIZE * (SIZE - 1) // 2).all()
            assert mpiagg.allreduce(np.ones(4), "sum").tolist() == [SIZE] * 4
            other.aggregate(plain)
            gossip.wait()
            assert bits(mine) == bits(plain)


def test_forms_can_alternate_and_nothing_new_is_built(make):
    mine, plain = weights_of(RANK), weights_of(RANK)
    with make() as gossip, make() as synchronous:
        for call in range(2 * SIZE + 4):
            if call == 2 * SIZE:
                opened = set(gossip._channel.open)
            if call % 2:
                gossip.aggregate(mine)
            else:
                gossip.start(mine)
                gossip.wait()
            synchronous.aggregate(plain)
        assert bits(mine) == bits(plain)
        assert set(gossip._channel.open) == opened


def test_several_at_once():
    mine = [weights_of(RANK) for _ in FORMS]
    plain = [weights_of(RANK) for _ in FORMS]
    forms = [make() for make in FORMS.values()]
    for gossip, weights in zip(forms, mine, strict=True):
        gossip.start(weights)
    for gossip in reversed(forms):
        gossip.wait()
    for make, weights, expected in zip(FORMS.values(), mine, plain, strict=True):
        with make() as gossip:
            gossip.aggregate(expected)
        assert bits(weights) == bits(expected)
    for gossip in forms:
        gossip.free()


def test_calls_between_communications_only_count(make):
    mine = weights_of(RANK)
    with make(communication_interval=3) as gossip:
        for call in range(7):
            before, sent = bits(mine), gossip.bytes_sent
            gossip.start(mine)
            gossip.wait()
            if call % 3:
                assert bits(mine) == before
                assert gossip.bytes_sent == sent
        assert gossip.state_dict() == {"calls": 7, "communications": 3}


def test_nothing_can_be_mixed_at_all(make):
    with make() as gossip:
        gossip.start([])
        gossip.wait()
        assert gossip.state_dict() == {"calls": 1, "communications": 1}


def test_it_goes_on_while_nobody_waits(monkeypatch, make):
    """The main thread does not call MPI between start and the moment when all is done."""
    monkeypatch.setattr(mixing, "PIECE_BYTES", 10_000)
    mine, plain = weights_of(RANK), weights_of(RANK)
    with make() as gossip:
        gossip.start(mine)
        if threads_allowed():
            deadline = time.monotonic() + 40
            while not all(plan._idle for plan in plans_of(gossip)):
                assert time.monotonic() < deadline
                time.sleep(1e-3)
        gossip.wait()
    with make() as gossip:
        gossip.aggregate(plain)
    assert bits(mine) == bits(plain)


def test_a_wait_that_stalls_can_be_called_again():
    """All ranks wait for the last one, which starts only when they have given up."""
    mine, late = weights_of(RANK), RANK == SIZE - 1
    with mpiagg.Decentralized(peer_selection="all") as gossip:
        gossip.start(mine)  # A layout is agreed on by all ranks, so the first time the last one starts with the others.
        gossip.wait()
        if not late:
            gossip.start(mine)
            (plan,) = plans_of(gossip)
            plan.timeout, patient = 0.05, plan.timeout
            with pytest.raises(mpiagg.StallError):
                gossip.wait()
            plan.timeout = patient
        COMM.Barrier()
        if late:
            gossip.start(mine)
        gossip.wait()
        assert gossip.state_dict() == {"calls": 2, "communications": 2}
    assert len(set(COMM.allgather(b"".join(bits(mine))))) == 1


# -- misuse: all of that is in what the forms share

BOTH = pytest.mark.parametrize("make", [neighbors, peers("shift_one")], ids=["neighbors", "shift_one"])


@BOTH
def test_what_comes_in_the_wrong_order_is_refused(make):
    mine, plain = weights_of(RANK), weights_of(RANK)
    with make() as gossip:
        refused(mpiagg.PlanError, r"wait\(\) comes after start\(\)", gossip.wait)
        gossip.start(mine)
        state = {"calls": 0, "communications": 0}
        words = r"start\(\) was called; call wait\(\) first"
        refused(mpiagg.PlanError, words, gossip.start, mine)
        refused(mpiagg.PlanError, words, gossip.aggregate, mine)
        refused(mpiagg.PlanError, words, gossip.state_dict)
        refused(mpiagg.PlanError, words, gossip.load_state_dict, state)
        # What is refused does no harm to what is under way.
        gossip.wait()
        assert gossip.state_dict() == {"calls": 1, "communications": 1}
        refused(mpiagg.PlanError, r"wait\(\) comes after start\(\)", gossip.wait)
    with make() as gossip:
        gossip.aggregate(plain)
    assert bits(mine) == bits(plain)


@BOTH
def test_a_call_that_only_counts_is_waited_for_like_any_other(make):
    with make(communication_interval=2) as gossip:
        gossip.aggregate(weights_of(RANK))
        gossip.start(weights_of(RANK))
        refused(mpiagg.PlanError, "call wait", gossip.aggregate, weights_of(RANK))
        gossip.wait()
        assert gossip.state_dict() == {"calls": 2, "communications": 1}


@BOTH
def test_bad_tensors_start_nothing(make):
    with make() as gossip:
        refused(TypeError, "not for integers", gossip.start, [np.full(3, RANK)])
        if SIZE > 1:
            refused(mpiagg.MismatchError, "ranks disagree", gossip.start, [np.zeros(3 + (RANK == 0))])
        refused(mpiagg.PlanError, "comes after", gossip.wait)
        assert gossip.state_dict() == {"calls": 0, "communications": 0}


@BOTH
def test_what_is_freed_is_not_used(make):
    gossip = make()
    mine = weights_of(RANK)
    gossip.start(mine)
    gossip.wait()
    gossip.free()
    gossip.free()
    refused(mpiagg.PlanError, "is freed", gossip.start, mine)
    refused(mpiagg.PlanError, "is freed", gossip.wait)


@BOTH
def test_what_is_freed_under_way_is_given_up(make):
    mine, before = weights_of(RANK), bits(weights_of(RANK))
    gossip = make()
    gossip.start(mine)
    gossip.free()
    refused(mpiagg.PlanError, "is freed", gossip.wait)
    assert bits(mine) == before
    assert gossip.state_dict() == {"calls": 1, "communications": 1}
    with make() as other:  # what is left of the first does not reach another
        other.start(mine)
        other.wait()
    plain = weights_of(RANK)
    with make() as other:
        other.aggregate(plain)
    assert bits(mine) == bits(plain)


@BOTH
def test_a_plan_for_tensors_mixes_them_each_time_it_runs(make):
    mine, plain = weights_of(RANK), weights_of(RANK)
    with make() as gossip, make() as synchronous, gossip.aggregate_init(mine) as plan:
        for _ in range(3):
            plan.start()
            plan.wait()
            synchronous.aggregate(plain)
            assert bits(mine) == bits(plain)
        assert gossip.state_dict() == synchronous.state_dict()
