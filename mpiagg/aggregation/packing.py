"""Lists of arrays as vectors: one for each dtype, laid out once for a layout and kept."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import numpy as np

from mpiagg.arrays import (
    Array,
    Device,
    Form,
    address,
    cuts_of,
    device_of,
    flat,
    form_of,
    is_array,
    joined,
    ranges,
    working_dtype,
)
from mpiagg.plans.bound import STAGED_BYTES
from mpiagg.plans.plan import Plan
from mpiagg.transport import free_if_over

KEPT_PLANS: Final = 64
"""How many plans are kept for one layout: a tensor that is not packed needs one for each place where it lies."""


TensorLayout = tuple[Form, ...]
"""The form of every array of a list."""


def layout_of(tensors: object) -> TensorLayout:
    """Return the layout of a list of arrays."""
    if not isinstance(tensors, Sequence):
        return (Form(type(tensors).__name__),)
    return tuple(map(_form_of, tensors))


def key_of(tensors: object) -> Hashable:
    """Return what is equal for lists of one layout; it is there in less time than the layout."""
    if not isinstance(tensors, Sequence):
        return layout_of(tensors)
    return tuple([(x.dtype, x.shape) if isinstance(x, np.ndarray) else _form_of(x) for x in tensors])


def _form_of(x: Any) -> Form:
    if isinstance(x, np.ndarray):  # again here, as this is asked of every array of every call
        return Form(x.dtype, x.shape)
    return form_of(x) if is_array(x) else Form(type(x).__name__)


def describe_layout(layout: TensorLayout) -> str:
    """Return a layout as people read it."""
    each = ", ".join(map(str, layout))
    return f"{len(layout)} tensors: {each}" if layout else "no tensors"


def check_tensors(tensors: object) -> None:
    """Check that this is a list of arrays of numbers that can be written to.

    Raises
    ------
    TypeError
        If it is not a list, or what is in it is not an array of numbers.
    ValueError
        If one is read-only.
    """
    if not isinstance(tensors, Sequence):
        raise TypeError(f"a list of arrays is aggregated, not {type(tensors).__name__}")
    devices = set()
    for index, x in enumerate(tensors):
        if x.__class__ is not np.ndarray and not is_array(x):
            raise TypeError(f"tensor {index} must be a NumPy array, not {type(x).__name__}")
        if not isinstance(x, np.ndarray):
            devices.add(device_of(x).name)
        elif not x.flags.writeable:
            raise ValueError(f"tensor {index} is read-only")
        working_dtype(x.dtype)
    if len(devices) > 1:
        raise ValueError(
            f"the arrays of a list are on one device, and on the host, not on {' and '.join(sorted(devices))}"
        )


class Group:
    """The tensors of one dtype on one device in a list, and the vector that they are packed into.

    Half precision is packed as float32, in which it is combined. A tensor that is alone in its group and
    contiguous is not packed: its own memory is the vector, unless it is so short that a copy costs less than a plan
    for each place where it may lie.

    Parameters
    ----------
    dtype : numpy.dtype
        The tensors' dtype.
    device : Device
        Where they lie.
    members : dict of int to tuple of int
        Their places in the list, and their shapes.
    in_place : bool
        Whether a tensor's own memory may be the vector.

    Attributes
    ----------
    shapes : list of tuple of int
        The tensors', in the order in which they are packed.
    lengths : list of int
        How long they are.
    """

    def __init__(
        self, dtype: np.dtype[Any], device: Device, members: dict[int, tuple[int, ...]], *, in_place: bool
    ) -> None:
        self.dtype, self.device = dtype, device
        self._in_place = in_place
        self.working = working_dtype(dtype)
        self._members = members
        self.shapes = list(members.values())
        self.lengths = [math.prod(shape) for shape in self.shapes]
        self._vector: Array | None = None
        self._views: list[tuple[int, Array]] = []

    def pack(self, tensors: Sequence[Array]) -> Array:
        """Return a vector with the elements of the group's tensors."""
        own = self._own_memory(tensors)
        if own is not None:
            return own
        vector = self._lay_out() if self._vector is None else self._vector
        convert = self.device.convert
        for index, view in self._views:
            convert(view, tensors[index])
        return vector

    def unpack(self, vector: Array, tensors: Sequence[Array]) -> None:
        """Bring the vector that :meth:`pack` returned back into the tensors."""
        if vector is self._vector:
            convert = self.device.convert
            for index, view in self._views:
                convert(tensors[index], view)

    def joined(self, tensors: Sequence[Array]) -> Array | None:
        """Return the group's tensors as one vector if they lie one after the other."""
        return joined([tensors[index] for index in self._members])

    def _own_memory(self, tensors: Sequence[Array]) -> Array | None:
        if not self._in_place or len(self._members) > 1 or self.dtype != self.working:
            return None
        (index,) = self._members
        return flat(tensors[index]) if tensors[index].nbytes > STAGED_BYTES else None

    def _lay_out(self) -> Array:
        cuts = cuts_of(self.lengths)
        vector = self._vector = self.device.empty(cuts[-1], self.working)
        self._views = [
            (index, vector[start:stop].reshape(shape))
            for (index, shape), (start, stop) in zip(self._members.items(), ranges(cuts), strict=True)
        ]
        return vector


class Packing:
    """What is kept for one layout: its groups, and the plans that run on their vectors.

    There is a group for each dtype on each device; or, by layer, for each tensor.
    """

    def __init__(self, layout: TensorLayout, *, in_place: bool = True, by_layer: bool = False) -> None:
        members: dict[Hashable, dict[int, tuple[int, ...]]] = {}
        for index, (dtype, shape, device) in enumerate(layout):
            members.setdefault(index if by_layer else (dtype, device), {})[index] = shape
        self.groups = [
            Group(layout[min(group)].dtype, layout[min(group)].device, group, in_place=in_place)
            for group in members.values()
        ]
        self._plans: OrderedDict[Hashable, Plan[Any]] = OrderedDict()

    def plan(self, vector: Array, variant: Hashable, make: Callable[[Array], Plan[Any]]) -> Plan[Any]:
        """Return the plan of a variant on a vector; ``make`` makes it if it is not there. The longest unused one goes.

        The plan does not keep the vector alive: it only touches the memory when it runs, and then the vector is there.
        """
        device = device_of(vector)
        key = (address(vector), vector.size, vector.dtype, device.name, variant)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make(device.borrow(address(vector), vector.size, vector.dtype))
            if len(self._plans) > KEPT_PLANS:
                self._free(last=False)
        else:
            self._plans.move_to_end(key)
        return plan

    def free(self) -> None:
        """Free the plans."""
        while self._plans:
            self._free(last=True)

    def _free(self, *, last: bool) -> None:
        """Free the plan that was used last, or first."""
        _, plan = self._plans.popitem(last=last)
        free_if_over(plan)
