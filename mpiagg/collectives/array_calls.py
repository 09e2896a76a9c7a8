"""What the arguments of an array function mean: a call, found again by what was passed."""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpiagg.arrays import (
    HOST,
    Array,
    Form,
    Reduction,
    as_input,
    check_output,
    check_wire_dtype,
    check_wire_op,
    device_of,
)
from mpiagg.collectives.mpi_ops import resolve as resolve_op
from mpiagg.common.arguments import check_flag, check_root
from mpiagg.plans.bound import prepare
from mpiagg.plans.call import Call
from mpiagg.plans.choices import NATIVE, SHARED, TO_EACH_RANK, Choice, pick, takes_native
from mpiagg.plans.learning import choose, resolve
from mpiagg.plans.native import KNOWN_TO_MPI
from mpiagg.plans.operation import Operation, even_counts
from mpiagg.plans.plan import Plan
from mpiagg.schedules import Collective
from mpiagg.transport import CHECK, DEFAULT_TIMEOUT, Channel, channel_of, check_timeout, limited

Op = str | MPI.Op


Counts = tuple[tuple[int, ...], tuple[int, ...]]
"""The rows for each rank that an array has, and those that come from each; of an all-gather the second alone."""

Arguments = tuple[
    str, npt.ArrayLike | None, Op, int, Array | None, str, int | None, str | None, bool | None, Counts | None
]
"""The arguments of a collective call, as they were given: the collective's name, x, op, root, out, algorithm, lanes,
wire, reproducible, and the counts where ranks have different ones. No class of its own, since making one takes as long
as finding the call."""


_FLAGS: Final = (type(None), bool)
"""The classes of ``reproducible``: 1 and 0 are equal to True and False, and not as good."""


def key_of(arguments: Arguments, x: Any) -> Hashable:
    """Return what a call depends on; raise AttributeError where that cannot be said."""
    name, _, op, root, out, algorithm, lanes, wire, reproducible, counts = arguments
    which = op.handle if op.__class__ is MPI.Op else op
    if out is x or out is None:
        lies: Hashable = out is x
    elif out.__class__ is np.ndarray:
        lies = out.dtype, out.dtype.num, out.shape, out.flags.num  # as in _form, which costs as much again
    else:
        lies = _form(out)
    usual = lanes is None and wire is None and reproducible is None and counts is None and root.__class__ is int
    if usual and algorithm == "auto":
        if x.__class__ is np.ndarray:
            return name, x.dtype, x.dtype.num, x.shape, x.flags.num, lies, which, root
        return name, _form(x), lies, which, root
    # Types stand beside numbers, because True and 1.0 are equal to 1 and not as good.
    kinds = root.__class__, lanes.__class__, reproducible.__class__
    return name, _form(x), lies, which, root, algorithm, lanes, wire, reproducible, kinds, counts


def kept(arguments: Arguments, x: Array, channel: Channel) -> Call:
    """Return the call of arguments that have not come before, and keep it if they can be found again."""
    operation, x, result = meant(arguments, x, channel)
    call = resolve(channel, operation, None if operation.source is None else x, result)
    call.has_source, call.has_result = operation.source is not None, result is not None
    call.shape = () if result is None else result.shape
    op = arguments[2]
    if operation.ragged:  # with other counts the next time: what is kept is for all of a dtype, or nothing
        by_mpi = call.given_as_it_is and operation.reduction.dtype.char in KNOWN_TO_MPI
        if arguments[6] is None and (by_mpi or call.of_any_lengths):  # no number of lanes
            call.once = channel.calls.find(_ragged_key(x, arguments[5], arguments[8]), lambda: call) is not call
    elif not isinstance(op, MPI.Op) or op.is_predefined:  # another one may have the handle of one that was freed
        with suppress(AttributeError, TypeError):  # what cannot be a key
            channel.calls.find(key_of(arguments, x), lambda: call)
            call.once = False
    return call


def _ragged_key(x: Array, algorithm: str, reproducible: bool | None) -> Hashable:
    return "alltoallv", algorithm, reproducible, x.dtype, x.dtype.num


def _fits(out: Any, shape: tuple[int, ...], x: Any) -> bool:
    """Whether MPI can be given an array for the result, of a shape, beside the input."""
    like = out.__class__ is np.ndarray and (out.shape, out.dtype, out.dtype.num) == (shape, x.dtype, x.dtype.num)
    return like and out.flags.carray and not np.may_share_memory(x, out)


