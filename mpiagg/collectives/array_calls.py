"""What the arguments of an array function mean: a call, found again by what was passed."""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpiagg.arrays import Array, Form, Reduction, as_input, check_output, check_wire_dtype, device_of
from mpiagg.collectives.mpi_ops import resolve as resolve_op
from mpiagg.common.arguments import check_flag, check_root
from mpiagg.plans.calls import Call, resolve
from mpiagg.plans.choices import NATIVE, Case, Choice, pick, takes_native
from mpiagg.plans.operation import Operation, even_counts
from mpiagg.schedules import Collective
from mpiagg.transport import Channel

Op = str | MPI.Op


Arguments = tuple[str, npt.ArrayLike, Op, int, Array | None, str, int | None, str | None, bool | None]
"""The arguments of a collective call, as they were given: the collective's name, x, op, root, out, algorithm, lanes,
wire, reproducible. No class of its own, since making one takes as long as finding the call."""


def key_of(arguments: Arguments, x: Any) -> Hashable:
    """Return what a call depends on; raise AttributeError where that cannot be said."""
    name, _, op, root, out, algorithm, lanes, wire, reproducible = arguments
    which = op.handle if op.__class__ is MPI.Op else op
    if out is x or out is None:
        lies: Hashable = out is x
    elif out.__class__ is np.ndarray:
        lies = out.dtype, out.dtype.num, out.shape, out.flags.num  # as in _form, which costs as much again
    else:
        lies = _form(out)
    if algorithm == "auto" and lanes is None and wire is None and reproducible is None and root.__class__ is int:
        if x.__class__ is np.ndarray:
            return name, x.dtype, x.dtype.num, x.shape, x.flags.num, lies, which, root
        return name, _form(x), lies, which, root
    # Types stand beside numbers, because True and 1.0 are equal to 1 and not as good.
    kinds = root.__class__, lanes.__class__, reproducible.__class__
    return name, _form(x), lies, which, root, algorithm, lanes, wire, reproducible, kinds


def kept(arguments: Arguments, x: Array, channel: Channel) -> Call:
    """Return the call of arguments that have not come before, and keep it if they can be found again."""
    operation, x, result = meant(arguments, x, channel)
    call = resolve(channel, operation, None if operation.source is None else x, result)
    call.has_result = result is not None
    call.shape = () if result is None else result.shape
    op = arguments[2]
    if not isinstance(op, MPI.Op) or op.is_predefined:  # another one may have the handle of one that was freed
        with suppress(AttributeError, TypeError):  # what cannot be a key
            channel.calls.find(key_of(arguments, x), lambda: call)
            call.once = False
    return call


def meant(
    arguments: Arguments, x: Array, channel: Channel, *, at_once: bool = True
) -> tuple[Operation, Array, Array | None]:
    """Return the operation of arguments, to be carried out at once or planned, the input, and where the result goes."""
    name, _, given_op, given_root, given_out, algorithm, lanes, wire, given_reproducible = arguments
    collective, x = Collective(name), as_input(x)
    device, root = device_of(x), check_root(given_root, channel.size)
    if given_reproducible is not None:
        check_flag("reproducible", given_reproducible)
    reproducible = channel.reproducible if given_reproducible is None else given_reproducible
    how, op, only_native = Reduction(np.add, x.dtype, "sum"), MPI.SUM, False
    if collective.reduces:
        how, op, only_native = resolve_op(given_op, x.dtype, channel.size)
    counts, shape = _layout(collective, x, channel)
    nbytes = sum(counts) * how.dtype.itemsize
    native = takes_native(collective, how, nbytes, minima=False, at_once=at_once)
    native = native and x.dtype == how.dtype and not reproducible
    case = Case(collective, nbytes, channel.layout, library=channel.library if native else None)
    choice = pick(algorithm, lanes, case, wire, device)
    check_wire_dtype(wire, x.dtype)
    if only_native:
        if algorithm not in ("auto", NATIVE) or wire is not None:
            asked = f"algorithm {algorithm!r}" if wire is None else f"wire {wire!r}"
            raise ValueError(f"{asked} cannot apply an op that is not predefined; 'native' can")
        choice = Choice(NATIVE)
    form = Form(x.dtype, x.shape, device)
    operation = Operation(collective, channel.rank, channel.layout, root, counts, how, choice, op, form)
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


def _layout(collective: Collective, x: Array, channel: Channel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the counts of an operation and the shape of its result."""
    if collective is Collective.ALLGATHER:
        return (x.size,) * channel.size, (channel.size, *x.shape)
    if collective is not Collective.REDUCE_SCATTER:
        return (x.size,), x.shape
    if x.ndim == 0:
        raise ValueError("reduce_scatter cuts the first axis; an array without dimensions has none")
    rows = even_counts(len(x), channel.size)
    width = math.prod(x.shape[1:])
    return tuple(row * width for row in rows), (rows[channel.rank], *x.shape[1:])
