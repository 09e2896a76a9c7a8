"""Collectives of neighbors beside mpi4py's own on a communicator with the same graph, and beside their definition."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support import call, kept_plans, refused

import mpiagg
from mpiagg.aggregation.gossip import exponential, ring
from mpiagg.errors import MismatchError, PlanError, StallError
from mpiagg.transport import channel_of, messages, process
from mpiagg.watch.recorder import SUBJECT

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
ALL = range(SIZE)
FEW = SIZE <= 4  # ranks that outnumber the cores take long
SHAPES = [(), (0,), (3,), (2, 5), (5000,)] if FEW else [(0,), (5000,)]
MOST_ROWS = [1, 4, 3000] if FEW else [3000]
LONELY_HANG = MPI.get_vendor()[0] == "Open MPI"
"""Whether the library's own does not end, or fails, where a rank has no source or no destination (ompi issue 14452)."""
FUNCTIONS = ("neighbor_allgather", "neighbor_allgatherv", "neighbor_alltoall", "neighbor_alltoallv")


def both_ways(neighbors):
    """Return the sources and the destinations of all ranks in a graph whose edges lead both ways."""
    return [list(neighbors(rank)) for rank in ALL], [list(neighbors(rank)) for rank in ALL]


def of_edges(edges):
    sources = [[source for source, target in edges if target == rank] for rank in ALL]
    return sources, [[target for source, target in edges if source == rank] for rank in ALL]


def random_graph(seed):
    """Return a graph with any edges, some of them several times, which ranks name in any order.

    In every other one each rank has a source and a destination.
    """
    rng = np.random.default_rng(seed)
    edges = rng.integers(0, SIZE, (rng.integers(0, 4 * SIZE), 2)).tolist()
    if seed % 2:
        edges += enumerate(rng.permutation(SIZE).tolist())
    sources, destinations = of_edges(edges)
    for each in (*sources, *destinations):
        rng.shuffle(each)
    return sources, destinations


GRAPHS = {
    "none": both_ways(lambda _: []),
    "ring": both_ways(lambda rank: [(rank - 1) % SIZE, (rank + 1) % SIZE]),
    "one way": of_edges([(rank, (rank + 1) % SIZE) for rank in ALL]),
    "exponential": both_ways(lambda rank: exponential(rank, SIZE)),
    "star": both_ways(lambda rank: [0] if rank else list(range(1, SIZE))),
    "complete, with itself": both_ways(lambda _: list(ALL)),
    "to the last": of_edges([(rank, SIZE - 1) for rank in ALL]),
    "itself twice": both_ways(lambda rank: [rank, rank]),
    "other twice": both_ways(lambda rank: [rank ^ 1, rank, rank ^ 1] if rank ^ 1 < SIZE else []),
    **{f"random {seed}": random_graph(seed) for seed in range(6)},
}


def values(rank, shape, dtype="float64"):
    """Return other numbers for each rank."""
    return (np.random.default_rng(rank + 1).standard_normal(shape) * 9).astype(dtype)


def edges_into(graph, rank=RANK):
    """Return for each source which rank it is, and at which place it has this one among its destinations."""
    sources, destinations = graph
    found = []
    for place, source in enumerate(sources[rank]):
        before = sources[rank][:place].count(source)
        found.append((source, [k for k, target in enumerate(destinations[source]) if target == rank][before]))
    return found


def of_graph(name, comm=WORLD):
    """Return the keywords for a graph."""
    sources, destinations = GRAPHS[name]
    return {"sources": sources[RANK], "destinations": destinations[RANK], "comm": comm}


@pytest.fixture(params=GRAPHS)
def graph(request):
    return request.param


@pytest.fixture
def beside(comm, graph):
    """Return mpi4py's own communicator with the graph."""
    sources, destinations = GRAPHS[graph]
    beside = comm.Create_dist_graph_adjacent(sources[RANK], destinations[RANK])
    yield beside
    beside.Free()


