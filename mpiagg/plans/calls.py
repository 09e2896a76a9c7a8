"""What a blocking call is resolved into: made once for what a caller passes, and run with the arrays of each call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, Accelerator, Array, address, device_of, is_flat
from mpiagg.errors import PlanError
from mpiagg.plans.block_exchange import BlockExchange, memory_for_calls, serves_blocks
from mpiagg.plans.bound import COPIED_BYTES, STAGED_BYTES, bind_arrays, goes_by_host, pinned, plan_of
from mpiagg.plans.call import Call, WithPlan, in_errstate
from mpiagg.plans.choices import NATIVE, Memory
from mpiagg.plans.mailboxes import ThroughMailboxes, goes_by_mailboxes, lanes_of
from mpiagg.plans.native import KNOWN_TO_MPI, call_native, native_caller
from mpiagg.plans.one_shot import OneShot, at_once
from mpiagg.plans.operation import Operation
from mpiagg.plans.recorded import Recorded
from mpiagg.plans.staging import from_host, to_host
from mpiagg.tables import ANNOUNCED
from mpiagg.transport import DEFAULT_TIMEOUT, NOWHERE, Block, Channel, FreedAfterUse, SignedBarrier
from mpiagg.watch import END


def resolve(channel: Channel, operation: Operation, x: Array | None, out: Array | None, *, quiet: bool = False) -> Call:
    """Return the call of an operation for arrays like these: of their dtypes, shapes and layouts, on their devices."""
    o, device = operation, device_of(x if out is None else out)
    channel.memory.signatures()  # made by all ranks together, at the first call of any kind
    given = [part for part in (x, out) if part is not None]
    flat = all(map(is_flat, given))
    as_they_are = flat and all(part.dtype == o.reduction.dtype for part in given)
    by_host = device is not HOST and goes_by_host(o)
    if serves_blocks(channel, o, device) and (for_calls := memory_for_calls(channel)) is not None:
        return _Blocks(channel, o, for_calls, quiet=quiet)
    if o.ragged and o.choice.unregistered is not None:
        o = replace(o, choice=o.choice.in_other_memory)
    if o.choice.algorithm == NATIVE and as_they_are and not by_host:
        return _Native(channel, o, x, out, quiet=quiet)
    by_mailboxes = device is HOST and as_they_are and not o.lacks(x, out) and goes_by_mailboxes(channel, o)
    by_mailboxes = by_mailboxes and channel.memory.for_calls() is not None
    if by_mailboxes and o.nbytes <= ANNOUNCED:
        return _ByMailboxes(channel, o, quiet=quiet)
    short = o.nbytes <= STAGED_BYTES or o.choice.algorithm == NATIVE or not as_they_are
    if not flat or by_host or (device is HOST and short):
        return _Copied(channel, o, x, out, quiet=quiet)
    return _Placed(channel, o, x, out, by_mailboxes=by_mailboxes, quiet=quiet)


class _Native(Call, Recorded):
    """The MPI library's own collective on the caller's arrays."""

    given_as_it_is = handed_on = True

    def __init__(
        self,
        channel: Channel,
        operation: Operation,
        x: Array | None,
        out: Array | None,
        *,
        quiet: bool = False,
        words: str = "",
    ) -> None:
        Call.__init__(self, channel, operation, quiet=quiet)
        Recorded.__init__(self, channel, words or operation.description, operation.collective.value, operation.nbytes)
        self.subject.data = operation.data
        self._call = native_caller(channel.native, operation, x, out)

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Carry the operation out; see :meth:`Call.run`."""
        self.hand_on(self._call, (x, out), timeout)

    def hand_on(self, call: Callable[..., object], given: tuple[Any, ...], timeout: float) -> None:
        """Make a call of the MPI library's own."""
        self.subject.unleavable = timeout
        self.record(call, given)


