"""Sets of the ranks of the job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from mpi4py import MPI

from mpiagg.horovod.engine import Engine
from mpiagg.horovod.exceptions import InvalidRequestError
from mpiagg.horovod.requests import TensorRequest, Terms

DYNAMIC: Final = "HOROVOD_DYNAMIC_PROCESS_SETS"
"""The environment variable that allows process sets to be added and removed after ``init``."""


class ProcessSet:
    """Some ranks of the job, among which collectives can be done.

    Parameters
    ----------
    ranks_or_comm : iterable of int or MPI.Comm
        The ranks, or a communicator of them.

    Attributes
    ----------
    process_set_id : int or None
        Its number; None as long as it is not added.
    ranks : list of int or None
        The ranks in the job, in order.
    mpi_comm : MPI.Comm or None
        The communicator that it was made from.

    Examples
    --------
    >>> first = hvd.ProcessSet([0])
    >>> first.ranks
    [0]
    >>> if size > 1:  # a set of all ranks is there already
    ...     first = hvd.add_process_set(first)
    ...     if first.included():
    ...         total = hvd.allreduce(torch.ones(2), process_set=first)
    ...     removed = hvd.remove_process_set(first)
    """

    def __init__(self, ranks_or_comm: Iterable[int] | MPI.Comm) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm = ranks_or_comm if isinstance(ranks_or_comm, MPI.Comm) else None
        self.ranks: list[int] | None = None
        if not isinstance(ranks_or_comm, MPI.Comm):
            self.ranks = sorted(map(int, ranks_or_comm))
            if len(self.ranks) != len(set(self.ranks)):
                raise ValueError(f"a process set has a rank twice: {self.ranks}")

    def initialized(self) -> bool:
        """Whether it is one of the job's sets.

        Returns
        -------
        bool
            Whether it was added, and not removed since.
        """
        return self.process_set_id is not None

    def included(self) -> bool | None:
        """Return whether this rank is in it.

        Returns
        -------
        bool or None
            Whether this rank is in it; None as long as its ranks are not known, which are a communicator's.
        """
        return None if self.ranks is None else state().base.rank in self.ranks

    def size(self) -> int | None:
        """Return how many ranks it has.

        Returns
        -------
        int or None
            The number of ranks; None before it is added.
        """
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank's number in it.

        Returns
        -------
        int or None
            The number, from 0 on; None before it is added.

        Raises
        ------
        ValueError
            If this rank is not in it.
        """
        return None if self.process_set_id is None else engine_of(self).rank

    def __repr__(self) -> str:
        """Say it in words."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalSet(ProcessSet):
    """All ranks; it is a set as long as Horovod is initialised."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0


global_process_set: Final = _GlobalSet()
"""The set of all ranks."""


