"""Operations whose messages within a node go through memory that its ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from mpiagg.arrays import (
    HOST,
    Accelerator,
    Array,
    accelerator_of,
    convert,
    cuts_of,
    device_of,
    flat,
    overlap,
    same_memory,
)
from mpiagg.plans.binding import bind, scratch_length
from mpiagg.plans.choices import NATIVE, NCCL, SEGMENT
from mpiagg.plans.native import bind_native, called_at_once
from mpiagg.plans.operation import Operation
from mpiagg.plans.ports import ask
from mpiagg.plans.program import Arrival, BoundRound, Call, Computing, Copying, Deferred, Program, in_turn
from mpiagg.plans.sharing import Mail, Part, Task, Vectors, gate_round, mail_rounds, owner_work
from mpiagg.schedules import Action, Collective, Round, algorithm
from mpiagg.transport import LINE, NOWHERE, SHARED_TAG, Block, Channel, Gate, Positions, SignedGate

SHARED: Final = "shared"
"""The algorithm of one stage within one node, in which owners read inputs and write results, wherever they lie."""

ONE_SHOT: Final = 4 * 2**10
"""Bytes up to which every rank reduces everything by itself: one gate then, and two for longer vectors."""

ANNOUNCED: Final = 32 * 2**10
"""Bytes from which calls first ask whether all vectors lie in shared memory; shorter ones are copied anyway. Between
nodes, shorter ones go by messages, within the nodes, too: more gates between the messages took longer."""


def serves(channel: Channel, operation: Operation, device: Accelerator | None) -> bool:
    """Whether this rank's part of an operation can go through shared memory: it has somebody to share it with."""
    o = operation
    if channel.node.size == 1 or o.choice.wire is not None or o.choice.algorithm in (NATIVE, NCCL):
        return False
    if o.entry.owned is None:
        return False
    if device is not None and channel.device_memory is None:
        return False  # nobody has any device memory that others map
    # What knows nothing of nodes has rounds in which some of a node's ranks meet others, and some do not.
    return len(o.layout.nodes) == 1 or (o.choice.algorithm != SHARED and o.nbytes > ANNOUNCED)


def folds_as_it_is(channel: Channel, operation: Operation, vector: Array) -> bool:
    """Whether a vector of a dtype that is combined in another need not be converted, if all others lie like it.

    That is half precision in memory of a device that the ranks of one node map: a kernel combines it in float32.
    """
    o, shared = operation, channel.device_memory
    return (
        shared is not None
        and o.collective is Collective.ALLREDUCE
        and o.choice.algorithm not in (NATIVE, NCCL)
        and len(o.layout.nodes) == 1
        and serves(channel, o, accelerator_of(vector))
        and shared.position(vector) != NOWHERE
    )


def serves_at_once(channel: Channel, operation: Operation) -> bool:
    """Whether every rank can reduce the vectors of all by itself, from where they write them for each other."""
    o = operation
    return (
        o.collective is Collective.ALLREDUCE
        and o.choice.algorithm not in (NATIVE, NCCL)
        and serves(channel, o, None)
        and len(o.layout.nodes) == 1
        and 0 < o.nbytes <= min(ONE_SHOT, o.choice.segment or SEGMENT)
    )


