"""Averaging with neighbors beside a restatement of all ranks as a matrix."""

from itertools import combinations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from support import refused

import mpiagg
from mpiagg.aggregation import mixing
from mpiagg.aggregation.gossip import exponential, ring

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()

EDGES = list(combinations(range(SIZE), 2))
GRAPHS = {
    "none": [],
    "one edge": EDGES[:1],
    "path": [(one, other) for one, other in EDGES if other == one + 1],
    "ring": [(one, other) for one, other in EDGES if other - one in (1, SIZE - 1)],
    "star": [(one, other) for one, other in EDGES if one == 0],
    "complete": EDGES,
    "lollipop": [(one, other) for one, other in EDGES if other <= SIZE // 2 or other == one + 1],
}


def neighbors_in(edges, rank=RANK):
    return [one + other - rank for one, other in edges if rank in (one, other)]


def metropolis(edges):
    """The whole mixing matrix, from the definition."""
    degree = [len(neighbors_in(edges, rank)) for rank in range(SIZE)]
    matrix = np.zeros((SIZE, SIZE))
    for one, other in edges:
        matrix[one, other] = matrix[other, one] = 1 / (1 + max(degree[one], degree[other]))
    return matrix + np.diag(1 - matrix.sum(axis=1))


def noise(rank, length=1000, dtype=np.float64):
    return np.random.default_rng(rank).standard_normal(length).astype(dtype)


def distance(vector):
    """The consensus distance of the ranks."""
    everyone = np.array(COMM.allgather(vector))
    return ((everyone - everyone.mean(axis=0)) ** 2).sum()


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(np.float64, 1e-15), (np.float32, 1e-6), (np.complex128, 1e-15), (np.float16, 5e-3), (ml_dtypes.bfloat16, 4e-2)],
)
def test_any_graph_is_its_matrix(graph, dtype, tolerance):
    edges = GRAPHS[graph]
    matrix = metropolis(edges)
    kind = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    everyone = np.array([noise(rank, 12).astype(dtype).astype(kind) for rank in range(SIZE)])
    mine = [everyone[RANK, :8].reshape(2, 4).astype(dtype), everyone[RANK, 8:].astype(dtype)]
    with mpiagg.NeighborAverage(neighbors=neighbors_in(edges)) as gossip:
        for _ in range(4):
            gossip.aggregate(mine)
            everyone = matrix @ everyone
            vector = np.concatenate([x.ravel() for x in mine]).astype(kind)
            assert np.allclose(vector, everyone[RANK], rtol=0, atol=8 * tolerance)
        assert gossip.bytes_sent == 4 * len(neighbors_in(edges)) * 12 * max(4, np.dtype(dtype).itemsize)


@pytest.mark.parametrize("graph", ["ring", "complete", "one edge"])
@pytest.mark.parametrize("piece", [1000, 2**20])
def test_a_plain_mean_is_a_sum_in_the_order_of_the_ranks_and_one_division(monkeypatch, graph, piece):
    monkeypatch.setattr(mixing, "PIECE_BYTES", piece)
    together = sorted([RANK, *neighbors_in(GRAPHS[graph])])
    total = noise(together[0], 10_007, np.float32)
    for rank in together[1:]:
        total = total + noise(rank, 10_007, np.float32)
    mine = [noise(RANK, 10_007, np.float32)]
    with mpiagg.NeighborAverage(neighbors=neighbors_in(GRAPHS[graph])) as gossip:
        gossip.aggregate(mine)
        (packing,) = gossip._packings.values()
        assert max(plan.nbytes for plan in packing._plans.values()) <= (len(together) - 1) * piece
    assert mine[0].tobytes() == (total / np.float32(len(together))).tobytes()
    if graph == "complete":
        assert len(set(COMM.allgather(mine[0].tobytes()))) == 1


@settings(max_examples=6)
@given(st.sets(st.integers(0, max(0, len(EDGES) - 1))), st.integers(0, 9))
def test_the_mean_is_kept_and_the_distance_never_grows(chosen, seed):
    edges = [EDGES[number] for number in sorted(chosen) if number < len(EDGES)]
    mine = [noise(RANK + SIZE * seed, 50)]
    mean, far = COMM.allreduce(mine[0]) / SIZE, distance(mine[0])
    with mpiagg.NeighborAverage(neighbors=neighbors_in(edges)) as gossip:
        for _ in range(3):
            gossip.aggregate(mine)
            before, far = far, distance(mine[0])
            assert far <= before * (1 + 1e-12) + 1e-28
            assert np.allclose(COMM.allreduce(mine[0]) / SIZE, mean, rtol=0, atol=1e-14)


