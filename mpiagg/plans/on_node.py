"""Operations whose messages within a node go through memory that its ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from mpiagg.arrays import Accelerator, Array, accelerator_of, convert, device_of
from mpiagg.plans.binding import Lane, bind, scratch_length
from mpiagg.plans.choices import NATIVE, SEGMENT, SHARED, Case, Memory, choose
from mpiagg.plans.endpoints import Asking
from mpiagg.plans.mailboxes import ThroughMailboxes, goes_by_mailboxes
from mpiagg.plans.moves import bind_moves
from mpiagg.plans.native import bind_native, called_at_once
from mpiagg.plans.one_shot import ONE_SHOT, at_once, segment_of
from mpiagg.plans.operation import Operation
from mpiagg.plans.owners import READ_SEGMENT, exchange_work, owner_work, rounds_by_reading, stages
from mpiagg.plans.places import AnnouncedProgram, Places, told_by_all
from mpiagg.plans.program import Arrival, Callback, Copying, Deferred, Program, in_turn
from mpiagg.plans.sharing import (
    InTurn,
    NodeTask,
    Vectors,
    barrier_round,
    rounds_in_place,
)
from mpiagg.plans.slots import by_slots, slot_rounds, slots_for
from mpiagg.schedules import Collective, Round
from mpiagg.tables import ANNOUNCED
from mpiagg.transport import LINE, NOWHERE, SHARED_TAG, Block, Channel, NodeBarrier, Positions, SignedBarrier


def serves(channel: Channel, operation: Operation, device: Accelerator | None) -> bool:
    """Whether this rank's part of an operation can go through shared memory: it has somebody to share it with."""
    o = operation
    if channel.node.size == 1 or not o.shares:
        return False
    if o.entry.in_step:  # with all ranks, in the host's memory
        return len(o.layout.nodes) == 1 and device is None
    if device is not None and channel.memory.device is None and not by_slots(channel, o):
        return False  # nobody has any device memory that others map, or would need it
    # What knows nothing of nodes has rounds in which some of a node's ranks meet others, and some do not.
    return len(o.layout.nodes) == 1 or (o.choice.algorithm != SHARED and o.nbytes > ANNOUNCED)


def reduces_in_place(channel: Channel, operation: Operation, vector: Array) -> bool:
    """Whether a vector of a dtype that is combined in another need not be converted, if all others lie like it.

    That is half precision in memory of a device that the ranks of one node map: a kernel combines it in float32.
    """
    o, shared = operation, channel.memory.device
    return (
        shared is not None
        and o.collective is Collective.ALLREDUCE
        and len(o.layout.nodes) == 1
        and serves(channel, o, accelerator_of(vector))
        and shared.position(vector) != NOWHERE
    )


