"""Local SGD: ranks train by themselves for a while, and average what they have come to."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.all_reduce import AllReduce
from mpiagg.aggregation.base import expect_keys
from mpiagg.aggregation.memory import Remembering, check_arrays
from mpiagg.aggregation.packing import Layout, Packing
from mpiagg.arrays import Array, check_wire_dtype, load, settle, to_host
from mpiagg.common.arguments import check_flag, check_integer, check_number
from mpiagg.plans.plan import Plan
from mpiagg.plans.program import in_turn


class Anchor:
    """Where all ranks were last together, for one list of tensors.

    Attributes
    ----------
    tensors : sequence of numpy.ndarray
        The tensors that are averaged next.
    calls : int
        How many calls there have been.
    vectors, anchors, velocities : list of numpy.ndarray
        A vector for each dtype: room for the weights, then for their differences from the anchor; the anchor; and the
        outer optimizer's velocity, if it has momentum.
    plan : Plan
        Averages the vectors over the ranks.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[Array],
        average: Callable[[Sequence[Array]], Plan[None]],
        *,
        momentum: bool,
    ) -> None:
        self.tensors = tensors
        self.calls = 0
        self._groups = Packing(layout, in_place=False).groups
        self.vectors = [group.pack(tensors) for group in self._groups]
        self.anchors = [np.zeros_like(vector) for vector in self.vectors]
        self.velocities = [np.zeros_like(vector) for vector in self.vectors] if momentum else []
        self.plan = average(self.vectors)

    def pack(self) -> None:
        """Bring the weights into the vectors."""
        for group in self._groups:
            group.pack(self.tensors)

    def subtract(self) -> None:
        """Turn the weights in the vectors into the anchors less them."""
        for vector, anchor in zip(self.vectors, self.anchors, strict=True):
            np.subtract(anchor, vector, out=vector)

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

    def unpack(self) -> None:
        """Bring the anchors into the weights."""
        for group, vector, anchor in zip(self._groups, self.vectors, self.anchors, strict=True):
            np.copyto(vector, anchor)
            group.unpack(vector, self.tensors)

    def state(self) -> dict[str, Any]:
        """Return copies of what is kept."""
        kept = {"anchors": self.anchors, "velocities": self.velocities}
        return {"calls": self.calls, **{name: [to_host(x) for x in vectors] for name, vectors in kept.items()}}

    def check_state(self, state: Mapping[str, Any]) -> str:
        """Raise ValueError if this is not what :meth:`state` returns; return a digest of it."""
        expect_keys(state, ("calls", "anchors", "velocities"))
        check_integer("calls", state["calls"], 0)
        check_arrays("anchors", state["anchors"], self.anchors)
        check_arrays("velocities", state["velocities"], self.velocities)
        digest = zlib.crc32(b"".join(x.tobytes() for x in (*state["anchors"], *state["velocities"])))
        return f"after {state['calls']} calls, with anchors and velocities of CRC-32 {digest:08x}"

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` returned."""
        self.calls = int(state["calls"])
        for own, loaded in zip(self.anchors + self.velocities, state["anchors"] + state["velocities"], strict=True):
            load(own, loaded)


class LocalSGD(Remembering[Anchor]):
    """Let every rank take some steps by itself, then go on from the average of where they have come to.

    Call ``aggregate(weights)`` after every step of the local optimizer. All ranks start from a common point, the
    anchor. In every ``period``-th call the difference d between the anchor and the weights is averaged over the ranks,
    an outer optimizer takes it for a gradient and moves the anchor, and all weights are set to the anchor. With an
    outer learning rate of 1 and no momentum, that is the average of the weights.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The ranks; the world by default.
    period : int
        Average in every so-manieth call; the calls between only count.
    warmup_steps : int
        In so many calls at the beginning, average each time, and leave the outer optimizer out. The period begins
        after them.
    outer_learning_rate : float
        The outer optimizer's, greater than 0.
    outer_momentum : float
        The outer optimizer's, from 0 to less than 1: v <- momentum v + d.
    nesterov : bool
        Whether the anchor moves by d + momentum v (Nesterov's momentum) or by v, each times the learning rate.
    wire : {None, "fp16", "bf16", "u8", "u4", "u2", "exact"}
        How the differences travel; as for :class:`AllReduce`.
    algorithm : str
        As for :class:`AllReduce`.

    Raises
    ------
    ValueError
        For an argument out of its range, or an unknown wire or algorithm.
    MismatchError
        On all ranks, if they disagree on any argument.

    Notes
    -----
    All ranks have the same anchor, bit for bit, and after an average the same weights. The first call with a layout
    averages the weights themselves, in full precision, also with a wire: the average is the anchor. Weights of
    float16 and bfloat16 are kept and averaged in float32.

    Each list of tensors counts its own calls; lists of one layout are taken for the same tensors. A plan of
    :meth:`aggregate_init` has an anchor of its own, and does all of a call when it is started.

    Cost: an all-reduce of the weights' bytes every ``period`` steps. Memory: two vectors as long as the weights, one
    more with momentum, and the all-reduce's scratch. It is wrong to use where ranks see very different data and the
    period is long: they drift apart, and the average need not be good. A NaN on one rank reaches all.

    Source: Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD", ICLR 2020 (the warm-up); Wang,
    Tantia, Ballas and Rabbat, "SlowMo", ICLR 2020 (outer momentum); Douillard et al., "DiLoCo: Distributed
    low-communication training of language models", 2023 (outer Nesterov momentum, with 0.7 and 0.9).
    """

    aggregates: ClassVar[Literal["gradients", "weights"]] = "weights"

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        period: int = 8,
        *,
        warmup_steps: int = 0,
        outer_learning_rate: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = True,
        wire: str | None = None,
        algorithm: str = "auto",
    ) -> None:
        super().__init__(comm)
        self.period, self.warmup_steps, self.nesterov, self.wire = period, warmup_steps, nesterov, wire
        self.outer_learning_rate, self.outer_momentum = outer_learning_rate, outer_momentum

        def check() -> str:
            self.nesterov = check_flag("nesterov", nesterov)
            self.period = check_integer("period", period, 1)
            self.warmup_steps = check_integer("warmup_steps", warmup_steps, 0)
            self.outer_learning_rate = check_number(
                "outer_learning_rate", outer_learning_rate, "a number greater than 0", lambda x: x > 0
            )
            self.outer_momentum = check_number(
                "outer_momentum", outer_momentum, "a number from 0 to less than 1", lambda x: 0 <= x < 1
            )
            kind = "Nesterov" if nesterov else "heavy-ball"
            outer = f"learning rate {self.outer_learning_rate}, {kind} momentum {self.outer_momentum}"
            return f"LocalSGD of period {period} after {warmup_steps} steps, {outer}"

        self._channel.agree_on(check)
        self._differences = AllReduce(comm, algorithm=algorithm, wire=wire)
        self._weights = AllReduce(comm, algorithm=algorithm)

    def _plan_of(self, memory: Anchor, tensors: Sequence[Array]) -> Plan[None]:
        return self._plan(in_turn(partial(self._run, memory, tensors)))

    def free(self) -> None:
        """Free the plans; a second call does nothing."""
        super().free()
        self._differences.free()
        self._weights.free()

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        super()._check_dtype(dtype)
        check_wire_dtype(self.wire, dtype)

    def _new_memory(self, layout: Layout, tensors: Sequence[Array]) -> Anchor:
        return Anchor(layout, tensors, self._differences.aggregate_init, momentum=self.outer_momentum > 0)

    def _run(self, memory: Anchor, tensors: Sequence[Array]) -> None:
        self._check_tensors(tensors, self._check_dtype)
        memory.tensors = tensors
        memory.calls += 1
        local = memory.calls - self.warmup_steps
        if memory.calls == 1:
            self._meet(memory)
        elif local <= 0 or local % self.period == 0:
            memory.pack()
            memory.subtract()
            memory.plan()
            self.bytes_sent += memory.plan.sent_bytes
            self._step(memory, warming=local <= 0)
            memory.unpack()
        settle(*tensors)

    def _meet(self, memory: Anchor) -> None:
        """Let the average of the weights be the anchor."""
        memory.pack()
        before = self._weights.bytes_sent
        self._weights.aggregate(memory.vectors)
        self.bytes_sent += self._weights.bytes_sent - before
        for anchor, mean in zip(memory.anchors, memory.vectors, strict=True):
            np.copyto(anchor, mean)
        memory.unpack()

    def _step(self, memory: Anchor, *, warming: bool) -> None:
        """Move the anchors by the averaged differences."""
        if warming:
            memory.move(memory.vectors, 1)
            return
        rate, momentum = self.outer_learning_rate, self.outer_momentum
        memory.accelerate(momentum)
        if self.nesterov or not momentum:
            memory.move(memory.vectors, rate)
        if momentum:
            memory.move(memory.velocities, rate * momentum if self.nesterov else rate)
