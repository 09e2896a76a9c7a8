"""Channels: tags, pieces of long messages, and ranks that disagree."""

import contextlib
import gc
import re
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import mpiagg
from mpiagg.common.arguments import NODES
from mpiagg.schedules import MOST_LANES
from mpiagg.transport import DEFAULT_TIMEOUT, channel_of, channels, comparison, limited, meetings, messages
from mpiagg.transport.tags import LINES
from mpiagg.transport.waiting import time_limit
from mpiagg.watch import OperationLog, Subject

pytestmark = pytest.mark.mpi


@pytest.fixture
def in_pieces(comm, rank, size, monkeypatch):
    """Let messages go in pieces of 12 bytes, as those of Open MPI between nodes, with any library: in mid-number."""
    monkeypatch.setenv(NODES, ",".join("1" * size))
    monkeypatch.setattr(messages, "PIECE", 12)
    channel = channel_of(comm)
    monkeypatch.setattr(channel, "_longest_cut", messages.CUT)
    pieces = list(channel._pieces(np.empty(30, np.uint8), (rank + 1) % size, cut=True))
    assert len(pieces) == (3 if size > 1 else 1)


@pytest.mark.few_ranks
@pytest.mark.parametrize("algorithm", [*mpiagg.algorithms("allreduce"), "auto"])
@pytest.mark.parametrize("most", [1, 8, 12])
def test_long_messages_are_cut(comm, rank, size, monkeypatch, algorithm, most):  # noqa: PLR0917 - fixtures and parameters
    # A limit of a few bytes stands for that of real life; 12 cuts in the middle of numbers.
    monkeypatch.setattr(messages, "MOST_BYTES", most)
    all_reduces_are_right(comm, rank, size, algorithm)


@pytest.mark.few_ranks
@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("algorithm", [*mpiagg.algorithms("allreduce"), "auto"])
def test_all_reduces_go_in_pieces(comm, rank, size, algorithm):
    all_reduces_are_right(comm, rank, size, algorithm)
    narrow = [np.arange(30, dtype="f4") + r for r in range(size)]
    assert np.array_equal(mpiagg.allreduce(narrow[rank], comm=comm, algorithm=algorithm, wire="bf16"), sum(narrow))


def all_reduces_are_right(comm, rank, size, algorithm):
    everyone = [np.arange(5.0) + r for r in range(size)]
    result = mpiagg.allreduce(everyone[rank], comm=comm, algorithm=algorithm)
    assert np.array_equal(result, sum(everyone))
    with mpiagg.allreduce_init(everyone[rank], comm=comm, algorithm=algorithm, lanes=2) as plan:
        assert np.array_equal(plan(), sum(everyone))
        assert np.array_equal(plan(), sum(everyone))


@pytest.mark.few_ranks
@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("verb", ["allgather", "alltoall", "reduce_scatter"])
def test_other_exchanges_go_in_pieces(comm, rank, size, verb):
    everyone = [np.arange(size * 5.0).reshape(size, 5) + r for r in range(size)]
    wanted = {
        "allgather": np.stack(everyone),
        "alltoall": np.stack([x[rank] for x in everyone]),
        "reduce_scatter": sum(everyone)[rank],
    }[verb]
    for algorithm in mpiagg.algorithms(verb):
        result = getattr(mpiagg, verb)(everyone[rank], comm=comm, algorithm=algorithm)
        assert np.array_equal(result.reshape(wanted.shape), wanted), algorithm


def test_pieces_cover_a_chunk(comm, rank, monkeypatch):
    monkeypatch.setattr(messages, "MOST_BYTES", 10)
    chunk = np.arange(7, dtype="f4")
    channel = channel_of(comm)
    pieces = list(channel._pieces(chunk, rank, cut=True))
    assert [piece.nbytes for piece in pieces] == [10, 10, 8]
    assert b"".join(piece.tobytes() for piece in pieces) == chunk.tobytes()
    assert all(np.shares_memory(piece, chunk) for piece in pieces)
    assert list(channel._pieces(chunk[:0], rank, cut=True)) == []


