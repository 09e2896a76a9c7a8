"""Where the arrays of an operation lie for the ranks of a node, and which of them others can reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpiagg.arrays import HOST, Array, accelerator_of, convert, cuts_of, device_of, flat, overlap, same_memory
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import Callback, Program
from mpiagg.plans.sharing import VectorRange, Vectors
from mpiagg.schedules import Collective
from mpiagg.transport import NOWHERE, Node, Position, Positions, SharedMemory, SignedBarrier


class Places:
    """The input and the output of this rank as vectors that others may read and write.

    Parameters
    ----------
    operation : Operation
    node : Node
    memory : SharedMemory
        What its ranks share, where the arrays are.
    x, out : numpy.ndarray or None
        This rank's input and where its result goes, of any layout; None where it has none.
    in_place : bool
        Whether the operation is carried out in place on ``out``, which is ``x`` then.

    Attributes
    ----------
    given : pair of numpy.ndarray or None
        The arrays as vectors, as they were given.
    source, target : numpy.ndarray or None
        What others read and write.
    bring : callable or None
        Brings the input to the target first, where others read it there.
    """

    def __init__(
        self,
        operation: Operation,
        node: Node,
        memory: SharedMemory,
        x: Array | None,
        out: Array | None,
        *,
        in_place: bool,
    ) -> None:
        self._operation, self._node, self._memory, self._in_place = operation, node, memory, in_place
        self.given = _vector(operation, x), _vector(operation, out)
        self.source, self.target = self.given
        self.bring: Callback | None = None
        if not in_place:
            self._settle(x, out)

    def _settle(self, x: Array | None, out: Array | None) -> None:
        """Find out from where others can read the input while they write results."""
        o, (source, target) = self._operation, self.given
        apart = source is not None and target is not None and _stay_apart(o, source, target)
        if o.collective.moves:
            return
        if o.collective is Collective.REDUCE_SCATTER:
            if not apart:
                self.source = self.target = None
            return
        if x is None or out is None:
            return
        if target is None:
            if o.collective is Collective.BROADCAST:
                self.source = None  # nobody would bring the root's own result to where it goes
            return
        place = target[o.own_chunk] if o.collective is Collective.ALLGATHER else target
        shaped = place.reshape(x.shape)
        if same_memory(x, shaped):
            self.source = place
        elif o.collective is Collective.BROADCAST:  # of which the root's work as an owner brings one chunk alone
            self.source, self.bring = (
                (source if apart and self._mapped(source) else target),
                partial(convert, shaped, x),
            )
        elif not (apart and self._read_where_it_is(source)) and self._mapped(target):
            self.source, self.bring = place, partial(convert, shaped, x)

    def _read_where_it_is(self, source: Array | None) -> bool:
        """Whether owners read the input from there: in an all-gather only this rank does."""
        if self._operation.collective is Collective.ALLREDUCE and accelerator_of(source) is not None:
            return False  # the kernel that reduces vectors on devices does it in place
        return self._operation.collective is Collective.ALLGATHER or self._mapped(source)

    def _mapped(self, vector: Array | None) -> bool:
        return vector is not None and self._memory.position(vector) != NOWHERE

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the vectors, which need not be that in which they are combined."""
        lies = self.source if self.target is None else self.target
        return self._operation.reduction.dtype if lies is None else lies.dtype

    def positions(self, *, apart: bool) -> Positions:
        """Return where this rank's vectors lie, for the others; ``apart`` if on another device than its slots."""
        source, target = (
            NOWHERE if part is None else self._memory.position(part) for part in (self.source, self.target)
        )
        return Positions(source, target, apart)

    def in_pieces(self, *, brought: bool) -> tuple[Array | None, Array | None] | None:
        """Return the input and the output as vectors for who reads and writes them piece by piece.

        None, where they lie in each other's way, or are no vectors of one dtype; ``brought`` if the input has been
        brought to where others read it.
        """
        o, (x, out) = self._operation, self.given
        x = self.source if brought else x
        missing = (x is None and o.source is not None) or (out is None and o.target is not None)
        clash = x is not None and out is not None and (x.dtype != out.dtype or not _stay_apart(o, x, out))
        return None if missing or clash else (x, out)

    def reached(self, positions: Sequence[Positions]) -> bool:
        """Whether all vectors that other ranks must reach lie in memory that they map."""
        o = self._operation
        if self._in_place or o.collective is Collective.ALLGATHER:
            return all(told.target != NOWHERE for told in positions)
        if o.collective is Collective.ALLREDUCE:
            return all(NOWHERE not in told[:2] for told in positions)
        if o.collective is Collective.ALLTOALL:
            return all(told.source != NOWHERE for told in positions)
        root = positions[self._node.ranks.index(o.root)] if o.collective.rooted else None
        if o.collective is Collective.BROADCAST:
            return all((told.source if told is root else told.target) != NOWHERE for told in positions)
        if o.collective.moves and root is not None:
            return (root.target if o.collective is Collective.GATHER else root.source) != NOWHERE
        return all(told.source != NOWHERE for told in positions) and (root is None or root.target != NOWHERE)

    def vectors(self, positions: Sequence[Positions]) -> Vectors:
        """Return the vectors of all ranks of the node, this one's as they are kept here."""
        o, dtype, cuts = self._operation, self.dtype, cuts_of(self._operation.counts)
        # Of a gather's input and a scatter's output there is one chunk alone.
        gathers, scatters = {Collective.ALLGATHER, Collective.GATHER}, {Collective.REDUCE_SCATTER, Collective.SCATTER}
        parted = 0 if o.collective in gathers else 1 if o.collective in scatters else None
        found: list[dict[int, VectorRange]] = [{}, {}]
        for place, (rank, told) in enumerate(zip(self._node.ranks, positions, strict=True)):
            for kind, position in enumerate(told[:2]):
                start, stop = (0, sum(o.counts)) if kind != parted or self._in_place else (cuts[rank], cuts[rank + 1])
                own = (self.source, self.target)[kind] if rank == o.rank else None
                if own is not None:
                    found[kind][rank] = VectorRange(own, start)
                elif rank != o.rank and position != NOWHERE:
                    view = self._memory.view(place, position, (stop - start) * dtype.itemsize)
                    found[kind][rank] = VectorRange(view.view(dtype), start)
        sources, targets = found
        into = o.root if o.collective is Collective.REDUCE else o.rank
        # By now they are apart, or the input lies where its place in the output is.
        apart = self.source is not None and self.target is not None and not overlap(self.source, self.target)
        return Vectors(sources.get(o.rank), targets.get(into), into, sources, targets, apart=apart)