class _ByMailboxes(Call):
    """Vectors that every rank copies to mailboxes, and takes from there to the caller's array, wherever that lies."""

    def __init__(self, channel: Channel, operation: Operation, *, quiet: bool) -> None:
        super().__init__(channel, operation, quiet=quiet)
        found = channel.memory.for_calls()
        assert found is not None
        o, short, lanes = operation, at_once(operation) is not None, lanes_of(operation, found[1])
        key = _MailboxPlan, o.collective, o.root, o.choice, o.reduction, short, lanes, quiet
        self._mailbox_plan = channel.calls.find(key, partial(_MailboxPlan, self, *found, short=short))
        self._parts: Any = self._mailbox_plan.mailboxes.parts_of(operation)
        self._subject = operation.subject(channel.log)
        self._subject.rounds = self._mailbox_plan.plan.subject.rounds
        self._mailbox_plan.begin_use()

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Carry the operation out; see :meth:`Call.run`."""
        mailbox_plan, log = self._mailbox_plan, self.channel.log
        mailboxes, plan = mailbox_plan.mailboxes, mailbox_plan.plan
        if not log.blocking[END]:
            log.check_thread()  # which may read what is written here
        mailboxes.x, mailboxes.out, mailboxes.parts = x, out, self._parts
        plan.timeout, plan.subject = timeout, self._subject
        try:
            mailbox_plan.go()
        except BaseException:
            mailboxes.forget()
            raise
        if mailboxes.x is not x or mailboxes.out is not out:
            raise PlanError(f"{self.operation.label}: two threads came to it at the same moment")
        mailboxes.x = mailboxes.out = None  # which are the caller's to keep

    def free(self) -> None:
        """Let go of the plan."""
        self._mailbox_plan.end_use()


class _MailboxPlan(FreedAfterUse):
    """The plan of calls through mailboxes that are alike but for their lengths, if these are cut alike."""

    def __init__(self, call: _ByMailboxes, barrier: SignedBarrier, block: Block, *, short: bool) -> None:
        super().__init__()
        channel, o = call.channel, call.operation
        self.mailboxes: OneShot | ThroughMailboxes = (
            OneShot(o, channel.node.place, barrier, block)
            if short
            else ThroughMailboxes(o, barrier, block, channel.memory.room)
        )
        self.plan = plan_of(channel, o, self.mailboxes.program(), None)
        self.go = call.freely(self.plan)


class _Copied(Call):
    """Vectors that are copied into one that belongs to the call, and out of it.

    So go short ones, for which one plan then serves all places; those of other layouts or dtypes than the operation
    needs; and those of a device's that go by way of the host.
    """

    def __init__(
        self, channel: Channel, operation: Operation, x: Array | None, out: Array | None, *, quiet: bool
    ) -> None:
        super().__init__(channel, operation, quiet=quiet)
        o, device = operation, device_of(x if out is None else out)
        self._device = device if isinstance(device, Accelerator) else None
        self._by = self._device if goes_by_host(o) else None
        whole = device.empty(o.length, o.reduction.dtype) if self._by is None else pinned(o, self._by)
        # What is too large for half precision becomes infinite.
        warned = not quiet or self.dtype == o.reduction.dtype
        self._load: Callable[[Any, Any], object] = device.convert
        self._store = self._load if warned else partial(in_errstate, self._load)
        self._source, self._target = (None if part is None else whole[part] for part in (o.source, o.target))
        self._inner: Call
        if o.choice.algorithm == NATIVE:
            self._inner = _Native(channel, o, self._source, self._target)
        else:
            self._inner = _PlanAtAddress(self, self._source, self._target, own=True)
        self.plan = self._inner.plan
        self._nbytes = whole.nbytes

    @property
    def nbytes(self) -> int:
        """The memory that belongs to it alone."""
        return self._nbytes + self._inner.nbytes

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Carry the operation out; see :meth:`Call.run`."""
        by, source, target = self._by, self._source, self._target
        one_thread = self.channel.one_thread  # the vector belongs to the call
        one_thread.enter()
        try:
            if x is not None and source is not None:
                if by is None:
                    self._load(source if x.ndim == 1 else source.reshape(x.shape), x)
                else:
                    to_host(by, source, x)
                    by.synchronise()
            self._inner.run(source, target, timeout)
            if out is not None and target is not None:
                if by is None:
                    self._store(out, target if out.ndim == 1 else target.reshape(out.shape))
                else:
                    from_host(by, out, target)
            if self._device is not None:
                self._device.synchronise()
        finally:
            one_thread.leave()

    def free(self) -> None:
        """Free what it runs."""
        self._inner.free()


