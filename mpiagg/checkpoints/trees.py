"""States as text: JSON, with arrays beside it. What is read is checked in full before it is used."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from mpiagg.arrays import Array
from mpiagg.checkpoints.per_rank import PerRank
from mpiagg.common import documents

MOST_DEPTH: Final = 100
"""How deep dicts and lists may be nested."""

MOST_SIDE: Final = 2**62

_BITS: Final = (*("int8", "int16", "int32", "int64"), *("uint8", "uint16", "uint32", "uint64"))
DTYPES: Final = (
    *("bool", *_BITS, "float16", "bfloat16", "float32", "float64", "float128"),
    *("complex64", "complex128", "complex256"),
)
"""The names of dtypes that are saved; the longest are not known on every machine."""

Tree = Any
"""A state with :class:`Stored` in the places of arrays."""


class Stored(NamedTuple):
    """Where an array is kept, and what it is.

    Attributes
    ----------
    dtype : numpy.dtype
        Its dtype.
    shape : tuple of int
        Its shape.
    scalar : bool
        Whether it is one of NumPy's numbers.
    file, offset : int
        Of which rank the file is, and where in it the array begins, in bytes.
    digest : str
        SHA-256 of its bytes.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    scalar: bool
    file: int
    offset: int
    digest: str

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return math.prod(self.shape) * self.dtype.itemsize


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def digest_of(data: bytes | memoryview) -> str:
    """Return the SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def dtype_of(name: Any) -> np.dtype[Any]:
    """Return the dtype of a name, or raise ValueError if arrays of it cannot be there."""
    if name not in DTYPES:
        raise ValueError(f"{name!r} is no dtype of an array in a checkpoint")
    try:
        if name == "bfloat16":
            import ml_dtypes  # noqa: PLC0415 - an extra

            name = ml_dtypes.bfloat16
        found: np.dtype[Any] = np.dtype(name)
    except (ImportError, TypeError):
        raise ValueError(f"arrays of {name} need what this machine has not (bfloat16 needs ml_dtypes)") from None
    return found


# -- writing


def encode(state: object) -> tuple[str, list[tuple[Array, bool]]]:
    """Return a state as JSON, and its arrays in their order, contiguous, with whether they are NumPy's numbers.

    Raises
    ------
    TypeError
        If there is something in it that cannot be saved; the message says where.
    ValueError
        If it is nested too deeply, or a number is too long.
    """
    arrays: list[tuple[Array, bool]] = []

    def walk(value: Any, place: str, depth: int) -> object:
        if depth > MOST_DEPTH:
            raise ValueError(f"a state may be nested {MOST_DEPTH} deep")
        if isinstance(value, np.ndarray | np.generic):
            if isinstance(value, np.ma.MaskedArray):
                raise TypeError(f"{place} is a masked array: save its data and its mask as two arrays")
            _check_dtype(value.dtype, place)
            arrays.append((np.asarray(value, order="C"), isinstance(value, np.generic)))
            return {"array": len(arrays) - 1}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return [walk(each, f"{place}[{index}]", depth + 1) for index, each in enumerate(value)]
        if not isinstance(value, Mapping):
            raise TypeError(f"{place} is of type {type(value).__name__}: {_ADVICE}")
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{place} has the key {key!r}: keys must be str")
        return {"dict": {key: walk(each, f"{place}[{key!r}]", depth + 1) for key, each in value.items()}}

    return json.dumps(walk(state, "state", 0)), arrays


_ADVICE: Final = (
    "dicts with keys of str, lists, NumPy arrays, numbers, str, bool and None can be saved; "
    "make a tuple a list, bring other arrays to NumPy, and decide of a PerRank what to go on from"
)


def _check_dtype(dtype: np.dtype[Any], place: str) -> None:
    try:
        known = dtype_of(dtype.name) == dtype and dtype.isnative
    except ValueError:
        known = False
    if not known:
        raise TypeError(f"{place} has dtype {dtype}: arrays of numbers in native byte order can be saved")


def text_of(tree: str, arrays: Sequence[Stored]) -> bytes:
    """Return what :func:`decode` reads."""
    table = [[x.dtype.name, x.shape, x.scalar, x.file, x.offset, x.digest] for x in arrays]
    return f'{{"arrays": {json.dumps(table)},\n "state": {tree}}}\n'.encode()


# -- reading


_Count = Annotated[int, Meta(ge=0, le=MOST_SIDE)]
_ArrayEntry = tuple[str, tuple[_Count, ...], bool, _Count, _Count, str]


class _TreeText(Struct, forbid_unknown_fields=True):
    """What a text says: of each array what :func:`text_of` writes, and the state."""

    arrays: list[_ArrayEntry]
    state: Any


def decode(text: bytes, lengths: Mapping[int, int]) -> tuple[Tree, list[Stored]]:
    """Return the state that a text says, and its arrays.

    Parameters
    ----------
    text : bytes
        What :func:`text_of` has returned, or anything.
    lengths : dict of int to int
        For each file that the arrays may be in, how many bytes of arrays it has.

    Raises
    ------
    ValueError
        If it says none: every array must lie in a file, beside the others, and be in the state once.
    """
    content = documents.made(documents.parsed(text), _TreeText)
    arrays = [_stored(entry, lengths) for entry in content.arrays]
    _check_apart(arrays)
    left = iter(enumerate(arrays))

    def walk(value: Any, depth: int) -> Tree:
        if depth > MOST_DEPTH:
            raise ValueError("it is nested too deeply")
        if isinstance(value, list):
            return [walk(each, depth + 1) for each in value]
        if not isinstance(value, dict):
            return value
        if len(value) == 1 and isinstance(value.get("dict"), dict):
            return {key: walk(each, depth + 1) for key, each in value["dict"].items()}
        index, stored = next(left, (None, None))
        if stored is None or json.dumps(value) != json.dumps({"array": index}):
            raise ValueError("an object must be a dict, or the array whose turn it is")
        return stored

    tree = walk(content.state, 0)
    if not isinstance(tree, dict):
        raise ValueError("the state must be a dict")  # noqa: TRY004 - a file's fault
    if next(left, None) is not None:
        raise ValueError("there are arrays that the state has not")
    return tree, arrays


def _stored(entry: _ArrayEntry, lengths: Mapping[int, int]) -> Stored:
    name, shape, scalar, file, offset, digest = entry
    if file not in lengths:
        raise ValueError(f"an array must be in one of the files {sorted(lengths)}")
    if scalar and shape:
        raise ValueError("a number has no shape")
    stored = Stored(dtype_of(name), shape, scalar, file, offset, digest)
    if stored.nbytes > lengths[file] - offset:
        raise ValueError(f"an array of {stored.nbytes} bytes from {offset} on is not within its file")
    return stored


def _check_apart(arrays: Sequence[Stored]) -> None:
    """Raise ValueError if arrays overlap: so all of them together are no longer than the files."""
    ends: dict[int, int] = {}
    for x in sorted(arrays, key=lambda x: (x.file, x.offset, x.nbytes)):
        if x.offset < ends.get(x.file, 0):
            raise ValueError("arrays overlap")
        ends[x.file] = x.offset + x.nbytes


def fill(tree: Tree, read: Callable[[Stored], Any]) -> Any:
    """Return a state with arrays in their places."""
    if isinstance(tree, Stored):
        return read(tree)
    if isinstance(tree, dict):
        return {key: fill(each, read) for key, each in tree.items()}
    return [fill(each, read) for each in tree] if isinstance(tree, list) else tree


def merge(trees: Sequence[Tree], read: Callable[[Stored], Any]) -> Tree:
    """Return one state of the states of all ranks; where they differ, :class:`PerRank` with all of them."""
    first, *others = trees
    if isinstance(first, dict) and all(isinstance(tree, dict) and tree.keys() == first.keys() for tree in others):
        return {key: merge([tree[key] for tree in trees], read) for key in first}
    if isinstance(first, list) and all(isinstance(tree, list) and len(tree) == len(first) for tree in others):
        return [merge(each, read) for each in zip(*trees, strict=True)]
    if all(_same(first, other) for other in others):
        return first
    return PerRank(trees, lambda tree: fill(tree, read))


def _same(one: Tree, other: Tree) -> bool:
    if isinstance(one, Stored) and isinstance(other, Stored):
        return (one.dtype, one.shape, one.scalar, one.digest) == (other.dtype, other.shape, other.scalar, other.digest)
    # By what is written of them: NaN is NaN, and 1 neither 1.0 nor True.
    return type(one) is type(other) and not isinstance(one, dict | list) and repr(one) == repr(other)
