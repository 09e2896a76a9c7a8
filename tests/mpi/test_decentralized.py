"""Decentralized averaging beside a restatement of all ranks in NumPy."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support import refused

import mpiagg
from mpiagg.aggregation import decentralized, mixing

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
ONE_PEER = ["shift_one", "one_peer_exponential"]


def peer_of(rank, size, step):
    """The pairing in words: halves that shift against each other; for odd sizes a round-robin."""
    if size % 2:
        return (step - rank) % size
    half = size // 2
    return half + (step + rank) % half if rank < half else (rank - half - step) % half


def noise(rank, shape, dtype=np.float32):
    return np.random.default_rng(rank).standard_normal(shape).astype(dtype)


def source_of(rank, size, step, peer_selection):
    """From whom a rank receives; in the exponential form the rank that is 1, 2, 4, ... below it in turn."""
    if peer_selection == "shift_one":
        return peer_of(rank, size, step)
    distances = [2**power for power in range(size) if 2**power < size] or [0]
    return (rank - distances[step % len(distances)]) % size


def averaged(weights, step, peer_selection="shift_one"):
    """What every rank has after a communication, each as a list of arrays."""
    after = []
    for rank in range(len(weights)):
        peer = source_of(rank, len(weights), step, peer_selection)
        low, high = weights[min(rank, peer)], weights[max(rank, peer)]
        after.append(weights[rank] if peer == rank else [mean(x, y) for x, y in zip(low, high, strict=True)])
    return after


def mean(x, y):
    work = np.float32 if x.dtype.name in ("float16", "bfloat16") else x.dtype
    return np.divide(x.astype(work) + y.astype(work), 2, dtype=work).astype(x.dtype)


def same(arrays, expected):
    for array, wanted in zip(arrays, expected, strict=True):
        assert array.dtype == wanted.dtype
        assert array.tobytes() == wanted.tobytes()


def weights_of(rank, dtypes=(np.float32,)):
    return [noise(rank + 10 * number, shape, dtype) for dtype in dtypes for number, shape in enumerate([(3, 4), (), 5])]


@pytest.mark.parametrize(
    "dtypes",
    [
        [np.float32],
        [np.float64],
        [np.float16],
        [ml_dtypes.bfloat16],
        [np.complex64],
        [np.float16, np.float64, np.float32],
    ],
)
@pytest.mark.parametrize("peer_selection", ONE_PEER)
def test_a_communication_is_its_restatement(dtypes, peer_selection):
    everyone = [weights_of(rank, dtypes) for rank in range(SIZE)]
    mine = [x.copy() for x in everyone[RANK]]
    with mpiagg.Decentralized(peer_selection=peer_selection) as gossip:
        for step in range(2 * SIZE + 1):
            gossip.aggregate(mine)
            everyone = averaged(everyone, step, peer_selection)
            same(mine, everyone[RANK])


@pytest.mark.parametrize("piece", [64_000, 2**30])
@pytest.mark.parametrize("peer_selection", ONE_PEER)
def test_long_weights_are_exchanged_in_pieces_in_their_own_memory(monkeypatch, piece, peer_selection):
    monkeypatch.setattr(mixing, "PIECE_BYTES", piece)
    everyone = [[noise(rank, 100_003)] for rank in range(SIZE)]
    mine = [everyone[RANK][0].copy()]
    with mpiagg.Decentralized(peer_selection=peer_selection) as gossip:
        for step in range(SIZE):
            gossip.aggregate(mine)
            everyone = averaged(everyone, step, peer_selection)
            same(mine, everyone[RANK])
        scratch = [plan.nbytes for packing in gossip._packings.values() for plan in packing._plans.values()]
        assert max(scratch) <= piece
        meetings = sum(source_of(RANK, SIZE, step, peer_selection) != RANK for step in range(SIZE))
        assert gossip.bytes_sent == meetings * 4 * 100_003


@pytest.mark.parametrize("peer_selection", ONE_PEER)
def test_known_peers_build_nothing(peer_selection):
    with mpiagg.Decentralized(peer_selection=peer_selection) as gossip:
        mine = weights_of(RANK)
        for _ in range(SIZE):
            gossip.aggregate(mine)
        opened = set(gossip._channel.open)
        for _ in range(2 * SIZE):
            gossip.aggregate(mine)
        assert set(gossip._channel.open) == opened


@pytest.mark.parametrize("peer_selection", ONE_PEER)
def test_ranks_come_together_and_the_mean_is_kept(peer_selection):
    mine = [np.array([float(RANK * 1024)])]
    wanted = 1024 * (SIZE - 1) / 2
    distance = COMM.allreduce((mine[0][0] - wanted) ** 2)
    with mpiagg.Decentralized(peer_selection=peer_selection) as gossip:
        for _ in range(3 * SIZE):
            gossip.aggregate(mine)
            assert COMM.allreduce(mine[0][0]) / SIZE == pytest.approx(wanted, rel=1e-14)
            before, distance = distance, COMM.allreduce((mine[0][0] - wanted) ** 2)
            assert distance <= before * (1 + 1e-12)
    spread = COMM.allreduce(mine[0][0], MPI.MAX) - COMM.allreduce(mine[0][0], MPI.MIN)
    assert spread <= 1024 * (SIZE - 1) / 8
    if SIZE in (1, 2, 4):
        assert mine[0][0] == wanted


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_one_peer_exponential_is_exact_after_its_steps_at_powers_of_two(dtype):
    mine = [np.array([RANK, SIZE - RANK], dtype)]
    exact = np.array([(SIZE - 1) / 2, (SIZE + 1) / 2])
    with mpiagg.Decentralized(peer_selection="one_peer_exponential") as gossip:
        for _ in range((SIZE - 1).bit_length()):
            assert not all(COMM.allgather((mine[0].astype(np.float64) == exact).all()))
            gossip.aggregate(mine)
    assert all(COMM.allgather((mine[0].astype(np.float64) == exact).all())) == (SIZE in (1, 2, 4, 8))


@pytest.mark.parametrize("hierarchical", [False, True])
def test_all_is_the_mean_of_all(hierarchical):
    with mpiagg.Decentralized(peer_selection="all", hierarchical=hierarchical) as gossip:
        for length in (3, 50_000):
            mine = [np.full(length, float(RANK)), np.full(2, RANK, np.float16)]
            gossip.aggregate(mine)
            assert (mine[0] == (SIZE - 1) / 2).all()
            assert (mine[1] == (SIZE - 1) / 2).all()


def test_half_precision_does_not_overflow():
    mine = [np.full(3, 60_000, np.float16)]
    with mpiagg.Decentralized() as gossip:
        gossip.aggregate(mine)
    assert mine[0].tolist() == [60_000] * 3


# -- when


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_only_every_so_many_calls_communicate(interval):
    everyone = [weights_of(rank) for rank in range(SIZE)]
    mine = [x.copy() for x in everyone[RANK]]
    with mpiagg.Decentralized(communication_interval=interval) as gossip:
        for call in range(7):
            if call % interval == 0:
                everyone = averaged(everyone, call // interval)
            gossip.aggregate(mine)
            same(mine, everyone[RANK])
        assert gossip.state_dict() == {"calls": 7, "communications": -(-7 // interval)}


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_saved_state_goes_on_with_the_same_bits(stop):
    straight, resumed = weights_of(RANK), weights_of(RANK)
    with mpiagg.Decentralized(communication_interval=2) as gossip:
        for _ in range(9):
            gossip.aggregate(straight)
    with mpiagg.Decentralized(communication_interval=2) as gossip:
        for _ in range(stop):
            gossip.aggregate(resumed)
        state = gossip.state_dict()
    with mpiagg.Decentralized(communication_interval=2) as gossip:
        gossip.load_state_dict(state)
        for _ in range(9 - stop):
            gossip.aggregate(resumed)
    same(resumed, straight)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "keys"),
        ({"calls": 1}, "keys"),
        ({"calls": 1, "communications": 1, "more": 1}, "keys"),
        ({"calls": -1, "communications": 0}, "calls must be"),
        ({"calls": 1, "communications": 1.5}, "communications must be"),
    ],
)
def test_a_state_of_something_else_is_refused(state, words):
    with mpiagg.Decentralized() as gossip:
        refused(ValueError, words, gossip.load_state_dict, state)
        assert gossip.state_dict() == {"calls": 0, "communications": 0}


def test_ranks_must_load_the_same_state():
    if SIZE > 1:
        with mpiagg.Decentralized() as gossip:
            state = {"calls": 4 + (RANK == 0), "communications": 4}
            refused(mpiagg.MismatchError, "rank 0: Decentralized after 5 calls", gossip.load_state_dict, state)
            assert gossip.state_dict() == {"calls": 0, "communications": 0}


# -- nodes


def cut(*starts):
    """Nodes of neighbouring ranks that start where they are told, as far as there are ranks."""
    edges = [start for start in starts if start < SIZE] + [SIZE]
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(edges))


PARTITIONS = {
    "one": cut(0),
    "pairs": cut(0, 2, 4, 6),
    "uneven": cut(0, 1, 4),
    "each": tuple((rank,) for rank in range(SIZE)),
    "dealt": tuple(nodes for nodes in (tuple(range(0, SIZE, 2)), tuple(range(1, SIZE, 2))) if nodes),
}


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_pairs_of_nodes_get_their_mean(monkeypatch, partition, dtype):
    nodes = PARTITIONS[partition]
    monkeypatch.setattr(decentralized, "nodes_of", lambda _: nodes)
    everyone = [np.arange(6, dtype=dtype).reshape(2, 3) + 8 * rank for rank in range(SIZE)]
    mine = [everyone[RANK].astype(dtype)]
    work = np.float32 if dtype == np.float16 else dtype
    with mpiagg.Decentralized(hierarchical=True) as gossip:
        for step in range(4):
            gossip.aggregate(mine)
            after = list(everyone)
            for own, node in enumerate(nodes):
                ranks = {*node, *nodes[peer_of(own, len(nodes), step)]}
                total = sum(everyone[rank].astype(work) for rank in ranks)
                for rank in node:
                    after[rank] = (total / work(len(ranks))).astype(dtype)
            assert np.allclose(mine[0], after[RANK], rtol=1e-3 if dtype == np.float16 else 1e-14)
            if step == 0:  # Sums of small integers are exact.
                same(mine, [after[RANK]])
            everyone = after
    total = COMM.allreduce(mine[0].astype(np.float64))
    assert np.allclose(total / SIZE, np.arange(6).reshape(2, 3) + 4 * (SIZE - 1), rtol=1e-3)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_nodes_give_half_of_what_the_smallest_has(monkeypatch, partition):
    nodes = PARTITIONS[partition]
    monkeypatch.setattr(decentralized, "nodes_of", lambda _: nodes)
    everyone = [noise(rank, 1000, np.float64) for rank in range(SIZE)]
    mean = sum(everyone) / SIZE
    mine = [everyone[RANK].copy()]
    share = min(map(len, nodes)) / 2
    with mpiagg.Decentralized(peer_selection="one_peer_exponential", hierarchical=True) as gossip:
        for step in range(5):
            gossip.aggregate(mine)
            means = [sum(everyone[rank] for rank in node) / len(node) for node in nodes]
            for own, node in enumerate(nodes):
                source = source_of(own, len(nodes), step, "one_peer_exponential")
                for rank in node:
                    everyone[rank] = means[own] + share / len(node) * (means[source] - means[own])
            assert np.allclose(mine[0], everyone[RANK], rtol=0, atol=1e-14)
            assert np.allclose(COMM.allreduce(mine[0]) / SIZE, mean, rtol=0, atol=1e-14)
        together = COMM.allgather(mine[0].tobytes())
        assert all(together[rank] == together[node[0]] for node in nodes for rank in node)


@pytest.mark.parametrize("peer_selection", ["shift_one", "one_peer_exponential", "all"])
def test_all_ranks_of_a_machine_are_one_node(peer_selection):
    nodes = decentralized.nodes_of(COMM)
    name = COMM.allgather(MPI.Get_processor_name())
    assert sorted(rank for node in nodes for rank in node) == list(range(SIZE))
    assert all(len({name[rank] for rank in node}) == 1 for node in nodes)
    with mpiagg.Decentralized(peer_selection=peer_selection, hierarchical=True) as gossip:
        mine = [np.full(3, float(RANK))]
        gossip.aggregate(mine)
        if len(nodes) == 1:
            assert mine[0].tolist() == [(SIZE - 1) / 2] * 3


# -- errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"peer_selection": "ring"}, "unknown peer_selection 'ring'; known: shift_one, one_peer_exponential, all"),
        ({"peer_selection": None}, "unknown peer_selection"),
        ({"communication_interval": 0}, "communication_interval must be"),
        ({"communication_interval": 1.5}, "communication_interval must be"),
        ({"communication_interval": True}, "communication_interval must be"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    refused(ValueError, words, mpiagg.Decentralized, **arguments)


@pytest.mark.parametrize("arguments", [{"hierarchical": RANK == 0}, {"communication_interval": 1 + RANK}])
def test_ranks_must_agree_on_the_arguments(arguments):
    if SIZE > 1:
        refused(mpiagg.MismatchError, "ranks disagree", mpiagg.Decentralized, **arguments)


@pytest.mark.parametrize("peer_selection", ["shift_one", "all"])
def test_integers_are_refused(peer_selection):
    mine = [np.full(3, 1.0 * RANK), np.full(3, RANK)]
    with mpiagg.Decentralized(peer_selection=peer_selection) as gossip:
        refused(TypeError, "not for integers", gossip.aggregate, mine)
        # A refused call counts for nothing.
        assert gossip.state_dict() == {"calls": 0, "communications": 0}
    assert mine[0].tolist() == mine[1].tolist() == [RANK] * 3


def test_layouts_must_be_the_same_on_all_ranks():
    mine = [np.full(3 + (RANK == 0 and SIZE > 1), 1.0 * RANK)]
    with mpiagg.Decentralized() as gossip:
        if SIZE > 1:
            refused(mpiagg.MismatchError, r"rank 0: .*\(4,\)", gossip.aggregate, mine)
        assert (mine[0] == RANK).all()


def test_what_is_freed_is_not_used():
    gossip = mpiagg.Decentralized(communication_interval=2)
    for _ in range(2):
        gossip.free()
        refused(mpiagg.PlanError, "Decentralized is freed", gossip.aggregate, [np.zeros(1)])
