"""What a blocking call is resolved into: made once for what a caller passes, and run with the arrays of each call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, Accelerator, Array, Reduction, address, device_of
from mpiagg.errors import PlanError
from mpiagg.plans.block_exchange import BlockExchange, memory_for_calls, serves_blocks
from mpiagg.plans.bound import STAGED_BYTES, bind_arrays, goes_by_host, pinned, plan_of
from mpiagg.plans.choices import NATIVE, Choice, Memory
from mpiagg.plans.native import native_caller
from mpiagg.plans.one_shot import OneShot, serves_at_once
from mpiagg.plans.operation import Operation
from mpiagg.plans.plan import Plan
from mpiagg.plans.recorded import Recorded
from mpiagg.plans.sharing import barrier_program
from mpiagg.plans.staging import from_host, to_host
from mpiagg.schedules import Collective
from mpiagg.transport import DEFAULT_TIMEOUT, Block, Channel, SignedBarrier
from mpiagg.watch import END

QUICK_BARRIERS: Final = ("Open MPI",)
"""The MPI libraries whose own barrier takes less time on a node than a barrier of ours: ``bench/calls.py`` shows it."""

_NEW_ERRSTATE: Final = int(np.__version__.partition(".")[0]) >= 2
"""Whether NumPy's errors are handled as a context says, and not as a thread says."""


class Call:
    """A collective call that has been resolved.

    Parameters
    ----------
    channel : Channel
    operation : Operation
    quiet : bool
        Whether NumPy does not warn of what becomes of numbers, as MPI does not.

    Attributes
    ----------
    dtype : numpy.dtype
        That of the arrays.
    shape : tuple of int
        That of the result, for those who make it.
    has_source, has_result : bool
        Whether this rank has an input, and whether it gets a result.
    used : bool
        Whether it was used since the channel has last looked for calls to forget.
    once : bool
        Whether it cannot be found again, and is freed when it has run.
    plan : Plan or None
        What it runs, if it has a plan of its own.
    given_as_it_is : bool
        Whether a method of mpi4py's is for the MPI library, with the arguments that it was given: by ``record``.
    of_any_lengths : bool
        Whether it serves all operations that are like its own but for the lengths of blocks: by ``run_other``.
    """

    once = True
    given_as_it_is = False
    of_any_lengths = False
    plan: Plan[Any] | None = None

    def __init__(self, channel: Channel, operation: Operation, *, quiet: bool = False) -> None:
        self.channel, self.operation, self.quiet = channel, operation, quiet
        self.dtype = operation.reduction.dtype if operation.form is None else operation.form.dtype
        self.shape: tuple[int, ...] = ()
        self.has_source = self.has_result = True
        self.used = True

    @property
    def nbytes(self) -> int:
        """The memory that belongs to it alone."""
        return 0

    def check(self) -> None:
        """Raise on all ranks if they are about to make different calls; collective."""
        self.channel.agree(self.operation.description)

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Carry the operation out, from ``x`` to ``out``.

        Parameters
        ----------
        x, out : numpy.ndarray or None
            The input and the output, as they were when this was resolved; None where this rank has none.
        timeout : float
            Seconds that a wait may last without any message completing.
        """
        raise NotImplementedError

    def free(self) -> None:
        """Give back what it holds."""

    def _freely(self, plan: Plan[Any]) -> Callable[[], object]:
        """Return what runs a plan, without NumPy's warnings if they are not wanted."""
        if not self.quiet or self.operation.reduction.dtype.kind not in "fc":
            return plan
        if not _NEW_ERRSTATE:
            return partial(_in_errstate, plan)
        context = Context()
        context.run(np.seterr, all="ignore")
        return partial(context.run, plan)


def _in_errstate(act: Callable[..., object], *arguments: object) -> None:
    with np.errstate(all="ignore"):
        act(*arguments)


def resolve(channel: Channel, operation: Operation, x: Array | None, out: Array | None, *, quiet: bool = False) -> Call:
    """Return the call of an operation for arrays like these: of their dtypes, shapes and layouts, on their devices."""
    o, device = operation, device_of(x if out is None else out)
    channel.memory.signatures()  # made by all ranks together, at the first call of any kind
    given = [part for part in (x, out) if part is not None]
    flat = all(part.flags.c_contiguous for part in given)
    as_they_are = flat and all(part.dtype == o.reduction.dtype for part in given)
    by_host = device is not HOST and goes_by_host(o)
    if o.choice.algorithm == NATIVE and as_they_are and not by_host:
        return _Native(channel, o, x, out, quiet=quiet)
    if device is HOST and as_they_are and serves_at_once(channel, o) and channel.memory.for_calls() is not None:
        return _Short(channel, o, quiet=quiet)
    if serves_blocks(channel, o, device) and (for_calls := memory_for_calls(channel)) is not None:
        return _Blocks(channel, o, for_calls, quiet=quiet)
    short = o.nbytes <= STAGED_BYTES or o.choice.algorithm == NATIVE or not as_they_are
    if not flat or by_host or (device is HOST and short):
        return _Copied(channel, o, x, out, quiet=quiet)
    return _Placed(channel, o, x, out, quiet=quiet)


