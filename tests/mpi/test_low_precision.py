"""Low-precision decentralized averaging beside a restatement of all ranks in NumPy, with a quantiser of its own."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from low_precision import neighbors_agree, noise, replicas_of
from mpi4py import MPI

import mpiagg
from mpiagg.aggregation import low_precision

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()


def quantised(z):
    """Return what is left of z after 8 bits: one range for all, whole steps, half to even."""
    low, high = np.float32(z.min()), np.float32(z.max())
    if low == high:
        return np.full_like(z, low)
    span = float(high) - float(low)
    # Far from zero beside the range, or for tiny ranges, float32 does not do.
    work = np.float32 if span > 1e-30 and max(abs(low), abs(high)) < 2**14 * span else np.float64
    span = work(span)
    scale = work(255) / (span + work(min(1e-7, float(span) / 1024)))
    top = np.rint(work(high) * scale)
    level = np.clip(np.rint(z.astype(np.float32).astype(work) * scale), top - 255, top)
    return (level / scale).astype(z.dtype)


class Ring:
    """All ranks at once: nodes in a ring, each with its replica."""

    def __init__(self, nodes, quantise=quantised):
        self.nodes, self.quantise, self.replicas = nodes, quantise, None

    def neighbors(self, own):
        size = len(self.nodes)
        weights = {}
        for other in ((own - 1) % size, (own + 1) % size):
            if other != own:
                share = min(1.0, len(self.nodes[other]) / len(self.nodes[own])) / 3
                weights[other] = weights.get(other, 0) + share
        return weights

    def communicate(self, everyone):
        """Return the weights of all ranks after a communication; each is one vector."""
        x = [sum(everyone[rank] for rank in node[1:]) + everyone[node[0]] for node in self.nodes]
        x = [total / total.dtype.type(len(node)) for total, node in zip(x, self.nodes, strict=True)]
        if self.replicas is None:
            self.replicas = x
        after = []
        for own, replica in enumerate(self.replicas):
            z = x[own] - replica
            for other, weight in self.neighbors(own).items():
                z = z + (self.replicas[other] - replica) * z.dtype.type(weight)
            after.append(replica + self.quantise(z))
        self.replicas = after
        return [after[next(own for own, node in enumerate(self.nodes) if rank in node)] for rank in range(SIZE)]


FLAT = tuple((rank,) for rank in range(SIZE))


def split(vector):
    """Return a vector's values as tensors."""
    return [vector[:200].reshape(10, 20).copy(), vector[200:201].reshape(()).copy(), vector[201:].copy()]


def add(tensors, vector):
    for tensor, change in zip(tensors, split(vector), strict=True):
        np.add(tensor, change, out=tensor)


def same(tensors, vector):
    assert np.concatenate([x.ravel() for x in tensors]).tobytes() == vector.tobytes()


# -- results


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_it_is_its_restatement(dtype):
    everyone, ring = [noise(rank, dtype=dtype) for rank in range(SIZE)], Ring(FLAT)
    mine = split(everyone[RANK])
    with mpiagg.LowPrecisionDecentralized() as aggregation:
        for step in range(SIZE + 3):
            everyone = ring.communicate(everyone)
            aggregation.aggregate(mine)
            same(mine, everyone[RANK])
            assert neighbors_agree(aggregation)
            local = [noise(rank, step, dtype=dtype) / dtype(8) for rank in range(SIZE)]
            everyone = [x + y for x, y in zip(everyone, local, strict=True)]
            add(mine, local[RANK])


@pytest.mark.parametrize("fault", [1, 1.001])
def test_the_restatement_would_find_a_fault(fault):
    everyone, ring = [noise(rank) for rank in range(SIZE)], Ring(FLAT, lambda z: quantised(z) * np.float32(fault))
    mine = [everyone[RANK].copy()]
    with mpiagg.LowPrecisionDecentralized() as aggregation:
        for _ in range(2):
            everyone = ring.communicate(everyone)
            aggregation.aggregate(mine)
            mine[0][RANK] += 1
            everyone = [x + (np.arange(300) == rank) for rank, x in enumerate(everyone)]
    assert (mine[0].tobytes() == everyone[RANK].astype(np.float32).tobytes()) == (fault == 1)


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_other_codecs(codec):
    wire = np.float16 if codec == "fp16" else ml_dtypes.bfloat16
    everyone, ring = [noise(rank) for rank in range(SIZE)], Ring(FLAT, lambda z: z.astype(wire).astype(np.float32))
    mine = split(everyone[RANK])
    with mpiagg.LowPrecisionDecentralized(codec=codec) as aggregation:
        for _ in range(4):
            everyone = ring.communicate(everyone)
            aggregation.aggregate(mine)
            same(mine, everyone[RANK])
            assert neighbors_agree(aggregation)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_kept_in_float32(dtype):
    everyone, ring = [noise(rank).astype(dtype).astype(np.float32) for rank in range(SIZE)], Ring(FLAT)
    mine = [everyone[RANK].astype(dtype), np.full(2, float(RANK))]
    others = [np.full(2, float(rank)) for rank in range(SIZE)]
    second = Ring(FLAT)
    with mpiagg.LowPrecisionDecentralized() as aggregation:
        for _ in range(4):
            everyone, others = ring.communicate(everyone), second.communicate(others)
            aggregation.aggregate(mine)
            assert mine[0].dtype == dtype
            everyone = [x.astype(dtype).astype(np.float32) for x in everyone]
            assert mine[0].tobytes() == everyone[RANK].astype(dtype).tobytes()
            assert mine[1].tobytes() == others[RANK].tobytes()


