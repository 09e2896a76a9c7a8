"""A training loop that is stopped, and goes on from its checkpoint; that ranks die is in tests/test_ulfm.py."""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from support import refused

import mpiagg


class Training:
    """Descends a quadratic of each rank's own, with momentum."""

    def __init__(self, comm):
        self.comm = comm
        self.weights, self.velocity = np.zeros(5), np.zeros(5)
        self.steps = []

    def step(self, step):
        gradient = self.weights - np.arange(5) - self.comm.rank - step % 3
        mpiagg.allreduce(gradient, "avg", out=gradient, comm=self.comm)
        self.velocity = 0.9 * self.velocity + gradient
        self.weights -= 0.1 * self.velocity
        self.steps.append(step)

    def state_dict(self):
        return {"weights": self.weights, "velocity": self.velocity}

    def load_state_dict(self, state):
        self.weights, self.velocity = state["weights"].copy(), state["velocity"].copy()


@pytest.fixture
def folder(world, tmp_path_factory):
    """A folder that all ranks share."""
    return world.bcast(str(tmp_path_factory.mktemp("loop")) if world.rank == 0 else None)


def trained(steps, **options):
    with mpiagg.Loop(Training, **options) as loop:
        loop.run(steps)
    return loop


def test_takes_every_step_once(size):
    with mpiagg.Loop(Training) as loop:
        assert loop.trained is None
        loop.run(7)
        assert (loop.step, loop.stopped, loop.failures, loop.comm.size) == (7, False, [], size)
        loop.run(9)
        assert loop.trained.steps == [*range(9)]


def test_a_run_of_no_steps_makes_what_is_trained():
    with mpiagg.Loop(Training) as loop:
        loop.run(0)
        assert loop.trained.steps == []


def test_goes_on_from_a_checkpoint_as_if_nothing_had_happened(folder, bits):
    whole = trained(12)
    first = trained(5, checkpoint=folder)
    second = trained(12, checkpoint=folder)
    assert first.trained.steps + second.trained.steps == [*range(12)]
    assert bits(second.trained.weights) == bits(whole.trained.weights)
    assert trained(12, checkpoint=folder).trained.steps == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(folder, size, bits, number):
    def make(comm):
        training = Training(comm)
        step = training.step

        def signalled(index):
            if comm.rank == size - 1 and index == 3:
                os.kill(os.getpid(), number)
            step(index)

        training.step = signalled
        return training

    before = signal.getsignal(number)
    stopped = mpiagg.Loop(make, checkpoint=folder)
    stopped.run(10)
    assert (stopped.stopped, stopped.step) == (True, 4)
    stopped.free()
    assert signal.getsignal(number) == before
    resumed = trained(10, checkpoint=folder)
    assert (resumed.stopped, resumed.trained.steps) == (False, [*range(4, 10)])
    assert bits(resumed.trained.weights) == bits(trained(10).trained.weights)


def test_a_signal_before_a_run_ends_it_before_its_first_step(folder, rank, size):
    with mpiagg.Loop(Training, checkpoint=folder) as loop:
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        loop.run(5)
        assert (loop.stopped, loop.step) == (True, 0)
        assert mpiagg.load_checkpoint(folder)["step"] == 0
        loop.run(5)  # which has been asked nothing
        assert (loop.stopped, loop.step) == (False, 5)


def test_a_signal_after_the_last_step_changes_nothing(folder, rank):
    class Last(Training):
        def step(self, step):
            super().step(step)
            if step in {4, 7} and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    with mpiagg.Loop(Last, checkpoint=folder) as loop:
        loop.run(5)
        assert (loop.stopped, loop.step) == (False, 5)
        loop.run(8)  # there is something left that can be stopped
        assert (loop.stopped, loop.step) == (True, 5)
        loop.run(8)
        os.kill(os.getpid(), signal.SIGTERM)
        loop.run(8)
        assert (loop.stopped, loop.step) == (False, 8)


def test_loops_share_signals_in_any_order(folder, world):
    before = signal.getsignal(signal.SIGTERM)
    first, second = (mpiagg.Loop(Training, checkpoint=f"{folder}/{name}") for name in "ab")
    first.free()
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    second.run(3)
    assert second.stopped
    second.free()
    assert signal.getsignal(signal.SIGTERM) == before
    refused(ValueError, "commit_every", mpiagg.Loop, Training, checkpoint=folder, commit_every=0)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_a_loop_has_had_is_nobody_else_s(folder):
    before, interval = signal.getsignal(signal.SIGTERM), sys.getswitchinterval()
    loop = mpiagg.Loop(Training, checkpoint=folder)
    loop.run(1)
    # From now on no other thread runs unless this one waits: whoever hears of signals is late.
    sys.setswitchinterval(10)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        loop.free()
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        sys.setswitchinterval(interval)
    time.sleep(0.1)  # in which the job would end


@contextlib.contextmanager
def own_handler():
    """Have SIGTERM handled in a way of the test's own; give the numbers that have come."""
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        yield heard
    finally:
        signal.signal(signal.SIGTERM, before)