class _Native(Call, Recorded):
    """The MPI library's own collective on the caller's arrays."""

    given_as_it_is = True

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
        self._call = native_caller(channel.comm, operation, x, out)

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Carry the operation out; see :meth:`Call.run`."""
        self.subject.unleavable = timeout
        self.record(self._call, (x, out))


class _WithPlan(Call):
    """A call that has a plan of its own."""

    def _take(self, plan: Plan[Any], nbytes: int = 0) -> None:
        plan.nbytes += nbytes
        self.plan = plan
        self._go = self._freely(plan)

    def _run(self, timeout: float) -> None:
        if not self.channel.log.blocking[END]:
            self.channel.log.check_thread()  # which may be in this plan
        self.plan.timeout = timeout  # type: ignore[union-attr]  # who runs it has taken one
        self._go()

    @property
    def nbytes(self) -> int:
        """The memory that belongs to it alone."""
        return 0 if self.plan is None else self.plan.nbytes

    def free(self) -> None:
        """Free the plan, unless an error has left it in the middle: the channel keeps it then."""
        if self.plan is not None:
            with suppress(PlanError):
                self.plan.free()


class _Short(_WithPlan):
    """Vectors so short that every rank takes all it needs from mailboxes, to the caller's array, after one barrier."""

    def __init__(self, channel: Channel, operation: Operation, *, quiet: bool) -> None:
        super().__init__(channel, operation, quiet=quiet)
        self._one_shot = OneShot(channel, operation)
        self._take(plan_of(channel, operation, self._one_shot.program(), None))

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Carry the operation out; see :meth:`Call.run`."""
        one_shot, plan, log = self._one_shot, self.plan, self.channel.log
        if not log.blocking[END]:
            log.check_thread()  # which may read what is written here
        one_shot.x, one_shot.out = x, out
        plan.timeout = timeout  # type: ignore[union-attr]  # there is one
        self._go()
        if one_shot.x is not x or one_shot.out is not out:
            raise PlanError(f"{self.operation.label}: two threads came to it at the same moment")
        one_shot.x = one_shot.out = None  # which are the caller's to keep


class _Copied(Call):
    """Vectors that are copied into one that belongs to the call, and out of it.

    So go short ones, for which one plan then serves all places; those of other layouts or dtypes than the operation
    needs; and those of a device's that go by way of the host.
    """

    def __init__(
        self, channel: Channel, operation: Operation, x: Array | None, out: Array | None, *, quiet: bool
    ) -> None:
        super().__init__(channel, operation, quiet=quiet)
        o, self._device = operation, device_of(x if out is None else out)
        self._by = self._device if isinstance(self._device, Accelerator) and goes_by_host(o) else None
        whole = self._device.empty(o.length, o.reduction.dtype) if self._by is None else pinned(o, self._by)
        # What is too large for half precision becomes infinite.
        warned = not quiet or self.dtype == o.reduction.dtype
        self._store = self._device.convert if warned else partial(_in_errstate, self._device.convert)
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
        device, by, source, target = self._device, self._by, self._source, self._target
        with self.channel.one_thread:  # the vector belongs to the call
            if x is not None and source is not None:
                if by is None:
                    device.convert(source.reshape(x.shape), x)
                else:
                    to_host(by, source, x)
                    by.synchronise()
            self._inner.run(source, target, timeout)
            if out is not None and target is not None:
                if by is None:
                    self._store(out, target.reshape(out.shape))
                else:
                    from_host(by, out, target)
            if isinstance(device, Accelerator):
                device.synchronise()

    def free(self) -> None:
        """Free what it runs."""
        self._inner.free()


class _Placed(Call):
    """Vectors that are worked on where they lie; there is a plan for each place."""

    def __init__(
        self, channel: Channel, operation: Operation, x: Array | None, out: Array | None, *, quiet: bool = False
    ) -> None:
        super().__init__(channel, operation, quiet=quiet)
        choice = operation.choice
        other = replace(operation, choice=choice.in_other_memory) if choice.unregistered == NATIVE else None
        # On other ranks the same call may be one that is copied, under the words of the whole choice.
        words = operation.description
        self._native = None if other is None else _Native(channel, other, x, out, quiet=quiet, words=words)

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Carry the operation out; see :meth:`Call.run`."""
        leased = self.channel.memory.host.leased
        if self._native is not None and not leased:
            self._native.run(x, out, timeout)
            return
        # Once ranks map each other's devices, other plans are right, on all of them at the same call.
        mapped = leased, self.channel.memory.device is not None
        x = None if self.operation.source is None else x  # what is no input can be of any layout
        key = (self, _place_of(x), x is out or _place_of(out), mapped)
        found: Any = self.channel.calls.get(key)
        if found is None:
            found = self.channel.calls.find(key, partial(_PlanAtAddress, self, x, out))
        found.used = True
        found.run(None, None, timeout)

    @property
    def given_as_it_is(self) -> bool:  # type: ignore[override]  # which is for all time elsewhere
        """Whether no arrays can lie in memory that ranks share, so that the MPI library's own is taken."""
        return self._native is not None and not self.channel.memory.host.leased

    def record(self, call: Callable[..., object], given: tuple[Any, ...]) -> None:
        """Make a call of the MPI library's own."""
        assert self._native is not None
        self._native.record(call, given)

    def free(self) -> None:
        """Free the plans for its places, if it cannot be found again, and so neither can they."""
        kept = self.channel.calls
        for key in [key for key in kept if isinstance(key, tuple) and key[0] is self] if self.once else []:
            kept.pop(key).free()


