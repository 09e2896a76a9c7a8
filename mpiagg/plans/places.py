"""Where the arrays of an operation lie for the ranks of a node, and which of them others can reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpiagg.arrays import HOST, Array, accelerator_of, convert, device_of, flat, overlap, same_memory
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import Callback, Program
from mpiagg.plans.sharing import VectorRange, Vectors
from mpiagg.schedules import Collective
from mpiagg.transport import NOWHERE, READ, Node, Position, Positions, SharedMemory, SignedBarrier


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
    read : bool
        Whether it is enough that others read the arrays.

    Attributes
    ----------
    given : pair of numpy.ndarray or None
        The arrays as vectors, as they were given.
    source, target : numpy.ndarray or None
        What others read and write.
    bring : callable or None
        Brings the input to the target first, where others read it there.
    scratch_bytes : int
        Of memory that others read and is nobody's output.
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
        read: bool = False,
    ) -> None:
        o = self._operation = operation
        self._node, self._memory = node, memory
        self._in_place, self._read = in_place, read
        self.given = _vector(operation, x), _vector(operation, out)
        self.source, self.target = self.given
        self.bring: Callback | None = None
        self.scratch_bytes = 0
        if not in_place:
            self._settle(x, out)
        if read and o.collective is Collective.REDUCE and o.rank != o.root:
            start, stop = o.lanes(1)[0][o.rank]
            self.target = np.empty(stop - start, o.reduction.dtype)  # its chunk, for the root to read
            self.scratch_bytes = self.target.nbytes

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
        elif (self._mapped(target) and not (apart and self._read_where_it_is(source))) or (self._read and not apart):
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
            NOWHERE if part is None else self._memory.position(part, read=self._read)
            for part in (self.source, self.target)
        )
        return Positions(source, target, apart)

    def in_pieces(self, *, brought: bool) -> tuple[Array | None, Array | None] | None:
        """Return the input and the output as vectors for who reads and writes them piece by piece.

        None, where they lie in each other's way, or are no vectors of one dtype, or the operation needs one vector;
        ``brought`` if the input has been brought to where others read it.
        """
        o, (x, out) = self._operation, self.given
        x = self.source if brought else x
        clash = x is not None and out is not None and (x.dtype != out.dtype or not _stay_apart(o, x, out))
        return None if o.lacks(x, out) or clash or self._in_place else (x, out)

    def reached(self, positions: Sequence[Positions]) -> bool:
        """Whether all vectors that other ranks must reach lie where they do: in memory that they map, or read."""
        o = self._operation
        sources = all(told.source != NOWHERE for told in positions)
        targets = all(told.target != NOWHERE for told in positions)
        if self._in_place or o.collective is Collective.ALLGATHER:
            return targets
        if o.collective is Collective.ALLREDUCE:
            return sources and targets
        if o.collective in (Collective.ALLTOALL, Collective.REDUCE_SCATTER):
            return sources
        root = positions[self._node.ranks.index(o.root)]
        if o.collective is Collective.BROADCAST:
            return all((told.source if told is root else told.target) != NOWHERE for told in positions)
        if o.collective is Collective.SCATTER:
            return root.source != NOWHERE
        # A root that reads needs the inputs, or what the others have made of their chunks of a sum.
        reduces, reads = o.collective is Collective.REDUCE, not self.written(positions)
        needed = (sources or not (reduces or reads)) and (targets or not (reduces and reads))
        return root.target != NOWHERE and needed

    def written(self, positions: Sequence[Positions]) -> bool:
        """Whether ranks can write to the vectors of others to which their owners' results go."""
        o = self._operation
        if o.collective in (Collective.ALLREDUCE, Collective.ALLGATHER, Collective.BROADCAST):
            return all(told.target.window != READ for told in positions)
        into_root = o.collective in (Collective.REDUCE, Collective.GATHER)
        return not into_root or positions[self._node.ranks.index(o.root)].target.window != READ

    def vectors(self, positions: Sequence[Positions]) -> Vectors:
        """Return the vectors of all ranks of the node, this one's as they are kept here."""
        o, dtype, chunks = self._operation, self.dtype, self._operation.lanes(1)[0]
        # Of a gather's input and a scatter's output there is one chunk alone, and of what a root will read.
        gathers, scatters = {Collective.ALLGATHER, Collective.GATHER}, {Collective.REDUCE_SCATTER, Collective.SCATTER}
        parted = 0 if o.collective in gathers else 1 if o.collective in scatters else None
        found: list[dict[int, VectorRange]] = [{}, {}]
        for place, (rank, told) in enumerate(zip(self._node.ranks, positions, strict=True)):
            for kind, position in enumerate(told[:2]):
                for_root = kind == 1 and o.collective is Collective.REDUCE and rank != o.root
                whole = self._in_place or (kind != parted and not for_root)
                start, stop = (0, sum(o.counts)) if whole else chunks[rank]
                own = (self.source, self.target)[kind] if rank == o.rank else None
                if own is not None:
                    found[kind][rank] = VectorRange(own, start)
                elif rank != o.rank and position != NOWHERE:
                    lies = self._memory.found(place, position, (stop - start) * dtype.itemsize)
                    found[kind][rank] = VectorRange(lies.view(dtype), start)
        sources, targets = found
        into = o.root if o.collective is Collective.REDUCE and self.written(positions) else o.rank
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
