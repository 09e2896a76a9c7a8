"""States of parts of tensors: what one rank has saved, and what any number of ranks make of what all have saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from mpiagg.arrays import Array, load, to_host
from mpiagg.checkpoints import PerRank
from mpiagg.common.arguments import check_integer
from mpiagg.sharded.division import Part, Unit


class SavedPiece(NamedTuple):
    """Elements that some rank has saved.

    Attributes
    ----------
    into : slice
        Where in the part that is wanted they go.
    start, stop : int
        Which of the saved elements they are.
    length : int
        How many elements were saved with them.
    read : callable
        Returns the saved elements.
    """

    into: slice
    start: int
    stop: int
    length: int
    read: Callable[[], Any]


class Shard(NamedTuple):
    """What is loaded into a part of a tensor.

    Attributes
    ----------
    values : list of SavedPiece
        The parameter's.
    kept : callable
        Returns what the optimizer keeps, by name: for each the pieces; or a number or an array without dimensions, or
        with more than one, which is of the whole tensor. ValueError if it is none for this part.
    """

    values: list[SavedPiece]
    kept: Callable[[], dict[str, Any]]


def shard_state(part: Part, unit: Unit, values: Array, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a part of a tensor, as copies on the host.

    Parameters
    ----------
    part : Part
        Which.
    unit : Unit
        In which the tensor is.
    values : numpy.ndarray
        The rank's part of the unit.
    kept : dict
        What the optimizer keeps: vectors have an element for each of the part's.
    """
    return {
        "shape": list(unit.shapes[part.tensor]),
        "start": part.start,
        "stop": part.stop,
        "values": to_host(values[part.within]),
        "kept": {name: to_host(x) if hasattr(x, "ndim") else x for name, x in kept.items()},
    }


def arrays_in(kept: Mapping[str, Any]) -> list[Array]:
    """Return the arrays of what an optimizer keeps for a part of a tensor."""
    found = (x[WHOLE] if isinstance(x, Mapping) else x for x in kept.values())
    return [x for x in found if _is_shard(x)]


def _is_shard(x: Any) -> bool:
    return hasattr(x, "ndim") and x.ndim > 0


def of_rank(value: Any, rank: int) -> Any:
    """Return what a rank has saved, of what was loaded."""
    return value[rank] if isinstance(value, PerRank) else value


def checked_state(state: Any, parts: Mapping[str, Part], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Shard]:
    """Return what is to be loaded into each part.

    Parameters
    ----------
    state : dict
        What :meth:`Sharded.state_dict` has returned, or what was loaded of it.
    parts : dict of str to Part
        This rank's part of each tensor.
    shapes : dict of str to tuple of int
        The tensors' shapes.

    Raises
    ------
    ValueError
        If it is none for these tensors, or has not all of the parts.
    """
    if not isinstance(state, Mapping) or state.keys() != {"ranks", "optimizer", "tensors", "buffers"}:
        raise ValueError("a state has the keys 'ranks', 'optimizer', 'tensors' and 'buffers'")
    tensors = state["tensors"]
    if not isinstance(tensors, Mapping) or tensors.keys() != parts.keys():
        raise ValueError(f"the state is not of the tensors {', '.join(parts)}")
    ranks = check_integer("ranks of the state", state["ranks"], 1)
    return {name: _shard(name, tensors[name], part, shapes[name], ranks) for name, part in parts.items()}


def checked_buffers(given: Any, own: Mapping[str, Array]) -> dict[str, Array]:
    """Return what is to be loaded into buffers: where ranks had different ones, rank 0's.

    Raises
    ------
    ValueError
        If these are other buffers.
    """
    if not isinstance(given, Mapping) or given.keys() != own.keys():
        raise ValueError(f"the state has not the buffers {', '.join(own)}")
    found = {name: of_rank(x, 0) for name, x in given.items()}
    for name, x in found.items():
        if not isinstance(x, np.ndarray) or (x.shape, x.dtype) != (own[name].shape, own[name].dtype):
            raise ValueError(f"buffer {name} is {own[name].dtype} {own[name].shape}, in the state something else")
    return found


