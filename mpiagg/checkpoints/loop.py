"""A training loop that goes on when ranks die, and that can be stopped and started again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from mpiagg.checkpoints import load_checkpoint, save_checkpoint, stopping
from mpiagg.checkpoints.newcomers import Newcomers, enter, is_new
from mpiagg.collectives.comm import Comm
from mpiagg.collectives.flags import Flags
from mpiagg.collectives.functions import allreduce
from mpiagg.common.arguments import check_flag, check_integer
from mpiagg.errors import RankFailedError
from mpiagg.transport import channel_of
from mpiagg.transport.channels import leave
from mpiagg.transport.failures import active, all_agree, survivors
from mpiagg.transport.meetings import keep_for_good


class Trained(Protocol):
    """What a :class:`Loop` trains. If it has ``free()``, that is called before another one takes its place."""

    def step(self, step: int) -> object:
        """Take a step of training, the first being number 0; collective."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return all that must be saved to go on from here."""

    def load_state_dict(self, state: Mapping[str, Any]) -> object:
        """Go on from a state, which may be of another number of ranks; collective."""


_METHODS: Final = "step(i), state_dict() and load_state_dict(state)"


class _Commit(NamedTuple):
    """The state after so many steps."""

    step: int
    state: Mapping[str, Any]


class Loop:
    """Trains step by step and continues when ranks fail; making one is collective.

    In a job of Open MPI that was started with ``mpiexec --with-ft ulfm`` the ranks that are left go on when others die:
    on a communicator without them, with an object that ``make`` makes anew, from the last state that all of them have
    kept in memory. A checkpoint outlives the job.

    Parameters
    ----------
    make : callable
        Takes a communicator and returns what is trained on its ranks, with ``step(i)``, ``state_dict()`` and
        ``load_state_dict(state)``; collective. What must be the same on all ranks is for ``load_state_dict`` to
        make so, with :meth:`DDP.broadcast_parameters`, as it is for ``make``.
    comm : MPI.Intracomm, optional
        The ranks, the world by default; the loop works on duplicates.
    commit_every : int
        After how many steps the state is copied in memory, where ranks that die are survived. Two copies are kept.
    checkpoint : str or path, optional
        The folder of a checkpoint, for :func:`save_checkpoint`: :meth:`run` begins with what is there. It is saved when
        :meth:`run` ends. From when the loop is made until it is freed, SIGTERM or SIGUSR1 to any of the ranks ends the
        run that is under way, or else the next one, before further steps are taken; nothing else becomes of them. A
        program that blocks them before (``signal.pthread_sigmask``) keeps those that come while it starts for the loop,
        which unblocks them. A process that is forked has no loop: such a signal ends it.
    checkpoint_every : int, optional
        After how many steps it is saved meanwhile.
    respawn : bool
        Whether ranks are started in the places of those that died, where the others go on: with this program's command
        line, from its beginning. The others train meanwhile. When a new rank has come to make its loop, the state is
        saved to the checkpoint, which is needed for that, and all go on from there on a communicator of all of them.

    Attributes
    ----------
    comm : Comm
        The ranks that are left.
    trained : object
        What ``make`` has returned for them; None before the first :meth:`run`.
    step : int
        How many steps have been taken.
    stopped : bool
        Whether a signal has ended the last :meth:`run` before all steps were taken.
    failures : list of RankFailedError
        What this rank has survived.

    Raises
    ------
    TypeError, ValueError
        For numbers of steps that are not integers above 0.
    MismatchError
        If ranks pass different numbers.

    Examples
    --------
    >>> class Counter:
    ...     def __init__(self, comm):
    ...         self.comm, self.total = comm, np.zeros(1)
    ...     def step(self, step):
    ...         self.total += mpiagg.allreduce(np.ones(1), comm=self.comm)
    ...     def state_dict(self):
    ...         return {"total": self.total}
    ...     def load_state_dict(self, state):
    ...         self.total[:] = state["total"]
    >>> with mpiagg.Loop(Counter) as loop:
    ...     loop.run(steps=3)
    ...     print(loop.step, bool(loop.trained.total == 3 * size))
    3 True
    """

    def __init__(
        self,
        make: Callable[[Comm], Trained],
        comm: MPI.Intracomm | None = None,
        *,
        commit_every: int = 10,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        respawn: bool = False,
    ) -> None:
        def check() -> str:
            check_integer("commit_every", commit_every, 1)
            if checkpoint_every is not None:
                check_integer("checkpoint_every", checkpoint_every, 1)
                if checkpoint is None:
                    raise ValueError("checkpoint_every is given, but no checkpoint")
            if check_flag("respawn", respawn) and checkpoint is None:
                raise ValueError("respawn needs a checkpoint, from which new ranks begin")
            return f"a Loop with {commit_every=}, {checkpoint=}, {checkpoint_every=}, {respawn=}"

        if checkpoint is not None:
            stopping.listen(self)
        self.failures: list[RankFailedError] = []
        try:
            if is_new() and respawn is True:
                self.comm = enter(check)
            else:
                self.comm = self._made(MPI.COMM_WORLD if comm is None else comm, check)
        except BaseException:
            stopping.listen_no_more(self)
            raise
        self._words = check()
        self.trained: Trained | None = None
        self.step = 0
        self.stopped = False
        self._make = make
        self._commit_every = commit_every
        self._checkpoint, self._checkpoint_every = checkpoint, checkpoint_every
        self._commits: list[_Commit] = []
        self._unsaved = False
        self._flags: Flags | None = None
        self._respawn = respawn and active()
        self._wanted = self.comm.Get_size()
        self._newcomers: Newcomers | None = None
        self._growing = False

    def run(self, steps: int) -> None:
        """Train until so many steps are taken in all, those before a checkpoint too; collective.

        A rank that dies costs the steps since the last commit, at most. The last steps are only over when all ranks
        have taken them. What an earlier call has not been able to save is saved, also if no steps are left.

        Parameters
        ----------
        steps : int
            How many, from 0 on; the same on all ranks.

        Raises
        ------
        TypeError, ValueError
            If ``steps`` is not an integer from 0 on; if what ``make`` returns cannot be trained; or if the checkpoint
            cannot be used.
        Exception
            What ``make`` and what it has made raise, but for :class:`RankFailedError`.
        """
        self.stopped = False
        while True:
            if not self._trained_together(steps):
                self._shrink()
            elif self._growing:
                self._grow()
            else:
                break
        if self.stopped:
            stopping.answered(self)

    def free(self) -> None:
        """Give back what the loop holds, its communicator too; collective. A second call does nothing."""
        try:
            if self._newcomers is not None:
                self._newcomers.dismiss()
                self._newcomers = None
            self._free_flags()
            self._commits.clear()
            if self.comm != MPI.COMM_NULL:
                self.comm.Free()
        finally:
            stopping.listen_no_more(self)

    def __enter__(self) -> Loop:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Return the loop."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the loop, unless an error ends it: the other ranks may be elsewhere."""
        if error is None:
            self.free()
        else:
            stopping.listen_no_more(self)

    def _made(self, comm: MPI.Intracomm, check: Callable[[], str]) -> Comm:
        """Return a duplicate of a communicator, of those of its ranks that are alive, if their arguments are right."""
        given, made = comm, None
        while True:
            try:
                channel_of(comm).agree_on(check)
                made = Comm(comm)
            except RankFailedError as error:
                self.failures.append(error)
            if not active() or all_agree(comm, word=made is not None):
                break
            alive = survivors(comm)
            if made is not None:
                made.Free()
            if comm is not given:
                leave(comm)
            comm, made = alive, None
        if comm is not given:
            leave(comm)
        assert made is not None
        return made

    # -- the way through the steps

    def _trained_together(self, steps: int) -> bool:
        """Train, and return whether all ranks that were there have come to the end."""
        survived = False
        try:
            with channel_of(self.comm).failures.told():
                self._train(steps)
            survived = True
        except RankFailedError as error:
            self.failures.append(error)
        return all_agree(self.comm, word=survived) if active() else survived

    def _train(self, steps: int) -> None:
        channel_of(self.comm).agree_on(lambda: f"Loop.run({check_integer('steps', steps, 0)})")
        if self._flags is None:
            self._begin()
        trained, flags = self.trained, self._flags
        assert trained is not None
        assert flags is not None

        def asked() -> bool:
            nothing_new = False, False
            told = flags.share(
                lambda: [
                    stopping.asked(self),
                    self._unsaved,
                    *(self._newcomers.look() if self._newcomers else nothing_new),
                ]
            )
            stop, self._unsaved, ready, given_up = map(bool, told)
            self._growing = ready and not stop and self.step < steps
            if given_up:
                self._newcomers = None
                self._start_missing()
            return stop and self.step < steps

        self._growing = False
        self.stopped = asked()  # before the first step
        if self.step < steps and not self.stopped and not self._growing:
            self._start_missing()
        # There may be but a commit of this state, or saving it may have failed.
        if self.stopped or self._growing or (self._unsaved and self.step >= steps):
            self._save()
        while self.step < steps and not self.stopped and not self._growing:
            trained.step(self.step)
            self.step += 1
            self._unsaved = True
            # All are together here: so commits are one apart at most, and all stop at the same step.
            self.stopped = asked()
            if self.step % self._commit_every == 0:
                self._commit()
            if self.stopped or self._growing or self.step == steps or self._due():
                self._save()

    def _begin(self) -> None:
        """Make what is trained, and go on from the last commit, from the checkpoint, or from its beginning."""
        self._free_trained()
        made = self._make(self.comm)

        def check() -> str:
            if not all(callable(getattr(made, name, None)) for name in ("step", "state_dict", "load_state_dict")):
                raise TypeError(f"make has returned a {type(made).__name__}, which has not {_METHODS}")
            return "what a Loop trains"

        channel_of(self.comm).agree_on(check)
        self.trained = made
        # New ranks do not know how many there were at first.
        self._wanted = int(allreduce(np.array([self._wanted]), "max", comm=self.comm)[0])
        # A rank may have died here before, when some had the first commit and others had not.
        last = np.array([self._commits[-1].step if self._commits else -1])
        common = int(allreduce(last, "min", comm=self.comm)[0])
        self._commits = [commit for commit in self._commits if commit.step == common]
        if self._commits:
            self._load(made, {"step": common, "state": deepcopy(self._commits[0].state)})
        elif (kept := self._saved()) is not None:
            self._load(made, kept)
        # Only now, lest a run after an error train what has not been loaded, and take the place of the checkpoint.
        self._flags = Flags(self.comm, 4)
        self._commit()

    def _saved(self) -> Mapping[str, Any] | None:
        """Return what is in the checkpoint, if there is one."""
        with suppress(FileNotFoundError):
            return None if self._checkpoint is None else load_checkpoint(self._checkpoint, self.comm)
        return None

    def _load(self, made: Trained, kept: Mapping[str, Any]) -> None:
        def check() -> str:
            if set(kept) != {"step", "state"}:
                raise ValueError(f"{self._checkpoint!r} is a checkpoint, but not of a Loop")
            return f"go on from step {check_integer('step', kept['step'], 0)}"

        channel_of(self.comm).agree_on(check)
        made.load_state_dict(kept["state"])
        self.step = kept["step"]

    def _state(self) -> dict[str, Any]:
        assert self.trained is not None
        return {"step": self.step, "state": self.trained.state_dict()}

    def _save(self) -> None:
        if self._checkpoint is not None:
            save_checkpoint(self._checkpoint, self._state(), self.comm)
            self._unsaved = False

    def _commit(self) -> None:
        """Keep the state, and the one before: another rank may not come to keep this one."""
        if active():
            self._commits = [*self._commits[-1:], _Commit(**deepcopy(self._state()))]

    def _due(self) -> bool:
        return self._checkpoint_every is not None and self.step % self._checkpoint_every == 0

    # -- ranks that die, and ranks that come

    def _start_missing(self) -> None:
        """Start ranks in the places of the dead, if that is wanted and they are not on their way; collective."""
        if self._respawn and self._newcomers is None and self.comm.Get_size() < self._wanted:
            self._newcomers = Newcomers(self.comm, self._wanted - self.comm.Get_size())

    def _grow(self) -> None:
        """Go on together with new ranks, from the checkpoint that has just been saved; collective."""
        newcomers, self._newcomers, grown = self._newcomers, None, None
        assert newcomers is not None
        self._free_flags()
        self._free_trained()
        self._commits.clear()
        with suppress(RankFailedError, MPI.Exception):
            grown = newcomers.join(self._words)
        # Only among those of before: a new rank that has not come so far has ended.
        if all_agree(self.comm, word=grown is not None) and grown is not None:
            old, self.comm = self.comm, grown
            leave(old)
        elif grown is not None:
            grown.Revoke()
            keep_for_good(grown)

    def _shrink(self) -> None:
        """Go on without the dead; collective among the living."""
        self._newcomers = None
        self._free_flags()
        self._free_trained()
        old, self.comm = self.comm, self.comm.shrink()
        leave(old)

    def _free_flags(self) -> None:
        if self._flags is not None:
            self._flags.free()
            self._flags = None

    def _free_trained(self) -> None:
        if (free := getattr(self.trained, "free", None)) is not None:
            free()
        self.trained = None
