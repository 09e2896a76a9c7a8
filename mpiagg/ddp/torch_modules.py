"""Modules of torch as DDP sees them. The only file of DDP that imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from mpiagg.arrays import Array

_HOOKED: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""The parameters from which a DDP takes the gradients, by identity: another would find none."""


def array_of(tensor: torch.Tensor, name: str) -> Array:
    """Return a tensor as an array over the same memory.

    Raises
    ------
    TypeError
        If it is not dense and in the host's memory, or of a dtype that NumPy has not. bfloat16 needs ``ml_dtypes``.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor on the CPU, not {tensor.layout} on {tensor.device}")
    bare = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(bare.view(torch.int16).numpy()).view(_bfloat16())
    return np.asarray(bare.numpy())


def tensor_of(array: Array) -> torch.Tensor:
    """Return an array as a tensor over the same memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes  # noqa: PLC0415 - optional
    except ImportError:
        raise TypeError("bfloat16 tensors need the package ml_dtypes") from None
    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


class TorchParameter:
    """A parameter whose data and gradient are seen as arrays over the tensors' memory."""

    def __init__(self, name: str, tensor: torch.nn.Parameter) -> None:
        self._name, self._tensor = name, tensor

    @property
    def data(self) -> Array:
        """The parameter's values."""
        return array_of(self._tensor, f"parameter {self._name}")

    @property
    def grad(self) -> Array | None:
        """The gradient; TypeError if it is sparse."""
        gradient = self._tensor.grad
        if gradient is None:
            return None
        return array_of(gradient.resolve_conj().resolve_neg(), f"the gradient of parameter {self._name}")

    @grad.setter
    def grad(self, array: Array | None) -> None:
        """Make the gradient a view of an array."""
        self._tensor.grad = None if array is None else tensor_of(array)

    def on_gradient(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call this whenever a backward pass has completed the gradient; return what ends that."""
        handle = self._tensor.register_post_accumulate_grad_hook(lambda _: call())
        _HOOKED[id(self._tensor)] = self._tensor

        def end() -> None:
            handle.remove()
            _HOOKED.pop(id(self._tensor), None)

        return end


class TorchAdapter:
    """A ``torch.nn.Module``: its parameters that require gradients; the others and the buffers are only broadcast.

    Parameters that several layers share appear once.

    Raises
    ------
    TypeError
        If a parameter or buffer is not a dense tensor on the CPU, or of a dtype that NumPy has not.
    ValueError
        If a lazy module has not run yet, and so has no parameters; or if another DDP takes the gradients.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        for name, tensor in self._tensors():
            if torch.nn.parameter.is_lazy(tensor):
                raise ValueError(f"{name} is not initialised; run the module once first")
            if _HOOKED.get(id(tensor)) is tensor:
                raise ValueError(f"another DDP trains {name}; free() that first")
        self.arrays()
        self._known = [(name, x, x.dtype, x.requires_grad) for name, x in module.named_parameters()]
        self.parameters = [TorchParameter(name, x) for name, x, _, trained in self._known if trained]
        self.hooked = self.parameters

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [*self._module.named_parameters(), *self._module.named_buffers()]

    def arrays(self) -> list[Array]:
        """Return all parameters and buffers."""
        return [array_of(x.view(torch.uint8) if x.dtype == torch.bool else x, name) for name, x in self._tensors()]

    def words(self) -> list[str]:
        """Return the parameters and buffers in words."""
        return [
            f"{name} {x.dtype} {tuple(x.shape)}{'' if x.requires_grad else ' without gradient'}"
            for name, x in self._tensors()
        ]

    def check(self) -> None:
        """Raise ValueError if a parameter was replaced, has come to require a gradient, or has changed its dtype."""
        now = dict(self._module.named_parameters())
        if now.keys() != {name for name, *_ in self._known}:
            raise ValueError("the module has other parameters now; free() DDP and make it again")
        for name, known, dtype, trained in self._known:
            tensor = now[name]
            if tensor is not known:
                raise ValueError(f"parameter {name} was replaced; free() DDP and make it again")
            if tensor.requires_grad and not trained:
                raise ValueError(f"parameter {name} has come to require a gradient; free() DDP and make it again")
            if tensor.dtype != dtype:
                raise ValueError(f"parameter {name} has become {tensor.dtype}; change dtypes by DDP.to()")

    def check_destination(self, *args: Any, **kwargs: Any) -> None:
        """Raise TypeError if ``module.to`` with these arguments would leave the CPU."""
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, torch.Tensor):
            device = device.device
        if device is not None and not isinstance(device, torch.dtype) and torch.device(device).type != "cpu":
            raise TypeError(f"DDP trains on the CPU, not on {device}")
