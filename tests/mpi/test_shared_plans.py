"""Plans and calls through shared memory, many at once and in any order; and errors in the middle of them."""

import signal
from contextlib import suppress
from random import Random

import numpy as np
import pytest
from mpi4py import MPI
from restated import result, same_bits, values
from support import kept_plans

import mpiagg
from mpiagg.transport import SignedBarrier, channel_of

pytestmark = pytest.mark.mpi

LENGTHS = (1, 500, 1024, 5000, 9000, 140_000)


class Running:
    """A plan, what goes into it, and what must come out."""

    def __init__(self, comm, length, *, registered, turn):
        self.comm, self.length, self.turn = comm, length, turn
        self.out = mpiagg.empty(length, comm=comm) if registered else np.empty(length, np.float32)
        self.plan = mpiagg.allreduce_init(self.out, out=self.out, comm=comm, algorithm="shared")
        self.busy = False

    def start(self):
        self.turn += 1
        self.out[:] = values(self.comm.rank, self.length, turn=self.turn % 7)
        self.plan.start()
        self.busy = True

    def check(self):
        self.busy = False
        vectors = [values(rank, self.length, turn=self.turn % 7) for rank in range(self.comm.size)]
        assert same_bits(self.out, result("allreduce", vectors, self.comm.rank)[1])


class Crowd:
    """Plans that are made, started, ended and freed; the same ones on all ranks, but in orders of their own."""

    def __init__(self, comm, seed):
        self.comm = comm
        self.together, self.alone = Random(seed), Random(100 * seed + comm.rank)
        self.plans, self.done = [], []

    def shuffled(self, plans):
        return self.alone.sample(plans, len(plans))

    def some(self, *, busy):
        """Return plans that run, or that do not; the same on all ranks."""
        found = [plan for plan in self.plans if plan.busy == busy]
        return self.together.sample(found, self.together.randint(0, len(found)))

    def make(self):
        length, registered = self.together.choice(LENGTHS), self.together.random() < 0.5
        self.plans.append(Running(self.comm, length, registered=registered, turn=len(self.plans)))

    def start(self):
        for plan in self.shuffled(self.some(busy=False)):
            plan.start()

    def end(self):
        busy = [plan.plan for plan in self.plans if plan.busy]
        for plan in self.shuffled(self.some(busy=True)):
            plan.plan.wait(meanwhile=busy)
            plan.check()

    def call(self):
        length = self.together.choice(LENGTHS)
        vectors = [values(rank, length) for rank in range(self.comm.size)]
        out = mpiagg.allreduce(vectors[self.comm.rank], comm=self.comm, algorithm="shared")
        assert same_bits(out, result("allreduce", vectors, self.comm.rank)[1])

    def leave(self):
        for plan in self.some(busy=False):
            self.plans.remove(plan)
            self.done.append(plan)

    def free(self):
        """Free some of those that are of no more use: each rank others, and when it likes."""
        for plan in self.alone.sample(self.done, self.alone.randint(0, len(self.done))):
            plan.plan.free()
            self.done.remove(plan)


@pytest.mark.parametrize("seed", range(4 if MPI.COMM_WORLD.size <= 4 else 1))
def test_plans_are_made_run_and_freed_in_any_order(comm, seed):
    crowd = Crowd(comm, seed)
    for _ in range(70):
        act = crowd.together.choices([crowd.make, crowd.start, crowd.end, crowd.call, crowd.leave], [6, 6, 4, 2, 2])[0]
        act()
        crowd.free()
    while any(plan.busy for plan in crowd.plans):
        crowd.end()
    for plan in crowd.plans + crowd.done:
        plan.plan.free()
    channel = channel_of(comm)
    assert channel.open.keys() == {id(plan) for plan in kept_plans(channel)}


