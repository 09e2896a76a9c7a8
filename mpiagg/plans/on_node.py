"""Operations whose messages within a node go through memory that its ranks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from mpiagg.arrays import HOST, Accelerator, Array, accelerator_of, convert, device_of
from mpiagg.plans.binding import bind, scratch_length
from mpiagg.plans.choices import NATIVE, NCCL, SEGMENT
from mpiagg.plans.operation import Operation
from mpiagg.plans.ports import ask
from mpiagg.plans.program import BoundRound, Call, Computing, Deferred, Program, in_turn
from mpiagg.plans.sharing import Mail, Task, gate_round, mail_rounds, owner_work
from mpiagg.schedules import Action, Collective, Round, algorithm
from mpiagg.transport import LINE, NOWHERE, SHARED_TAG, Block, Channel, Gate, Position, SignedGate

ONE_SHOT: Final = 4 * 2**10
"""Bytes up to which every rank reduces everything by itself: one gate then, and two for longer vectors."""

ANNOUNCED: Final = 32 * 2**10
"""Bytes from which calls first ask whether all vectors lie in shared memory; shorter ones are copied anyway. Between
nodes, shorter ones go by messages, within the nodes, too: more gates between the messages took longer."""


def serves(channel: Channel, operation: Operation, buffer: Array) -> bool:
    """Whether this rank's part of an operation can go through shared memory: it has somebody to share it with."""
    o = operation
    if channel.node.size == 1 or o.choice.wire is not None or o.entry.owned is None:
        return False
    if device_of(buffer) is not HOST and channel.device_memory is None:
        return False  # nobody has any device memory that others map
    # What knows nothing of nodes has rounds in which some of a node's ranks meet others, and some do not.
    return len(o.layout.nodes) == 1 or (o.choice.algorithm != "shared" and o.nbytes > ANNOUNCED)


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
        and serves(channel, o, vector)
        and shared.position(vector) != NOWHERE
    )


def bind_on_node(channel: Channel, operation: Operation, buffer: Array, tag: int) -> Program:
    """Return the program of an operation, in place on a buffer; its messages within the node go through memory.

    With a tag of its own, it is made by all ranks together. Programs of blocking calls are made by each rank when it
    needs them; they share the channel's own block of memory, and say at each run where the vectors lie.
    Where there is not enough memory to share, all goes by messages.
    """
    ground = _Ground(channel, operation, buffer, tag)
    return ground.called() if tag == SHARED_TAG else ground.planned()


