"""Who has which part of which tensor: units, whose tensors lie in one vector that is cut among the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from mpiagg.arrays import Array, Form, cuts_of, ranges
from mpiagg.ddp.buckets import fill_buckets
from mpiagg.plans.operation import even_counts

SPLITS: Final = ("elements", "tensors")
"""Whether a tensor may be cut among ranks, or is one rank's as a whole."""


class Part(NamedTuple):
    """What one rank has of a tensor.

    Attributes
    ----------
    tensor : int
        Which.
    start, stop : int
        From which of its elements to which, in C order; where they are equal the rank has nothing of it.
    place : int
        Where in the rank's part of the unit these begin.
    """

    tensor: int
    start: int
    stop: int
    place: int

    @property
    def within(self) -> slice:
        """Where in the rank's part of the unit it lies."""
        return slice(self.place, self.place + self.stop - self.start)


class Unit:
    """Tensors of one dtype in one vector, of which each rank has a part.

    Parameters
    ----------
    members : sequence of int
        The tensors, in the order in which they lie in the vector, where it is cut evenly.
    forms : sequence of Form
        Those of all tensors.
    owners : dict of int to int, optional
        Which rank has which tensor, where each is one rank's as a whole: then a rank's lie together.
    size : int
        How many ranks there are.

    Attributes
    ----------
    members : list of int
        The tensors, in the order in which they lie in the vector.
    form : Form
        That of one of them: of all the dtype and the device.
    length : int
        How many elements there are.
    counts : tuple of int
        How many of them each rank has.
    spans : dict of int to tuple of int
        Where in the vector each tensor begins and ends.
    """

    def __init__(
        self, members: Sequence[int], forms: Sequence[Form], size: int, owners: dict[int, int] | None = None
    ) -> None:
        self.members = sorted(members, key=owners.__getitem__) if owners else list(members)
        lengths = [math.prod(forms[index].shape) for index in self.members]
        self.form, self.length = forms[self.members[0]], sum(lengths)
        self.shapes = {index: forms[index].shape for index in self.members}
        self.spans = dict(zip(self.members, ranges(cuts_of(lengths)), strict=True))
        if owners is None:
            self.counts = even_counts(self.length, size)
        else:
            own = [0] * size
            for index, length in zip(self.members, lengths, strict=True):
                own[owners[index]] += length
            self.counts = tuple(own)
        self._cuts = cuts_of(self.counts)

    def parts(self, rank: int) -> list[Part]:
        """Return what a rank has of each tensor, in the order in which they lie in the vector."""
        first, last = self._cuts[rank], self._cuts[rank + 1]
        found = []
        for index, (start, stop) in self.spans.items():
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                found.append(Part(index, begin - start, end - start, begin - first))
            else:
                found.append(Part(index, 0, 0, 0))
        return found

    def own(self, rank: int) -> slice:
        """Return where in the vector a rank's part lies."""
        return slice(self._cuts[rank], self._cuts[rank + 1])

    def views(self, vector: Array) -> dict[int, Array]:
        """Return the tensors as views of the vector."""
        return {index: vector[slice(*span)].reshape(self.shapes[index]) for index, span in self.spans.items()}


def units_of(
    forms: Sequence[Form], cap: int, size: int, split: str, layers: Sequence[Sequence[int]] | None
) -> tuple[list[Unit], list[list[int]]]:
    """Divide tensors into units, and units among the ranks.

    Parameters
    ----------
    forms : sequence of Form
        The tensors' dtypes and shapes.
    cap : int
        How many bytes a unit has at most, where there are no layers; a longer tensor is one alone.
    size : int
        How many ranks there are.
    split : {"elements", "tensors"}
        See :data:`SPLITS`.
    layers : sequence of sequences of int, optional
        Which tensors are used together.

    Returns
    -------
    list of Unit
        The units, from the first tensors to the last.
    list of lists of int
        For each layer its units; without layers each unit is one.
    """
    if layers is None:
        members = [list(each) for each in reversed(fill_buckets(forms, cap))]
        of_layers = [[number] for number in range(len(members))]
    else:
        members, of_layers = [], []
        for layer in layers:
            kinds: dict[tuple[Any, Any], list[int]] = {}
            for index in reversed(layer):  # as buckets are filled
                kinds.setdefault((forms[index].dtype, forms[index].device), []).append(index)
            of_layers.append(list(range(len(members), len(members) + len(kinds))))
            members += kinds.values()
    owners = _owners(members, forms, size) if split == "tensors" else None
    return [Unit(each, forms, size, owners) for each in members], of_layers


def _owners(units: Sequence[Sequence[int]], forms: Sequence[Form], size: int) -> dict[int, int]:
    """Return which rank has which tensor: the longest first, each to the rank that has the least so far."""
    length = {index: math.prod(forms[index].shape) for unit in units for index in unit}
    has, owners = [0] * size, {}
    for index in sorted(length, key=lambda index: (-length[index], index)):
        owner = min(range(size), key=lambda rank: (has[rank], rank))
        owners[index] = owner
        has[owner] += length[index]
    return owners


def check_layers(layers: object, count: int) -> list[list[int]]:
    """Return layers as lists; raise ValueError if they do not name each of ``count`` tensors once."""
    good = isinstance(layers, Sequence) and all(isinstance(layer, Sequence) and len(layer) for layer in layers)
    found = [list(layer) for layer in layers] if good else []  # type: ignore[attr-defined]  # it is a sequence
    if sorted((index for layer in found for index in layer), key=str) != sorted(range(count), key=str):
        raise ValueError(f"layers must be lists that name each tensor from 0 to {count - 1} once, not {layers!r}")
    return found


def check_split(split: str | None, default: str) -> str:
    """Return how tensors are divided; raise ValueError for an unknown word."""
    if split is not None and split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    return split or default
