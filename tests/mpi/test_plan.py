"""Plans on real ranks: run again and again, side by side, with a deadline, and without allocating."""

import tracemalloc
from itertools import product

import numpy as np
import pytest
from mpi4py import MPI
from support import fill_recorder, kept_plans

import mpiagg
from mpiagg.common.arguments import NODES
from mpiagg.transport import Channel, channel_of, kept

pytestmark = pytest.mark.mpi

EVERY = [
    *(("allreduce", name) for name in (*mpiagg.algorithms("allreduce"), "auto", "native")),
    *(("reduce", name) for name in (*mpiagg.algorithms("reduce"), "native")),
    *(("broadcast", name) for name in (*mpiagg.algorithms("broadcast"), "native")),
    *(("allgather", name) for name in (*mpiagg.algorithms("allgather"), "native")),
    *(("reduce_scatter", name) for name in (*mpiagg.algorithms("reduce_scatter"), "native")),
]


def init(collective, *arguments, **keywords):
    return getattr(mpiagg, f"{collective}_init")(*arguments, **keywords)


def right(collective, everyone, rank, root=0):
    """What a rank gets, by NumPy."""
    return {
        "allreduce": lambda: sum(everyone),
        "reduce": lambda: sum(everyone) if rank == root else None,
        "broadcast": lambda: everyone[root],
        "allgather": lambda: np.stack(everyone),
        "reduce_scatter": lambda: np.array_split(sum(everyone), len(everyone))[rank],
    }[collective]()


def agrees(result, wanted):
    return result is None if wanted is None else np.array_equal(result, wanted)


def whole(size, turn, length=13):
    """All ranks' vectors of whole numbers, others each turn."""
    return [np.arange(length, dtype=float) * (turn + 1) + r * r + turn for r in range(size)]


class Told:
    """A request that tells of its start."""

    def __init__(self, request, started):
        self._request, self.Test, self.Free = request, request.Test, request.Free
        self._started = started

    def Start(self):
        self._started()
        self._request.Start()