class OneShot:
    """An all-reduction of short vectors: one gate, after which every rank has all of them in mailboxes.

    Parameters
    ----------
    channel : Channel
        Whose memory for calls there must be.
    operation : Operation

    Attributes
    ----------
    x, out : numpy.ndarray
        The vector to reduce next, and where the result goes: contiguous.
    """

    x: Any = None
    out: Any = None

    def __init__(self, channel: Channel, operation: Operation) -> None:
        found = channel.memory_for_calls()
        assert found is not None
        self._gate, block = found
        o, self._operation = operation, operation
        boxes = [
            [part[start : start + o.nbytes].view(o.reduction.dtype) for part in block.parts]
            for start in (LINE, LINE + box_of(block))
        ]
        place, signature = channel.node.place, o.signature
        # A memory view writes in a third of NumPy's time. Of several equal dtypes it takes the usual one.
        quick = o.reduction.dtype.char in "?bhilqBHILQfd"
        usual = np.dtype(o.reduction.dtype.str)
        self._own: list[Any] = [pair[place].view(usual).data if quick else pair[place] for pair in boxes]
        self._boxes = [(pair[0], pair[1], pair[2:]) for pair in boxes]
        self._combine, self._signature = o.reduction.combine, signature
        self._finish = o.reduction.finish if o.reduction.divisor is not None else None

    def program(self) -> Program:
        """Return the program."""
        arrival = Arrival(self._operation.label, 0, self._gate)
        return Program((BoundRound((self._write,), (self._gate.passed,), (self._read,), (arrival,)),), (), 0)

    def _write(self) -> None:
        x, box = self.x, self._own[self._gate.count & 1]
        try:
            box[:] = x if x.ndim == 1 else x.reshape(-1)
        except ValueError:  # a memory view of another of several equal dtypes
            np.copyto(np.asarray(box), x.reshape(-1))
        self._gate.enter_and_come(self._signature)

    def _read(self) -> None:
        gate, out = self._gate, self.out
        first, second, others = self._boxes[(gate.count - 1) & 1]
        if out.ndim != 1:
            out = out.reshape(-1)
        self._combine(first, second, out)
        for other in others:
            self._combine(out, other, out)
        if self._finish is not None:
            self._finish(out)
        gate.leave()


def box_of(block: Block) -> int:
    """Return the bytes of a mailbox in a block for calls, of which there are two behind the gate's line."""
    return (block.nbytes - LINE) // 2


