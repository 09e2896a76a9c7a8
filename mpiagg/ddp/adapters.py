"""Modules as DDP sees them: parameters, each with data and a gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mpiagg.arrays import Array, accelerator_of, device_of, form_of, is_array, same_memory, working_dtype, writeable


@runtime_checkable
class Parameter(Protocol):
    """What DDP asks of a parameter."""

    grad: Array | None

    @property
    def data(self) -> Array:
        """The values."""


class Source(Protocol):
    """A stream in which a library that is not ours computes gradients on a device; the same object each time."""

    def copy(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Copy gradients to where they go, (to, from) as that library has them, behind what the stream has to do."""

    def inside(self) -> AbstractContextManager[object]:
        """Return a block in which it is the thread's present stream."""


class HookedParameter(Parameter, Protocol):
    """A parameter that tells when its gradient is complete.

    Attributes
    ----------
    on_host : bool
        Whether it lies on the host.
    """

    on_host: bool

    @property
    def has_other_hooks(self) -> bool:
        """Whether others than DDP hear of its gradient, too."""

    def on_gradient(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call this whenever a backward pass has completed the gradient; return what ends that."""

    def brought_to(self, view: Array) -> Array | None:
        """Return the gradient; if it can be, as the view of a bucket, to which it has been copied."""

    def source(self) -> Source:
        """Return the stream in which a gradient on a device has just been computed."""

    def pair(self, view: Array) -> tuple[Any, Any] | None:
        """Return what :meth:`Source.copy` copies to bring the gradient to the view of a bucket; None if it cannot."""


@dataclass
class ArrayParameter:
    """A bare array as a parameter."""

    data: Array
    grad: Array | None = None


class Unsynced(Protocol):
    """What looks for optimizers that step with gradients which are not aggregated."""

    def clear(self) -> None:
        """Forget the gradients that there were: they are aggregated."""

    def end(self) -> None:
        """Look no more."""


class Adapter(Protocol):
    """A module as DDP sees it.

    Attributes
    ----------
    parameters : sequence of Parameter
        Those whose gradients are aggregated.
    hooked : sequence of HookedParameter
        The same, if they tell when their gradients are complete, and their gradients can be views of the buckets.
    """

    @property
    def parameters(self) -> Sequence[Parameter]:
        """See above."""

    @property
    def hooked(self) -> Sequence[HookedParameter]:
        """See above."""

    def arrays(self) -> list[Array]:
        """Return the parameters, in their own memory."""

    def words(self) -> list[str]:
        """Return what it consists of: the names, dtypes and shapes."""

    def names(self) -> list[str]:
        """Return the parameters' names, empty ones where they have none."""

    def unsynced(self, under_way: Callable[[], bool | None]) -> Unsynced | None:
        """Return what keeps optimizers from steps with gradients that are not aggregated, if they can be seen.

        It is told whether gradients are under way; None where optimizers may step all the same.
        """

    def stream(self) -> AbstractContextManager[object]:
        """Return a block in which devices are asked in the streams in which the module is computed."""

    def check(self) -> None:
        """Raise ValueError if the module has changed so that its gradients would be missed."""


class ArrayAdapter:
    """A list of arrays, or an object whose ``parameters()`` are arrays or have arrays."""

    hooked: Sequence[HookedParameter] = ()

    def __init__(self, module: Any) -> None:
        self._module = module
        self.parameters = parameters_of(module)

    def arrays(self) -> list[Array]:
        """Return the parameters' arrays."""
        return [parameter.data for parameter in self.parameters]

    def words(self) -> list[str]:
        """Return the parameters in words, with their names where the module has some."""
        forms = map(form_of, self.arrays())
        return [f"{name} {form}".lstrip() for name, form in zip(self.names(), forms, strict=True)]

    def names(self) -> list[str]:
        """Return the parameters' names; those in a list have none."""
        if not hasattr(self._module, "named_parameters"):
            return [""] * len(self.parameters)
        return [name for name, _ in self._module.named_parameters()]

    def unsynced(self, _: Callable[[], bool | None]) -> None:
        """Return None: nobody steps but the program itself, of which nothing can be seen."""

    def stream(self) -> AbstractContextManager[object]:
        """Return a block in which the arrays lie on the present device; its stream is the program's own."""
        devices = (accelerator_of(parameter.data) for parameter in self.parameters)
        return next((device.present() for device in devices if device is not None), nullcontext())

    def check(self) -> None:
        """Find nothing: the parameters are those that there were at first."""


def is_torch(module: Any) -> bool:
    """Return whether it is a module of torch's."""
    torch = sys.modules.get("torch")  # who has a module of torch's has imported it
    return torch is not None and isinstance(module, torch.nn.Module)


def kind_of(module: Any) -> type[Any]:
    """Return the class of DDP for a module."""
    if is_torch(module):
        from mpiagg.ddp.torch_ddp import TorchDDP as Kind  # noqa: PLC0415 - torch is an extra
    else:
        from mpiagg.ddp.array_ddp import ArrayDDP as Kind  # type: ignore[assignment]  # noqa: PLC0415 - it is a DDP
    return Kind


def adapt(module: Any) -> Adapter:
    """Return a module as DDP sees it; raises what :func:`parameters_of` does."""
    if is_torch(module):
        from mpiagg.ddp.torch_modules import TorchAdapter  # noqa: PLC0415 - torch is an extra

        return TorchAdapter(module)
    return ArrayAdapter(module)


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
        parameter = ArrayParameter(item) if is_array(item) else item
        if not isinstance(parameter, Parameter):
            raise TypeError(f"parameter {index}, a {type(item).__name__}, is no array, and has not both data and grad")
        if not is_array(parameter.data):
            raise TypeError(f"the data of parameter {index} must be a NumPy array, not {type(parameter.data).__name__}")
        working_dtype(parameter.data.dtype)
        if not writeable(parameter.data):
            raise ValueError(f"parameter {index} is read-only")
        yield parameter


def check_gradient(index: int, gradient: Any, data: Array) -> None:
    """Check the gradient of a parameter.

    Raises
    ------
    TypeError
        If it is not an array, or of another dtype than the parameter.
    ValueError
        If it is of another shape, or read-only, or lies in the bucket in the place of another parameter.
    """
    if not is_array(gradient):
        raise TypeError(f"gradient {index} must be a NumPy array or None, not {type(gradient).__name__}")
    if device_of(gradient) is not device_of(data):
        raise ValueError(f"gradient {index} is on {device_of(gradient).name}, its parameter on {device_of(data).name}")
    if gradient.dtype != data.dtype:
        raise TypeError(f"gradient {index} has dtype {gradient.dtype}, its parameter {data.dtype}")
    if gradient.shape != data.shape:
        raise ValueError(f"gradient {index} has shape {gradient.shape}, its parameter {data.shape}")
    if not writeable(gradient):
        raise ValueError(f"gradient {index} is read-only")
    if data.base is not None and not same_memory(gradient, data) and np.may_share_memory(gradient, data.base):
        raise ValueError(f"gradient {index} lies in a bucket, in the place of another parameter")