@pytest.mark.parametrize(("algorithm", "nbytes"), [("direct", 2**16), ("direct", 2**16 + 8), ("ring", 2**16 + 8)])
def test_ranks_that_exchange_long_messages_start_to_send_first(comm, rank, size, monkeypatch, algorithm, nbytes):  # noqa: PLR0917 - fixtures and parameters
    """Over TCP a receive that comes first lets the other rank send all of its own before."""
    monkeypatch.setenv(NODES, str(size))  # so that no message is cut
    started = []
    for what in ("send", "receive"):
        given = getattr(Channel, f"{what}_init")

        def told(channel, *arguments, cut, given=given, what=what):
            for request in given(channel, *arguments, cut=cut):
                yield Told(request, lambda: started.append(what))

        monkeypatch.setattr(Channel, f"{what}_init", told)
    x = np.full(nbytes // 8, rank * 1.0)
    with mpiagg.allgather_init(x, algorithm=algorithm, comm=comm) as plan:
        assert np.array_equal(plan()[:, 0], np.arange(size))
    others = size - 1
    if algorithm == "direct":
        sends, receives = ["send"] * others, ["receive"] * others
        assert started == (sends + receives if nbytes > 2**16 else receives + sends)
    else:  # of two ranks, those of a ring exchange, too
        assert started == (["send", "receive"] if size == 2 else ["receive", "send"] * others)


@pytest.mark.parametrize(
    "collective", ["allreduce", "reduce", "allgather", "reduce_scatter", "gather", "alltoall", "scan"]
)
def test_a_plan_keeps_its_input(comm, size, collective):
    with init(collective, np.full((size, 50), 1), comm=comm, algorithm="native") as plan:
        others = [np.full((size, 50), 7) for _ in range(20)]  # where the input lay, if it is gone
        result = plan()
        wanted = comm.rank + 1 if collective == "scan" else size if collective in ("allreduce", "reduce_scatter") else 1
        assert result is None or (result == (size if collective == "reduce" else wanted)).all()
        assert others[0][0, 0] == 7


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
def test_restarted_with_other_data(comm, rank, size, collective, algorithm):
    x = np.zeros(13)
    for lanes in (1, 3):
        with init(collective, x, comm=comm, algorithm=algorithm, lanes=lanes) as plan:
            for turn in range(4):
                everyone = whole(size, turn)
                x[:] = everyone[rank]
                if turn % 2:
                    result = plan()
                else:
                    plan.start()
                    while turn and not plan.test():
                        pass
                    result = plan.wait()
                assert agrees(result, right(collective, everyone, rank)), (lanes, turn)
                assert result is plan.result


@pytest.mark.parametrize("root", ["first", "last"])
@pytest.mark.parametrize(("collective", "algorithm"), [pair for pair in EVERY if pair[0] in ("reduce", "broadcast")])
def test_roots(comm, rank, size, collective, algorithm, root):  # noqa: PLR0917 - fixtures and parameters
    root = 0 if root == "first" else size - 1
    everyone = whole(size, 1)
    with init(collective, everyone[rank], root=root, comm=comm, algorithm=algorithm) as plan:
        assert agrees(plan(), right(collective, everyone, rank, root))


def test_plans_in_and_out_of_place(comm, rank, size):
    everyone = whole(size, 2, 24)
    for algorithm in ("ring", "native"):
        for out in (np.zeros((4, 6)), np.zeros((4, 6), order="F"), np.zeros((4, 12))[:, ::2]):
            x = everyone[rank].reshape(4, 6)
            with mpiagg.allreduce_init(x, out=out, comm=comm, algorithm=algorithm) as plan:
                assert plan() is out
                assert np.array_equal(out, sum(everyone).reshape(4, 6))
            assert np.array_equal(x.reshape(-1), everyone[rank])
            out[:] = x
            with mpiagg.allreduce_init(out, out=out, comm=comm, algorithm=algorithm) as plan:
                assert plan() is out
                assert np.array_equal(out, sum(everyone).reshape(4, 6))
                plan()
                assert np.array_equal(out, size * sum(everyone).reshape(4, 6))


@pytest.mark.parametrize("dtype", ["e", "f", "i", "?", "G"])
def test_the_bits_of_the_simulation(comm, rank, vectors, compare, dtype):
    inputs = vectors(dtype, 17)
    op = "max" if dtype == "?" else "sum"
    for algorithm, lanes in product(mpiagg.algorithms("allreduce"), (1, 2)):
        with mpiagg.allreduce_init(inputs[rank], op, comm=comm, algorithm=algorithm, lanes=lanes) as plan:
            compare(plan(), inputs, op, algorithm, lanes)


@pytest.mark.parametrize(("first", "second"), [("ring", "ring"), ("tree", "direct"), ("circulant", "native")])
def test_two_plans_under_way_may_end_in_either_order(comm, rank, size, first, second):
    x, y = np.full(9, float(rank)), np.full(5, 1.0 + rank)
    a = mpiagg.allreduce_init(x, comm=comm, algorithm=first)
    b = mpiagg.allreduce_init(y, comm=comm, algorithm=second, lanes=2)
    for turn in range(6):
        # The ranks start and wait in orders of their own.
        for plan in (a, b) if (turn + rank) % 2 else (b, a):
            plan.start()
        for plan in (a, b) if (turn + rank // 2) % 2 else (b, a):
            plan.wait(meanwhile=(a, b))
        assert a.result.tolist() == [size * (size - 1) / 2] * 9
        assert b.result.tolist() == [size * (size + 1) / 2] * 5
    a.free()
    b.free()


def test_the_plan_that_was_started_last_may_be_waited_for_first(comm, rank, size):
    with (
        mpiagg.allreduce_init(np.full(9, float(rank)), comm=comm, algorithm="ring") as first,
        mpiagg.allgather_init(rank, comm=comm, algorithm="direct") as second,
    ):
        for _ in range(3):
            first.start()
            second.start()
            assert second.wait().tolist() == list(range(size))
            assert first.wait().tolist() == [size * (size - 1) / 2] * 9


def test_blocking_calls_beside_a_plan_under_way(comm, size):
    with mpiagg.allreduce_init(np.ones(50), comm=comm, algorithm="ring") as plan:
        plan.start()
        for _ in range(3):
            # Its peers may wait for the plan's messages meanwhile; they are sent or kept by the MPI library.
            assert np.array_equal(mpiagg.allreduce(np.ones(4), comm=comm, algorithm="tree"), np.full(4, float(size)))
        assert np.array_equal(plan.wait(), np.full(50, float(size)))


# -- misuse


def test_use_after_free(comm, size):
    plan = mpiagg.allreduce_init(np.ones(3), comm=comm, algorithm="ring")
    assert plan().tolist() == [size] * 3
    plan.free()
    plan.free()
    for use in (plan, plan.start, plan.test, plan.wait):
        with pytest.raises(mpiagg.PlanError, match=r"^allreduce by ring: the plan is freed$"):
            use()


def test_started_twice(comm, size):
    plan = mpiagg.allreduce_init(np.ones(3), comm=comm, algorithm="ring", lanes=2)
    plan.start()
    if not plan.test():
        for use in (plan, plan.start, plan.free):
            with pytest.raises(mpiagg.PlanError, match=r"^allreduce by ring: the plan is running; wait for it first$"):
                use()
    assert plan.wait().tolist() == [size] * 3
    assert plan.wait().tolist() == [size] * 3
    assert plan.test()
    plan.free()


def test_a_plan_that_waits_for_a_peer_is_running(comm, rank, size):
    # Rank 0 can see its plan run, since rank 1 starts only after it was told to.
    if size > 1:
        plan = mpiagg.broadcast_init(np.full(3, float(rank)), root=1, comm=comm, algorithm="parameter_server")
        if rank == 0:
            plan.start()
            assert not plan.test()
            for use in (plan, plan.start, plan.free):
                with pytest.raises(
                    mpiagg.PlanError, match=r"^broadcast by parameter_server: the plan is running; wait"
                ):
                    use()
        comm.Barrier()
        if rank:
            plan.start()
        assert plan.wait().tolist() == [1.0] * 3
        plan.free()


def test_leaving_the_block_frees_the_plan(comm):
    with mpiagg.allreduce_init(np.ones(3), comm=comm) as plan:
        assert id(plan) in channel_of(comm).open
    assert id(plan) not in channel_of(comm).open
    with pytest.raises(mpiagg.PlanError, match="the plan is freed"):
        plan()
    with pytest.raises(RuntimeError, match="the user's"), mpiagg.allreduce_init(np.ones(3), comm=comm) as plan:
        raise RuntimeError("the user's")
    assert id(plan) not in channel_of(comm).open


# -- the deadline


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_peer_that_does_not_come_is_named_and_may_come_late(comm, rank, size, lanes):
    if size == 1:
        assert mpiagg.broadcast(np.ones(1), comm=comm).tolist() == [1]
        return
    # Every rank but the root waits for the root, which waits at the barrier until all have given up.
    x = np.full(10, 7.0 if rank == 0 else 0.0)
    plan = mpiagg.broadcast_init(x, root=0, comm=comm, algorithm="parameter_server", lanes=lanes)
    if rank:
        plan.timeout = 0.01
        plan.start()
        message = f"{80 // lanes} bytes to arrive from rank 0"
        words = f"^waited 0.01 s in vain for broadcast by parameter_server, round 0: {message}\n"
        for _ in range(2):
            with pytest.raises(mpiagg.StallError, match=words) as caught:
                plan.wait()
            assert isinstance(caught.value, TimeoutError)
    comm.Barrier()
    if not rank:
        plan.start()
    plan.timeout = 50
    assert plan.wait().tolist() == [7.0] * 10
    plan.free()


def test_a_call_that_stalls_leaves_a_plan_that_says_so(world, rank, size):
    if size == 1:
        assert mpiagg.broadcast(np.ones(1)).tolist() == [1]
        return
    comm = world.Dup()
    plan = mpiagg.broadcast_init(np.full(3, float(rank)), root=0, comm=comm, algorithm="parameter_server")
    if rank:
        plan.timeout = 0.01
        with pytest.raises(mpiagg.StallError, match="24 bytes to arrive from rank 0"):
            plan()
        for use in (plan, plan.start, plan.test, plan.wait, plan.free):
            with pytest.raises(mpiagg.PlanError, match="an error has left the plan in the middle of its run"):
                use()
    world.Barrier()
    if not rank:
        plan()
    # The messages arrive, so that the job can end; the plan and its communicator stay as they are.
    for release in plan._releases:
        if rank:
            release.__self__.Wait()
    plan._idle = True
    plan.free()
    comm.Free()


def test_a_started_plan_in_which_something_raises_is_not_done(world, size):
    if size == 1:
        assert mpiagg.allreduce(np.ones(1)).tolist() == [1]
        return
    comm = world.Dup()
    plan = mpiagg.allreduce_init(np.full(size, 3e38, np.float32), comm=comm, algorithm="direct")

    def run():
        plan.start()
        plan.wait()

    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        run()
    for use in (plan, plan.start, plan.test, plan.wait, plan.free):
        with pytest.raises(mpiagg.PlanError, match="an error has left the plan in the middle of its run"):
            use()
    world.Barrier()
    plan._idle = True  # every rank has failed where no message was under way, so that this one can be freed
    plan.free()
    comm.Free()


# -- memory


@pytest.mark.few_ranks
@pytest.mark.parametrize("algorithm", [*mpiagg.algorithms("allreduce"), "native"])
def test_the_steady_state_allocates_nothing(comm, algorithm):
    x = np.ones(20_000)
    with (
        mpiagg.allreduce_init(x, "max", comm=comm, out=x, algorithm=algorithm) as one_lane,
        mpiagg.allreduce_init(x, "max", comm=comm, out=x, algorithm=algorithm, lanes=2) as two_lanes,
    ):
        run(one_lane, two_lanes, times=3)
        tracemalloc.start()
        try:
            fill_recorder()
            run(one_lane, two_lanes, times=5)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            run(one_lane, two_lanes, times=10)
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert after - before < 1000
    assert peak - before < 10_000  # the vector has 160,000 bytes, and a chunk at least 20,000
    assert x.tolist() == [1.0] * x.size


def run(*plans, times):
    for _ in range(times):
        for plan in plans:
            plan()


@pytest.mark.parametrize("algorithm", mpiagg.algorithms("allreduce"))
def test_scratch_is_what_the_schedule_counts(comm, rank, size, algorithm):
    from mpiagg.schedules import TABLE, Collective, check

    length = 840 * 4  # divisible by every number of chunks up to 8
    counted = check(algorithm, "allreduce", size)[rank].scratch
    rounds = TABLE[algorithm].schedule(Collective.ALLREDUCE, rank, size)
    pieces = ([step for steps in a_round.messages if len(steps) > 1 for step in steps] for a_round in rounds)
    packed = max((sum(step.count for step in steps) for steps in pieces), default=0)
    # The next round uses the room of as many messages again.
    x = np.ones(length)
    with mpiagg.allreduce_init(x, comm=comm, out=x, algorithm=algorithm) as plan:
        if not TABLE[algorithm].shares or size == 1:
            chunk = x.nbytes // TABLE[algorithm].chunks(Collective.ALLREDUCE, size)
            assert counted * chunk <= plan.nbytes <= (counted + 2 * packed) * chunk
        else:  # two mailboxes instead, of a size that serves other lengths too, and a barrier
            assert 2 * x.nbytes <= plan.nbytes - 64 <= 4 * x.nbytes


# -- plans that are kept


def test_kept_plans_stay_within_their_limits(comm, size, monkeypatch):
    channel = channel_of(comm)
    monkeypatch.setattr(kept, "MOST", 16)
    monkeypatch.setattr(kept, "MOST_BYTES", 400_000)
    arrays = []
    for length in [*range(1, 30), *range(6000, 6030), *range(1, 30), 200_000]:
        x = np.ones(length)
        arrays.append(x)  # so that each has an address of its own
        assert mpiagg.allreduce(x, out=x, comm=comm, algorithm="recursive_doubling")[-1] == size
        assert 1 <= len(channel.calls) <= 16
        assert len(channel.open) == len(kept_plans(channel)) <= 16
        total = sum(plan.nbytes for plan in kept_plans(channel))
        assert total <= 400_000 or len(kept_plans(channel)) == 1


def test_a_kept_plan_is_found_again(comm, size):
    channel = channel_of(comm)
    x = np.ones(10_000)
    for _ in range(5):
        x[:] = 1
        mpiagg.allreduce(x, out=x, comm=comm, algorithm="ring")
        assert np.array_equal(x, np.full(10_000, float(size)))
    assert len(kept_plans(channel)) == 1
    for _ in range(5):
        assert mpiagg.allreduce(np.ones(7), comm=comm, algorithm="ring").tolist() == [size] * 7
    assert len(kept_plans(channel)) == 2


def test_an_array_in_the_place_of_a_freed_one(comm, rank, size):
    # The plan outlives the array that it was made for; another one of the same length may get its memory.
    places = set()
    for turn in range(20):
        x = np.full(100_000, float(rank + turn))
        places.add(x.ctypes.data)
        mpiagg.allreduce(x, out=x, comm=comm, algorithm="ring")
        assert np.array_equal(x, np.full(100_000, size * (size - 1) / 2 + turn * size))
        del x
    y = np.full(100_000, rank, "f4")
    assert np.array_equal(mpiagg.allreduce(y, comm=comm, algorithm="ring"), np.full(100_000, size * (size - 1) // 2))


def test_results_of_calls_are_not_the_plans_own(comm, rank):
    first = mpiagg.allreduce(np.full(4, 1.0 + rank), comm=comm)
    before = first.copy()
    second = mpiagg.allreduce(np.full(4, 100.0), comm=comm)
    assert np.array_equal(first, before)
    assert not np.shares_memory(first, second)


@pytest.mark.parametrize("at_once", [False, True])
def test_what_a_rank_has_sent_arrives_while_it_waits(comm, at_once):
    """The last rank comes to the collective when it has received a message, which others bring forward meanwhile."""
    if comm.size == 1:
        return
    last, message = comm.size - 1, np.zeros(2**19)
    buffer = bytearray(message.nbytes + 2 * MPI.BSEND_OVERHEAD)
    x, out = np.full(2000, 1.0), np.empty(2000)
    with mpiagg.allreduce_init(x, out=out, comm=comm, timeout=20) as plan:
        plan()
        if comm.rank == last:
            for rank in range(last):
                comm.Recv(message, rank)
        else:
            MPI.Attach_buffer(buffer)
            comm.Bsend(message, last)
        if at_once:
            plan()
        else:
            plan.start()
            plan.wait()
        if comm.rank != last:
            MPI.Detach_buffer()
    assert np.all(out == comm.size)


@pytest.mark.parametrize("length", [1, 2000, 100_000])
@pytest.mark.parametrize(
    "collective", [*dict.fromkeys(name for name, _ in EVERY), "gather", "scatter", "alltoall", "scan"]
)
def test_an_array_may_lie_at_an_odd_address(comm, rank, size, collective, length):
    values = np.arange(size * length, dtype="f4").reshape(size, length) % 10 + rank
    room = np.zeros(values.nbytes + 1, "u1")
    x = np.ndarray(values.shape, "f4", room, 1 if rank == size - 1 else 0)
    x[:] = values
    wanted = getattr(mpiagg, collective)(values, comm=comm)
    assert agrees(getattr(mpiagg, collective)(x, comm=comm), wanted)
    with init(collective, x, comm=comm) as plan:
        assert agrees(plan(), wanted)
    assert np.array_equal(x, values)