@pytest.mark.parametrize("fabric", [False, True])
@pytest.mark.parametrize("nbytes", [messages.PIECE, messages.PIECE + 1, messages.CUT, messages.CUT + 1])
def test_long_messages_of_open_mpi_go_by_tcp_in_pieces(comm, rank, size, monkeypatch, nbytes, fabric):  # noqa: PLR0917 - fixtures and parameters
    """But within a node, and where one rank alone has an adapter of another kind."""
    monkeypatch.setenv(NODES, ",".join(["2"] * (size // 2) + ["1"] * (size % 2)))
    monkeypatch.setattr(comparison, "has_fabric", lambda: fabric and rank == size - 1)
    channel = channel_of(comm)
    for peer in range(size):
        chunk = np.empty(nbytes, np.uint8)
        assert [piece.nbytes for piece in channel._pieces(chunk, peer, cut=False)] == [nbytes]
        lengths = [piece.nbytes for piece in channel._pieces(chunk, peer, cut=True)]
        apart = channel.layout.node_of(peer) != channel.layout.node_of(rank)
        cut = apart and not fabric and nbytes <= messages.CUT and MPI.get_vendor()[0] == "Open MPI"
        whole, rest = divmod(nbytes, messages.PIECE)
        assert lengths == ([messages.PIECE] * whole + [rest] * (rest > 0) if cut else [nbytes])


@pytest.fixture
def asked(size, monkeypatch):
    """Return the set of what is asked for of messages between nodes: whether they may be cut."""
    monkeypatch.setenv(NODES, ",".join("1" * size))
    asked, given = set(), messages.Channel._pieces

    def pieces(channel, chunk, peer, *, cut):
        asked.add(cut)
        return given(channel, chunk, peer, cut=cut)

    monkeypatch.setattr(messages.Channel, "_pieces", pieces)
    return asked


@pytest.mark.parametrize(
    ("prepare", "cut"),
    [
        (mpiagg.allgather_init, True),
        (mpiagg.allreduce_init, True),
        (mpiagg.alltoall_init, True),
        (mpiagg.broadcast_init, False),
        (mpiagg.gather_init, False),
        (mpiagg.scan_init, False),
    ],
)
def test_messages_of_exchanges_alone_may_be_cut(comm, size, asked, prepare, cut):
    algorithm = "pairwise" if prepare is mpiagg.alltoall_init else "direct"
    with prepare(
        np.ones((size, 20)), algorithm="ring" if prepare is mpiagg.scan_init else algorithm, comm=comm
    ) as plan:
        plan()
    assert asked == ({cut} if size > 1 else set())


def test_messages_to_neighbors_are_not_cut(comm, rank, size, asked):
    """Of a line of ranks the first only sends: in pieces, which nobody asks for, it would be ahead of the others."""
    before, after = [rank - 1] * (rank > 0), [rank + 1] * (rank < size - 1)
    line = comm.Create_dist_graph_adjacent(before, after)
    result = mpiagg.neighbor_allgather(np.full(20, rank), comm=line)
    assert result.tolist() == [[peer] * 20 for peer in before]
    line.Free()
    assert asked == ({False} if size > 1 else set())


def test_tags_follow_one_another_and_come_round(comm):
    channel, first = channel_of(comm), MOST_LANES * (1 + LINES)
    assert channel.tags.in_turn() == first
    assert channel.tags.in_turn(5) == first + 2
    assert channel.tags.in_turn() == first + 7
    channel.tags.next = channel.tags.turns - 2
    assert channel.tags.in_turn(3) == first
    assert channel.tags.in_turn() == first + 3  # and two at least, for vectors of devices
    lines = [channel.tags.of_next_line(7) for _ in range(2 * LINES)]
    assert lines == 2 * sorted(set(lines[:LINES]))
    assert set(np.diff(lines[:LINES])) == {MOST_LANES}
    assert lines[LINES - 1] + MOST_LANES <= channel.tags.in_turn(1, 7)
    assert channel.tags.of_next_line(8) not in lines
    upper = comm.Get_attr(MPI.TAG_UB)
    assert channel.tags.shared(-1) + MOST_LANES <= upper + 1


def test_plans_work_where_tags_come_round(comm, size):
    channel = channel_of(comm)
    channel.tags.next = channel.tags.turns - 1
    for _ in range(3):
        with mpiagg.allreduce_init(np.ones(6), comm=comm, lanes=2) as plan:
            assert plan().tolist() == [size] * 6


def test_the_channel_is_found_again_and_goes_with_its_communicator(world):
    comm = world.Dup()
    channel = channel_of(comm)
    assert channel_of(comm) is channel
    assert channel.comm != comm
    assert (channel.rank, channel.size) == (comm.rank, comm.size)
    assert id(channel) in channels._channels
    plan = mpiagg.allreduce_init(np.ones(3), comm=comm)
    mpiagg.allreduce(np.ones(3), comm=comm)
    comm.Free()
    assert id(channel) not in channels._channels
    assert channel.comm == MPI.COMM_NULL
    assert not channel.open
    assert not channel.calls
    with pytest.raises(mpiagg.PlanError, match="the plan is freed"):
        plan()
    channel.free()


def test_ranks_that_agree(comm):
    channel_of(comm).agree("the same")
    channel_of(comm).agree("")
    channel_of(comm).agree("ä" * 1000)


def test_what_ranks_agree_on_is_told_while_they_wait_for_others(comm, monkeypatch):
    told = []

    def complete(request, purpose, *rest):
        told.append(purpose)
        return real(request, purpose, *rest)

    real = meetings.complete
    monkeypatch.setattr(meetings, "complete", complete)
    channel = channel_of(comm)
    told.clear()
    channel.agree("a sum\nof three")
    assert set(told) == {"agree on what they are about to do (a sum of three)"}


def test_ranks_that_disagree_are_named(comm, rank, size):
    channel = channel_of(comm)
    if size > 1:
        word = "one thing" if rank % 2 == 0 else "another"
        even, odd = range(0, size, 2), range(1, size, 2)
        with pytest.raises(mpiagg.MismatchError) as caught:
            channel.agree(word)
        assert str(caught.value) == f"ranks disagree: {named(even)}: one thing; {named(odd)}: another"
    channel.agree("peace")


def test_an_error_on_one_rank_is_told_to_all(comm, rank, size):
    channel = channel_of(comm)
    failing = size - 1
    kind = ValueError if rank == failing else mpiagg.MismatchError
    with pytest.raises(kind) as caught:
        channel.agree("well", ValueError("out of luck") if rank == failing else None)
    told = "out of luck" if rank == failing else f"rank {failing} raised ValueError: out of luck"
    assert str(caught.value) == told
    channel.agree("peace")


def named(ranks):
    ranks = list(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


# -- ranks that plan different things


ODD_ONES = {
    "shape": (lambda x, **how: mpiagg.allreduce_init(x[:-1], **how), r"float64 \(5,\)", r"float64 \(6,\)"),
    "dtype": (lambda x, **how: mpiagg.allreduce_init(x.astype("f4"), **how), "of float32", "of float64"),
    "op": (lambda x, **how: mpiagg.allreduce_init(x, "max", **how), "op max", "op sum"),
    "algorithm": (
        lambda x, **how: mpiagg.allreduce_init(x, algorithm="ring", **how),
        "allreduce by ring",
        "allreduce by shared",
    ),
    "lanes": (lambda x, **how: mpiagg.allreduce_init(x, lanes=3, **how), "3 lanes", "shared of"),
    "collective": (mpiagg.broadcast_init, "broadcast by native", "allreduce by"),
}


@pytest.mark.parametrize("what", ODD_ONES)
def test_plans_that_differ_are_refused_on_every_rank(comm, rank, size, what):
    make, said_by_odd, said_by_others = ODD_ONES[what]
    x = np.arange(6.0)
    before = x.copy()
    if size > 1:
        with pytest.raises(mpiagg.MismatchError, match=r"^ranks disagree: ") as caught:
            (make if rank == size - 1 else mpiagg.allreduce_init)(x, comm=comm)
        others, odd = str(caught.value).removeprefix("ranks disagree: ").split("; ")
        assert others.startswith(f"{named(range(size - 1))}: ")
        assert odd.startswith(f"rank {size - 1}: ")
        assert re.search(said_by_odd, odd)
        assert re.search(said_by_others, others)
    assert np.array_equal(x, before)
    assert not channel_of(comm).open
    with mpiagg.allreduce_init(x, comm=comm) as plan:
        assert np.array_equal(plan(), size * before)


def test_roots_that_differ(comm, rank, size):
    if size > 1:
        way = "shared" if MPI.get_vendor()[0] == "MPICH" else "native"
        words = rf"rank 0: reduce by {way} .*, root 1; rank.* 1.*: .*, root 0"
        with pytest.raises(mpiagg.MismatchError, match=words):
            mpiagg.reduce_init(np.ones(3), root=int(rank == 0), comm=comm)
    with mpiagg.reduce_init(np.ones(3), root=size - 1, comm=comm) as plan:
        result = plan()
    assert (result is not None) == (rank == size - 1)


BAD_ONES = {
    "op": ({"op": "mean"}, ValueError, "unknown op 'mean'"),
    "algorithm": ({"algorithm": "rung"}, ValueError, "unknown algorithm 'rung'"),
    "lanes": ({"lanes": 0}, ValueError, "lanes must be"),
    "dtype": ({"x": np.array(["a"] * 6)}, TypeError, "cannot be aggregated"),
    "out": ({"out": np.zeros(7)}, ValueError, "out has shape"),
    "out type": ({"out": [0.0] * 6}, TypeError, "out must be a NumPy array"),
}


@pytest.mark.parametrize("what", BAD_ONES)
def test_a_bad_argument_on_one_rank_is_told_to_all(comm, rank, size, what):
    changed, kind, words = BAD_ONES[what]
    arguments = {"x": np.arange(6.0), **(changed if rank == 0 else {})}
    with pytest.raises(kind if rank == 0 else mpiagg.MismatchError) as caught:
        mpiagg.allreduce_init(comm=comm, **arguments)
    told = str(caught.value)
    assert words in told
    assert rank == 0 or told.startswith(f"rank 0 raised {kind.__name__}: ")
    assert np.array_equal(mpiagg.allreduce(np.arange(6.0), comm=comm), np.arange(6.0) * size)


def test_agreeing_has_a_deadline(world, rank, size):
    comm = world.Dup()
    channel = channel_of(comm)
    if rank == 0 and size > 1:
        with limited(0.01), pytest.raises(mpiagg.StallError, match="in vain for all ranks to agree"):
            channel.agree("early")
    world.Barrier()
    if rank and size > 1:
        # They learn of it from the first rank, which comes to free the communicator.
        with pytest.raises(mpiagg.StallError, match=r"^rank 0 waited in vain for all ranks to agree"):
            channel.agree("late")
    comm.Free()


@pytest.mark.parametrize("how", ["first", "check", "init"])
def test_the_timeout_of_a_call_holds_where_ranks_meet_for_it(world, rank, size, how):
    comm = world.Dup()
    if how != "first":
        mpiagg.allreduce(np.ones(3), comm=comm)
    arguments = {"comm": comm, **({"check": True} if how == "check" else {})}
    call = mpiagg.allreduce_init if how == "init" else mpiagg.allreduce
    if rank == 0 and size > 1:
        with pytest.raises(mpiagg.StallError, match=r"waited 0\.01 s in vain for all ranks"):
            call(np.ones(3), timeout=0.01, **arguments)
    world.Barrier()
    if rank and size > 1:
        with pytest.raises(mpiagg.StallError, match="rank 0 waited in vain for all ranks"):
            call(np.ones(3), timeout=50, **arguments)
    assert called(comm).tolist() == [size] * 3
    comm.Free()


def called(comm):
    return mpiagg.allreduce(np.ones(3), comm=comm, check=True)


def planned(comm):
    return mpiagg.allreduce_init(np.ones(3), comm=comm)


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (mpiagg.Comm.Split, called),
        (mpiagg.Comm.Split, mpiagg.Comm.Dup),
        (planned, mpiagg.Comm.Dup),
        (called, mpiagg.Comm.Free),
        (mpiagg.Comm, called),
    ],
)
def test_ranks_that_come_together_for_different_purposes_are_told(world, rank, size, first, others):
    if size == 1:
        return
    comm = mpiagg.Comm(world)
    with pytest.raises(mpiagg.MismatchError, match=r"different ends: rank 0: .*; ranks? 1.*: ") as error:
        (others if rank else first)(comm)
    assert len(set(world.allgather(str(error.value)))) == 1
    assert called(comm).tolist() == [size] * 3
    comm.Free()


def test_a_fault_that_was_told_does_not_lose_what_is_under_way(world, rank, size):
    if size == 1:
        return
    comm = mpiagg.Comm(world)
    channel = channel_of(comm)
    if rank == 0:
        channel.log.fault = mpiagg.MismatchError("told by another")
        with limited(5), pytest.raises(mpiagg.MismatchError, match="told by another"):
            called(comm)
        with limited(5), pytest.raises(mpiagg.MismatchError, match="told by another"):
            called(comm)  # the one before has not come to its end
        channel.log.fault = None
    world.Barrier()
    if rank:
        with pytest.raises(mpiagg.StallError, match="rank 0 waited in vain"):
            called(comm)
    assert called(comm).tolist() == [size] * 3
    comm.Free()


def test_what_was_given_up_goes_with_its_communicator(world, rank, size):
    if size == 1:
        return
    for _ in range(3):  # MPI gives handles again
        comm = world.Dup()
        if rank == 0:
            with limited(0.01), pytest.raises(mpiagg.StallError):
                meetings.gather(comm, b"x", "see whether anybody comes")
        world.Barrier()
        if rank:
            with pytest.raises(mpiagg.StallError, match="rank 0 waited in vain"):
                meetings.gather(comm, b"x", "see whether anybody comes")
        else:
            meetings.end_all(Subject(OperationLog("", 0, 1), "a test"))
        comm.Free()
        comm = world.Dup()
        assert meetings.gather(comm, bytes([rank]), "tell ranks") == [bytes([each]) for each in range(size)]
        comm.Free()


def test_first_calls_for_different_purposes_are_told(comm, rank, size):
    if size == 1:
        return
    with pytest.raises(mpiagg.MismatchError, match=r"make a communicator; ranks? .*make a communicator by Comm"):
        mpiagg.Comm(comm) if rank else called(comm)
    assert called(comm).tolist() == [size] * 3


def test_a_time_limit_is_that_of_the_innermost_call_that_has_one(world):
    del world
    with limited(5):
        assert time_limit() == 5
        with limited(None):
            assert time_limit() == 5
        for bad in (-1, "soon"):
            with limited(bad):
                assert time_limit() == 5
        with limited(2.5):
            assert time_limit() == 2.5
    assert time_limit() == DEFAULT_TIMEOUT


class Request:
    """A request of MPI's, as far as those ask who wait for it."""

    def __init__(self, done):
        self.done = done

    def Test(self):
        return self.done


@pytest.mark.parametrize("done", [False, True])
def test_who_gives_a_request_up_keeps_its_memory(done):
    # A rank that comes late sends all the same, and MPI writes what arrives to where it was told to.
    request = Request(done)
    alive = weakref.ref(request)
    with contextlib.suppress(mpiagg.StallError):
        meetings.complete(request, "agree", None, 0.01)
    del request
    gc.collect()
    assert (alive() is None) == done


@pytest.mark.parametrize("stalls", [True, False])
def test_memory_of_a_plan_that_is_left_in_the_middle_outlives_its_communicator(world, rank, stalls):
    comm = world.Dup()
    out = np.empty(3)
    alive = weakref.ref(out)
    plan = mpiagg.broadcast_init(np.ones(3), out=out, root=0, comm=comm, algorithm="parameter_server")
    if not stalls:
        plan()
    elif rank:
        plan.timeout = 0.01
        with contextlib.suppress(mpiagg.StallError):
            plan()
    world.Barrier()
    comm.Free()
    del plan, out
    gc.collect()
    assert (alive() is not None) == (stalls and rank > 0)


def test_whatever_one_rank_raises_all_are_told(comm, rank):
    def say():
        if rank == 0:
            raise RuntimeError("the disk is full")
        return "well"

    with pytest.raises(RuntimeError if rank == 0 else mpiagg.MismatchError, match="the disk is full"):
        channel_of(comm).agree_on(say)
    channel_of(comm).agree_on(lambda: "peace")


def test_nodes_that_one_rank_has_wrong_are_refused_on_all(world, rank, size, monkeypatch):
    if rank == size - 1:
        monkeypatch.setenv("MPIAGG_NODES", "two")
    error = ValueError if rank == size - 1 else mpiagg.MismatchError
    with pytest.raises(error, match="MPIAGG_NODES='two' must say"):
        mpiagg.Comm(world)
    monkeypatch.undo()
    comm = mpiagg.Comm(world)
    comm.Barrier()
    comm.Free()