def _exchange(arguments: Arguments, x: Any, channel: Channel, timeout: float) -> Array | None:
    """Carry an all-to-all of rows out as one of arrays like these that has come before, of whatever lengths.

    Returns
    -------
    numpy.ndarray or None
        The result; None if it is to be looked at more closely.
    """
    *_, out, algorithm, lanes, _, reproducible, counts = arguments
    usual = lanes is None and reproducible.__class__ in _FLAGS and algorithm.__class__ is str
    if counts is None or not counts[0] or not usual:
        return None
    call: Any = channel.calls.get(_ragged_key(x, algorithm, reproducible))
    sent, received = counts
    if (
        call is None
        or x.__class__ is not np.ndarray
        or not x.flags.c_contiguous
        or not x.flags.aligned
        or x.shape[:1] != (sum(sent),)
    ):
        return None
    shape, width = (sum(received), *x.shape[1:]), math.prod(x.shape[1:])
    if out is None:
        out = np.empty(shape, x.dtype)
    elif not _fits(out, shape, x):
        return None
    call.used = True
    if not call.handed_on:
        lengths, taken = (tuple(rows * width for rows in each) for each in counts)
        call.run_other(lengths, taken, x, out, timeout)
        return out
    given = [[part, [rows * width for rows in each]] for part, each in ((x, sent), (out, received))]
    call.hand_on(channel.native.Alltoallv, given, timeout)
    return out


def _input(arguments: Arguments, channel: Channel) -> Array:
    """Return x as an array; of a rank that has nothing to scatter one of its shape, which is not read."""
    name, x, _, root, out, *_ = arguments
    if x is not None or name != "scatter":
        return as_input(x)
    if check_root(root, channel.size) == channel.rank:
        raise ValueError(f"scatter takes an array of {channel.size} rows on its root")
    if out is None:
        raise ValueError("scatter takes an array, or without one an out that tells the shape of a row")
    row = as_input(out)
    return np.broadcast_to(row, (channel.size, *row.shape))


def meant(
    arguments: Arguments, x: Array, channel: Channel, *, at_once: bool = True
) -> tuple[Operation, Array, Array | None]:
    """Return the operation of arguments, to be carried out at once or planned, the input, and where the result goes."""
    name, _, given_op, given_root, given_out, algorithm, lanes, wire, given_reproducible, rows = arguments
    collective, x = Collective(name), as_input(x)
    device, root = device_of(x), check_root(given_root, channel.size)
    if given_reproducible is not None:
        check_flag("reproducible", given_reproducible)
    reproducible = channel.reproducible if given_reproducible is None else given_reproducible
    how, op, only_native = Reduction(np.add, x.dtype, "sum"), MPI.SUM, False
    if collective.reduces:
        how, op, only_native = resolve_op(given_op, x.dtype, channel.size)
        if collective.prefix and how.divisor is not None:
            raise ValueError(f"{name} has no op {given_op!r}: each rank's result is of another number of ranks")
    counts, received, shape = _layout(collective, x, channel, rows)
    ragged = rows is not None and collective is Collective.ALLTOALL
    # Ranks choose the same: where they do not know the same lengths, by none.
    nbytes = 0 if ragged else sum(counts) * how.dtype.itemsize
    native = takes_native(collective, how, nbytes, channel.layout, minima=False, at_once=at_once)
    native = native and x.dtype == how.dtype and not reproducible
    case, trial = channel.case(collective, nbytes, native=native, reproducible=reproducible), None
    if at_once and (algorithm, lanes, wire) == ("auto", None, None) and not (ragged or only_native or reproducible):
        choice, trial = choose(channel, case, device)
    else:
        choice = pick(algorithm, lanes, case, wire, device)
    if ragged and algorithm == "auto":
        other = TO_EACH_RANK[collective] if reproducible else NATIVE
        on_node = device is HOST and len(channel.layout.nodes) == 1
        choice = Choice(SHARED, unregistered=None if reproducible else NATIVE) if on_node else Choice(other)
    check_wire_op(wire, how.name)
    check_wire_dtype(wire, x.dtype)
    if only_native:
        if algorithm not in ("auto", NATIVE) or wire is not None:
            asked = f"algorithm {algorithm!r}" if wire is None else f"wire {wire!r}"
            raise ValueError(f"{asked} cannot apply an op that is not predefined; 'native' can")
        choice = Choice(NATIVE)
    form = Form(x.dtype, x.shape, device) if rows is None else None
    operation = Operation(
        *(collective, channel.rank, channel.layout, root, counts, how, choice, op, form, received, ragged),
        tried=trial,
    )
    # A bad one is an error on every rank that gives it, also where there is nothing to be written to it.
    out = None if given_out is None else check_output(given_out, shape, x.dtype, device)
    if operation.target is None:
        return operation, x, None
    return operation, x, device.empty(shape, x.dtype) if out is None else out