class _Ground:
    """What the programs of an operation are made of."""

    def __init__(self, channel: Channel, operation: Operation, buffer: Array, tag: int) -> None:
        self.channel, self.operation, self.buffer = channel, operation, buffer
        self.tag = channel.tags.shared(operation.signature) if tag == SHARED_TAG else tag
        self.node = channel.node
        # Of a chunk for each rank, two elements at least go through memory at a time.
        self.segment = max(operation.choice.segment or SEGMENT, 2 * operation.size * buffer.itemsize)
        self.device = accelerator_of(buffer)
        # Gates, and blocks for them, are in the host's memory; the vectors may be in a device's.
        shared = channel.memory if self.device is None else channel.device_memory
        assert shared is not None  # or else this way does not serve
        self.reach = shared
        self.position = self.reach.position(buffer)
        # Within one node there is nothing but what its ranks share; across nodes there are messages.
        self.all_here = self.node.size == operation.size
        short = operation.nbytes <= min(ONE_SHOT, self.segment)
        elsewhere = operation.choice.elsewhere if self.all_here else None  # other nodes have other memory
        self.mailed = self.all_here and elsewhere is None and self.device is None
        self.messages = operation
        if elsewhere is not None:
            self.messages = replace(operation, choice=operation.choice._replace(algorithm=elsewhere, elsewhere=None))
        self.one_shot = self.all_here and short and self.device is None and operation.collective is Collective.ALLREDUCE
        # Whether the vector is to be combined in another dtype.
        self.narrow = buffer.dtype != operation.reduction.dtype
        self.asking = None if self.device is None else _Asking(self.device, operation.label)

    # -- made by all ranks together

    def planned(self) -> Program:
        """Return the program for vectors that stay where they are."""
        memory, busy = self.channel.memory, self.channel.busy
        positions = memory.tell(self.position)
        mapped = NOWHERE not in positions
        by_mail = self.one_shot or (self.mailed and not mapped)
        if not (by_mail or mapped):
            return self.by_messages()
        try:
            block = memory.take(LINE + (2 * self._box() if by_mail else 0), busy=busy)
        except MemoryError:
            return self.by_messages()
        gate = Gate(block, self.node.place, self.node.ranks)
        program = self._by_mail(gate, block) if by_mail else in_turn(self._ready(), self._in_place(gate, positions))
        back = Program((), (partial(memory.give_back, block),), block.nbytes)
        return replace(in_turn(program, back), sent_bytes=self._sent_bytes())

    # -- made by each rank for itself

    def called(self) -> Program:
        """Return the program for vectors that may lie elsewhere at the next call."""
        memory = self.channel.memory
        if memory.refused:
            return self.by_messages()
        try:
            gate, block = self.channel.ground(LINE + 2 * SEGMENT)
        except MemoryError:
            memory.refused = True
            return self.by_messages()
        enter = BoundRound((partial(gate.enter, self.operation.signature),), (), (), ())
        leave = BoundRound((gate.leave,), (), (), ())
        if self.operation.nbytes <= ANNOUNCED and self.device is None:
            program = self._by_mail(gate, block)
            return replace(program, rounds=(enter, *program.rounds, leave), sent_bytes=self._sent_bytes())
        met = gate_round(gate, self.operation.label, 0)
        announce = met._replace(starts=(partial(gate.announce, self.position), *met.starts))
        found = _Found(gate, partial(self._where_they_lie, gate, block))
        o = self.messages
        length = scratch_length(o.schedule(), o.lanes()) + (o.length if self.narrow else 0)
        nbytes = 0 if self.mailed else o.reduction.dtype.itemsize * length
        rounds = (*self._ready().rounds, enter, announce, Deferred(found.program).as_round(), leave)
        return Program(rounds, (found.release,), nbytes, self._sent_bytes(), self.device)

    def _where_they_lie(self, gate: SignedGate, block: Block, positions: tuple[Position, ...]) -> Program:
        if NOWHERE not in positions:
            return self._in_place(gate, positions, first=False)
        return self._by_mail(gate, block) if self.mailed else self.by_messages()

    def _sent_bytes(self) -> int:
        """Return how many bytes this rank hands to others in one run: as many as messages would carry."""
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
        o, buffer = self.messages, self.buffer
        bound = partial(bind, self.channel, o.schedule(), lanes=o.lanes(), reduction=o.reduction, label=o.label)
        if not self.narrow:
            return bound(buffer=buffer, tag=self.tag)
        wide = device_of(buffer).empty(buffer.size, o.reduction.dtype)
        program = bound(buffer=wide, tag=self.tag)
        program = in_turn(partial(convert, wide, buffer), program, partial(convert, buffer, wide))
        return replace(program, nbytes=program.nbytes + wide.nbytes)

    def _box(self) -> int:
        """Return the bytes of a mailbox: of few sizes, so that a block serves plans of other lengths after this one."""
        enough = 1 << max(self.operation.nbytes - 1, LINE - 1).bit_length()
        return min(enough, -(-self.segment // LINE) * LINE)

    def _by_mail(self, gate: Gate, block: Block) -> Program:
        """Return the program that copies through mailboxes, a segment after the other."""
        o = self.operation
        # The boxes lie in the same places for all who share the block, so that nobody writes where another still reads.
        box = (block.nbytes - LINE) // 2
        room = min(box, self.segment) // self.buffer.itemsize
        if o.length > room:
            room -= o.size  # where each rank's chunk is cut, each part may have an element more than the others
        lanes = [[(0, o.length)]] if self.one_shot else o.lanes(max(1, -(-o.length // max(1, room))))
        first, second = (
            {rank: part[start : start + box] for rank, part in zip(self.node.ranks, block.parts, strict=True)}
            for start in (LINE, LINE + box)
        )
        mail = Mail(gate, (first[o.rank], second[o.rank]), (first, second))
        return Program(
            tuple(mail_rounds(self._schedule(), Task(self.buffer, lanes, o.reduction), mail, o.label)), (), 0
        )

    def _in_place(self, gate: Gate, positions: Sequence[Position], *, first: bool = True) -> Program:
        """Return the program for vectors that all ranks of the node reach; ``first`` if it begins with a gate."""
        o = self.operation
        assert o.entry.owned is not None
        owned = o.entry.owned(o.rank, o.layout)
        vectors = {
            rank: self.reach.view(place, position, self.buffer.nbytes).view(self.buffer.dtype)
            for place, (rank, position) in enumerate(zip(self.node.ranks, positions, strict=True))
        }
        vectors[o.rank] = self.buffer  # which the program keeps, for as long as it is there
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
                parts.append(
                    bind(self.channel, rounds, self.buffer, o.lanes(), o.reduction, label=o.label, tag=self.tag)
                )
        return in_turn(*parts)

    def _ready(self) -> Program:
        """Return the program that waits until this rank's vector is ready for the others."""
        return (
            Program((), (), 0) if self.asking is None else Program((self.asking.follow(),), (), 0, device=self.device)
        )

    def _work(self, rounds: Sequence[Round], owned: range, vectors: Mapping[int, Array]) -> Call:
        """Return the call that does an owner's part of some rounds."""
        o = self.operation
        task = Task(self.buffer, o.lanes(), o.reduction)
        if self.asking is None or self.device is None:
            return owner_work(rounds, owned, task, vectors, self.segment)
        if o.collective is Collective.ALLREDUCE and self.all_here:
            # What an owner does with its chunk then is one kernel: a fold of all ranks' in their order, and copies.
            return self.asking.ask(
                *(
                    self.device.fold([vectors[rank][start:stop] for rank in self.node.ranks], o.reduction)
                    for lane in task.lanes
                    for start, stop in [(lane[owned.start][0], lane[owned.stop - 1][1])]
                    if start < stop
                )
            )
        return self.asking.ask(owner_work(rounds, owned, task, vectors, max(self.buffer.nbytes, 1)))

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

    def __init__(self, gate: SignedGate, make: Callable[[tuple[Position, ...]], Program]) -> None:
        self._gate, self._make = gate, make
        self._positions: tuple[Position, ...] = ()
        self._program = Program((), (), 0)

    def program(self) -> Program:
        """Return the program for what they have just announced."""
        positions = self._gate.positions()
        if positions != self._positions:
            self.release()
            self._positions, self._program = positions, self._make(positions)
        return self._program

    def release(self) -> None:
        """Release what the program holds."""
        program, self._positions, self._program = self._program, (), Program((), (), 0)
        for release in program.releases:
            release()
