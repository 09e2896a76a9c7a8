"""What a benchmark runs: one collective on one length, by each algorithm and by the MPI library, and its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import mpiagg
from mpiagg.arrays import HOST, Array, Device, convert, working_dtype
from mpiagg.collectives.mpi_ops import mpi_op
from mpiagg.plans.choices import NATIVE
from mpiagg.plans.operation import even_counts
from mpiagg.schedules import Collective

PERIOD: Final = 251
"""Test data repeats after so many elements: a prime, so that chunks that are mixed up do not look alike."""

TimedCall = Callable[[], object]


LARGEST_VALUE: Final = 4
"""The largest of one rank's values in test data for anything but products."""

_LOSSES: Final = {"fp16": 2**-10, "bf16": 2**-7, "u8": 2 / 255, "u4": 2 / 15, "u2": 2 / 3, "exact": 0.0}
"""What a result may be off by after a wire, in parts of the largest possible one: values are rounded twice at most."""


class Contender(NamedTuple):
    """A way to carry a task out.

    Attributes
    ----------
    name : str
    call, free : callable
    off : float
        How far a result may be from the right one.
    task : Task or None
        Whose arrays it works on, if not on those of the task that all are given.
    """

    name: str
    call: TimedCall
    free: TimedCall = lambda: None
    off: float = 0.0
    task: Task | None = None


def registered_zeros(comm: MPI.Intracomm, count: int, dtype: np.dtype[Any], device: Device = HOST) -> Array:
    """Return a vector that the other ranks of the node have mapped, of zeros: sums of what lay there could overflow."""
    return cleared(mpiagg.empty(count, dtype, comm=comm, device=device.name))


def cleared(array: Array) -> Array:
    """Return a contiguous array when it holds zeros."""
    array.view(np.uint8).fill(0)  # not every device knows every dtype
    return array