def _form(array: Any) -> Hashable:
    """Return what a call depends on of an array."""
    if isinstance(array, np.ndarray):
        # The number tells C's long from long long, which may be equal.
        return array.__class__, array.dtype, array.dtype.num, array.shape, array.flags.num
    return array.dtype, array.shape, array.flags.c_contiguous, device_of(array).name


def _layout(
    collective: Collective, x: Array, channel: Channel, given: Counts | None
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the counts of an operation, those that an all-to-all receives, and the shape of its result."""
    size, rank, width = channel.size, channel.rank, math.prod(x.shape[1:])
    if given is not None:
        sent, received = (tuple(rows * width for rows in part) for part in given)
        here = sum(given[0]) if collective is Collective.ALLTOALL else given[1][rank]
        if not x.shape or len(x) != here:
            found = len(x) if x.shape else "none"
            raise ValueError(f"the counts are of {here} rows, and the array, of shape {x.shape}, has {found}")
        shape = (sum(given[1]), *x.shape[1:])
        return (sent, received, shape) if collective is Collective.ALLTOALL else (received, (), shape)
    if collective in (Collective.ALLGATHER, Collective.GATHER):
        return (x.size,) * size, (), (size, *x.shape)
    if collective is Collective.SCATTER:
        if not x.shape or len(x) != size:
            raise ValueError(f"scatter takes an array of {size} rows, one for each rank; it has {x.shape}")
        return (width,) * size, (), x.shape[1:]
    if collective is Collective.ALLTOALL:
        if not x.shape or len(x) % size:
            raise ValueError(f"alltoall cuts the first axis into {size} equal parts; the array has {x.shape}")
        counts = (x.size // size,) * size
        return counts, counts, x.shape
    if collective is not Collective.REDUCE_SCATTER:
        return (x.size,), (), x.shape
    if x.ndim == 0:
        raise ValueError("reduce_scatter cuts the first axis; an array without dimensions has none")
    rows = even_counts(len(x), size)
    return tuple(row * width for row in rows), (), (rows[rank], *x.shape[1:])


ArrayPlan = Plan[Any]
"""A plan whose result is an array, or None where a rank gets none."""


def to_check(check: bool | None) -> bool:
    """Return whether ranks compare what they call, as the call says, or else the environment."""
    return CHECK if check is None else check_flag("check", check)


def run(arguments: Arguments, comm: MPI.Intracomm | None, timeout: float | None, *, check: bool | None) -> Array:
    """Carry a collective call out at once.

    Returns
    -------
    numpy.ndarray
        The result; None where a rank gets none: the functions for which that may be say so.
    """
    if timeout is None:
        return _run_within(DEFAULT_TIMEOUT, arguments, comm, check)
    with limited(timeout):
        return _run_within(timeout, arguments, comm, check)


def _run_within(timeout: float, arguments: Arguments, comm: MPI.Intracomm | None, check: bool | None) -> Array:
    # A communicator of our class has its channel at hand; that of one that was freed keeps no calls, and is not taken.
    channel: Channel = getattr(comm, "_channel", None) or channel_of(comm)
    if to_check(check):

        def say() -> str:  # before anything is made that ranks make together
            check_timeout(timeout)
            return meant(arguments, _input(arguments, channel), channel)[0].description

        channel = channel_of(comm)
        channel.agree_on(say)
    if timeout is not DEFAULT_TIMEOUT:
        check_timeout(timeout)
    given, out = arguments[1], arguments[4]
    x: Any = given if given.__class__ is np.ndarray else _input(arguments, channel)
    if arguments[-1] is not None and (done := _exchange(arguments, x, channel, timeout)) is not None:
        return done
    try:
        call: Any = channel.calls[key_of(arguments, x)]
    except (AttributeError, KeyError, TypeError):  # one that has not come before, or cannot be kept
        call = kept(arguments, x, channel_of(comm))
    call.used = True
    if not call.has_result:
        out = None
    elif out is None:
        out = device_of(x).empty(call.shape, x.dtype)
    try:
        call.run(x if call.has_source else None, out, timeout)
    finally:
        if call.once:
            call.free()
    return out  # type: ignore[return-value]  # as above


def planned(arguments: Arguments, comm: MPI.Intracomm | None, timeout: float | None) -> ArrayPlan:
    """Return the plan of a collective call; collective."""
    with limited(timeout):
        channel = channel_of(comm)
        good: list[tuple[Operation, Array, Array | None]] = []

        def say() -> str:
            check_timeout(timeout)
            good.append(meant(arguments, _input(arguments, channel), channel, at_once=False))
            return good[0][0].description

        channel.agree_on(say)
        operation, x, out = good[0]
        plan: ArrayPlan = prepare(channel, operation, x, out, tag=channel.tags.in_turn(operation.choice.lanes))
        plan.timeout = check_timeout(timeout)
        return plan
