"""What XLA hands to a function that it calls, laid out as its C interface says, and a function that takes it.

XLA's foreign function interface is a C header that jaxlib's wheel brings (``xla/ffi/api/c_api.h``, version 0.3). The
layouts here are those of that header, so nothing has to be compiled: ctypes makes a C function of a Python one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any, ClassVar, Final

import ml_dtypes
import numpy as np

from mpiagg.arrays import Array

MAJOR: Final = 0
"""The version of the interface whose layouts these are; a newer minor version only adds to them."""

_METADATA: Final = 1
_EXECUTE: Final = 3
_INTERNAL: Final = 13
_TOKEN: Final = 17

_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    code: np.dtype(kind)
    for code, kind in {
        1: np.bool_,
        2: np.int8,
        3: np.int16,
        4: np.int32,
        5: np.int64,
        6: np.uint8,
        7: np.uint16,
        8: np.uint32,
        9: np.uint64,
        10: np.float16,
        11: np.float32,
        12: np.float64,
        15: np.complex64,
        16: ml_dtypes.bfloat16,
        18: np.complex128,
    }.items()
}
"""XLA's numbers of dtypes."""

DTYPES: Final = frozenset(_DTYPES.values())
"""The dtypes of arrays that a function here can be given."""

_MOST: Final = 4096
"""How many places in memory are remembered as arrays."""


class _Struct(ctypes.Structure):
    """What every struct of the interface begins with."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("struct_size", c_size_t), ("extension", c_void_p))


class _Version(_Struct):
    _fields_ = (("major", c_int), ("minor", c_int))


class _Api(_Struct):
    _fields_ = (("version", _Version), ("internal", c_void_p), ("error_create", c_void_p))


class _Buffer(_Struct):
    _fields_ = (("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64)))


class _Buffers(_Struct):
    _fields_ = (("size", c_int64), ("types", c_void_p), ("at", POINTER(POINTER(_Buffer))))


class _Text(ctypes.Structure):
    _fields_ = (("at", c_void_p), ("length", c_size_t))


class _Attributes(_Struct):
    _fields_ = (("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("at", POINTER(POINTER(_Text))))


class _Frame(_Struct):
    _fields_ = (
        ("api", POINTER(_Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("version", _Version), ("traits", c_uint32), ("state", c_int64))


class _Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("type", c_int),
        ("next", c_void_p),
        ("metadata", POINTER(_Metadata)),
    )


class _ErrorArguments(_Struct):
    _fields_ = (("message", c_char_p), ("code", c_int))


_FUNCTION: Final = ctypes.CFUNCTYPE(c_void_p, POINTER(_Frame))
_ERROR_CREATE: Final = ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorArguments))

Execute = Callable[[bytes, Array, Array], None]
"""Does what a text says with an input, into an output, which may be one array."""


def c_function(execute: Execute) -> Any:
    """Return a C function for XLA, of one array and a token to one array and a token; keep it as long as XLA may call.

    Parameters
    ----------
    execute : callable
        Called with the text of the call's one attribute, the input and the output. What it raises, XLA gets as an
        error with the words of it.
    """
    arrays: dict[tuple[int, ...], Array] = {}

    def array_of(buffer: Any) -> Array:
        """Return the memory of a buffer as an array: XLA mostly comes back with the same memory."""
        place = (buffer.data or 0, buffer.dtype, *buffer.dims[: buffer.rank])
        found = arrays.get(place)
        if found is None:
            if len(arrays) >= _MOST:
                arrays.clear()
            found = arrays[place] = _array_at(*place)
        return found

    def called(pointer: Any) -> int | None:
        frame = pointer.contents
        # An exception that left this function would be lost, and XLA would go on with what is in the output.
        try:
            if frame.extension:
                _tell_version(frame)
            elif frame.stage == _EXECUTE:
                text = frame.attributes.at[0].contents
                x, out = (
                    next(
                        each
                        for each in (buffers.at[place].contents for place in range(buffers.size))
                        if each.dtype != _TOKEN
                    )
                    for buffers in (frame.arguments, frame.results)
                )
                execute(ctypes.string_at(text.at, text.length), array_of(x), array_of(out))
        except BaseException as error:  # noqa: BLE001 - XLA raises it where the result is asked for
            return _error(frame, f"{type(error).__name__}: {error}")
        return None

    return _FUNCTION(called)


def _array_at(address: int, code: int, *shape: int) -> Array:
    dtype = _DTYPES[code]
    length = int(np.prod(shape, dtype=np.int64))
    if length == 0:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * (length * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


def _tell_version(frame: Any) -> None:
    """Say for which version of the interface this is: XLA asks when the function is registered."""
    api = frame.api.contents
    if api.version.major != MAJOR or frame.struct_size < ctypes.sizeof(_Frame):
        raise ImportError(f"mpiagg.jax needs XLA's foreign functions {MAJOR}.x, not {api.version.major}.x")
    extension = ctypes.cast(frame.extension, POINTER(_Extension)).contents
    if extension.type == _METADATA:
        told = extension.metadata.contents.version
        told.major, told.minor = api.version.major, api.version.minor


def _error(frame: Any, message: str) -> int | None:
    arguments = _ErrorArguments(
        struct_size=ctypes.sizeof(_ErrorArguments), message=message.encode(errors="replace"), code=_INTERNAL
    )
    create = _ERROR_CREATE(frame.api.contents.error_create)
    error: int | None = create(ctypes.byref(arguments))
    return error