class _PlanAtAddress(_WithPlan):
    """The plan of one place in memory.

    It outlives the caller's arrays and must not keep them alive. It only touches their memory again when a call comes
    with arrays in the same place. Arrays of our ``own`` it keeps: messages may still arrive there after an error.
    """

    def __init__(self, call: Call, x: Array | None, out: Array | None, *, own: bool = False) -> None:
        super().__init__(call.channel, call.operation, quiet=call.quiet)
        o, same = call.operation, x is out
        if not own:
            x, out = (None if part is None else _borrowed(part) for part in (x, out))
        program = bind_arrays(call.channel, o, out if same else x, out)
        self._take(plan_of(call.channel, o, program, None))

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Carry the operation out; see :meth:`Call.run`."""
        del x, out
        self._run(timeout)
        self.channel.memory.warn_of_slots()  # which may be an error, and must not leave a run in the middle


def _place_of(array: Array | None) -> object:
    """Return where an array lies, and what else its plan depends on."""
    if array.__class__ is np.ndarray:
        known: Any = array
        return MPI.Get_address(known), known.dtype  # in a tenth of the time that NumPy takes to tell
    return None if array is None else (address(array), array.dtype)


def _borrowed(array: Array) -> Array:
    return device_of(array).borrow(address(array), array.size, array.dtype)


class _Blocks(_WithPlan):
    """Blocks whose lengths only their ends know, in memory that the ranks of a node share, if they lie there."""

    of_any_lengths = True

    def __init__(
        self, channel: Channel, operation: Operation, for_calls: tuple[SignedBarrier, Block], *, quiet: bool
    ) -> None:
        super().__init__(channel, operation, quiet=quiet)
        by_messages = partial(bind_arrays, channel, memory=Memory.NONE)
        self._exchange = BlockExchange(channel, operation, for_calls, by_messages)
        self._take(plan_of(channel, operation, self._exchange.program(), None))

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Carry the operation out; see :meth:`Call.run`."""
        self.run_other(self.operation, x, out, timeout)

    def run_other(self, operation: Operation, x: Array | None, out: Array | None, timeout: float) -> None:
        """Carry another operation out, of other lengths, from ``x`` to ``out``."""
        exchange, plan = self._exchange, self.plan
        with self.channel.one_thread:  # the arrays belong to the call
            if plan is not None and not plan.running:  # an error may have left another call in the middle
                exchange.operation, exchange.x, exchange.out = operation, x, out
            self._run(timeout)
            exchange.x = exchange.out = None  # which are the caller's to keep
            if exchange.fault is not None:
                raise exchange.fault


class Barrier(_WithPlan, Recorded):
    """A barrier: by counters in memory that the ranks of a node share, or the MPI library's own."""

    def __init__(self, channel: Channel) -> None:
        how = Reduction(np.bitwise_or, np.dtype(np.uint8), "bor")
        byte = Operation(Collective.ALLREDUCE, channel.rank, channel.layout, 0, (1,), how, Choice(NATIVE), MPI.BOR)
        _WithPlan.__init__(self, channel, byte)
        Recorded.__init__(self, channel, "barrier")
        on_one_node = channel.library not in QUICK_BARRIERS and 1 < channel.size == channel.node.size
        for_calls = channel.memory.for_calls() if on_one_node else None
        if for_calls is not None:
            program = barrier_program(for_calls[0], "barrier")
            self._take(Plan(channel, program, result=None, label="barrier", in_order=True))
        self.given_as_it_is = for_calls is None

    def check(self) -> None:
        """Raise on all ranks if others are about to make another call; collective."""
        self.channel.agree("barrier")

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Wait for all ranks."""
        del x, out
        self._run(timeout)