class _Saved:
    """What all ranks have saved of a tensor, or one of them.

    Parameters
    ----------
    name : str
        The tensor.
    given : dict, or PerRank
        What was loaded of it.
    ranks : int
        How many ranks saved it.
    length : int
        How many elements it has.
    """

    def __init__(self, name: str, given: Any, ranks: int, length: int) -> None:
        self._name, self._given, self._length = name, given, length
        self._each = list(given) if isinstance(given, PerRank) else None
        for one in [given] if self._each is None else self._each:
            if not isinstance(one, Mapping) or one.keys() != _KEYS:
                raise ValueError(f"the state of tensor {name} must have the keys {', '.join(sorted(_KEYS))}")
        several = self._each is not None or any(isinstance(given[key], PerRank) for key in ("start", "stop", "values"))
        self._ranks = ranks if several else 1  # what a rank has saved itself is there once

    def of(self, key: str, rank: int) -> Any:
        """Return what a rank has saved under a key."""
        return of_rank(self._given[key] if self._each is None else self._each[rank][key], rank)

    def pieces(self, part: Part) -> dict[int, SavedPiece]:
        """Return by rank what makes up a part; raise ValueError if something is missing."""
        found, length = dict[int, SavedPiece](), 0
        for rank in range(self._ranks):
            start = check_integer("start", self.of("start", rank), 0)
            stop = check_integer("stop", self.of("stop", rank), start)
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last and part.start + length == first:
                where, read = slice(first - part.start, last - part.start), partial(self.of, "values", rank)
                found[rank] = SavedPiece(where, first - start, last - start, stop - start, read)
                length += last - first
        if length != part.stop - part.start:
            raise ValueError(
                f"the state of tensor {self._name} lacks elements of {part.start} to {part.stop}: it was divided "
                "otherwise, and is what one rank has saved; load a checkpoint of all"
            )
        return found

    def kept(self, pieces: Mapping[int, SavedPiece], part: Part) -> dict[str, Any]:
        """Return what the optimizer keeps for a part; raise ValueError if it is none for it."""
        found: dict[str, Any] = {}
        for rank, piece in pieces.items():
            kept = self.of("kept", rank)
            if not isinstance(kept, Mapping):
                raise ValueError(f"what is kept of tensor {self._name} must be a dict")  # noqa: TRY004 - a file's fault
            for key, value in kept.items():
                own = of_rank(value, rank)
                if isinstance(own, Mapping):  # something of the tensor as a whole, as Adafactor keeps
                    if part.stop - part.start != piece.length or piece.length != self._length:
                        raise ValueError(f"{key} of {self._name} is of the whole tensor, and it is divided now")
                    found[key] = of_rank(own.get(WHOLE), rank)
                    if not _is_shard(found[key]):
                        raise ValueError(f"{key} of {self._name} must be an array")
                elif _is_shard(own):
                    check_array(f"{key} of {self._name}", own, piece.length)
                    found.setdefault(key, []).append(piece._replace(read=partial(of_rank, own, rank)))
                else:
                    found.setdefault(key, own)
        return found


WHOLE: Final = "whole"
"""Under which stands an array that is not one element for each of the tensor's."""

_KEYS: Final = {"shape", "start", "stop", "values", "kept"}


def _shard(name: str, given: Any, part: Part, shape: tuple[int, ...], ranks: int) -> Shard:
    """Return what is to be loaded into a part of a tensor."""
    saved = _Saved(name, given, ranks, math.prod(shape))
    if saved.of("shape", 0) != list(shape):
        raise ValueError(f"tensor {name} has shape {list(shape)}, its state {saved.of('shape', 0)}")
    pieces = saved.pieces(part)
    for piece in pieces.values():
        check_array(name, piece.read(), piece.length)
    return Shard(list(pieces.values()), partial(saved.kept, pieces, part))


def check_array(name: str, x: Any, length: int) -> None:
    """Raise ValueError if this is no vector of real numbers of a length."""
    if not isinstance(x, np.ndarray) or x.shape != (length,) or x.dtype.kind not in "fV":
        raise ValueError(f"the state of {name} must be {length} real numbers")


def write_shards(into: Array, pieces: Sequence[SavedPiece]) -> None:
    """Write pieces to where they go."""
    for piece in pieces:
        load(into.reshape(-1)[piece.into], piece.read()[piece.start : piece.stop])