class _Placed(Call):
    """Vectors that are worked on where they lie, by a plan for each place; while places are new they are copied.

    While there is no memory that ranks map, they go through mailboxes or to the MPI library, where that is chosen.
    """

    def __init__(
        self,
        channel: Channel,
        operation: Operation,
        x: Array | None,
        out: Array | None,
        *,
        by_mailboxes: bool = False,
        quiet: bool = False,
    ) -> None:
        super().__init__(channel, operation, quiet=quiet)
        choice = operation.choice
        self._unmapped: _ByMailboxes | _Native | None = None
        if by_mailboxes and not channel.memory.host.leased:
            self._unmapped = _ByMailboxes(channel, operation, quiet=quiet)
        if choice.unregistered == NATIVE:
            other = replace(operation, choice=choice.in_other_memory)
            # On other ranks the same call may be one that is copied, under the words of the whole choice.
            self._unmapped = _Native(channel, other, x, out, quiet=quiet, words=operation.description)
        self._is_new = True

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Carry the operation out; see :meth:`Call.run`."""
        leased = self.channel.memory.host.leased
        if self._unmapped is not None and not leased:
            self._unmapped.run(x, out, timeout)
            return
        # Once ranks map each other's devices, other plans are right, on all of them at the same call.
        mapped = leased, self.channel.memory.device is not None
        x = None if self.operation.source is None else x  # what is no input can be of any layout
        key = (self, place_of(x), x is out or place_of(out), mapped)
        found: Any = self.channel.calls.get(key)
        if found is None:
            found = self._found_anew(key, x, out)
        found.used = True
        found.run(x, out, timeout)

    def _found_anew(self, key: Hashable, x: Array | None, out: Array | None) -> Call:
        """Return what serves a place without a plan: one is made for the first, and for others if they come again."""
        calls, is_new = self.channel.calls, self._is_new
        self._is_new = False
        if is_new or self.operation.nbytes > COPIED_BYTES or self._are_shared(x, out) or calls.asked_before(key):
            return calls.find(key, partial(_PlanAtAddress, self, x, out))
        return calls.find((self, None), partial(_Copied, self.channel, self.operation, x, out, quiet=self.quiet))

    def _are_shared(self, *arrays: Array | None) -> bool:
        """Whether an array is on a device, or in memory that ranks share."""
        given, memory = [each for each in arrays if each is not None], self.channel.memory.host
        on_device = any(device_of(each) is not HOST for each in given)
        return on_device or (memory.leased and any(memory.position(each) != NOWHERE for each in given))

    @property
    def given_as_it_is(self) -> bool:  # type: ignore[override]  # others have one that never changes
        """Whether no arrays can lie in memory that ranks share, so that the MPI library's own is taken."""
        return isinstance(self._unmapped, _Native) and not self.channel.memory.host.leased

    def record(self, call: Callable[..., object], given: tuple[Any, ...]) -> None:
        """Make a call of the MPI library's own."""
        assert isinstance(self._unmapped, _Native)
        self._unmapped.record(call, given)

    def free(self) -> None:
        """Free what it runs, and the plans for its places if it cannot be found again, and so neither can they."""
        if self._unmapped is not None:
            self._unmapped.free()
        kept = self.channel.calls
        for key in [key for key in kept if isinstance(key, tuple) and key[0] is self] if self.once else []:
            kept.forget(key).free()