@pytest.mark.parametrize("shapes", [[], [(0,)], [(0,), (3,)], [(1,)], [(40_000,), (3, 0)]])
def test_no_tensors_short_ones_and_long_ones(shapes):
    mine = [np.full(shape, float(RANK)) for shape in shapes]
    with mpiagg.LowPrecisionDecentralized() as aggregation:
        aggregation.aggregate(mine)
        aggregation.aggregate(mine)
        assert neighbors_agree(aggregation)
    ring = Ring(FLAT)
    wanted = [np.array([float(rank)]) for rank in range(SIZE)]
    wanted = ring.communicate(ring.communicate(wanted))[RANK][0]
    assert all((x == wanted).all() for x in mine)


def test_nothing_else_is_touched():
    base = np.full((6, 6), float(RANK))
    kept = base[::2, 1::3]
    with mpiagg.LowPrecisionDecentralized() as aggregation:
        aggregation.aggregate([kept])
    outside = np.ones((6, 6), bool)
    outside[::2, 1::3] = False
    assert (base[outside] == RANK).all()
    assert np.unique(kept).size == 1


# -- training


def train(aggregate, steps, rate=0.1, length=40):
    """Return the weights of a rank that descends a quadratic of its own; the optimum of all is their targets' mean."""
    target = noise(RANK, 99, length, np.float64)
    x = np.zeros(length)
    for step in range(steps):
        x -= rate * 0.96**step * (x - target)
        aggregate(x)
    return x


def spread(x):
    mean = COMM.allreduce(x) / SIZE
    return np.sqrt(COMM.allreduce(float(((x - mean) ** 2).sum())) / SIZE)


def test_training_converges_as_with_full_precision():
    before = []

    def exact(x):
        """The same in full precision: the ring's mean of the weights as they were, and this rank's own step."""
        own = before.pop() if before else x.copy()
        everyone = COMM.allgather(own)
        x += (everyone[(RANK - 1) % SIZE] + own + everyone[(RANK + 1) % SIZE]) / 3 - own
        before.append(x.copy())

    with mpiagg.LowPrecisionDecentralized() as aggregation:
        low = train(lambda x: aggregation.aggregate([x]), 100)
    full = train(exact, 100)
    optimum = COMM.allreduce(noise(RANK, 99, 40, np.float64)) / SIZE
    descent = np.prod(1 - 0.1 * 0.96 ** np.arange(100))
    assert np.abs(COMM.allreduce(low) / SIZE - optimum * (1 - descent)).max() < 2e-3
    assert spread(low) == pytest.approx(spread(full), rel=0.02, abs=1e-9)


def test_the_mean_is_kept_and_ranks_come_together():
    mine = [noise(RANK, length=64, dtype=np.float64)]
    mean, first = COMM.allreduce(mine[0]) / SIZE, spread(mine[0])
    with mpiagg.LowPrecisionDecentralized() as aggregation:
        for _ in range(60):
            aggregation.aggregate(mine)
    assert np.allclose(COMM.allreduce(mine[0]) / SIZE, mean, atol=0.05)
    assert spread(mine[0]) <= 1e-2 * first


def drift(forget):
    """Return how far apart the ranks of a restatement are in the end, if the replicas are lost on the way or not."""
    ranks = [noise(rank, length=64, dtype=np.float64) for rank in range(4)]
    targets = [noise(rank, 99, 64, np.float64) for rank in range(4)]
    own = list(ranks)
    kept = [dict.fromkeys(((r - 1) % 4, (r + 1) % 4)) for r in range(4)]
    for r in range(4):
        kept[r] = {peer: own[peer] for peer in kept[r]}
    for step in range(400):
        if forget and step == 20:
            own = list(ranks)
            kept = [dict.fromkeys(kept[r], ranks[r]) for r in range(4)]
        ranks = [x - 0.02 * (x - target) for x, target in zip(ranks, targets, strict=True)]
        changes = []
        for r in range(4):
            z = ranks[r] - own[r] + sum((theirs - own[r]) / 3 for theirs in kept[r].values())
            changes.append(quantised(z))
        own = ranks = [x + change for x, change in zip(own, changes, strict=True)]
        kept = [{peer: theirs + changes[peer] for peer, theirs in kept[r].items()} for r in range(4)]
    mean = sum(ranks) / 4
    return max(np.abs(x - mean).max() for x in ranks)


