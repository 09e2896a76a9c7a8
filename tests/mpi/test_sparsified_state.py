"""What sparsified aggregation saves and loads, what it refuses, and how it does in DDP."""

import numpy as np
import pytest
from mpi4py import MPI
from support import refused

import mpiagg
from mpiagg.aggregation import exchanges

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
LAST = SIZE - 1

WAYS = {
    "topk": {"ratio": 0.2},
    "randomk": {"ratio": 0.2, "selection": "randomk", "seed": 2**70},
    "blockk": {"ratio": 0.2, "selection": "blockk"},
    "threshold": {"selection": "threshold", "threshold": 1.5},
}
each_way = pytest.mark.parametrize("way", WAYS)


def gradients(step, more=0):
    random = np.random.default_rng([RANK, step])
    return [random.standard_normal(8 + more), random.standard_normal((3, 7)).astype(np.float32)]


def bits(arrays):
    return [x.tobytes() for x in arrays]


def steps_of(aggregation, steps):
    """Aggregate lists of two layouts, and return all results."""
    results = []
    for step in steps:
        for more in (0, 3):
            mine = gradients(step, more)
            aggregation.aggregate(mine)
            results += bits(mine)
    return results


# -- states


def plain(state):
    """Whether this can be saved without pickle."""
    if isinstance(state, dict):
        return all(isinstance(key, str) and plain(value) for key, value in state.items())
    if isinstance(state, list):
        return all(map(plain, state))
    return type(state) in {int, str} or (isinstance(state, np.ndarray) and state.dtype.kind in "fc")


@each_way
@pytest.mark.parametrize("stop", [0, 2])
def test_a_saved_state_goes_on_with_the_same_bits(way, stop):
    with mpiagg.Sparsified(**WAYS[way]) as aggregation:
        straight = steps_of(aggregation, range(4))
        last = aggregation.state_dict()
    with mpiagg.Sparsified(**WAYS[way]) as aggregation:
        resumed = steps_of(aggregation, range(stop))
        state = aggregation.state_dict()
        steps_of(aggregation, range(1))  # The state has copies.
    assert plain(state)
    with mpiagg.Sparsified(**WAYS[way]) as aggregation:
        aggregation.load_state_dict(state)
        resumed += steps_of(aggregation, range(stop, 4))
        assert resumed == straight
        assert repr(aggregation.state_dict()) == repr(last)
        # One that is in use can be set back, too.
        aggregation.load_state_dict(last)
        again = steps_of(aggregation, [4])
        aggregation.load_state_dict(last)
        assert steps_of(aggregation, [4]) == again


def state_after(steps):
    with mpiagg.Sparsified() as aggregation:
        for _ in range(steps):
            aggregation.aggregate([np.ones(3)])
        return aggregation.state_dict()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("step"), "keys"),
        (lambda state: state.update(more=1), "keys"),
        (lambda state: state.update(step=-1), "step must be"),
        (lambda state: state.update(step=1.5), "step must be"),
        (lambda state: state.update(velocities=[np.zeros(3)]), "velocities must be"),
        (lambda state: state.update(kept=[]), "kept must be"),
        (lambda state: state.update(kept=None), "kept must be"),
        (lambda state: state.update(kept=[np.zeros(4)]), "kept must be"),
        (lambda state: state.update(kept=[np.zeros(3, np.float32)]), "kept must be"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_state_of_something_else_is_refused(change, words, known):
    state = state_after(2)
    change(state["memories"][0]["state"])
    with mpiagg.Sparsified() as aggregation:
        mine = [np.full(3, 7.0)]
        if known:
            aggregation.aggregate([np.ones(3)])
            before = repr(aggregation.state_dict())
            refused(ValueError, words, aggregation.load_state_dict, state)
            assert repr(aggregation.state_dict()) == before
        else:
            aggregation.load_state_dict(state)
            refused(ValueError, words, aggregation.aggregate, mine)
        assert mine[0].tolist() == [7.0] * 3


@pytest.mark.parametrize("known", [True, False])
def test_ranks_must_be_equally_far(known):
    if SIZE > 1:
        state = state_after(2)
        state["memories"][0]["state"]["step"] += RANK == 0
        with mpiagg.Sparsified(selection="randomk") as aggregation:
            if known:
                aggregation.aggregate([np.ones(3)])
                refused(mpiagg.MismatchError, "step 3", aggregation.load_state_dict, state)
            else:
                aggregation.load_state_dict(state)
                refused(mpiagg.MismatchError, "step 3", aggregation.aggregate, [np.ones(3)])


# -- DDP


def synced(way, method):
    """Return the gradients of three steps in several buckets, the state, and what was sent."""
    shapes, results = [(6, 5), (4,), (30,), (2, 3)], []
    aggregation = mpiagg.Sparsified(**WAYS[way])
    parameters = [np.zeros(shape) for shape in shapes]
    with aggregation, mpiagg.DDP(parameters, aggregation=aggregation, bucket_bytes=250) as ddp:
        assert len(aggregation.state_dict()["memories"]) >= 3
        for step in range(3):
            random = np.random.default_rng([RANK, step])
            mine = [random.standard_normal(shape) for shape in shapes]
            getattr(ddp, method)(mine)
            results += bits(mine)
        return results, repr(aggregation.state_dict()), aggregation.bytes_sent


@each_way
def test_buckets_in_ddp_overlap_with_the_same_bits(way):
    serial = synced(way, "sync_gradients")
    assert synced(way, "overlapped_sync_gradients") == serial
    assert COMM.allgather(serial[0]) == [serial[0]] * SIZE


# -- errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ratio": 0}, "ratio must be"),
        ({"ratio": -0.5}, "ratio must be"),
        ({"ratio": 1.01}, "ratio must be"),
        ({"ratio": float("nan")}, "ratio must be"),
        ({"ratio": 10**400}, "ratio must be"),
        ({"ratio": "0.1"}, "ratio must be"),
        ({"ratio": True}, "ratio must be"),
        ({"ratio": None}, "ratio must be"),
        ({"selection": "best"}, "unknown selection 'best'; known: topk, randomk, blockk, threshold"),
        ({"selection": None}, "unknown selection"),
        ({"selection": "threshold"}, "needs a threshold"),
        ({"threshold": 1.0}, "the others have none"),
        ({"selection": "threshold", "threshold": 0}, "threshold must be"),
        ({"selection": "threshold", "threshold": float("inf")}, "threshold must be"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 0.5}, "seed must be"),
        ({"op": "max"}, "unknown op 'max'; known: avg, sum"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    refused(ValueError, words, mpiagg.Sparsified, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"ratio": 0.5 if RANK else 0.25},
        {"selection": "randomk" if RANK else "blockk"},
        {"selection": "threshold", "threshold": 1 + RANK},
        {"seed": RANK},
        {"op": "sum" if RANK else "avg"},
    ],
)
def test_ranks_must_agree_on_the_arguments(arguments):
    if SIZE == 1:
        mpiagg.Sparsified(**arguments).free()
    else:
        refused(mpiagg.MismatchError, "ranks disagree", mpiagg.Sparsified, **arguments)


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ([np.ones(2), np.arange(3)], TypeError, "not for integers"),
        ([np.ones(2), np.array([True])], TypeError, "not for"),
        ([np.ones(2), [1.0]], TypeError, "tensor 1 must be a NumPy array"),
        ([np.ones(2), np.broadcast_to(1.0, 3)], ValueError, "tensor 1 is read-only"),
    ],
)
def test_bad_tensors_are_refused_and_nothing_is_touched(tensors, error, words):
    with mpiagg.Sparsified() as aggregation:
        refused(error, words, aggregation.aggregate, tensors)
        refused(error, words, aggregation.aggregate_init, tensors)
        assert tensors[0].tolist() == [1, 1]
        assert aggregation.state_dict() == {"memories": []}
        assert aggregation.bytes_sent == 0


