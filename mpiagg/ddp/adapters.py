"""Modules as DDP sees them: parameters, each with data and a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mpiagg.arrays import Array, same_memory, working_dtype


@runtime_checkable
class Parameter(Protocol):
    """What DDP asks of a parameter."""

    data: Array
    grad: Array | None


@dataclass
class ArrayParameter:
    """A bare array as a parameter."""

    data: Array
    grad: Array | None = None


def parameters_of(module: Any) -> list[Parameter]:
    """Return the parameters of a module, or of a list of arrays.

    Parameters
    ----------
    module : list of numpy.ndarray, or object with ``parameters()``
        The items that ``parameters()`` yields have ``data`` and ``grad``, or are arrays.

    Raises
    ------
    TypeError
        If it is neither, or a parameter's data is not an array of numbers.
    ValueError
        If a parameter's data is read-only.
    """
    if hasattr(module, "parameters"):
        items = list(module.parameters())
    elif isinstance(module, list | tuple):
        items = list(module)
    else:
        raise TypeError(f"a module is a list of arrays, or has parameters(); this is {type(module).__name__}")
    return list(_checked(items))


def _checked(items: list[Any]) -> Iterator[Parameter]:
    for index, item in enumerate(items):
        parameter = ArrayParameter(item) if isinstance(item, np.ndarray) else item
        if not isinstance(parameter, Parameter):
            raise TypeError(f"parameter {index}, a {type(item).__name__}, is no array, and has not both data and grad")
        if not isinstance(parameter.data, np.ndarray):
            raise TypeError(f"the data of parameter {index} must be a NumPy array, not {type(parameter.data).__name__}")
        working_dtype(parameter.data.dtype)
        if not parameter.data.flags.writeable:
            raise ValueError(f"parameter {index} is read-only")
        yield parameter


def check_gradient(index: int, gradient: object, data: Array) -> None:
    """Check the gradient of a parameter.

    Raises
    ------
    TypeError
        If it is not an array, or of another dtype than the parameter.
    ValueError
        If it is of another shape, or read-only, or lies in the bucket in the place of another parameter.
    """
    if not isinstance(gradient, np.ndarray):
        raise TypeError(f"gradient {index} must be a NumPy array or None, not {type(gradient).__name__}")
    if gradient.dtype != data.dtype:
        raise TypeError(f"gradient {index} has dtype {gradient.dtype}, its parameter {data.dtype}")
    if gradient.shape != data.shape:
        raise ValueError(f"gradient {index} has shape {gradient.shape}, its parameter {data.shape}")
    if not gradient.flags.writeable:
        raise ValueError(f"gradient {index} is read-only")
    if data.base is not None and not same_memory(gradient, data) and np.may_share_memory(gradient, data.base):
        raise ValueError(f"gradient {index} lies in a bucket, in the place of another parameter")