class OnNode:
    """What the programs of an operation on a node are made of, between arrays of this rank.

    Parameters
    ----------
    channel : Channel
    operation : Operation
    x, out : numpy.ndarray or None
        Where this rank's input is, and where its result goes, of any layout; None where it has none.
    buffer : callable
        Returns the vector of the whole length on which the operation is carried out where not all arrays are shared,
        with what copies the input to it and the result out of it.
    tag : int
        Of the messages; ``SHARED_TAG`` for blocking calls.
    """

    def __init__(  # noqa: PLR0917 - what there is to be said of them
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
        self.segment = o.choice.segment or SEGMENT
        # Barriers, and blocks for them, are in the host's memory; the vectors may be in a device's.
        shared = channel.memory.host if self.device is None else channel.memory.known(self.device)
        # Within one node there is nothing but what its ranks share; across nodes there are messages.
        self.all_here = self.node.size == o.size
        unregistered = o.choice.unregistered if self.all_here else None  # other nodes have other memory
        self.takes_mailboxes = self.device is None and goes_by_mailboxes(channel, o)
        self.messages = o
        if unregistered is not None:
            case = Case(o.collective, o.nbytes, o.layout, Memory.NONE)
            other = choose(case)._replace(lanes=o.choice.lanes) if o.choice.reads else o.choice.in_other_memory
            self.messages = replace(o, choice=other)
        self.asking = None if self.device is None else Asking(self.device, o.label)
        # Owners read inputs and write results wherever they lie; several stages work on one buffer.
        one_stage = self.all_here and o.choice.algorithm == SHARED
        readable = one_stage and self.device is None and o.choice.reads and o.choice.lanes == 1
        self.read = readable and channel.memory.read()
        self._buffer = buffer
        self._made: Copying | None = None
        self.store: Callback | None = None
        if one_stage:
            self.places = Places(o, self.node, shared, x, out, in_place=False, read=self.read)
            self.first = self.places.bring
        else:
            whole, self.first, self.store, _ = self.copying
            self.places = Places(o, self.node, shared, whole, whole, in_place=True)

    @property
    def copying(self) -> Copying:
        """The buffer, with what copies to it and from it."""
        made = self._made = self._buffer() if self._made is None else self._made
        return made

    @property
    def _owned(self) -> range:
        """The chunks that this rank owns, by an algorithm in which ranks own any."""
        entry = self.operation.entry
        assert entry.owned is not None
        return entry.owned(self.operation.rank, self.operation.layout)

    @property
    def _positions(self) -> Positions:
        apart = self.device is not None and self.channel.memory.apart_from_slots(self.device)
        return self.places.positions(apart=apart)

    # -- made by all ranks together

    def planned(self) -> Program:
        """Return the program for arrays that stay where they are."""
        o, memory, busy = self.operation, self.channel.memory.host, self.channel.busy
        positions = told_by_all(memory, self._positions)
        mapped = self.places.reached(positions)
        by_one_barrier = at_once(o) is not None and o.collective is Collective.ALLREDUCE and o.nbytes <= ONE_SHOT
        by_mailboxes = self.takes_mailboxes and (by_one_barrier or not mapped)
        ask_for = partial(slots_for, self.channel, self.operation, self.device, positions, together=True)
        slots = None if by_mailboxes or mapped else ask_for()
        if not (by_mailboxes or mapped or slots):
            return self.by_messages()
        try:
            block = memory.take(LINE + (2 * self._box() if by_mailboxes else 0), busy=busy)
        except MemoryError:
            self.channel.memory.give_back_slots(slots)
            return self.by_messages()
        barrier, brought = NodeBarrier(block, self.node.place, self.node.ranks), self.first is not None
        if by_mailboxes:
            program = self.by_mailboxes(barrier, block)
        elif slots is None:
            program = in_turn(self._ready(), self.in_place(barrier, positions))
        else:
            program = in_turn(self._ready(), self.through_slots(barrier, slots, brought=brought))
        give_back = partial(memory.give_back, block), partial(self.channel.memory.give_back_slots, slots)
        back = Program((), give_back, block.nbytes + (0 if slots is None else slots.nbytes))
        return replace(in_turn(program, back), sent_bytes=self.messages.sent_bytes)

    # -- made by each rank for itself

    def called(self) -> Program:
        """Return the program of blocking calls, at the next of which the others' arrays may lie elsewhere.

        Whether there are any arrays to be looked for is asked when it runs: on all ranks at the same call.
        """
        if self.device is None and self.operation.nbytes <= ANNOUNCED:
            return self._unannounced()
        if self.device is not None or self.read:
            return self._announced()
        memory, made = self.channel.memory.host, dict[bool, Program]()

        def choose() -> Program:
            leased = memory.leased
            if leased not in made:
                made[leased] = self._announced() if leased else self._unannounced()
            return made[leased]

        def release() -> None:
            for program in made.values():
                for each in program.releases:
                    each()
            made.clear()

        rounds = (Deferred(choose).as_round(),)
        return Program(rounds, (release,), self._scratch_bytes(), self.messages.sent_bytes)

    def _unannounced(self) -> Program:
        """Return the program for arrays of which none can be in memory that the ranks share."""
        for_calls = self.channel.memory.for_calls() if self.takes_mailboxes else None
        if for_calls is None:
            return self.by_messages()
        barrier, block = for_calls
        program = self.by_mailboxes(barrier, block)
        return replace(self._within(barrier, program), sent_bytes=self.messages.sent_bytes)

    def _announced(self) -> Program:
        """Return the program that begins with a barrier, at which ranks say where their arrays lie."""
        for_calls = self.channel.memory.for_calls()
        if for_calls is None:
            return self.by_messages()
        barrier, block = for_calls
        met = barrier_round(barrier, self.operation.label, 0)
        announced = barrier.in_short(self._positions)
        announce = met._replace(starts=(partial(barrier.announce, announced), *met.starts))
        found = AnnouncedProgram(barrier, partial(self._where_they_lie, barrier, block))
        if self.device is not None:
            self.channel.memory.users.add(found)
        program = self._within(barrier, Program((announce, Deferred(found.program).as_round()), (), 0))
        rounds = (*self._ready().rounds, *program.rounds)
        return Program(rounds, (found.release,), self._scratch_bytes(), self.messages.sent_bytes, self.device)

    def _within(self, barrier: SignedBarrier, program: Program) -> Program:
        """Return a program that enters the operation at the barrier that calls share first, and leaves it last."""
        return in_turn(partial(barrier.enter, self.operation.signature), program, barrier.leave)

    def _where_they_lie(self, barrier: SignedBarrier, block: Block, positions: tuple[Positions, ...]) -> Program:
        if self.places.reached(positions):
            return self.in_place(barrier, positions, first=False)
        brought = self.first is not None
        if self.takes_mailboxes:
            return self.by_mailboxes(barrier, block, brought=brought)
        slots = slots_for(self.channel, self.operation, self.device, positions, together=False)
        if slots is None:
            return self.by_messages(brought=brought)
        return self.through_slots(barrier, slots, brought=brought)

    def _scratch_bytes(self) -> int:
        """Return the memory that is needed where vectors are read, or that messages would need."""
        if self.read:
            return self.places.scratch_bytes + READ_SEGMENT
        o = self.messages
        if self.takes_mailboxes or o.choice.algorithm == NATIVE or o.collective.moves:
            return 0
        narrow = self.places.dtype != o.reduction.dtype
        length = scratch_length(o.schedule(), o.lanes()) + (o.length if narrow else 0)
        return o.reduction.dtype.itemsize * length

    # -- four ways; to bring an input once more would be wrong where it lies partly in the output

    def _copying(self, *, brought: bool) -> Copying:
        return self.copying._replace(load=None) if brought else self.copying

    def _in_pieces(self, *, brought: bool) -> tuple[tuple[Array | None, Array | None], Copying | None]:
        """Return the input and the output as vectors, which are in a buffer where the arrays cannot be that."""
        if (vectors := self.places.in_pieces(brought=brought)) is not None:
            return vectors, None
        o, made = self.operation, self._copying(brought=brought)
        x, out = (None if part is None else made.buffer[part] for part in (o.source, o.target))
        return (x, out), made

    def by_messages(self, *, brought: bool = False) -> Program:
        """Return the program that sends messages within the node, too; ``brought`` if the input is in the buffer."""
        o = self.messages
        if o.choice.algorithm == NATIVE:
            return self._by_mpi(brought=brought)
        if o.collective.moves:
            return bind_moves(self.channel, o, *self.places.given, self.tag)
        made = self._copying(brought=brought)
        bound = partial(bind, self.channel, o.schedule(), lanes=o.lanes(), reduction=o.reduction, label=o.label)
        if made.buffer.dtype == o.reduction.dtype:
            return made.around(bound(buffer=made.buffer, tag=self.tag))
        wide = device_of(made.buffer).empty(made.buffer.size, o.reduction.dtype)
        program = bound(buffer=wide, tag=self.tag)
        program = in_turn(partial(convert, wide, made.buffer), program, partial(convert, made.buffer, wide))
        return made.around(replace(program, nbytes=program.nbytes + wide.nbytes))

    def _by_mpi(self, *, brought: bool) -> Program:
        """Return the program that is the MPI library's own collective: at once for blocking calls."""
        o, channel = self.messages, self.channel
        call = partial(bind_native, channel.comm, o) if self.together else partial(called_at_once, channel, o)
        x, out = self.places.given
        if brought or o.lacks(x, out):
            made = self._copying(brought=brought)
            return made.around(call(*(None if part is None else made.buffer[part] for part in (o.source, o.target))))
        return call(x, out)

    def _box(self) -> int:
        """Return the bytes of a mailbox: of few sizes, so that a block serves plans of other lengths after this one."""
        enough = 1 << max(self.operation.nbytes - 1, LINE - 1).bit_length()
        return min(enough, -(-segment_of(self.operation) // LINE) * LINE)

    def by_mailboxes(self, barrier: NodeBarrier, block: Block, *, brought: bool = False) -> Program:
        """Return the program that copies through mailboxes."""
        vectors, made = self._in_pieces(brought=brought)
        room = None if self.together else self.channel.memory.room  # blocking calls follow one another
        program = ThroughMailboxes(self.operation, barrier, block, room).bound_to(*vectors)
        return program if made is None else made.around(program)

    def through_slots(self, barrier: NodeBarrier, slots: Block, *, brought: bool = False) -> Program:
        """Return the program that copies to slots in memory of devices, and from there, a piece after the other."""
        o, asking = self.operation, self.asking
        assert asking is not None
        vectors, made = self._in_pieces(brought=brought)
        memory, work = (
            dict(zip(self.node.ranks, slots.parts, strict=True)),
            partial(self._work, o.schedule(), self._owned),
        )
        program = Program(tuple(slot_rounds(o, vectors, memory, barrier, asking, work)), (), 0, device=self.device)
        return program if made is None else made.around(in_turn(Program((asking.follow(),), (), 0), program))

    def in_place(self, barrier: NodeBarrier, positions: Sequence[Positions], *, first: bool = True) -> Program:
        """Return the program for vectors that all ranks of the node reach; ``first`` if it begins with a barrier."""
        vectors = self.places.vectors(positions)
        by_owners = self._by_owners if self.places.written(positions) else self._by_reading
        program = by_owners(barrier, vectors) if self.operation.entry.owned else self._in_step(barrier, vectors)
        if not first:
            met, *rounds = program.rounds  # of every way the first round is a barrier
            assert all(isinstance(awaited, Arrival) for awaited in met.awaited)
            program = replace(program, rounds=(met._replace(starts=(), tests=(), awaited=()), *rounds))
        return in_turn(program, self.store)

    def _in_step(self, barrier: NodeBarrier, vectors: Vectors) -> Program:
        """Return the program of the rounds, in which each rank reads from the others' vectors."""
        o = self.operation
        task = NodeTask(self.copying.buffer, o.lanes(), o.reduction)
        return Program(tuple(rounds_in_place(o.schedule(), task, vectors, barrier, self.segment, o.label)), (), 0)

    def _by_reading(self, barrier: NodeBarrier, vectors: Vectors) -> Program:
        """Return the program in which ranks make chunks in their own vectors, and the others read them there."""
        o = self.operation
        rounds = rounds_by_reading(o.schedule(), self._owned, o.lanes(), o.reduction, vectors, barrier, o.label)
        return Program(rounds, (), self.places.scratch_bytes)

    def _by_owners(self, barrier: NodeBarrier, vectors: Vectors) -> Program:
        """Return the program of stages, in which owners read from all vectors, and write into them."""
        o, owned = self.operation, self._owned
        parts: list[Program] = []
        for here, rounds in stages(o.schedule(), owned, self.node.ranks, alone=self.all_here):
            if here:
                work = self._work(rounds, owned, vectors, o.lanes())
                work = work if self.asking is None else self.asking.ask(work)
                before = barrier_round(barrier, o.label, len(parts), work)
                done = () if self.asking is None else (self.asking.done(),)
                after = barrier_round(barrier, o.label, len(parts) + 1)
                parts.append(Program((before, *done, after), (), 0, device=self.device))
            else:
                buffer, how = self.copying.buffer, o.reduction
                part = bind(self.channel, rounds, buffer, o.lanes(), how, label=o.label, tag=self.tag, cut=o.cut)
                parts.append(part)
        return in_turn(*parts)

    def _ready(self) -> Program:
        """Return the program that brings the input where others reach it, and waits until it is there."""
        if self.places.bring is not None and self.places.target is not None:
            self._made = Copying(self.places.target, None, None)
        if self.asking is None:
            return in_turn(self.first)
        return replace(in_turn(self.first, Program((self.asking.follow(),), (), 0)), device=self.device)

    def _work(self, rounds: Sequence[Round], owned: range, vectors: Vectors, lanes: Sequence[Lane]) -> Callback:
        """Return the call that does an owner's part of some rounds, on some lanes of vectors in reach."""
        o = self.operation
        if o.collective is Collective.ALLTOALL:
            return exchange_work(vectors, o.counts, o.rank)
        if self.device is None:
            return owner_work(rounds, owned, lanes, o.reduction, vectors, self.segment)
        if o.collective is Collective.ALLREDUCE and self.all_here:
            # What an owner does with its chunk then is one kernel: a fold of all ranks' in their order, and copies.
            return InTurn(
                [
                    self.device.fold(
                        [vectors.targets[rank].block(start, stop) for rank in self.node.ranks], o.reduction
                    )
                    for lane in lanes
                    for start, stop in [(lane[owned.start][0], lane[owned.stop - 1][1])]
                    if start < stop
                ]
            )
        return owner_work(rounds, owned, lanes, o.reduction, vectors, max(o.nbytes, 1))