def test_loops_that_are_gone_leave_signals_to_who_had_them(folder):
    with own_handler() as heard:
        freed = mpiagg.Loop(Training, checkpoint=folder)
        thread = threading.Thread(target=freed.free)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)  # which only the main thread could have given back
        assert heard == [signal.SIGTERM]
        dropped = mpiagg.Loop(Training, checkpoint=folder)
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(heard) == 1
        del dropped
        gc.collect()
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(heard) == 2


def test_processes_that_are_forked_end_by_signals(folder):
    with mpiagg.Loop(Training, checkpoint=folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks beside threads
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_a_checkpoint_is_saved_every_few_steps(folder):
    class Faulty(Training):
        def step(self, step):
            if step == 8:
                raise ZeroDivisionError
            super().step(step)

    loop = mpiagg.Loop(Faulty, checkpoint=folder, checkpoint_every=3)
    with pytest.raises(ZeroDivisionError):
        loop.run(10)
    loop.free()
    assert trained(10, checkpoint=folder).trained.steps == [*range(6, 10)]


@pytest.mark.parametrize("steps", [6, 4])
def test_what_could_not_be_saved_at_the_end_is_saved_by_the_next_run(folder, rank, world, steps):
    class Odd(Training):
        def state_dict(self):
            return {**super().state_dict(), **odd}

    odd = {"what": object()} if rank == world.size - 1 else {}
    with mpiagg.Loop(Odd, checkpoint=folder) as loop:
        error, words = (TypeError, "what") if odd else (mpiagg.MismatchError, "raised TypeError")
        for _ in range(2):  # it is tried anew each time
            refused(error, words, loop.run, 6)
        with pytest.raises(FileNotFoundError):
            mpiagg.load_checkpoint(folder)
        odd.clear()
        loop.run(steps)
        saved = mpiagg.load_checkpoint(folder)
        assert (loop.step, saved["step"], loop.trained.steps) == (6, 6, [*range(6)])
        assert (saved["state"]["weights"] == loop.trained.weights).all()
        generations = sorted(Path(folder).iterdir())
        loop.run(6)
        assert sorted(Path(folder).iterdir()) == generations  # not once more


def test_signals_are_left_alone_without_a_checkpoint():
    class Looking(Training):
        def step(self, step):
            super().step(step)
            self.handler = signal.getsignal(signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    with mpiagg.Loop(Looking) as loop:
        loop.run(1)
        assert loop.trained.handler == before


def test_an_error_while_loading_does_not_make_it_begin_anew(folder):
    trained(4, checkpoint=folder)

    class Faulty(Training):
        def load_state_dict(self, state):
            if not hasattr(loop, "failed"):
                loop.failed = True
                raise FileNotFoundError("a vocabulary")  # not the checkpoint
            super().load_state_dict(state)

        def free(self):
            freed.append(self)

    freed = []
    loop = mpiagg.Loop(Faulty, checkpoint=folder)
    with pytest.raises(FileNotFoundError, match="a vocabulary"):
        loop.run(2)
    assert mpiagg.load_checkpoint(folder)["step"] == 4
    failed = loop.trained
    loop.run(6)
    assert freed == [failed]
    assert loop.trained.steps == [4, 5]
    loop.free()


def test_methods_may_be_of_any_kind():
    class Wrapper:
        def __init__(self, comm):
            self.inner = Training(comm)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    with mpiagg.Loop(Wrapper) as loop:
        loop.run(2)
    assert loop.trained.steps == [0, 1]


def test_another_checkpoint_is_refused(folder):
    mpiagg.save_checkpoint(folder, {"weights": np.ones(3)})
    loop = mpiagg.Loop(Training, checkpoint=folder)
    refused(ValueError, "not of a Loop", loop.run, 3)
    loop.free()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"commit_every": 0}, "commit_every must be an integer of at least 1"),
        ({"commit_every": 1.5}, "commit_every must be an integer"),
        ({"checkpoint": "x", "checkpoint_every": 0}, "checkpoint_every must be an integer of at least 1"),
        ({"checkpoint_every": 2}, "no checkpoint"),
        ({"respawn": True}, "respawn needs a checkpoint"),
    ],
)
def test_bad_numbers_are_refused(options, words):
    refused(ValueError, words, mpiagg.Loop, Training, **options)


@pytest.mark.parametrize("who", ["all", "last"])
def test_what_cannot_be_trained_is_refused_on_all_ranks(rank, size, who):
    mine = who == "all" or rank == size - 1
    loop = mpiagg.Loop(type if mine else Training)
    words = "a type, which has not step" if mine else rf"rank {size - 1} raised TypeError: make has returned a type"
    refused(TypeError if mine else mpiagg.MismatchError, words, loop.run, 3)
    loop.free()


def test_ranks_that_pass_other_numbers_are_told(rank, size):
    if size > 1:
        refused(mpiagg.MismatchError, "commit_every", mpiagg.Loop, Training, commit_every=1 + (rank == 0))
    loop = mpiagg.Loop(Training)
    refused(ValueError, "steps must be an integer", loop.run, -1)
    if size > 1:
        refused(mpiagg.MismatchError, "Loop.run", loop.run, 5 + (rank == 0))
    loop.free()


def test_without_ulfm_communicators_cannot_be_shrunk(comm):
    duplicate = mpiagg.Comm(comm)
    refused(mpiagg.Error, "mpiexec --with-ft ulfm", duplicate.shrink)
    duplicate.Free()
