"""The frame of local SGD: ranks take steps by themselves, and then move a common point by what they differ from it."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, Literal

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.all_reduce import AllReduce
from mpiagg.aggregation.memory import AggregationMemory, Remembering
from mpiagg.aggregation.packing import Packing, TensorLayout
from mpiagg.aggregation.participation import Participation
from mpiagg.arrays import Array, settle
from mpiagg.common.arguments import check_flag, check_integer, check_number
from mpiagg.errors import Error
from mpiagg.plans.background import InBackground
from mpiagg.plans.plan import Plan
from mpiagg.plans.program import Program, in_turn
from mpiagg.transport import free_if_over


class Fragment:
    """Where all ranks were last together, for some of the tensors of a list.

    Attributes
    ----------
    vectors, anchors, velocities, residuals : list of numpy.ndarray
        A vector for each dtype: room for the weights, then for their differences from the anchor, then for the mean of
        these over the ranks; the anchor; the outer optimizer's velocity, if it has momentum; and what this rank has not
        sent of its differences, if that is kept.
    begun, applied : int
        The last call in which an average of them began, and in which one was applied.
    """

    def __init__(
        self,
        members: Sequence[int],
        layout: TensorLayout,
        tensors: Sequence[Array],
        average: Callable[[Sequence[Array], Sequence[Array], Sequence[Sequence[int]]], Plan[None]],
        *,
        momentum: bool,
        feedback: bool,
    ) -> None:
        self._members = members
        self.begun = self.applied = 0
        self._groups = Packing(tuple(layout[index] for index in members), in_place=False).groups
        self.vectors = [group.pack(self._own(tensors)) for group in self._groups]
        self.anchors = [np.zeros_like(vector) for vector in self.vectors]
        self.velocities = [np.zeros_like(vector) for vector in self.vectors] if momentum else []
        self.residuals = [np.zeros_like(vector) for vector in self.vectors] if feedback else []
        self._communication = InBackground(
            average(self.vectors, self.residuals, [group.lengths for group in self._groups])
        )

    def _own(self, tensors: Sequence[Array]) -> list[Array]:
        return [tensors[index] for index in self._members]

    def pack(self, tensors: Sequence[Array]) -> None:
        """Bring the weights into the vectors."""
        for group in self._groups:
            group.pack(self._own(tensors))

    def subtract(self) -> None:
        """Turn the weights in the vectors into the anchors less them."""
        for vector, anchor in zip(self.vectors, self.anchors, strict=True):
            np.subtract(anchor, vector, out=vector)

    def average(self) -> None:
        """Begin to average the vectors over the ranks, for :meth:`wait`."""
        self._communication.start()

    def drive(self) -> None:
        """Bring an average that was begun forward; there may be none."""
        self._communication.test()

    def wait(self) -> None:
        """Wait for an average that was begun; there may be none."""
        self._communication.wait()

    def finish(self) -> None:
        """Wait for an average that is under way, whatever became of earlier ones."""
        if not self._communication.test():
            self._communication.wait()

    def accelerate(self, momentum: float) -> None:
        """Add the differences to the velocities, if there are any."""
        for velocity, difference in zip(self.velocities, self.vectors, strict=False):
            np.multiply(velocity, momentum, out=velocity)
            np.add(velocity, difference, out=velocity)

    def move(self, steps: Sequence[Array], rate: float) -> None:
        """Subtract the rate times the steps from the anchors; the vectors are used up."""
        for anchor, step, room in zip(self.anchors, steps, self.vectors, strict=True):
            np.multiply(step, rate, out=room)
            np.subtract(anchor, room, out=anchor)

    def unpack(self, tensors: Sequence[Array], mixing: float) -> None:
        """Let the weights be the anchors and so much of what they differ from them."""
        own = self._own(tensors)
        for group, vector, anchor in zip(self._groups, self.vectors, self.anchors, strict=True):
            if mixing:
                group.pack(own)
                np.subtract(vector, anchor, out=vector)
                np.multiply(vector, mixing, out=vector)
                np.add(anchor, vector, out=vector)
            else:
                np.copyto(vector, anchor)
            group.unpack(vector, own)

    def free(self) -> None:
        """Free the plan, once it is over; if an error has left it in the middle, it stays."""
        with suppress(Error):
            self.wait()
        free_if_over(self._communication.plan)


class Anchor(AggregationMemory):
    """Where all ranks were last together, for one list of tensors.

    Attributes
    ----------
    tensors : sequence of numpy.ndarray
        The tensors that are averaged next.
    calls : int
        How many calls there have been.
    fragments : list of Fragment
        The parts of the list that are averaged by themselves.
    under_way : callable
        Returns whether the average of a fragment is under way after so many calls.
    plan : Plan
        Does nothing, but what belongs to the fragments goes with it.
    participation : Participation or None
        Who takes part in averages, where not all ranks need to.
    """

    counters = ("calls",)

    def __init__(
        self,
        tensors: Sequence[Array],
        fragments: Sequence[Fragment],
        under_way: Callable[[int, int], bool],
        plan: Callable[[Program], Plan[None]],
    ) -> None:
        self.tensors = tensors
        self.calls = 0
        self.fragments = fragments
        self._under_way = under_way
        self.participation: Participation | None = None
        self.plan = plan(Program((), tuple(fragment.free for fragment in fragments), 0))

    def _arrived(self, calls: int) -> list[Array]:
        """Return the vectors that have averages which are not applied after so many calls."""
        late = [fragment for place, fragment in enumerate(self.fragments) if self._under_way(calls, place)]
        for fragment in late:
            fragment.wait()
        return [x for fragment in late for x in fragment.vectors]

    def kept(self) -> dict[str, list[Array]]:
        """Return what is kept of all fragments."""
        names = "anchors", "velocities", "residuals"
        return {name: [x for fragment in self.fragments for x in getattr(fragment, name)] for name in names}

    def kept_at(self, counts: Mapping[str, int]) -> dict[str, list[Array]]:
        """Return that, and the averages that are not applied then, which are waited for."""
        return {**self.kept(), "arrived": self._arrived(counts["calls"])}

    def check_state(self, state: Mapping[str, Any]) -> str:
        """Raise ValueError if this is not what :meth:`state` returns; return a digest of it."""
        words = super().check_state(state)
        common = (*state["anchors"], *state["velocities"], *state["arrived"])
        digest = zlib.crc32(b"".join(x.tobytes() for x in common))
        return f"{words}, with anchors and velocities of CRC-32 {digest:08x}"

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` returned."""
        for fragment in self.fragments:
            fragment.finish()  # what is under way must not write to what is loaded
        super().load(state)
        for fragment in self.fragments:
            fragment.begun = fragment.applied = 0


