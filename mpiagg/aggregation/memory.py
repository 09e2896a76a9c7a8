"""Aggregations that keep something for each list of tensors from one call to the next, such as what was not sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from mpi4py import MPI

from mpiagg.aggregation.base import Aggregation, expect_keys
from mpiagg.aggregation.packing import TensorLayout, describe_layout, layout_of
from mpiagg.aggregation.resharding import resharded
from mpiagg.arrays import HOST, Array, load, settle, to_host
from mpiagg.common.arguments import check_integer
from mpiagg.plans.plan import Plan
from mpiagg.transport import free_if_over


class AggregationMemory(ABC):
    """What an aggregation keeps for one list of tensors.

    Attributes
    ----------
    tensors : sequence of numpy.ndarray
        The tensors that the plan aggregates when it runs next.
    plan : Plan
        Aggregates the tensors, in place. Its ``sent_bytes`` are those of its last run.
    counters : tuple of str
        Which attributes are integers of at least 0 that are part of the state, the same on all ranks.
    """

    counters: ClassVar[tuple[str, ...]] = ()
    tensors: Sequence[Array]
    plan: Plan[None]

    @abstractmethod
    def kept(self) -> dict[str, list[Array]]:
        """Return the lists of arrays that are kept, by name."""

    def kept_at(self, counts: Mapping[str, int]) -> dict[str, list[Array]]:
        """Return those that are kept when the counters are these, where that depends on them."""
        del counts
        return self.kept()

    def more(self) -> dict[str, Any]:
        """Return what else is part of the state, by name."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the counters, copies of what is kept, and what else is part of the state."""
        counts = self._counts
        copies = {name: [to_host(x) for x in arrays] for name, arrays in self.kept_at(counts).items()}
        return {**counts, **self.more(), **copies}

    @property
    def _counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.counters}

    def check_state(self, state: Mapping[str, Any]) -> str:
        """Raise ValueError or TypeError if this is not what :meth:`state` returns.

        Return in words what of it must be the same on all ranks, if anything must.
        """
        expect_keys(state, (*self.counters, *self.more(), *self.kept_at(self._counts)))
        counts = {name: check_integer(name, state[name], 0) for name in self.counters}
        for name, arrays in self.kept_at(counts).items():
            check_arrays(name, state[name], arrays)
        return ", ".join(f"{name} {count}" for name, count in counts.items())

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` returned."""
        counts = {name: int(state[name]) for name in self.counters}
        for name, count in counts.items():
            setattr(self, name, count)
        for name, arrays in self.kept_at(counts).items():
            for own, saved in zip(arrays, state[name], strict=True):
                load(own, saved)


M = TypeVar("M", bound=AggregationMemory)


@dataclass(frozen=True)
class _Entry(Generic[M]):
    """A memory, and the plan by which callers use it."""

    layout: TensorLayout
    memory: M
    plan: Plan[None]


class Remembering(Aggregation, Generic[M]):
    """An aggregation with a memory for each list of tensors.

    :meth:`aggregate` has one memory for each layout: lists of the same dtypes and shapes are taken for the same
    tensors. :meth:`aggregate_init` makes a new memory for each plan; it goes with the plan. A state holds them in the
    order in which they were made, and is given to memories in that order, also to those that are yet to be made.

    Attributes
    ----------
    averaged : tuple of str
        Which lists of arrays in the state of a memory count by the mean over the ranks, and go on as that mean on
        another number of ranks; what is in no such list must be the same on all ranks.
    """

    averaged: ClassVar[tuple[str, ...]] = ()

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        super().__init__(comm)
        self._entries: list[_Entry[M]] = []
        self._by_layout: dict[TensorLayout, M] = {}
        self._pending: list[Mapping[str, Any]] = []

    @abstractmethod
    def _new_memory(self, layout: TensorLayout, tensors: Sequence[Array]) -> M:
        """Return an empty memory for tensors of a layout on which the ranks have agreed; all ranks do so together."""

    def aggregate(self, tensors: Sequence[Array]) -> None:
        """Aggregate every array of the list, in place; see :meth:`Aggregation.aggregate`.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray
            As for :meth:`Aggregation.aggregate`.
        """
        self._require_open()
        layout = layout_of(tensors)
        with self._channel.one_thread:
            if layout not in self._by_layout:
                memory = self._by_layout[layout] = self._remember(tensors)
                self._entries.append(_Entry(layout, memory, memory.plan))
            memory = self._by_layout[layout]
            self._run(memory, tensors)
            memory.tensors = ()

    def aggregate_init(self, tensors: Sequence[Array]) -> Plan[None]:
        """Plan the aggregation of arrays that stay where they are; see :meth:`Aggregation.aggregate_init`.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray
            As for :meth:`Aggregation.aggregate`.
        """
        memory = self._remember(tensors)
        plan = self._plan_of(memory, tensors)
        self._entries.append(_Entry(layout_of(tensors), memory, plan))
        return plan

    def _run(self, memory: M, tensors: Sequence[Array]) -> None:
        """Aggregate tensors of a memory's layout, in place, once they are found good."""
        self._check_tensors(tensors, self._check_dtype)
        memory.tensors = tensors
        memory.plan()

    def _plan_of(self, memory: M, tensors: Sequence[Array]) -> Plan[None]:
        """Return the plan by which callers aggregate the tensors that a memory was made for."""
        del tensors
        return memory.plan

    def _remember(self, tensors: Sequence[Array]) -> M:
        """Return a new memory, with what was loaded for it."""
        layout = self._agree_on_tensors(tensors)
        self._forget()
        memory = self._new_memory(layout, tensors)
        if self._pending:
            try:
                self._channel.agree_on(lambda: _checked(memory, layout, self._pending[0]))
            except Exception:
                memory.plan.free()
                raise
            memory.load(self._pending.pop(0)["state"])
        settle(*tensors)  # what is kept has its first values
        return memory

    def _forget(self) -> None:
        """Let go of the memories whose plans are freed."""
        for entry in self._entries:
            if entry.plan.freed:
                free_if_over(entry.memory.plan)
        self._entries = [entry for entry in self._entries if not entry.plan.freed]

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept for each list of tensors, of this rank alone.

        Returns
        -------
        dict
            ``{"memories": [{"layout": ..., "state": {...}}, ...]}``; arrays are copies.

        Raises
        ------
        PlanError
            If the aggregation is freed, and what it has kept with it.
        """
        self._require_open()
        self._forget()
        own = [{"layout": describe_layout(entry.layout), "state": entry.memory.state()} for entry in self._entries]
        return {"memories": own + deepcopy(self._pending)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned on this rank; collective.

        It may have been on another number of ranks: see ``docs/checkpoints.md``.

        Parameters
        ----------
        state : dict
            What :meth:`state_dict` returned, or what :func:`mpiagg.load_checkpoint` has loaded of it.

        Raises
        ------
        ValueError, TypeError
            If ``state`` is not of such an aggregation, or not of tensors like those it has seen; or if another number
            of ranks has made it, and it is not for these.
        MismatchError
            On all ranks, if the states are of different tensors.
        PlanError
            If the aggregation is freed.
        """
        self._require_open()
        self._forget()
        state = self._carried(state)

        def check() -> str:
            expect_keys(state, ("memories",))
            if not isinstance(state["memories"], list):
                raise TypeError(f"memories must be a list, not {type(state['memories']).__name__}")
            for each in state["memories"]:
                expect_keys(each, ("layout", "state"))
            if len(state["memories"]) < len(self._entries):
                raise ValueError(f"{len(self._entries)} lists of tensors, but {len(state['memories'])} memories")
            words = [str(each["layout"]) for each in state["memories"]]
            for place, entry in enumerate(self._entries):
                words[place] = _checked(entry.memory, entry.layout, state["memories"][place])
            return f"{type(self).__name__} with memories of {'; '.join(words) or 'nothing'}"

        self._channel.agree_on(check)
        for entry, each in zip(self._entries, state["memories"], strict=False):
            entry.memory.load(each["state"])
        self._pending = deepcopy(state["memories"][len(self._entries) :])

    def _carried(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state for these ranks, which others may have made; collective."""
        return resharded(state, type(self).__name__, self.averaged, self._worth(), self.comm)

    def _worth(self) -> float:
        """Return how much the mean of what is ``averaged`` counts for in the results; see :mod:`resharding`."""
        return 1

    def free(self) -> None:
        """Free the plans, those of :meth:`aggregate_init` too; a second call does nothing."""
        super().free()
        self._by_layout.clear()
        while self._entries:
            entry = self._entries.pop()
            free_if_over(entry.plan)
            free_if_over(entry.memory.plan)


def check_arrays(name: str, given: object, wanted: Sequence[Array]) -> None:
    """Raise ValueError if ``given`` is not a list of arrays of the same dtypes and shapes as those wanted."""
    # What is saved are NumPy arrays, wherever what is kept lies.
    theirs, ours = layout_of(given), tuple(form._replace(device=HOST) for form in layout_of(wanted))
    if theirs != ours:
        raise ValueError(f"{name} must be {describe_layout(ours)}, not {describe_layout(theirs)}")


def _checked(memory: AggregationMemory, layout: TensorLayout, each: Mapping[str, Any]) -> str:
    words = describe_layout(layout)
    if each["layout"] != words:
        raise ValueError(f"the memory is of {each['layout']}, not of {words}")
    common = memory.check_state(each["state"])
    return f"{words} ({common})" if common else words