def test_layouts_must_be_the_same_on_all_ranks():
    mine = [np.ones(3 + (RANK == 0 and SIZE > 1))]
    with mpiagg.Sparsified() as aggregation:
        if SIZE > 1:
            refused(mpiagg.MismatchError, r"rank 0: .*\(4,\)", aggregation.aggregate, mine)
        assert (mine[0] == 1).all()


def test_what_is_freed_is_not_used():
    aggregation = mpiagg.Sparsified()
    aggregation.free()
    refused(mpiagg.PlanError, "Sparsified is freed", aggregation.aggregate, [np.zeros(1)])


def beyond(starts, message):
    """Write coordinates of which the last is one too large."""
    starts[-1] = 20
    message.form.encode(starts, message.coordinates)


def twice(starts, message):
    """Write the first coordinate in place of the second, too."""
    starts[1:2] = starts[0]
    message.form.encode(starts, message.coordinates)


def none(_, message):
    """Write no coordinates."""
    message.coordinates[:] = 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (beyond, "coordinates that do not ascend below 20"),
        (twice, "coordinates that do not"),
        (none, "0 coordinates, not"),
    ],
)
@each_way
def test_wrong_coordinates_are_refused_on_all_ranks(way, wrong, words, comm, monkeypatch):
    """The last rank sends something else than ascending coordinates of the 20 that there are."""

    def write(self, starts, values):
        real(self, starts, values)
        if RANK == LAST:
            wrong(starts.copy(), self._messages[RANK])

    real = exchanges.Gather._write
    monkeypatch.setattr(exchanges.Gather, "_write", write)
    mine = [np.full(20, 2.0)]
    with mpiagg.Sparsified(comm, **WAYS[way]) as aggregation:
        if way == "randomk" or (way == "blockk" and wrong is twice):  # no coordinates are sent, or a single one
            aggregation.aggregate(mine)
            assert np.count_nonzero(mine[0]) in range(4, 4 * comm.size + 1)
        else:
            refused(mpiagg.MismatchError, f"rank {LAST} has sent {words}", aggregation.aggregate, mine)
            assert mine[0].tolist() == [2.0] * 20


@pytest.mark.parametrize("wrong", [-1, 21, 2**62])
def test_impossible_counts_are_refused_on_all_ranks(wrong, comm, monkeypatch):
    def take(self, starts, kept):
        real(self, starts, kept)
        if RANK == LAST:
            self._counts[RANK] = wrong

    real = exchanges.CountedGather.take
    monkeypatch.setattr(exchanges.CountedGather, "take", take)
    mine = [np.full(20, 2.0)]
    with mpiagg.Sparsified(comm, **WAYS["threshold"]) as aggregation:
        refused(mpiagg.MismatchError, f"{wrong}.* of 20 coordinates", aggregation.aggregate, mine)
    assert mine[0].tolist() == [2.0] * 20


@pytest.mark.parametrize("way", ["randomk", "blockk"])
def test_random_choices_go_on_in_a_memory_that_was_not_the_first(way):
    straight, resumed, spare = (np.arange(1.0, 101) for _ in range(3))
    with mpiagg.Sparsified(**WAYS[way]) as aggregation, mpiagg.Sparsified(**WAYS[way]) as other:
        first, second = (aggregation.aggregate_init([x]) for x in (spare, straight))
        first.free()
        other.load_state_dict(aggregation.state_dict())
        third = other.aggregate_init([resumed])
        for _ in range(2):
            second()
            third()
            assert bits([straight]) == bits([resumed])
