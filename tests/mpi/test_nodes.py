"""Several nodes, played on one: the layout that is found, and collectives that go by it."""

from itertools import product

import numpy as np
import pytest
from mpi4py import MPI
from restated import same_bits, values

import mpiagg
from mpiagg.common.arguments import NODES
from mpiagg.schedules import Collective, Layout
from mpiagg.tables import Case, Choice, settings
from mpiagg.transport import NOWHERE, channel_of
from mpiagg.transport.nodes import Node

pytestmark = pytest.mark.mpi

SIZE = MPI.COMM_WORLD.size
LAYOUTS = sorted({
    (SIZE,),
    (1,) * SIZE,
    tuple(n for n in (SIZE - 1, 1) if n),
    tuple(n for n in (1, SIZE - 1) if n),
    tuple(n for n in (SIZE // 2, SIZE - SIZE // 2) if n),
    tuple(min(2, SIZE - first) for first in range(0, SIZE, 2)),
})  # fmt: skip
PLACES = ["anywhere", "registered", "on the first node", "on some ranks"]
if SIZE > 4:  # ranks that outnumber the cores take long
    LAYOUTS, PLACES = [(SIZE - 1, 1), (SIZE // 2, SIZE - SIZE // 2)], PLACES[1::2]


@pytest.fixture(params=LAYOUTS, ids=str)
def nodes(request, monkeypatch):
    """How many ranks the nodes have on which the ranks take themselves to be."""
    monkeypatch.setenv(NODES, ",".join(map(str, request.param)))
    return request.param


def test_the_layout_is_found(comm, rank, nodes):
    channel = channel_of(comm)
    assert channel.layout == Layout.of(nodes)
    node = channel.node
    assert node.ranks == channel.layout.nodes[channel.layout.node_of(rank)]
    assert node.ranks[node.place] == rank
    assert node.comm.allgather(rank) == list(node.ranks)


def test_all_ranks_are_on_one_node(comm, size):
    assert channel_of(comm).layout == Layout.of([size])


def test_communicators_that_cut_across_nodes(world, rank, nodes):
    # In reversed order, so that nodes' ranks are not one after the other where there are two of each.
    comm = world.Split(rank % 2, -rank)
    members = comm.allgather(rank)
    layout = Layout.of(nodes)
    assert channel_of(comm).layout == Layout.by_name([layout.node_of(member) for member in members])
    reversed_ = world.Split(0, -rank)
    for other, length in product((comm, reversed_), (5, 9001)):
        out = mpiagg.empty(length, comm=other)
        ranks = other.allgather(rank)
        for algorithm in ("hierarchical", "shared", "auto"):
            # Whole numbers: the same sum in every order.
            x = (np.arange(length) % 97 + rank).astype(np.float32)
            mpiagg.allreduce(x, out=out, comm=other, algorithm=algorithm)
            assert np.array_equal(out, sum((np.arange(length) % 97 + member).astype(np.float32) for member in ranks))
    del out
    comm.Free()
    reversed_.Free()


# -- one node after another, as the simulation has it


def vectors_at(place, comm, length, dtype):
    """Return a vector of this rank that lies in one of the places."""
    registered = mpiagg.empty(length + 8 * SIZE, dtype, comm=comm)
    channel = channel_of(comm)
    here = {
        "anywhere": False,
        "registered": True,
        "on the first node": channel.layout.node_of(comm.rank) == 0,
        "on some ranks": comm.rank % 2 == 0,
    }[place]
    return registered[3 * comm.rank : 3 * comm.rank + length] if here else np.empty(length, dtype)


@pytest.mark.parametrize("place", PLACES)
def test_the_bits_of_the_simulation(comm, rank, size, nodes, place):
    cases = [(0, "sum", 1), (1, "sum", 2), (7, "avg", 1), (9001, "max", 1), (9001, "avg", 3), (70_001, "sum", 2)]
    for (length, op, lanes), dtype in product(cases, ("float32", "float64")):
        out = vectors_at(place, comm, length, dtype)
        everyone = [values(other, length, dtype) for other in range(size)]
        simulated = mpiagg.simulate(everyone, op, "hierarchical", lanes=lanes, nodes=nodes)[rank]
        keywords = {"out": out, "comm": comm, "algorithm": "hierarchical", "lanes": lanes}
        for _ in range(2):
            mpiagg.allreduce(everyone[rank], op, **keywords)
            assert same_bits(out, simulated), (length, op, lanes)
        with mpiagg.allreduce_init(everyone[rank], op, **keywords) as plan:
            for _ in range(2):
                assert same_bits(plan(), simulated), (length, op, lanes)
                out[:] = 0


@pytest.mark.parametrize("place", PLACES)
def test_across_nodes_all_take_one_algorithm_wherever_vectors_lie(comm, rank, size, nodes, place):
    """What a choice has for vectors elsewhere is for one node: another has other memory, or nobody to share it with."""
    channel, length = channel_of(comm), 20_001
    vectors = [values(peer, length, "float32", 0) for peer in range(size)]
    wanted = mpiagg.simulate(vectors, algorithm="hierarchical", nodes=nodes)[rank]
    x = vectors_at(place, comm, length, "float32")
    with settings().trying(Case(Collective.ALLREDUCE, 0, channel.layout), Choice("hierarchical", unregistered="tree")):
        plan = mpiagg.allreduce_init(x, out=x, comm=comm)
        for call in (plan, lambda: mpiagg.allreduce(x, out=x, comm=comm)):
            x[:] = vectors[rank]
            call()
            assert len(nodes) == 1 or same_bits(x, wanted)
    plan.free()
    channel.calls.free()


def test_vectors_that_lie_elsewhere_each_time(comm, rank, size, nodes):
    everyone = [values(other, 10_000) for other in range(size)]
    simulated = mpiagg.simulate(everyone, "sum", "hierarchical", nodes=nodes)[rank]
    outs = [vectors_at(place, comm, 10_000, "float32") for place in ("registered", "anywhere", "on some ranks")]
    turns = np.random.default_rng(1).integers(0, len(outs), (12, size))  # known to all ranks, and of no use to any
    for turn in turns:
        out = outs[turn[rank]]
        mpiagg.allreduce(everyone[rank], out=out, comm=comm, algorithm="hierarchical")
        assert same_bits(out, simulated)


def test_plans_under_way_at_once(comm, rank, size, nodes):
    everyone = [values(other, 9000) for other in range(size)]
    simulated = mpiagg.simulate(everyone, "sum", "hierarchical", nodes=nodes)[rank]
    outs = [vectors_at(place, comm, 9000, "float32") for place in ("registered", "anywhere", "on some ranks")]
    plans = [mpiagg.allreduce_init(everyone[rank], out=out, comm=comm, algorithm="hierarchical") for out in outs]
    order = np.random.default_rng(rank)
    for _ in range(4):
        for number in order.permutation(len(plans)):
            plans[number].start()
        for number in order.permutation(len(plans)):
            plans[number].wait(meanwhile=plans)
        for out in outs:
            assert same_bits(out, simulated)
            out[:] = 0
    for number in order.permutation(len(plans)):
        plans[number].free()


def whole(collective, size, rank, root, length):
    """Return what a rank gets of vectors of small whole numbers, of which every order gives the same sum."""
    everyone = [(np.arange(length) % 97 + other).astype(np.float32) for other in range(size)]
    return everyone[rank], {
        "allreduce": lambda: sum(everyone),
        "reduce": lambda: sum(everyone) if rank == root else None,
        "broadcast": lambda: everyone[root],
        "allgather": lambda: np.stack(everyone),
        "reduce_scatter": lambda: np.array_split(sum(everyone), size)[rank],
    }[collective]()


@pytest.mark.parametrize("collective", ["allreduce", "reduce", "broadcast", "allgather", "reduce_scatter"])
@pytest.mark.usefixtures("nodes")
def test_every_algorithm_on_nodes(comm, rank, size, collective):
    for length, name in product((13, 9001), (*mpiagg.algorithms(collective), "auto")):
        out = mpiagg.empty((size, length) if collective == "allgather" else length, comm=comm)
        for root in {0, size - 1} if collective in ("reduce", "broadcast") else {None}:
            x, wanted = whole(collective, size, rank, root, length)
            keywords = {"comm": comm, "algorithm": name} | ({} if root is None else {"root": root})
            if collective != "reduce_scatter":
                keywords["out"] = out
            for got in (
                getattr(mpiagg, collective)(x, **keywords),
                getattr(mpiagg, f"{collective}_init")(x, **keywords)(),
            ):
                assert got is None if wanted is None else np.array_equal(got, wanted), (name, length, root)


def test_nothing_is_shared_with_other_nodes(comm, rank, nodes):
    layout = Layout.of(nodes)
    x = mpiagg.empty(100, comm=comm)
    alone = len(layout.nodes[layout.node_of(rank)]) == 1
    assert (channel_of(comm).memory.host.position(x) == NOWHERE) == alone


# -- the environment variable


def test_a_layout_that_is_none(comm, size, monkeypatch):
    for text in ("x", "1.5", "-1,2", f"{SIZE},1", f"{SIZE},", ",", "99999999999999999999"):
        monkeypatch.setenv(NODES, text)
        with pytest.raises(ValueError, match=f"^{NODES}=.* must say how many ranks each node has, {size} in all"):
            mpiagg.allreduce(np.ones(3), comm=comm)
    monkeypatch.setenv(NODES, "")
    assert mpiagg.allreduce(np.ones(3), comm=comm).tolist() == [size] * 3


def test_nodes_without_ranks_are_none(world, size, monkeypatch):
    monkeypatch.setenv(NODES, f" 0, {size},0")
    node = Node(world)
    assert node.layout == Layout.of([size])
    node.free()


@pytest.mark.usefixtures("nodes")
def test_an_all_to_all_of_rows_after_memory_was_made(comm, rank, size):
    x = mpiagg.empty(size, "float32", comm=comm)
    x[:] = rank
    with mpiagg.alltoallv_init(x, [1] * size, [1] * size, comm=comm) as plan:
        assert plan().tolist() == list(range(size))