class _PlanAtAddress(WithPlan):
    """The plan of one place in memory.

    It outlives the caller's arrays and must not keep them alive. It only touches their memory again when a call comes
    with arrays in the same place. Arrays of our ``own`` it keeps: messages may still arrive there after an error.
    """

    def __init__(self, call: Call, x: Array | None, out: Array | None, *, own: bool = False) -> None:
        super().__init__(call.channel, call.operation, quiet=call.quiet)
        o, same = call.operation, x is out
        if not own:
            x, out = (None if part is None else borrowed(part) for part in (x, out))
        program = bind_arrays(call.channel, o, out if same else x, out)
        self._take(plan_of(call.channel, o, program, None))

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Carry the operation out; see :meth:`Call.run`."""
        del x, out
        self._run(timeout)
        self.channel.memory.warn_of_slots()  # which may be an error, and must not leave a run in the middle


def place_of(array: Array | None) -> object:
    """Return where an array lies, and what else its plan depends on."""
    if array.__class__ is np.ndarray:
        known: Any = array
        return MPI.Get_address(known), known.dtype  # in a tenth of the time of NumPy's own interface
    return None if array is None else (address(array), array.dtype)


def borrowed(array: Array) -> Array:
    """Return the memory of a vector as one that does not keep it alive."""
    return device_of(array).borrow(address(array), array.size, array.dtype)


class _Blocks(WithPlan):
    """Blocks whose lengths only their ends know, of ranks that reach or read each other's memory on a node.

    Where the MPI library is to have what is short, it also has some calls after one in which all blocks were.
    """

    of_any_lengths = True

    def __init__(
        self, channel: Channel, operation: Operation, for_calls: tuple[SignedBarrier, Block], *, quiet: bool
    ) -> None:
        super().__init__(channel, operation, quiet=quiet)
        self._exchange = BlockExchange(channel, operation, for_calls)
        self._take(plan_of(channel, operation, self._exchange.program(), None))
        by_mpi = operation.choice.unregistered == NATIVE
        self._native = _Native(channel, operation, None, None, quiet=quiet) if by_mpi else None
        self._known = operation.reduction.dtype.char in KNOWN_TO_MPI

    @property
    def handed_on(self) -> bool:
        """Whether the next call is the MPI library's own."""
        return self._native is not None and self._known and self._exchange.by_mpi

    def hand_on(self, call: Callable[..., object], given: tuple[Any, ...], timeout: float) -> None:
        """Make a call of the MPI library's own."""
        assert self._native is not None
        self._native.hand_on(call, given, timeout)
        self._exchange.count()

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Carry the operation out; see :meth:`Call.run`."""
        self.run_other(self.operation.counts, self.operation.received, x, out, timeout)

    def run_other(self, counts: tuple[int, ...], received: tuple[int, ...], x: Any, out: Any, timeout: float) -> None:
        """Carry an operation of other lengths out, from ``x`` to ``out``."""
        if not self._exchange.by_mpi and self._served(counts, received, x, out, timeout):
            return
        channel, o = self.channel, replace(self.operation, counts=counts, received=received)
        if self._native is None:
            program = bind_arrays(channel, o, x, out, memory=Memory.NONE)
            with plan_of(channel, o, program, None) as plan:
                plan.timeout = timeout
                plan()
            return
        target = out if out.flags.carray else np.empty(out.shape, out.dtype)
        self.hand_on(partial(call_native, channel.native, o), (np.require(x, requirements=["C", "A"]), target), timeout)
        if target is not out:
            np.copyto(out, target)

    def _served(self, counts: tuple[int, ...], received: tuple[int, ...], x: Any, out: Any, timeout: float) -> bool:
        """Exchange what the ranks have, and return whether the blocks have been copied then."""
        exchange = self._exchange
        with self.channel.one_thread:  # the arrays belong to the call
            if not self.plan.running:  # type: ignore[union-attr]  # there is one; an error may have left it in the middle
                exchange.counts, exchange.received, exchange.x, exchange.out = counts, received, x, out
            self._run(timeout)
            exchange.x = exchange.out = None  # which are the caller's to keep
            if exchange.fault is not None:
                raise exchange.fault
            return exchange.served