def test_a_block_is_not_used_again_while_a_plan_may_read_it(comm, rank, size):
    # The last rank starts a plan and reads no further, while the others end it, free it and make new ones.
    x = np.full(1000, 1.0, np.float32)
    for _ in range(3):
        plan = mpiagg.allreduce_init(x, comm=comm, algorithm="shared")
        plan.start()
        slow = rank == size - 1 and size > 1
        if not slow:
            plan.wait()
            plan.free()
        others = []
        for turn in range(4):
            # Making them is collective: the slow rank is in the middle of its plan all the time.
            others.append(mpiagg.allreduce_init(np.full(1000, 7.0 + turn, np.float32), comm=comm, algorithm="shared"))
            assert others[-1]().tolist() == [size * (7.0 + turn)] * 1000
        assert plan.result.tolist() == [size] * 1000 if not slow else plan.wait().tolist() == [size] * 1000
        if slow:
            plan.free()
        for other in others:
            other.free()


# -- errors in the middle


@pytest.fixture
def broken(comm, world):
    """A communicator on which calls may go wrong."""
    yield comm
    # What an error has left running on some ranks keeps nobody from freeing the communicator, or from ending.
    world.Barrier()


ARRAYS = {
    "one shot": (4, False),
    "in place": (9000, True),
    "by mailboxes": (5000, False),
    "two segments": (200_000, False),
}
KINDS = list(ARRAYS) if MPI.COMM_WORLD.size <= 4 else ["in place"]


@pytest.mark.few_ranks
@pytest.mark.parametrize("how", ["error", "Ctrl-C"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_fails_on_one_rank(broken, world, rank, size, monkeypatch, kind, how):  # noqa: PLR0917 - fixtures and parameters
    length, registered = ARRAYS[kind]
    memory = mpiagg.empty(length + 2, comm=broken) if registered else np.empty(length + 2, np.float32)
    memory[:] = 3e38
    mpiagg.allreduce(memory[2:], "max", out=memory[2:], comm=broken)
    if size == 1:
        assert mpiagg.allreduce(memory[:length], comm=broken)[0] == memory[0]
        return
    stops = {"error": FloatingPointError, "Ctrl-C": KeyboardInterrupt}[how]
    if rank == 0 and how == "Ctrl-C":
        monkeypatch.setattr(SignedBarrier, "passed", lambda _: signal.raise_signal(signal.SIGINT))
    x = memory[:length]
    with np.errstate(over="raise" if rank == 0 and how == "error" else "ignore"):
        if rank == 0:
            with pytest.raises(stops):
                mpiagg.allreduce(x, out=x, comm=broken)
        else:
            with suppress(mpiagg.StallError):  # where rank 0 had done all that the others need, they end well
                assert np.isinf(mpiagg.allreduce(x, out=x, comm=broken, timeout=0.05)).all()
    monkeypatch.undo()
    world.Barrier()
    # Rank 0 knows; another may stall once more, before it does.
    x = memory[1 : length + 1]
    with pytest.raises(mpiagg.PlanError if rank == 0 else (mpiagg.PlanError, mpiagg.StallError)):
        mpiagg.allreduce(x, out=x, comm=broken, timeout=0.05)
    for other in (x, memory[2:], np.ones(3, np.float32), np.ones(20_000, np.float32)):
        with pytest.raises(mpiagg.PlanError, match="an error has left"):
            mpiagg.allreduce(other, out=other, comm=broken)
    # What has barriers of its own, or needs none, still works there; and so do other communicators.
    assert mpiagg.allreduce(np.ones(5), comm=broken, algorithm="ring").tolist() == [size] * 5
    with mpiagg.allreduce_init(np.ones(5000), comm=broken, algorithm="shared") as plan:
        assert plan().tolist() == [size] * 5000
    assert mpiagg.allreduce(np.ones(5), comm=world).tolist() == [size] * 5


@pytest.mark.parametrize("registered", [False, True])
def test_a_plan_whose_peers_come_late_goes_on(comm, world, rank, size, registered):
    x = mpiagg.empty(9000, comm=comm) if registered else np.empty(9000, np.float32)
    x[:] = 1
    plan = mpiagg.allreduce_init(x, out=x, comm=comm, algorithm="shared")
    if size > 1:
        if rank:
            plan.timeout = 0.01
            plan.start()
            for _ in range(2):
                with pytest.raises(mpiagg.StallError, match=r"round 0: ranks? 0.* to come\n"):
                    plan.wait()
        world.Barrier()
        if not rank:
            plan.start()
    plan.timeout = 10
    assert (plan.wait() == size if size > 1 else plan() == 1).all()
    plan.free()
