"""What the arguments of an array function mean: an operation, and the arrays that it is for."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpiagg.arrays import Array, Device, Form, Reduction, as_input, check_output, check_wire_dtype, device_of
from mpiagg.collectives.mpi_ops import resolve
from mpiagg.common.arguments import check_root
from mpiagg.plans.choices import NATIVE, Case, Choice, pick
from mpiagg.plans.operation import Operation, even_counts
from mpiagg.schedules import Collective
from mpiagg.transport import Channel

Op = str | MPI.Op


class ArrayCall(NamedTuple):
    """A collective call whose arguments have been found good."""

    operation: Operation
    x: Array
    out: Array | None

    def in_words(self) -> str:
        """Return what all ranks must agree on."""
        return self.operation.in_words


class Arguments(NamedTuple):
    """The arguments of a collective call, as they were given."""

    collective: Collective
    x: npt.ArrayLike
    op: Op
    root: int
    out: Array | None
    algorithm: str
    lanes: int | None
    wire: str | None = None

    def checked(self, channel: Channel) -> ArrayCall:
        """Return the call that they mean, if they are good; nothing is sent for that."""
        x = as_input(self.x)
        # Types stand beside numbers, because True and 1.0 are equal to 1 and not as good.
        device = device_of(x)
        key = (*self[:1], *self[2:4], *self[5:], type(self.root), type(self.lanes), x.shape, x.dtype, device.name)
        try:
            operation, shape = channel.known[key]
        except (KeyError, TypeError):  # MPI.Op cannot be hashed
            operation, shape = self._meant(x, channel, device)
            with suppress(TypeError):
                channel.remember(key, (operation, shape))
        # A bad one is an error on every rank that gives it, also where there is nothing to be written to it.
        out = device.empty(shape, x.dtype) if self.out is None else check_output(self.out, shape, x.dtype, device)
        return ArrayCall(operation, x, None if operation.target is None else out)

    def _meant(self, x: Array, channel: Channel, device: Device) -> tuple[Operation, tuple[int, ...]]:
        """Return the operation, and the shape of its result."""
        root = check_root(self.root, channel.size)
        if self.collective.reduces:
            how, op, only_native = resolve(self.op, x.dtype, channel.size)
        else:
            how, op, only_native = Reduction(np.add, x.dtype, "sum"), MPI.SUM, False
        counts, shape = _layout(self.collective, x, channel)
        case = Case(self.collective, sum(counts) * how.dtype.itemsize, channel.layout)
        choice = pick(self.algorithm, self.lanes, case, self.wire, device)
        check_wire_dtype(self.wire, x.dtype)
        if only_native:
            if self.algorithm not in ("auto", NATIVE) or self.wire is not None:
                asked = f"algorithm {self.algorithm!r}" if self.wire is None else f"wire {self.wire!r}"
                raise ValueError(f"{asked} cannot apply an op that is not predefined; 'native' can")
            choice = Choice(NATIVE)
        form = Form(x.dtype, x.shape, device)
        operation = Operation(self.collective, channel.rank, channel.layout, root, counts, how, choice, op, form)
        return operation, shape


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