def _vector(operation: Operation, array: Array | None) -> Array | None:
    """Return an array as a vector that others may reach, or None where its elements do not follow one another."""
    if array is None:
        return None
    if array.dtype != operation.reduction.dtype:  # of which only the kernel of an all-reduction knows what to do
        kernel = operation.collective is Collective.ALLREDUCE and device_of(array) is not HOST
        return flat(array) if kernel else None
    return flat(array)


def _stay_apart(operation: Operation, source: Array, target: Array) -> bool:
    """Whether others may read the input while the result is written."""
    if same_memory(source, target) or not overlap(source, target):
        return True
    o = operation
    if o.collective is Collective.REDUCE_SCATTER:
        return same_memory(source[o.own_chunk], target)
    return o.collective is Collective.ALLGATHER and same_memory(source, target[o.own_chunk])


def told_by_all(memory: SharedMemory, mine: Positions) -> tuple[Positions, ...]:
    """Return where the vectors of all ranks of the node lie; collective there."""
    told = memory.tell((*mine.source, *mine.target, mine.apart), "tell where their arrays lie")
    return tuple(Positions(Position(*words[:2]), Position(*words[2:4]), bool(words[4])) for words in told)


class AnnouncedProgram:
    """The program that was made for what ranks announced last; they mostly announce the same again."""

    def __init__(self, barrier: SignedBarrier, make: Callable[[tuple[Positions, ...]], Program]) -> None:
        self._barrier, self._make = barrier, make
        self._announced: tuple[int, ...] = ()
        self._program = Program((), (), 0)

    def program(self) -> Program:
        """Return the program for what they have just announced."""
        announced = self._barrier.announced()
        if announced != self._announced:
            self.release()
            self._announced, self._program = announced, self._make(self._barrier.positions(announced))
        return self._program

    def release(self) -> None:
        """Release what the program holds."""
        program, self._announced, self._program = self._program, (), Program((), (), 0)
        for release in program.releases:
            release()