def test_weights_in_other_lists_do_not_lose_the_replicas():
    # What Bagua does when it makes new buckets keeps the ranks apart for ever.
    assert drift(forget=True) > 1.5 * drift(forget=False)
    mine = noise(RANK, length=64, dtype=np.float64)
    with mpiagg.LowPrecisionDecentralized() as aggregation:
        for step in range(60):
            cut = 10 if step < 10 else 30
            aggregation.aggregate([mine[:cut], mine[cut:]])
            assert step % 20 or neighbors_agree(aggregation)
        assert len(replicas_of(aggregation)) == 2
    assert spread(mine) < 1e-2


# -- when, and how much


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_only_every_so_many_calls_communicate(interval):
    everyone, ring = [noise(rank) for rank in range(SIZE)], Ring(FLAT)
    mine, lists = split(everyone[RANK]), [split(everyone[RANK]) for _ in range(2)]
    with mpiagg.LowPrecisionDecentralized(communication_interval=interval) as aggregation:
        plans = [aggregation.aggregate_init(tensors) for tensors in lists]
        for call in range(7):
            if call % interval == 0:
                everyone = ring.communicate(everyone)
            aggregation.aggregate(mine)
            for plan in plans:
                plan.start()
            for plan in reversed(plans):
                plan.wait()
            for tensors in (mine, *lists):
                same(tensors, everyone[RANK])
        assert [entry.memory.calls for entry in aggregation._entries] == [7] * 3
        for plan in plans:
            plan.free()


def test_bytes_are_counted_and_nothing_is_built():
    peers = min(SIZE - 1, 2)
    with mpiagg.LowPrecisionDecentralized() as aggregation:
        mine = [noise(RANK, length=1000)]
        aggregation.aggregate(mine)
        flags = aggregation._faults.sent_bytes
        assert aggregation.bytes_sent == flags + peers * (4000 + 32 + 1024)
        opened, sent = set(aggregation._channel.open), aggregation.bytes_sent
        for _ in range(3):
            aggregation.aggregate([mine[0].copy()])
        assert set(aggregation._channel.open) == opened
        assert aggregation.bytes_sent == sent + 3 * (flags + peers * (32 + 1024))
    assert len(aggregation._channel.open) == len(opened) - 2


# -- nodes


def cut(*starts):
    edges = [start for start in starts if start < SIZE] + [SIZE]
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(edges))


PARTITIONS = {"one": cut(0), "pairs": cut(0, 2, 4, 6), "uneven": cut(0, 1, 4), "each": FLAT}


@pytest.mark.parametrize("partition", PARTITIONS)
def test_nodes_weigh_what_they_have_ranks(monkeypatch, partition):
    nodes = PARTITIONS[partition]
    monkeypatch.setattr(low_precision, "nodes_of", lambda _: nodes)
    everyone, ring = [np.arange(6.0) * (rank + 1) + 8 * rank for rank in range(SIZE)], Ring(nodes)
    mine = [everyone[RANK].copy()]
    total = sum(everyone)
    with mpiagg.LowPrecisionDecentralized(hierarchical=True) as aggregation:
        for step in range(12):
            everyone = ring.communicate(everyone)
            aggregation.aggregate(mine)
            assert np.allclose(mine[0], everyone[RANK], rtol=1e-13)
            if step == 0:  # Sums of small integers are exact.
                same(mine, everyone[RANK])
        state = aggregation.state_dict()
        leads = any(node[0] == RANK for node in nodes)
        assert len(state["memories"][0]["state"]["replicas"]) == leads
        aggregation.load_state_dict(state)
        aggregation.aggregate(mine)
        everyone = ring.communicate(everyone)
        assert np.allclose(mine[0], everyone[RANK], rtol=1e-13)
    assert np.allclose(COMM.allreduce(mine[0]), total, atol=0.02 * total.max())


@pytest.mark.parametrize("sizes", [[1, 1], [1, 1, 1], [3, 1], [1, 4, 2], [5, 1, 1, 2], [2, 2, 2]])
def test_the_weights_of_nodes_keep_the_mean_over_ranks(sizes):
    rows = [low_precision.ring_weights(own, sizes) for own in range(len(sizes))]
    for own, row in enumerate(rows):
        assert all(weight >= 0 for weight in row.values())
        assert sum(row.values()) < 1
        for other, weight in row.items():
            assert sizes[own] * weight == sizes[other] * rows[other][own]


def test_the_ranks_of_a_machine_have_one_mean():
    nodes = low_precision.nodes_of(COMM)
    with mpiagg.LowPrecisionDecentralized(hierarchical=True) as aggregation:
        mine = [np.full(3, float(RANK))]
        aggregation.aggregate(mine)
        if len(nodes) == 1:
            assert mine[0].tolist() == [(SIZE - 1) / 2] * 3