def divided(layout: TensorLayout, parts: int) -> list[list[int]]:
    """Return which tensors of a layout are in which of some parts, each about as long: runs of the list."""
    lengths = [int(np.prod(form.shape)) for form in layout]
    total = max(1, sum(lengths))
    members: list[list[int]] = [[] for _ in range(parts)]
    for index, (stop, length) in enumerate(zip(accumulate(lengths), lengths, strict=True)):
        members[min(parts - 1, (2 * stop - length) * parts // (2 * total))].append(index)
    return members


class LocalSteps(Remembering[Anchor]):
    """What methods have in common that average the differences from an anchor every so many steps.

    Subclasses say in :meth:`_averaging` how differences are averaged. See :class:`mpiagg.LocalSGD` for the parameters.

    Attributes
    ----------
    feedback : bool
        Whether residuals are kept.
    """

    aggregates: ClassVar[Literal["gradients", "weights"]] = "weights"
    averaged: ClassVar[tuple[str, ...]] = ("residuals",)
    feedback: bool

    def __init__(
        self,
        comm: MPI.Intracomm | None,
        period: int,
        *,
        warmup_steps: int = 0,
        outer_learning_rate: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = True,
        algorithm: str = "auto",
        fragments: int = 1,
        delay: int = 0,
        mixing: float = 0.0,
        check: Callable[[], str],
    ) -> None:
        super().__init__(comm)
        self.period, self.warmup_steps, self.nesterov = period, warmup_steps, nesterov
        self.outer_learning_rate, self.outer_momentum = outer_learning_rate, outer_momentum
        self.fragments, self.delay, self.mixing = fragments, delay, mixing
        self._channel.agree_on(lambda: f"{self._checked_arguments()}, {check()}")
        self._weights = AllReduce(comm, algorithm=algorithm)

    def _checked_arguments(self) -> str:
        """Check the arguments, and return them in words."""
        self.nesterov = check_flag("nesterov", self.nesterov)
        self.period = check_integer("period", self.period, 1)
        self.warmup_steps = check_integer("warmup_steps", self.warmup_steps, 0)
        self.fragments = check_integer("fragments", self.fragments, 1)
        self.delay = check_integer("delay", self.delay, 0, self.period - 1)
        self.outer_learning_rate = check_number(
            "outer_learning_rate", self.outer_learning_rate, "a number greater than 0", lambda x: x > 0
        )
        for name in ("outer_momentum", "mixing"):
            number = check_number(name, getattr(self, name), "a number from 0 to less than 1", lambda x: 0 <= x < 1)
            setattr(self, name, number)
        kind = "Nesterov" if self.nesterov else "heavy-ball"
        outer = f"learning rate {self.outer_learning_rate}, {kind} momentum {self.outer_momentum}"
        parts = f"{self.fragments} fragments, {self.delay} late, mixed by {self.mixing}"
        return f"{type(self).__name__} of period {self.period} after {self.warmup_steps} steps, {outer}, {parts}"

    @abstractmethod
    def _averaging(
        self, vectors: Sequence[Array], residuals: Sequence[Array], lengths: Sequence[Sequence[int]]
    ) -> Plan[None]:
        """Return the plan that averages differences in place.

        Parameters
        ----------
        vectors : sequence of numpy.ndarray
            The differences, a vector for each dtype.
        residuals : sequence of numpy.ndarray
            As long as the vectors: where is kept what is not sent of them; none if nothing is kept.
        lengths : sequence of sequence of int
            For each vector, how long the tensors in it are.
        """

    def _plan_of(self, memory: Anchor, tensors: Sequence[Array]) -> Plan[None]:
        return self._plan(in_turn(partial(self._run, memory, tensors)))

    def free(self) -> None:
        """Free the plans, once what is under way is over; a second call does nothing."""
        super().free()
        self._weights.free()

    def _new_memory(self, layout: TensorLayout, tensors: Sequence[Array]) -> Anchor:
        fragments = [
            Fragment(
                members,
                layout,
                tensors,
                self._averaging,
                momentum=self.outer_momentum > 0,
                feedback=self.feedback,
            )
            for members in divided(layout, self.fragments)
        ]
        return Anchor(tensors, fragments, self._under_way, self._plan)

    def _due(self, calls: int, place: int) -> bool:
        """Return whether the average of a fragment begins in a call."""
        local = calls - self.warmup_steps
        return calls > 1 and local > 0 and (local - place * self.period // self.fragments) % self.period == 0

    def _under_way(self, calls: int, place: int) -> bool:
        """Return whether the average of a fragment has begun and is not applied after so many calls."""
        return any(self._due(calls - late, place) for late in range(self.delay))

    def _run(self, memory: Anchor, tensors: Sequence[Array]) -> None:
        self._check_tensors(tensors, self._check_dtype)
        memory.tensors = tensors
        calls = memory.calls + 1
        if calls == 1:
            self._meet(memory)
        warming = 1 < calls <= self.warmup_steps
        for place, fragment in enumerate(memory.fragments):
            # A call in which a wait was in vain comes again: what it has begun and applied is not begun anew.
            if (warming or self._due(calls, place)) and fragment.begun != calls:
                fragment.pack(tensors)
                fragment.subtract()
                fragment.average()
                fragment.begun = calls
            if (warming or self._due(calls - self.delay, place)) and fragment.applied != calls:
                fragment.wait()
                self._step(fragment, warming=warming)
                fragment.unpack(tensors, 0 if warming else self.mixing)
                fragment.applied = calls
            fragment.drive()
        memory.calls = calls
        settle(*tensors)

    def _meet(self, memory: Anchor) -> None:
        """Let the average of the weights be the anchor."""
        for fragment in memory.fragments:
            fragment.pack(memory.tensors)
        before = self._weights.bytes_sent
        self._weights.aggregate([vector for fragment in memory.fragments for vector in fragment.vectors])
        self.bytes_sent += self._weights.bytes_sent - before
        for fragment in memory.fragments:
            for anchor, mean in zip(fragment.anchors, fragment.vectors, strict=True):
                np.copyto(anchor, mean)
            fragment.unpack(memory.tensors, 0)

    def _step(self, fragment: Fragment, *, warming: bool) -> None:
        """Move the anchors by the averaged differences."""
        if warming:
            fragment.move(fragment.vectors, 1)
            return
        rate, momentum = self.outer_learning_rate, self.outer_momentum
        fragment.accelerate(momentum)
        if self.nesterov or not momentum:
            fragment.move(fragment.vectors, rate)
        if momentum:
            fragment.move(fragment.velocities, rate * momentum if self.nesterov else rate)