def test_ranks_come_together_on_a_path():
    mine = [noise(RANK)]
    mean = COMM.allreduce(mine[0]) / SIZE
    with mpiagg.NeighborAverage(neighbors=neighbors_in(GRAPHS["path"])) as gossip:
        for _ in range(20 * SIZE):
            gossip.aggregate(mine)
    assert np.abs(mine[0] - mean).max() < 0.01


def test_neighbors_must_be_given():
    refused(ValueError, "neighbors must be given", mpiagg.NeighborAverage)


def test_who_has_no_neighbors_keeps_its_bits():
    # A division by one would make numbers of these that are none.
    mine = [np.array([np.nan, -0.0, complex(np.inf, 0)]), noise(RANK, 5, np.float16)]
    before = [x.tobytes() for x in mine]
    with mpiagg.NeighborAverage(neighbors=[]) as gossip:
        gossip.aggregate(mine)
        assert [x.tobytes() for x in mine] == before
        assert gossip.bytes_sent == 0
        assert gossip.state_dict() == {"calls": 1, "communications": 1}


@pytest.mark.parametrize("graph", [ring, exponential])
def test_oneself_and_repetitions_are_ignored(graph):
    named = graph(RANK, SIZE)
    results = []
    for neighbors in (named, [*reversed(named), RANK, *named], np.array(named, np.int64)):
        mine = [noise(RANK)]
        with mpiagg.NeighborAverage(neighbors=neighbors) as gossip:
            assert gossip.neighbors == named
            gossip.aggregate(mine)
        results.append(mine[0].tobytes())
    assert len(set(results)) == 1


def test_two_ranks_of_a_ring_meet_in_the_middle():
    # Counted twice, the other would weigh 2/3 in a mean by three, or make 1.0 of 1.5.
    mine = [np.array([1.0 + RANK % 2])]
    with mpiagg.NeighborAverage(neighbors=[RANK ^ 1, RANK ^ 1] if RANK ^ 1 < SIZE else []) as gossip:
        gossip.aggregate(mine)
    assert mine[0][0] == (1.5 if RANK ^ 1 < SIZE else 1.0)


# -- weights of the user's own


def test_given_weights():
    edges = GRAPHS["ring"]
    weights = {peer: (0.1 if 0 in (RANK, peer) else 0.4) for peer in neighbors_in(edges)}
    matrix = np.zeros((SIZE, SIZE))
    for one, other in edges:
        matrix[one, other] = matrix[other, one] = 0.1 if one == 0 else 0.4
    matrix += np.diag(1 - matrix.sum(axis=1))
    mine = [noise(RANK)]
    with mpiagg.NeighborAverage(neighbors=neighbors_in(edges), weights=weights) as gossip:
        gossip.aggregate(mine)
    wanted = (matrix @ np.array([noise(rank) for rank in range(SIZE)]))[RANK]
    assert np.allclose(mine[0], wanted, rtol=0, atol=1e-15)


def test_weights_that_leave_nothing_swap():
    other = RANK ^ 1
    neighbors = [other] if other < SIZE else []
    mine = [noise(RANK)]
    with mpiagg.NeighborAverage(neighbors=neighbors, weights=dict.fromkeys(neighbors, 1)) as gossip:
        gossip.aggregate(mine)
    assert mine[0].tobytes() == noise(other if neighbors else RANK).tobytes()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({}, "from each of the neighbors"),
        ([0.5], "from each of the neighbors"),
        ({"peer": 0.25, "self": 0.25}, "from each of the neighbors"),
        ({"peer": 0.0}, "must be a positive number, not 0.0"),
        ({"peer": -0.1}, "must be a positive number"),
        ({"peer": float("nan")}, "must be a positive number"),
        ({"peer": "half"}, "must be a positive number"),
        ({"peer": True}, "must be a positive number"),
        ({"peer": 1.1}, "at most 1 together, not 1.1"),
        ({"peer": float("inf")}, "must be a positive number, not inf"),
    ],
)
def test_bad_weights_are_refused(weights, words):
    # The last rank has no partner where their number is odd; there it is refused because the others are.
    if SIZE > 1:
        other = RANK ^ 1 if RANK ^ 1 < SIZE else None
        if isinstance(weights, dict):
            weights = {{"peer": other, "self": RANK}[key]: weight for key, weight in weights.items()}
        arguments = (
            {"neighbors": [other], "weights": weights} if other is not None else {"neighbors": [], "weights": {}}
        )
        error = ValueError if other is not None else mpiagg.MismatchError
        refused(error, words, mpiagg.NeighborAverage, **arguments)