def same_by_mpi(beside, graph, name, given, received, wanted):  # noqa: PLR0917 - what is compared
    """Show that mpi4py's own collective has the same result, if it works on the graph; counts as far as there are."""
    if all(each for ends in GRAPHS[graph] for each in ends) or not LONELY_HANG:
        found = np.empty_like(wanted)
        getattr(beside, f"Neighbor_{name}")(given, found if received is None else [found, received])
        assert same(found, wanted)


def same(result, wanted):
    # Some dtypes have bytes that carry no values.
    return (result.shape, result.dtype) == (wanted.shape, wanted.dtype) and np.array_equal(result, wanted)


def runs(name, *arguments, out, **keywords):
    """Yield what a collective returns: into a new array, into one that is given, and by a plan that runs twice."""
    function = getattr(mpiagg, name)
    for check in (False, True):
        for _ in range(2):
            yield function(*arguments, check=check, **keywords)
        yield function(*arguments, out=out, check=check, **keywords)
    with getattr(mpiagg, f"{name}_init")(*arguments, out=out, **keywords) as plan:
        for _ in range(2):
            out[...] = 0
            yield plan()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_allgather(comm, graph, beside, shape):
    x, (sources, _) = values(RANK, shape), GRAPHS[graph]
    wanted = np.array([values(source, shape) for source in sources[RANK]]).reshape(len(sources[RANK]), *shape)
    same_by_mpi(beside, graph, "allgather", np.array(x), None, wanted)
    for result in runs("neighbor_allgather", x, out=np.empty_like(wanted), **of_graph(graph, comm)):
        assert same(result, wanted)
    assert same(mpiagg.neighbor_allgather(x, comm=beside), wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_alltoall(comm, graph, beside, shape):
    sources, destinations = GRAPHS[graph]
    rows = [values(rank, (len(destinations[rank]), *shape)) for rank in ALL]
    coming = [rows[source][k] for source, k in edges_into(GRAPHS[graph])]
    wanted = np.array(coming).reshape(len(sources[RANK]), *shape)
    same_by_mpi(beside, graph, "alltoall", rows[RANK], None, wanted)
    for result in runs("neighbor_alltoall", rows[RANK], out=np.empty_like(wanted), **of_graph(graph, comm)):
        assert same(result, wanted)
    assert same(mpiagg.neighbor_alltoall(rows[RANK], comm=beside), wanted)


def ragged(graph, most, width):
    """Return how many rows each rank has for each of its destinations, and all of them."""
    counts = [np.random.default_rng(9 + rank).integers(0, most, len(GRAPHS[graph][1][rank])) for rank in ALL]
    return counts, [np.split(values(rank, (sum(counts[rank]), width)), np.cumsum(counts[rank])[:-1]) for rank in ALL]


@pytest.mark.parametrize("most", MOST_ROWS)
def test_alltoallv(comm, graph, beside, most):
    counts, rows = ragged(graph, most, 2)
    coming = [rows[source][k] for source, k in edges_into(GRAPHS[graph])]
    received = [len(part) for part in coming]
    x = np.concatenate([np.empty((0, 2)), *rows[RANK][: len(counts[RANK])]])
    wanted = np.concatenate([np.empty((0, 2)), *coming])
    same_by_mpi(beside, graph, "alltoallv", [x, counts[RANK] * 2], np.array(received, int) * 2, wanted)
    for given in (None, received):
        arguments = (x, counts[RANK], given)
        for result in runs("neighbor_alltoallv", *arguments, out=np.empty_like(wanted), **of_graph(graph, comm)):
            assert same(result, wanted)
        assert same(mpiagg.neighbor_alltoallv(*arguments, comm=beside), wanted)


@pytest.mark.parametrize("most", MOST_ROWS)
def test_allgatherv(comm, graph, beside, most):
    counts = np.random.default_rng(most).integers(0, most, SIZE)
    x, sources = values(RANK, (counts[RANK], 2)), GRAPHS[graph][0][RANK]
    received = [counts[source] for source in sources]
    wanted = np.concatenate([np.empty((0, 2)), *[values(source, (counts[source], 2)) for source in sources]])
    same_by_mpi(beside, graph, "allgatherv", x, np.array(received, int) * 2, wanted)
    for given in (None, received):
        for result in runs("neighbor_allgatherv", x, given, out=np.empty_like(wanted), **of_graph(graph, comm)):
            assert same(result, wanted)
        assert same(mpiagg.neighbor_allgatherv(x, given, comm=beside), wanted)


@pytest.mark.few_ranks
@pytest.mark.parametrize("dtype", ["?", "i1", "i8", "e", "f", "g", "F", "D", ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("length", [0, 3, 20_001])
def test_every_dtype_in_any_layout(comm, dtype, length):
    keywords = of_graph("random 1", comm)
    sources, destinations = keywords["sources"], keywords["destinations"]
    x = values(RANK, (length, 2), dtype)
    gathered = np.array([values(source, (length, 2), dtype) for source in sources], dtype).reshape(
        len(sources), length, 2
    )
    assert same(mpiagg.neighbor_allgather(np.asfortranarray(x), **keywords), gathered)
    apart = np.zeros((len(sources), length, 4), dtype)[..., ::2]
    assert mpiagg.neighbor_allgather(x, out=apart, **keywords) is apart
    assert same(apart, gathered)
    rows = np.array([x] * len(destinations), dtype).reshape(len(destinations), length, 2)
    with mpiagg.neighbor_alltoall_init(np.asfortranarray(rows), out=apart, **keywords) as plan:
        apart[...] = 0
        assert same(plan(), gathered)


def test_lists_and_numbers_are_arrays(comm):
    near = ring(RANK, SIZE)
    assert mpiagg.neighbor_allgather(RANK, near, comm=comm).tolist() == near
    assert mpiagg.neighbor_alltoall([RANK] * len(near), iter(near), comm=comm).tolist() == near
    assert mpiagg.neighbor_allgather(True, np.array(near, np.int8), comm=comm).tolist() == [True] * len(near)


def test_an_output_that_lies_in_the_input(comm):
    memory = values(RANK, (3, 5000))
    wanted = np.array([values((RANK - 1) % SIZE, (3, 5000))[1], values((RANK + 1) % SIZE, (3, 5000))[0]])
    around = [(RANK - 1) % SIZE, (RANK + 1) % SIZE]
    if SIZE == 2:  # both are the same rank: what comes first from it is what it sends first
        wanted = wanted[::-1]
    if SIZE == 1:
        wanted = memory[:2].copy()
    mpiagg.neighbor_alltoall(memory[:2], around, out=memory[1:], comm=comm)
    assert same(memory[1:], wanted)


# -- grids


def grids(size):
    dims = MPI.Compute_dims(size, 2)
    return [
        *((dims, periods) for periods in ([True, True], [False, False], [True, False])),
        ([size], [False]),
        ([1, size, 1], [True, True, False]),
    ]


@pytest.mark.parametrize(("dims", "periods"), grids(SIZE))
@pytest.mark.parametrize("length", [1, 9000])
def test_a_grid_with_and_without_borders(comm, dims, periods, length):
    grid = comm.Create_cart(dims, periods)
    ours = mpiagg.Comm(grid)  # a duplicate has the topology, too
    sources, destinations = grid.inoutedges
    gaps = np.array(sources) == MPI.PROC_NULL
    x = values(RANK, (len(destinations), length))
    for name, given in (("alltoall", x), ("allgather", x[0])):
        wanted = np.full((len(sources), length), 7.0)
        getattr(grid, f"Neighbor_{name}")(given, wanted)
        assert (wanted[gaps] == 7).all()
        function = getattr(mpiagg, f"neighbor_{name}")
        for where in (grid, ours):
            for out in (np.full_like(wanted, 7), np.full((len(sources), 2 * length), 7.0)[:, ::2]):
                for check in (False, True, False):
                    assert same(function(given, out=out, comm=where, check=check), wanted)
                with getattr(mpiagg, f"neighbor_{name}_init")(given, out=out, comm=where) as plan:
                    out[~gaps] = 0
                    assert same(plan(), wanted)
            assert same(function(given, comm=where), np.where(gaps[:, None], 0, wanted))
    counts = np.arange(len(destinations)) % 3
    x = values(RANK, (counts.sum(), 2))
    # What comes from below was sent upwards.
    received = [counts[place ^ 1] for place in range(len(sources))]
    wanted = np.full((sum(received), 2), 7.0)
    grid.Neighbor_alltoallv([x, counts * 2], [wanted, np.array(received) * 2])
    out = np.full_like(wanted, 7)
    for check in (False, True):
        assert same(mpiagg.neighbor_alltoallv(x, counts, received, out=out, comm=grid, check=check), wanted)
        told = mpiagg.neighbor_alltoallv(x, counts, comm=grid, check=check)
        there = np.repeat(~gaps, received)
        assert same(told, wanted[there])
    ours.Free()
    grid.Free()


def test_a_graph_that_all_ranks_know(comm):
    lists = [[(rank - 1) % SIZE, (rank + 1) % SIZE] for rank in ALL]
    graph = comm.Create_graph(np.cumsum([len(each) for each in lists]), [peer for each in lists for peer in each])
    assert mpiagg.neighbor_allgather(RANK, comm=graph, check=True).tolist() == lists[RANK]
    graph.Free()


def test_a_distributed_graph_of_any_edges(comm):
    targets = [(RANK + 1) % SIZE, RANK]
    graph = comm.Create_dist_graph([RANK], [2], targets)
    assert sorted(mpiagg.neighbor_allgather(RANK, comm=graph, check=True)) == sorted([(RANK - 1) % SIZE, RANK])
    graph.Free()


# -- plans, and what is kept


def test_plans_run_again_with_other_data_and_beside_one_another(comm):
    around, x = ring(RANK, SIZE), np.zeros(50_000)
    rows = np.zeros((len(around), 7))
    with (
        mpiagg.neighbor_allgather_init(x, around, comm=comm) as one,
        mpiagg.neighbor_alltoall_init(rows, around, comm=comm) as other,
    ):
        for turn in range(5):
            x[...] = RANK + 10 * turn
            rows[...] = RANK + 100 * turn
            plans = (one, other) if (RANK + turn) % 2 else (other, one)
            for plan in plans:
                plan.start()
            mpiagg.allreduce(x, comm=comm)
            gathered, exchanged = one.wait([other]), other.wait([one])
            assert (gathered == np.array(around).reshape(-1, 1) + 10 * turn).all()
            assert (exchanged == np.array(around).reshape(-1, 1) + 100 * turn).all()
    with pytest.raises(PlanError, match="freed"):
        one()


def test_short_calls_keep_their_plans_and_long_ones_do_not(comm):
    channel = channel_of(comm)
    for length in (5, 5, 5000, 5000):
        x = values(RANK, length)
        for _ in range(2):
            mpiagg.neighbor_allgather(x, ring(RANK, SIZE), comm=comm)
        assert len(kept_plans(channel)) == len(channel.open) == 1


def test_graphs_can_change_from_call_to_call(comm):
    for step in range(30):
        source, target = (RANK - step) % SIZE, (RANK + step) % SIZE
        x = values(RANK, 3) + step
        found = mpiagg.neighbor_allgather(x, sources=[source], destinations=[target], comm=comm, check=step % 7 == 0)
        assert same(found[0], values(source, 3) + step)


def test_the_number_of_rows_can_change_where_nobody_gets_them(comm):
    """On rank 0, which has no destinations, nothing but the array says how many rows there are."""
    others = list(range(1, SIZE))
    for rows in (3, 5, 1):
        sources, destinations = ([], [0]) if RANK else (others, [])
        found = mpiagg.neighbor_allgatherv(np.full(rows, RANK), sources=sources, destinations=destinations, comm=comm)
        assert np.array_equal(found, np.repeat(others, rows) if RANK == 0 else [])


def test_the_recorder_knows_them(comm):
    mpiagg.neighbor_allgather(np.zeros(3), ring(RANK, SIZE), comm=comm)
    found = [entry[SUBJECT].what for entry in process().recorder.entries]
    assert found[-1] == "neighbor_allgather with rows of float64 (3,)"


# -- errors


@pytest.mark.few_ranks
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("form", ["", "_init"])
def test_bad_arguments_are_refused_on_all_ranks(comm, name, form):
    function = getattr(mpiagg, f"{name}{form}")
    x = np.zeros((1, 2))
    more = ([1],) if name.endswith("toallv") else ()
    checked = {} if form else {"check": True}

    def bad(error, words, x=x, more=more, **keywords):
        keywords = {"neighbors": [RANK], "comm": comm, **checked, **keywords}
        refused(error, words, function, x, *more, **keywords)
        if SIZE > 1:  # on one rank alone
            usual = {"neighbors": [RANK], "comm": comm, **checked}
            arguments = (x, *more) if RANK == SIZE - 1 else (np.zeros((1, 2)), *([1] for _ in more))
            keywords = keywords if RANK == SIZE - 1 else usual
            refused(error if RANK == SIZE - 1 else MismatchError, words, function, *arguments, **keywords)

    for neighbor in (SIZE, -1, MPI.PROC_NULL, 0.0, None, True):
        bad(ValueError, f"neighbor must be an integer from 0 to {SIZE - 1}", neighbors=[neighbor])
    bad(TypeError, "not iterable", neighbors=0)
    bad(ValueError, "neighbors are both sources and destinations", sources=[])
    bad(ValueError, "sources and destinations must be given together", neighbors=None, sources=[RANK])
    bad(ValueError, "comm has no topology", neighbors=None)
    bad(TypeError, "object", x=np.array([[None]]))
    bad(ValueError, "timeout must be above 0", timeout=-1)
    bad(ValueError, "out has shape", out=np.zeros((5, 5)))
    bad(TypeError, "out has dtype", out=np.zeros((1, 1, 2) if name == "neighbor_allgather" else (1, 2), "f"))
    bad(TypeError, "out must be a NumPy array", out=[[0.0, 0.0]])
    if name != "neighbor_allgather":
        bad(ValueError, "takes an array of rows", x=np.float64(3))
    if "alltoall" in name:
        bad(ValueError, "rows for 1 destinations", x=np.zeros((2, 2)))
    if more:
        for counts in ([1, 1], [-1], [2**70]):
            bad(ValueError, "sendcounts must be 1 numbers of rows, one for each destination", more=(counts,))
    if name.endswith("v"):
        for counts in ([1, 1], [-1], [2**70]):
            bad(ValueError, "recvcounts must be 1 numbers of rows, one for each source", recvcounts=counts)
    assert not channel_of(comm).open


@pytest.mark.parametrize("form", ["", "_init"])
def test_what_ranks_disagree_on_is_told_to_all(comm, form):
    if SIZE == 1:
        return
    gather, exchange = (getattr(mpiagg, f"neighbor_{name}{form}") for name in ("allgather", "alltoallv"))
    keywords = {"comm": comm} if form else {"comm": comm, "check": True}
    words = "rank 0 names rank 1 as a destination once, and rank 1 names rank 0 as a source never"
    refused(MismatchError, words, gather, 0, sources=[], destinations=[1] if RANK == 0 else [], **keywords)
    words = "rank 0 names rank 1 as a destination once, and rank 1 names rank 0 as a source 2 times"
    graph = {"sources": {1: [0, 0]}.get(RANK, []), "destinations": {0: [1]}.get(RANK, [])}
    refused(MismatchError, words, gather, 0, **graph, **keywords)
    around = [(RANK + 1) % SIZE, (RANK - 1) % SIZE]
    refused(MismatchError, "ranks disagree", gather, np.zeros(3 + RANK % 2), around, **keywords)
    refused(MismatchError, "ranks disagree", gather, np.zeros(3, "f" if RANK else "d"), around, **keywords)
    rows, received = np.zeros(2), [1 + (RANK == 0), 1]
    target = around[0]
    assert target != 0 or RANK
    words = "rank 1 sends rank 0 (1|1 and 1) rows, which expects (2|2 and 1) rows"
    refused(MismatchError, words, exchange, rows, [1, 1], received, neighbors=around, **keywords)
    # The same, as it should be.
    made = exchange(rows + RANK, [1, 1], [1, 1], neighbors=around, **keywords)
    if form:
        with made as plan:
            made = plan().copy()
    assert made.tolist() == around


def test_many_differences_are_cut_short(comm):
    if SIZE > 2:
        words = "; and [0-9]+ more"
        refused(MismatchError, words, mpiagg.neighbor_allgather, 0, sources=[], destinations=ALL, comm=comm, check=True)


def test_a_rank_that_waits_for_what_nobody_sends_says_so(world):
    if SIZE > 1:
        comm = world.Dup()
        sources = [1] if RANK == 0 else []
        if RANK == 0:
            with pytest.raises(StallError, match="neighbor_allgather, round 0: 24 bytes to arrive from rank 1"):
                mpiagg.neighbor_allgather(np.zeros(3), sources=sources, destinations=[], comm=comm, timeout=0.2)
        else:
            mpiagg.neighbor_allgather(np.zeros(3), sources=sources, destinations=[], comm=comm)
        world.Barrier()
        comm.Free()


@pytest.mark.parametrize("sent", [1, 3, 500_000])
def test_a_message_of_another_length_is_not_taken(world, sent):
    if SIZE > 1:
        comm = world.Dup()
        graph = {"sources": {1: [0]}.get(RANK, []), "destinations": {0: [1]}.get(RANK, []), "comm": comm}
        x, counts, received = np.ones(sent * (RANK == 0)), {0: [sent]}.get(RANK, []), {1: [2]}.get(RANK, [])
        out = np.zeros(10)
        if RANK == 1:
            with pytest.raises(StallError, match="16 bytes to arrive from rank 0"):
                mpiagg.neighbor_alltoallv(x, counts, received, **graph, out=out[4:6], timeout=0.2)
            assert not out.any()
        elif RANK == 0 and sent == 500_000:  # which waits until it is received
            with pytest.raises(StallError, match="4000000 bytes to be sent to rank 1"):
                mpiagg.neighbor_alltoallv(x, counts, received, **graph, timeout=0.2)
        else:
            mpiagg.neighbor_alltoallv(x, counts, received, **graph)
        world.Barrier()
        comm.Free()


def test_messages_that_are_cut_are_not_taken_for_others(comm, monkeypatch):
    monkeypatch.setattr(messages, "MOST_BYTES", 1000)
    x = values(RANK, 5000)
    found = mpiagg.neighbor_allgather(x, ring(RANK, SIZE), comm=comm)
    assert all(same(part, values(peer, 5000)) for part, peer in zip(found, ring(RANK, SIZE), strict=True))


# -- communicators with a topology that come from ours, and what is mpi4py's own


FORMS = ["blocking", "nonblocking", "persistent"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", ["cart", "graph", "dist_graph", "dist_graph_adjacent"])
def test_the_mpi_librarys_own_collectives_of_neighbors(world, form, make):
    comm = mpiagg.Comm(world)
    around, total = [(RANK - 1) % SIZE, (RANK + 1) % SIZE], np.array([0.0])
    if make == "cart":
        graph = comm.Create_cart([SIZE], [True])
    elif make == "graph":
        graph = comm.Create_graph(
            range(2, 2 * SIZE + 2, 2), [peer for r in ALL for peer in (r - 1, r + 1)] % np.int32(SIZE)
        )
    elif make == "dist_graph":
        graph = comm.Create_dist_graph([RANK], [2], around)
    else:
        graph = comm.Create_dist_graph_adjacent(around, around)
    assert isinstance(graph, MPI.Topocomm)
    for turn in range(3):
        comm.Allreduce(np.array([1.0 + turn]), total)
        assert total[0] == SIZE * (1 + turn)
        x, out = np.full(3, RANK + 10.0 * turn), np.empty((2, 3))
        call(graph, form, "Neighbor_allgather", x, out)
        assert same(out, mpiagg.neighbor_allgather(x, comm=graph))
        assert sorted(out[:, 0]) == sorted(peer + 10 * turn for peer in around)
        assert mpiagg.allreduce(np.ones(2), comm=graph)[0] == SIZE
    graph.Free()
    comm.Free()


@pytest.mark.parametrize("form", FORMS)
def test_alltoallw_is_the_mpi_librarys_own(world, form):
    comm, total = mpiagg.Comm(world), np.array([0.0])
    types = [MPI.DOUBLE if peer % 2 else MPI.FLOAT for peer in ALL]
    kinds = [np.dtype("f8" if peer % 2 else "f4") for peer in ALL]
    x = np.concatenate([np.full(2, 10 * RANK + peer, kinds[RANK]).view("u1") for peer in ALL])
    out = np.zeros(sum(2 * kind.itemsize for kind in kinds), "u1")
    places = np.cumsum([0, *(2 * kind.itemsize for kind in kinds[:-1])])
    sent = [x, ([2] * SIZE, np.arange(SIZE) * 2 * kinds[RANK].itemsize), [types[RANK]] * SIZE]
    for _ in range(3):
        out[...] = 0
        comm.Allreduce(np.array([1.0]), total)
        assert total[0] == SIZE
        call(comm, form, "Alltoallw", sent, [out, ([2] * SIZE, places), types])
        for peer, place in enumerate(places):
            part = out[place : place + 2 * kinds[peer].itemsize].view(kinds[peer])
            assert part.tolist() == [10 * peer + RANK] * 2
    if form == "blocking":
        assert process().recorder.entries[-1][SUBJECT].what == "alltoallw by native"
    with pytest.raises((MPI.Exception, ValueError, TypeError)):
        comm.Alltoallw("text", out)
    comm.Allreduce(np.array([1.0]), total)
    comm.Free()


# -- the aggregation takes a topology, too


@pytest.mark.parametrize("periods", [True, False])
def test_the_average_takes_the_neighbors_of_a_communicator(comm, periods):
    grid = comm.Create_cart([SIZE], [periods])
    line = [peer for peer in (RANK - 1, RANK + 1) if 0 <= peer < SIZE]
    mine, wanted = [values(RANK, 100)], [values(RANK, 100)]
    with mpiagg.NeighborAverage(grid) as gossip:
        assert gossip.neighbors == (ring(RANK, SIZE) if periods else line)
        gossip.aggregate(mine)
        neighbors = gossip.neighbors
    with mpiagg.NeighborAverage(comm, neighbors) as gossip:
        gossip.aggregate(wanted)
    assert same(mine[0], wanted[0])
    grid.Free()


def test_the_average_needs_edges_both_ways(comm):
    if SIZE > 2:
        graph = comm.Create_dist_graph_adjacent([(RANK - 1) % SIZE], [(RANK + 1) % SIZE])
        refused((ValueError, MismatchError), "neighbors must be both", mpiagg.NeighborAverage, graph)
        with mpiagg.NeighborAverage(graph, ring(RANK, SIZE)) as gossip:
            gossip.aggregate([np.zeros(3)])
        graph.Free()