class WorldState:
    """What there is between ``init`` and ``shutdown``; making one is collective."""

    def __init__(self, comm: MPI.Intracomm, *, dynamic: bool) -> None:
        self.base = comm.Dup()
        self.dynamic = dynamic
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        self.local_rank, self.local_size = node.rank, node.size
        node.Free()
        cross = comm.Split(self.local_rank, comm.rank)
        self.cross_rank, self.cross_size = cross.rank, cross.size
        cross.Free()
        self.homogeneous = len(set(comm.allgather(self.local_size))) == 1
        self.engines = {0: Engine(comm)}
        self.sets: dict[int, ProcessSet] = {0: global_process_set}
        self._next = 1
        global_process_set.ranks = list(range(comm.size))

    def add(self, process_set: ProcessSet) -> None:
        """Make a set one of the job's; collective among all ranks."""
        if process_set.process_set_id is not None:
            raise ValueError(f"{process_set} is added already")
        if process_set.mpi_comm is not None:
            if process_set.mpi_comm == MPI.COMM_NULL:
                raise ValueError("give the ranks of a process set where this rank is not in its communicator")
            group, own = process_set.mpi_comm.Get_group(), self.base.Get_group()
            process_set.ranks = sorted(group.Translate_ranks(list(range(group.size)), own))
            group.Free()
            own.Free()
        ranks = process_set.ranks or []
        if not ranks or not all(0 <= rank < self.base.size for rank in ranks):
            raise ValueError(f"a process set has ranks from 0 to {self.base.size - 1}, not {ranks}")
        if any(each.ranks == ranks for each in self.sets.values()):
            raise ValueError(f"A process set with the same ranks has already been added: {ranks}")

        def task() -> None:
            member = self.base.rank in ranks
            comm = self.base.Split(0 if member else MPI.UNDEFINED, self.base.rank)
            if member:
                self.engines[self._next] = Engine(MPI.Intracomm(comm))
                comm.Free()

        self._together(f"add a process set of {ranks}", task)
        self.sets[self._next] = process_set
        process_set.process_set_id = self._next
        self._next += 1

    def remove(self, process_set: ProcessSet) -> None:
        """Take a set from the job's; collective among all ranks."""
        number = process_set.process_set_id
        assert number is not None
        self._together(f"remove process set {number}", lambda: None)
        if number in self.engines:
            self.engines.pop(number).end()
        del self.sets[number]
        process_set.process_set_id = None

    def _together(self, words: str, task: Any) -> None:
        engine = self.engines[0]
        engine.wait(engine.submit(TensorRequest(Terms("process sets", "process sets", words=words), task=task)))

    def end(self, *, to_restart: bool = False) -> None:
        """End all sets; collective. What not all ranks have asked for fails."""
        for engine in self.engines.values():  # others may be waiting in any of them
            engine.begin_to_end(to_restart=to_restart)
        for number in sorted(self.engines, reverse=True):
            self.engines[number].end()
        for each in self.sets.values():
            each.process_set_id = None
        global_process_set.process_set_id = 0

    def free(self) -> None:
        """Free the communicator of all ranks, when the sets have ended; collective."""
        if not MPI.Is_finalized():
            self.base.Free()


STATE: list[WorldState] = []
"""What there is between ``init`` and ``shutdown``: one, or none."""


def state() -> WorldState:
    """Return what there is between ``init`` and ``shutdown``.

    Raises
    ------
    ValueError
        If there is nothing.
    """
    if not STATE:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return STATE[0]


def engine_of(process_set: ProcessSet) -> Engine:
    """Return who brings together what the ranks of a set ask for.

    Raises
    ------
    InvalidRequestError
        If the set is not added, or this rank is not in it.
    """
    found = state().engines.get(-1 if process_set.process_set_id is None else process_set.process_set_id)
    if found is None:
        why = "is not added" if process_set.process_set_id is None else f"does not include rank {state().base.rank}"
        raise InvalidRequestError(f"{process_set} {why}")
    return found


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a set of ranks; collective among all ranks.

    Parameters
    ----------
    process_set : ProcessSet or sequence of int
        The set, or its ranks.

    Returns
    -------
    ProcessSet
        The set.

    Raises
    ------
    ValueError
        If sets cannot be added, or there is one of these ranks.

    Examples
    --------
    >>> if size > 1:
    ...     last = hvd.add_process_set([size - 1])
    ...     assert last.included() == (rank == size - 1)
    ...     removed = hvd.remove_process_set(last)
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _dynamic().add(made)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set of ranks; collective among all ranks.

    Parameters
    ----------
    process_set : ProcessSet
        The set.

    Returns
    -------
    bool
        Whether it was one that can be removed: the set of all ranks cannot.

    Raises
    ------
    ValueError
        If sets cannot be removed.

    Examples
    --------
    >>> hvd.remove_process_set(hvd.global_process_set)
    False
    """
    found = _dynamic()
    if process_set.process_set_id in (None, 0):
        return False
    found.remove(process_set)
    return True


def _dynamic() -> WorldState:
    if not state().dynamic:
        raise ValueError(f'set {DYNAMIC}=1, or call init(process_sets="dynamic"), to add and remove process sets')
    return state()


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each set.

    Returns
    -------
    dict
        For each set's number a list of its ranks; the set of all ranks has number 0.

    Raises
    ------
    ValueError
        Before :func:`init`.

    Examples
    --------
    >>> hvd.get_process_set_ids_and_ranks()[0] == list(range(size))
    True
    """
    return {number: list(each.ranks or []) for number, each in state().sets.items()}