class OnNode:
    """What the programs of an operation on one node are made of, between arrays of this rank.

    Parameters
    ----------
    channel : Channel
    operation : Operation
    x, out : numpy.ndarray or None
        Where this rank's input is, and where its result goes, of any layout; None where it has none.
    buffer : callable
        Returns the vector of the whole length in which the operation is carried out where not all arrays are shared,
        and the program for that in turns between what brings the input into it and the result out of it.
    tag : int
        Of the messages; ``SHARED_TAG`` for blocking calls.
    """

    def __init__(
        self,
        channel: Channel,
        operation: Operation,
        x: Array | None,
        out: Array | None,
        buffer: Callable[[], Copying],
        tag: int,
    ) -> None:
        o = operation
        self.channel, self.operation = channel, operation
        self.together = tag != SHARED_TAG
        self.tag = tag if self.together else channel.tags.shared(o.signature)
        self.node, self.device = channel.node, accelerator_of(x if out is None else out)
        # Of a chunk for each rank, two elements at least go through memory at a time.
        self.segment = max(o.choice.segment or SEGMENT, 2 * o.size * o.reduction.dtype.itemsize)
        # Gates, and blocks for them, are in the host's memory; the vectors may be in a device's.
        shared = channel.memory if self.device is None else channel.device_memory
        assert shared is not None  # or else this way does not serve
        self.reach = shared
        # Within one node there is nothing but what its ranks share; across nodes there are messages.
        self.all_here = self.node.size == o.size
        short = o.nbytes <= min(ONE_SHOT, self.segment)
        elsewhere = o.choice.elsewhere if self.all_here else None  # other nodes have other memory
        self.mailed = self.all_here and elsewhere is None and self.device is None
        self.messages = o
        if elsewhere is not None:
            self.messages = replace(o, choice=o.choice.in_other_memory)
        self.one_shot = self.all_here and short and self.device is None and o.collective is Collective.ALLREDUCE
        self.asking = None if self.device is None else _Asking(self.device, o.label)
        # Whether owners read inputs and write results wherever they lie; several stages work on one buffer.
        self.one_stage = self.all_here and o.choice.algorithm == SHARED
        self._buffer = buffer
        self._made: Copying | None = None
        self._brought = False
        self.store: Call | None = None
        self.given = _vector(o, x), _vector(o, out)
        self.x, self.out, self.first = self._settled(x, out)

    @property
    def copying(self) -> Copying:
        """The buffer, with what copies to it and from it."""
        made = self._made = self._buffer() if self._made is None else self._made
        return made

    # -- where arrays lie

    def _settled(self, x: Array | None, out: Array | None) -> tuple[Array | None, Array | None, Call | None]:
        """Return the input and the output as vectors that others may reach, and what brings the input there first."""
        o = self.operation
        if not self.one_stage:
            made = self.copying
            self.store = made.store
            return made.buffer, made.buffer, made.load
        source, target = self.given
        apart = source is not None and target is not None and _stay_apart(o, source, target)
        if o.collective is Collective.REDUCE_SCATTER:
            return (source, target, None) if apart else (None, None, None)
        if x is None or out is None or target is None:
            return source, target, None
        place = target[o.own_chunk] if o.collective is Collective.ALLGATHER else target
        if same_memory(x, place.reshape(x.shape)):
            return place, target, None
        bring = partial(convert, place.reshape(x.shape), x)
        if o.collective is Collective.BROADCAST:  # of which the root's owner work brings one chunk alone
            return (source if apart and self._mapped(source) else target), target, bring
        if apart and (self._mapped(source) or o.collective is Collective.ALLGATHER):
            if self.device is None or o.collective is not Collective.ALLREDUCE:
                return source, target, None
        if self._mapped(target):
            return place, target, bring
        return source, target, None

    def _mapped(self, vector: Array | None) -> bool:
        return vector is not None and self.reach.position(vector) != NOWHERE

    def positions(self) -> Positions:
        """Return where this rank's vectors lie, for the others."""
        return Positions(*(NOWHERE if part is None else self.reach.position(part) for part in (self.x, self.out)))

    def reached(self, positions: Sequence[Positions]) -> bool:
        """Whether all vectors that other ranks must reach lie in memory that they map."""
        o = self.operation
        if not self.one_stage:
            return all(told.target != NOWHERE for told in positions)
        root = positions[self.node.ranks.index(o.root)] if o.collective.rooted else None
        if o.collective is Collective.ALLREDUCE:
            return all(NOWHERE not in told for told in positions)
        if o.collective is Collective.ALLGATHER:
            return all(told.target != NOWHERE for told in positions)
        if o.collective is Collective.BROADCAST:
            return all((told.source if told is root else told.target) != NOWHERE for told in positions)
        sources = all(told.source != NOWHERE for told in positions)
        return sources and (root is None or root.target != NOWHERE)

    # -- made by all ranks together

    def planned(self) -> Program:
        """Return the program for arrays that stay where they are."""
        memory, busy = self.channel.memory, self.channel.busy
        positions = self._tell(self.positions())
        mapped = self.reached(positions)
        by_mail = self.one_shot or (self.mailed and not mapped)
        if not (by_mail or mapped):
            return self.by_messages()
        try:
            block = memory.take(LINE + (2 * self._box() if by_mail else 0), busy=busy)
        except MemoryError:
            return self.by_messages()
        gate = Gate(block, self.node.place, self.node.ranks)
        program = self.by_mail(gate, block) if by_mail else in_turn(self._ready(), self.in_place(gate, positions))
        back = Program((), (partial(memory.give_back, block),), block.nbytes)
        return replace(in_turn(program, back), sent_bytes=self._sent_bytes())

    def _tell(self, mine: Positions) -> tuple[Positions, ...]:
        sources, targets = map(self.channel.memory.tell, mine)
        return tuple(map(Positions, sources, targets))

    # -- made by each rank for itself

    def called(self) -> Program:
        """Return the program of blocking calls, in which arrays may lie elsewhere on the other ranks at the next call."""
        memory, ground = self.channel.memory, self.channel.memory_for_calls()
        if ground is None:
            return self.by_messages()
        gate, block = ground
        enter = BoundRound((partial(gate.enter, self.operation.signature),), (), (), ())
        leave = BoundRound((gate.leave,), (), (), ())
        if self.device is None and (self.operation.nbytes <= ANNOUNCED or (self.mailed and not memory.leased)):
            program = self.by_mail(gate, block)
            return replace(program, rounds=(enter, *program.rounds, leave), sent_bytes=self._sent_bytes())
        if self.device is None and not memory.leased:
            return self.by_messages()
        met = gate_round(gate, self.operation.label, 0)
        announce = met._replace(starts=(partial(gate.announce, gate.in_short(self.positions())), *met.starts))
        found = _Found(gate, partial(self._where_they_lie, gate, block))
        rounds = (*self._ready().rounds, enter, announce, Deferred(found.program).as_round(), leave)
        return Program(rounds, (found.release,), self._scratch_bytes(), self._sent_bytes(), self.device)

    def _where_they_lie(self, gate: SignedGate, block: Block, positions: tuple[Positions, ...]) -> Program:
        if self.reached(positions):
            return self.in_place(gate, positions, first=False)
        return self.by_mail(gate, block) if self.mailed else self.by_messages()

    def _scratch_bytes(self) -> int:
        """Return the memory that messages would need."""
        o = self.messages
        if self.mailed or o.choice.algorithm == NATIVE:
            return 0
        narrow = self._dtype != o.reduction.dtype
        length = scratch_length(o.schedule(), o.lanes()) + (o.length if narrow else 0)
        return o.reduction.dtype.itemsize * length

    def _sent_bytes(self) -> int:
        """Return how many bytes this rank hands to others in one run: as many as messages would carry."""
        if self.messages.choice.algorithm == NATIVE:
            return 0
        steps = [step for a_round in self.messages.schedule() for step in a_round if step.action is Action.SEND]
        return self.operation.reduction.dtype.itemsize * sum(
            stop - start
            for lane in self.messages.lanes()
            for step in steps
            for start, stop in lane[step.chunk : step.chunk + step.count]
        )

    def _schedule(self) -> list[Round]:
        o = self.operation
        name = "one_shot" if self.one_shot else o.choice.algorithm
        return algorithm(name).schedule(o.collective, o.rank, o.layout, o.root)

    # -- three ways

    def by_messages(self) -> Program:
        """Return the program that sends messages within the node, too."""
        o = self.messages
        if o.choice.algorithm == NATIVE:
            return self._by_mpi()
        made = self.copying
        bound = partial(bind, self.channel, o.schedule(), lanes=o.lanes(), reduction=o.reduction, label=o.label)
        if made.buffer.dtype == o.reduction.dtype:
            return made.around(bound(buffer=made.buffer, tag=self.tag))
        wide = device_of(made.buffer).empty(made.buffer.size, o.reduction.dtype)
        program = bound(buffer=wide, tag=self.tag)
        program = in_turn(partial(convert, wide, made.buffer), program, partial(convert, made.buffer, wide))
        return made.around(replace(program, nbytes=program.nbytes + wide.nbytes))

    def _by_mpi(self) -> Program:
        """Return the program that is the MPI library's own collective: at once for blocking calls."""
        o, comm = self.messages, self.channel.comm
        call = partial(bind_native, comm, o) if self.together else partial(called_at_once, comm, o)
        x, out = (self.x, self.out) if self._brought else self.given
        if (x is None and o.source is not None) or (out is None and o.target is not None):
            made = self.copying
            return made.around(call(*(None if part is None else made.buffer[part] for part in (o.source, o.target))))
        return call(x, out)

    def _box(self) -> int:
        """Return the bytes of a mailbox: of few sizes, so that a block serves plans of other lengths after this one."""
        enough = 1 << max(self.operation.nbytes - 1, LINE - 1).bit_length()
        return min(enough, -(-self.segment // LINE) * LINE)

    def by_mail(self, gate: Gate, block: Block) -> Program:
        """Return the program that copies through mailboxes, a segment after the other."""
        o, made = self.operation, self.copying
        # The boxes lie in the same places for all who share the block, so that nobody writes where another still reads.
        box = box_of(block)
        room = min(box, self.segment) // made.buffer.itemsize
        if o.length > room:
            room -= o.size  # where each rank's chunk is cut, each part may have an element more than the others
        lanes = [[(0, o.length)]] if self.one_shot else o.lanes(max(1, -(-o.length // max(1, room))))
        first, second = (
            {rank: part[start : start + box] for rank, part in zip(self.node.ranks, block.parts, strict=True)}
            for start in (LINE, LINE + box)
        )
        mail = Mail(gate, (first[o.rank], second[o.rank]), (first, second))
        rounds = mail_rounds(self._schedule(), Task(made.buffer, lanes, o.reduction), mail, o.label)
        return made.around(Program(tuple(rounds), (), 0))

    def in_place(self, gate: Gate, positions: Sequence[Positions], *, first: bool = True) -> Program:
        """Return the program for vectors that all ranks of the node reach; ``first`` if it begins with a gate."""
        o = self.operation
        assert o.entry.owned is not None
        owned = o.entry.owned(o.rank, o.layout)
        vectors = self._vectors(positions)
        parts: list[Program] = []
        for here, rounds in self._stages(owned):
            if here:
                before = gate_round(gate, o.label, len(parts), self._work(rounds, owned, vectors))
                if not parts and not first:
                    before = before._replace(starts=(), tests=(), awaited=())
                done = () if self.asking is None else (self.asking.done(),)
                after = gate_round(gate, o.label, len(parts) + 1)
                parts.append(Program((before, *done, after), (), 0, device=self.device))
            else:
                buffer = self.copying.buffer
                parts.append(bind(self.channel, rounds, buffer, o.lanes(), o.reduction, label=o.label, tag=self.tag))
        return in_turn(*parts, self.store)

    def _vectors(self, positions: Sequence[Positions]) -> Vectors:
        """Return the vectors of all ranks of the node."""
        o = self.operation
        cuts = cuts_of(o.counts)
        moved = {Collective.ALLGATHER: 0, Collective.REDUCE_SCATTER: 1}.get(o.collective)
        found: list[dict[int, Part]] = [{}, {}]
        for place, (rank, told) in enumerate(zip(self.node.ranks, positions, strict=True)):
            for kind, position in enumerate(told):
                # Of a gather's input and a scatter's output there is one chunk alone.
                start, stop = (0, o.length) if kind != moved else (cuts[rank], cuts[rank + 1])
                if rank == o.rank:
                    own = (self.x, self.out)[kind]  # which the program keeps, for as long as it is there
                    if own is not None:
                        found[kind][rank] = Part(own, start)
                elif position != NOWHERE:
                    dtype = self._dtype
                    view = self.reach.view(place, position, (stop - start) * dtype.itemsize).view(dtype)
                    found[kind][rank] = Part(view, start)
        sources, targets = found
        into = o.root if o.collective is Collective.REDUCE else o.rank
        # By now they are apart, or the input lies where its place in the output is.
        apart = self.x is not None and self.out is not None and not overlap(self.x, self.out)
        return Vectors(sources.get(o.rank), targets.get(into), into, sources, targets, apart=apart)

    @property
    def _dtype(self) -> np.dtype[Any]:
        """The dtype of the vectors, which need not be that in which they are combined."""
        lies = self.x if self.out is None else self.out
        return self.operation.reduction.dtype if lies is None else lies.dtype

    def _ready(self) -> Program:
        """Return the program that brings the input where others reach it, and waits until it is there."""
        if self.first is not None and self.one_stage and self.out is not None:
            self._brought, self._made = True, Copying(self.out, None, None)
        if self.asking is None:
            return in_turn(self.first)
        return replace(in_turn(self.first, Program((self.asking.follow(),), (), 0)), device=self.device)

    def _work(self, rounds: Sequence[Round], owned: range, vectors: Vectors) -> Call:
        """Return the call that does an owner's part of some rounds."""
        o = self.operation
        if self.asking is None or self.device is None:
            return owner_work(rounds, owned, o.lanes(), o.reduction, vectors, self.segment)
        if o.collective is Collective.ALLREDUCE and self.all_here:
            # What an owner does with its chunk then is one kernel: a fold of all ranks' in their order, and copies.
            return self.asking.ask(
                *(
                    self.device.fold(
                        [vectors.targets[rank].block(start, stop) for rank in self.node.ranks], o.reduction
                    )
                    for lane in o.lanes()
                    for start, stop in [(lane[owned.start][0], lane[owned.stop - 1][1])]
                    if start < stop
                )
            )
        return self.asking.ask(owner_work(rounds, owned, o.lanes(), o.reduction, vectors, max(o.nbytes, 1)))

    def _stages(self, owned: range) -> list[tuple[bool, list[Round]]]:
        """Return the rounds of this node alone, and those in which messages are sent, in turn.

        All ranks of a node have as many stages within it. Who has nothing to do between two of them knows the second by
        what it receives of its own chunks: they come from a rank that may have changed them.
        """
        stages: list[tuple[bool, list[Round]]] = []
        for a_round in self.operation.schedule():
            here = self._within_node(a_round)
            anew = any(step.action is Action.RECEIVE and step.chunk in owned for step in a_round)
            if not stages or stages[-1][0] != here or (here and anew):
                stages.append((here, []))
            stages[-1][1].append(a_round)
        return stages

    def _within_node(self, a_round: Round) -> bool:
        """Whether a round is about this node alone; a round without messages is about what was there before."""
        peers = [step.peer for step in a_round.messages]
        return all(peer in self.node.ranks for peer in peers) if peers else self.all_here


def _vector(operation: Operation, array: Array | None) -> Array | None:
    """Return an array as a vector that others may reach, or None where its elements do not follow one another."""
    if array is None or (array.dtype != operation.reduction.dtype and device_of(array) is HOST):
        return None
    return flat(array)


def _stay_apart(operation: Operation, source: Array, target: Array) -> bool:
    """Whether others may read the input while the result is written."""
    if same_memory(source, target) or not overlap(source, target):
        return True
    o = operation
    if o.collective is Collective.REDUCE_SCATTER:
        return same_memory(source[o.own_chunk], target)
    return o.collective is Collective.ALLGATHER and same_memory(source, target[o.own_chunk])


class _Asking:
    """A stream of a device's for what an operation asks of it."""

    def __init__(self, device: Accelerator, label: str) -> None:
        self._stream, self._computing = device.stream(), Computing(label)

    def follow(self) -> BoundRound:
        """Return the round that waits for all that was asked for before."""
        return self.done()._replace(starts=(self._stream.follow,))

    def done(self) -> BoundRound:
        """Return the round that waits for what was asked for here."""
        return BoundRound((), (self._stream.done,), (), (self._computing,))

    def ask(self, *calls: Call) -> Call:
        """Return the call that makes some calls, whose work goes to the stream."""
        return partial(ask, self._stream, calls)


class _Found:
    """The program that was made for what ranks announced last; they mostly announce the same again."""

    def __init__(self, gate: SignedGate, make: Callable[[tuple[Positions, ...]], Program]) -> None:
        self._gate, self._make = gate, make
        self._announced: tuple[int, ...] = ()
        self._program = Program((), (), 0)

    def program(self) -> Program:
        """Return the program for what they have just announced."""
        announced = self._gate.announced()
        if announced != self._announced:
            self.release()
            self._announced, self._program = announced, self._make(self._gate.positions(announced))
        return self._program

    def release(self) -> None:
        """Release what the program holds."""
        program, self._announced, self._program = self._program, (), Program((), (), 0)
        for release in program.releases:
            release()