def test_weights_must_be_the_same_on_both_sides():
    if SIZE > 1:
        weights = {0: {1: 0.5}, 1: {0: 0.25}}.get(RANK, {})
        words = "rank 0 gives rank 1 the weight 0.5, which gives it 0.25"
        refused(mpiagg.MismatchError, words, mpiagg.NeighborAverage, neighbors=list(weights), weights=weights)


# -- errors


@pytest.mark.parametrize("neighbor", [SIZE, -1, 0.0, None, True])
def test_what_is_no_rank_is_refused(neighbor):
    words = f"neighbor must be an integer from 0 to {SIZE - 1}"
    refused(ValueError, words, mpiagg.NeighborAverage, neighbors=[neighbor])


def test_neighbors_are_a_list():
    refused(TypeError, "not iterable", mpiagg.NeighborAverage, neighbors=0)


@pytest.mark.parametrize("interval", [0, 1.5, True])
def test_bad_intervals_are_refused(interval):
    refused(
        ValueError, "communication_interval must", mpiagg.NeighborAverage, None, [], communication_interval=interval
    )


def test_both_must_name_each_other():
    if SIZE > 1:
        words = "rank 0 has rank 1 as a neighbor, but rank 1 has not rank 0"
        refused(mpiagg.MismatchError, words, mpiagg.NeighborAverage, neighbors=[1] if RANK == 0 else [])
        words = f"rank {SIZE - 1} has rank 0 as a neighbor, but rank 0 has not rank {SIZE - 1}"
        refused(mpiagg.MismatchError, words, mpiagg.NeighborAverage, neighbors=[0] if RANK == SIZE - 1 else [])


def test_ranks_must_agree_on_the_arguments():
    if SIZE > 1:
        refused(
            mpiagg.MismatchError, "ranks disagree", mpiagg.NeighborAverage, None, [], communication_interval=1 + RANK
        )
        refused(
            mpiagg.MismatchError, "given weights", mpiagg.NeighborAverage, None, [], weights={} if RANK == 0 else None
        )


def test_integers_are_refused():
    mine = [np.full(3, 1.0 * RANK), np.full(3, RANK)]
    with mpiagg.NeighborAverage(neighbors=ring(RANK, SIZE)) as gossip:
        refused(TypeError, "not for integers", gossip.aggregate, mine)
        assert gossip.state_dict() == {"calls": 0, "communications": 0}
    assert mine[0].tolist() == mine[1].tolist() == [RANK] * 3


# -- when


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_saved_state_goes_on_with_the_same_bits(interval, stop):
    straight, resumed = [noise(RANK)], [noise(RANK)]
    arguments = {"neighbors": ring(RANK, SIZE), "communication_interval": interval}
    with mpiagg.NeighborAverage(**arguments) as gossip:
        for _ in range(7):
            gossip.aggregate(straight)
        assert gossip.state_dict() == {"calls": 7, "communications": -(-7 // interval)}
    with mpiagg.NeighborAverage(**arguments) as gossip:
        for _ in range(stop):
            gossip.aggregate(resumed)
        state = gossip.state_dict()
    with mpiagg.NeighborAverage(**arguments) as gossip:
        gossip.load_state_dict(state)
        for _ in range(7 - stop):
            gossip.aggregate(resumed)
    assert straight[0].tobytes() == resumed[0].tobytes()


def test_a_known_layout_builds_nothing():
    with mpiagg.NeighborAverage(neighbors=ring(RANK, SIZE)) as gossip:
        mine = [noise(RANK, 5), noise(RANK, 7, np.float16)]
        gossip.aggregate(mine)
        opened = set(gossip._channel.open)
        for _ in range(5):
            gossip.aggregate(mine)
        assert set(gossip._channel.open) == opened