@dataclass(frozen=True)
class Task:
    """A collective on the ranks of a communicator, with its memory.

    Attributes
    ----------
    collective : Collective
    comm : MPI.Intracomm
    count : int
        Elements of the vector; of chunks for all ranks, all of them together.
    dtype : numpy.dtype
    op : str
    root : int
    memory : numpy.ndarray, optional
        Where the vector lies: the first ``count`` elements of it, and where it cannot be in place the output: those
        from its middle on. Otherwise they have memory of their own.
    """

    collective: Collective
    comm: MPI.Intracomm
    count: int
    dtype: np.dtype[Any]
    op: str
    root: int
    memory: Array | None = None

    # -- memory, in place wherever the collective can be

    @cached_property
    def vector(self) -> Array:
        """The whole vector."""
        return self.zeros(self.count) if self.memory is None else self.memory[: self.count]

    @cached_property
    def x(self) -> Array:
        """The input of this rank."""
        if self.collective is Collective.ALLGATHER:
            assert self.out is not None
            own: Array = self.out[self.comm.rank]
            return own
        if self.collective is Collective.GATHER:
            return self.vector[: self.count // self.comm.size]
        if self.collective in (Collective.SCATTER, Collective.ALLTOALL):
            return self.vector.reshape(self.comm.size, -1)
        return self.vector

    @cached_property
    def out(self) -> Array | None:
        """The output of this rank; None where it gets none."""
        c, rank = self.collective, self.comm.rank
        if (c in (Collective.REDUCE, Collective.GATHER) and rank != self.root) or (c is Collective.EXSCAN and not rank):
            return None
        if c is Collective.REDUCE_SCATTER:
            return self.zeros(self.counts[rank])
        if c is Collective.SCATTER:
            return self.other[: self.count // self.comm.size]
        if c in (Collective.ALLGATHER, Collective.GATHER, Collective.ALLTOALL):
            return (self.vector if c is Collective.ALLGATHER else self.other).reshape(self.comm.size, -1)
        return self.other if c is Collective.EXSCAN else self.x

    @cached_property
    def other(self) -> Array:
        """A second vector, for what is not in place."""
        return self.zeros(self.count) if self.memory is None else self.memory[self.memory.size // 2 :][: self.count]

    @property
    def counts(self) -> tuple[int, ...]:
        """The elements of every rank's chunk."""
        return even_counts(self.count, self.comm.size)

    def zeros(self, length: int) -> Array:
        """Return a new vector of zeros, written to: the pages of ``np.zeros`` are all one page until then."""
        return np.full(length, 0, self.dtype)

    # -- contenders

    def ours(self, algorithm: str, lanes: int | None, *, planned: bool) -> Contender:
        """Return an algorithm of this package, as a plan or as a blocking call."""
        arguments: dict[str, Any] = {"out": self.out, "comm": self.comm, "algorithm": algorithm, "lanes": lanes}
        if self.collective.reduces:
            arguments["op"] = self.op
        if self.collective.rooted:
            arguments["root"] = self.root
        name = self.collective.value
        if not planned:
            return Contender(algorithm, partial(getattr(mpiagg, name), self.x, **arguments))
        plan = getattr(mpiagg, f"{name}_init")(self.x, **arguments)
        return Contender(algorithm, plan, plan.free)

    def native(self) -> Contender:
        """Return the MPI library's blocking collective, called as users of mpi4py do."""
        if not self.has_mpi_op:
            return self.ours(NATIVE, None, planned=False)  # which adds what is missing
        return Contender(NATIVE, self.library_call())

    def wired(self, wire: str, *, planned: bool) -> Contender:
        """Return the all-reduce of gradients by a wire."""
        aggregation = mpiagg.AllReduce(self.comm, op=self.op, wire=wire)
        largest = LARGEST_VALUE * (self.comm.size if self.op == "sum" else 1)
        name, off = f"auto-{wire}", _LOSSES[wire] * largest
        if not planned:
            return Contender(name, partial(aggregation.aggregate, [self.x]), aggregation.free, off)
        plan = aggregation.aggregate_init([self.x])

        def free() -> None:
            plan.free()
            aggregation.free()

        return Contender(name, plan, free, off)

    def copy(self) -> TimedCall:
        """Return a plain copy of the vector to other memory: what it costs only to read it and to write as much."""
        return partial(np.copyto, np.zeros_like(self.vector), self.vector)

    @property
    def has_mpi_op(self) -> bool:
        """Whether MPI has the operator and the dtype; it has no averages and no half precision."""
        return self.op != "avg" and working_dtype(self.dtype) == self.dtype

    def library_call(self) -> TimedCall:
        """Return the MPI library's blocking collective on the arrays as they are."""
        comm, op, root, out = self.comm, mpi_op(self.op, self.dtype), self.root, self.out
        made: dict[Collective, Callable[[], TimedCall]] = {
            Collective.ALLREDUCE: lambda: partial(comm.Allreduce, MPI.IN_PLACE, out, op),
            Collective.REDUCE: lambda: partial(comm.Reduce, self.x if out is None else MPI.IN_PLACE, out, op, root),
            Collective.BROADCAST: lambda: partial(comm.Bcast, out, root),
            Collective.ALLGATHER: lambda: partial(comm.Allgather, MPI.IN_PLACE, out),
            Collective.REDUCE_SCATTER: lambda: partial(comm.Reduce_scatter, self.x, out, self.counts, op),
            Collective.GATHER: lambda: partial(comm.Gather, self.x, out, root),
            Collective.SCATTER: lambda: partial(comm.Scatter, self.x, out, root),
            Collective.ALLTOALL: lambda: partial(comm.Alltoall, self.x, out),
            Collective.SCAN: lambda: partial(comm.Scan, MPI.IN_PLACE, out, op),
            Collective.EXSCAN: lambda: partial(comm.Exscan, self.x, self.other, op),
        }
        return made[self.collective]()

    # -- test data: small integers, whose sums and products are exact in every dtype

    def check(self, call: TimedCall, off: float = 0.0) -> int:
        """Run ``call`` on test data and return how many elements of this rank's output are wrong, by more than ``off``.

        Afterwards the memory is zero, so that calls in place, one upon another, stay within every dtype's range.
        """
        self._clear()
        convert(self.x, self.repeated(self._contribution(self.comm.rank), self.x.size).reshape(self.x.shape))
        call()
        wrong = 0 if self.out is None else self.count_wrong(self.out, self._expected(), off)
        self._clear()
        return wrong

    def count_wrong(self, out: Array, expected: Array, off: float) -> int:
        """Return how many elements are off the expected ones by more than ``off``."""
        if not off:
            return int(np.count_nonzero(out != expected))
        return int(np.count_nonzero(~(np.abs(out - expected) <= off)))  # a NaN is wrong, too

    def repeated(self, period: npt.NDArray[Any], length: int) -> Array:
        """Return a vector in which some values repeat, in the task's dtype."""
        return np.resize(period, length).astype(self.dtype)

    def _clear(self) -> None:
        for array in (self.x, self.out):
            if array is not None:
                cleared(array)

    def _contribution(self, rank: int) -> npt.NDArray[np.int64]:
        """Return one period of a rank's input."""
        if self.op != "prod":
            return np.random.default_rng(rank).integers(1, LARGEST_VALUE + 1, PERIOD)
        index = np.arange(PERIOD)
        return np.where(index % self.comm.size == rank, 1 + index % 3, 1)

    def _expected(self) -> Array:
        """Return this rank's right output."""
        c, rank, size = self.collective, self.comm.rank, self.comm.size
        if not c.reduces:
            return self._moved()
        last = {Collective.SCAN: rank + 1, Collective.EXSCAN: rank}.get(c, size)
        everyone = np.stack([self._contribution(peer) for peer in range(last)])
        combine = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(self.op, np.add)
        one_period = combine.reduce(everyone, axis=0).astype(working_dtype(self.dtype))
        if self.op == "avg":
            one_period = one_period / size
        whole = self.repeated(one_period, self.count)
        if c is not Collective.REDUCE_SCATTER:
            return whole
        start = sum(self.counts[:rank])
        return whole[start : start + self.counts[rank]]

    def _moved(self) -> Array:
        """Return this rank's right output, where it is what ranks had."""
        rank, size = self.comm.rank, self.comm.size
        if self.collective in (Collective.BROADCAST, Collective.SCATTER):
            whole = self.repeated(self._contribution(self.root), self.count)
            return whole if self.collective is Collective.BROADCAST else np.split(whole, size)[rank]
        exchanged = self.collective is Collective.ALLTOALL
        everything = self.zeros(self.count).reshape(size, -1)
        for peer in range(size):
            of_peer = self.repeated(self._contribution(peer), self.count if exchanged else self.count // size)
            convert(everything[peer], np.split(of_peer, size)[rank] if exchanged else of_peer)
        return everything
