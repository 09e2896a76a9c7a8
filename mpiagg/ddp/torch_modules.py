"""Modules of torch as DDP sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter, is_
from typing import Any, Final
from weakref import WeakMethod, WeakValueDictionary

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpiagg.arrays import HOST, Array, device_of, find_device
from mpiagg.ddp.torch_streams import TorchSource, is_on_host, present_source, stream_of
from mpiagg.errors import PlanError

DEVICES: Final = ("cpu", "cuda")
"""Where the tensors of a module may lie."""

_OWN_HOOKS: Final = 2
"""How many hooks DDP has on a parameter whose gradients it takes as they come."""

_HOOKED: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""The parameters from which a DDP or Sharded takes the gradients, by identity: another would find none."""


def check_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError or TypeError unless these are parameters and buffers that can go from rank to rank.

    Buffers stay tensors that torch can resize: of a tensor of which there was an array, it resizes the memory no more.
    """
    for name, tensor in tensors:
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} is not initialised; run the module once first")
        if _HOOKED.get(id(tensor)) is tensor:
            raise ValueError(f"another DDP or Sharded trains {name}; free() that first")
        stored_array(tensor.new_empty(1), name)
        if any(step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"{name} is expanded, and has one element for several; clone() it")


def on_gradient(tensor: torch.Tensor, call: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Call this whenever a backward pass has completed a parameter's gradient; return what ends that."""
    handle = tensor.register_post_accumulate_grad_hook(call)
    _HOOKED[id(tensor)] = tensor

    def end() -> None:
        handle.remove()
        _HOOKED.pop(id(tensor), None)

    return end


@contextmanager
def not_hooked(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let an adapter be made inside this block of tensors whose gradients the same DDP takes."""
    hooked = [tensor for tensor in tensors if _HOOKED.pop(id(tensor), None) is not None]
    try:
        yield
    finally:
        _HOOKED.update((id(tensor), tensor) for tensor in hooked)


def array_of(tensor: torch.Tensor, name: str) -> Array:
    """Return a tensor as an array over the same memory.

    Raises
    ------
    TypeError
        If it is not dense and on the CPU or a CUDA device, or of a dtype that NumPy has not. bfloat16 needs
        ``ml_dtypes``.
    DeviceError
        If it is on a CUDA device, and CuPy cannot be used.
    """
    if tensor.device.type not in DEVICES or tensor.layout is not torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor on the CPU or a CUDA device, not {tensor.layout} on {tensor.device}"
        )
    bare = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return _over(bare.view(torch.int16)).view(_bfloat16())
    try:
        return _over(bare)
    except TypeError as error:
        raise TypeError(f"{name} is of {tensor.dtype}, which NumPy has not") from error


def stored_array(tensor: torch.Tensor, name: str) -> Array:
    """Return a tensor of any dtype, which is only moved, as an array over the same memory; see :func:`array_of`."""
    return array_of(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, name)


def _over(tensor: torch.Tensor) -> Array:
    """Return an array over a tensor's memory, of whose dtype NumPy has one."""
    if is_on_host(tensor):
        return np.asarray(tensor.numpy())
    device: Any = find_device(f"cuda:{tensor.device.index}")  # says what is wrong, if anything is
    import cupy  # noqa: PLC0415 - CuPy is an extra

    with device.present():  # where CuPy puts what has no elements
        array: Array = cupy.asarray(tensor)
    return array


def tensor_of(array: Array) -> torch.Tensor:
    """Return an array as a tensor over the same memory."""
    if array.dtype.name == "bfloat16":
        return tensor_of(array.view(np.int16)).view(torch.bfloat16)
    device = device_of(array)
    return torch.from_numpy(array) if device is HOST else torch.as_tensor(array, device=device.name)


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
        self._name, self.tensor = name, tensor
        self.on_host, self._ordinal = is_on_host(tensor), tensor.device.index
        # The view of the bucket that was last the gradient, as an array and as a tensor: it mostly comes again.
        self._shown: tuple[Array | None, torch.Tensor | None] = None, None

    @property
    def data(self) -> Array:
        """The parameter's values."""
        return array_of(self.tensor, f"parameter {self._name}")

    @property
    def grad(self) -> Array | None:
        """The gradient; TypeError if it is sparse."""
        gradient = self.tensor.grad
        if gradient is None:
            return None
        if gradient is self._shown[1]:
            return self._shown[0]
        usual = self.on_host and gradient.dtype is torch.float32 and gradient.device.type == "cpu"
        if usual and gradient.layout is torch.strided and not gradient.is_neg():
            return np.asarray(gradient.detach().numpy())
        return array_of(gradient.resolve_conj().resolve_neg(), f"the gradient of parameter {self._name}")

    @grad.setter
    def grad(self, array: Array | None) -> None:
        """Make the gradient a view of an array."""
        self.tensor.grad = None if array is None else self._tensor_of(array)

    def _tensor_of(self, array: Array) -> torch.Tensor | None:
        if array is not self._shown[0]:
            self._shown = array, tensor_of(array)
        return self._shown[1]

    def brought_to(self, view: Array) -> Array | None:
        """Return the gradient, where that can be copied by torch itself as the view to which it has been copied."""
        gradient = self.tensor.grad
        if gradient is None or gradient.device != self.tensor.device or gradient.layout is not torch.strided:
            return self.grad
        into: Any = self._tensor_of(view)
        if gradient is not into:
            into.copy_(gradient.detach())
        return view

    def source(self) -> TorchSource:
        """Return the stream in which a gradient on a device has just been computed."""
        return present_source(self._ordinal)

    def pair(self, view: Array) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the view of a bucket and the gradient, both as tensors, where torch can copy the one to the other."""
        gradient = self.tensor.grad
        if gradient is None or gradient.device != self.tensor.device or gradient.layout is not torch.strided:
            return None
        into: Any = self._shown[1] if view is self._shown[0] else self._tensor_of(view)
        return into, gradient

    @property
    def has_other_hooks(self) -> bool:
        """Whether others than DDP hear of the gradient, too."""
        return len(getattr(self.tensor, "_post_accumulate_grad_hooks", None) or ()) > _OWN_HOOKS

    def on_gradient(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call this whenever a backward pass has completed the gradient; return what ends that."""
        return on_gradient(self.tensor, lambda _: call())


class UnsyncedParameters:
    """The parameters with gradients that are not aggregated; no optimizer of torch's may step with them.

    Parameters
    ----------
    parameters : sequence of torch.Tensor
        The parameters that require gradients.
    under_way : callable
        Returns whether gradients are on their way, and so no parameter's any more; None if an optimizer may step.

    Attributes
    ----------
    found : set of torch.Tensor
        The parameters, and what else a backward pass has left as a sign.
    synced : bool
        Whether a backward pass has aggregated its gradients, and no optimizer has stepped with them yet.
    """

    def __init__(self, parameters: Collection[torch.Tensor], under_way: Callable[[], bool | None]) -> None:
        self.found: set[torch.Tensor] = set()
        self.synced = False
        self._under_way = under_way
        # A set's own method, without a frame of Python: it is called for each parameter in each backward pass.
        self._hooks = [each.register_post_accumulate_grad_hook(self.found.add) for each in parameters]
        self._trained = frozenset(parameters)
        self._hooks.append(register_optimizer_step_pre_hook(self._before_step))

    def clear(self) -> None:
        """Forget the gradients that there were: they are aggregated."""
        self.found.clear()

    def excuse(self) -> None:
        """Let optimizers step with the gradients that there are: somebody else takes care of them."""
        self.synced = self.synced and not self.found
        self.found.clear()

    def tell(self, call: WeakMethod[Callable[[object], None]]) -> None:
        """Call a method at every gradient, as long as there is its object."""

        def told(parameter: torch.Tensor) -> None:
            if (method := call()) is not None:
                method(parameter)

        self._hooks += [each.register_post_accumulate_grad_hook(told) for each in self._trained]

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.synced and any(x in self._trained for group in optimizer.param_groups for x in group["params"]):
            self.synced = False
        if not self.found or (under_way := self._under_way()) is None:
            return
        mine = [x for group in optimizer.param_groups for x in group["params"] if x in self.found]
        if mine and (under_way or any(x.grad is not None for x in mine)):
            raise PlanError("an optimizer was to step with gradients that sync_gradients() has not aggregated")

    def end(self) -> None:
        """Look no more; a second call does nothing."""
        while self._hooks:
            self._hooks.pop().remove()


class TorchAdapter:
    """A ``torch.nn.Module``: its parameters that require gradients; the others and the buffers are only broadcast.

    Parameters that several layers share appear once. Those that the module's ``_ddp_params_and_buffers_to_ignore``
    names are left alone, as by torch's DDP. Weights of embeddings whose gradients are sparse are no ``parameters``.

    Attributes
    ----------
    sparse : list of torch.Tensor
        The weights of embeddings whose gradients are sparse.

    Raises
    ------
    TypeError
        If a parameter or buffer is not a dense tensor on the CPU or a CUDA device, or of a dtype that NumPy has not.
    ValueError
        If a lazy module has not run yet, and so has no parameters; if another DDP takes the gradients; or for an
        expanded parameter or buffer.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        check_tensors(self._tensors())
        self.arrays()
        self._known = [(name, x, x.dtype, x.device, x.requires_grad) for name, x in self._parameters()]
        trained = [(name, x) for name, x, *_, trains in self._known if trains]
        rare = {
            id(each.weight) for each in module.modules() if getattr(each, "sparse", False) and hasattr(each, "weight")
        }
        self.sparse = [x for _, x in trained if id(x) in rare]
        self.parameters = [TorchParameter(name, x) for name, x in trained if id(x) not in rare]
        self.hooked = self.parameters
        self._accelerated = next((x for _, x in self._tensors() if not is_on_host(x)), None)
        self._trained = [x for _, x, *_ in self._known]
        self._states = list(map(_STATE, self._trained))
        self._modules = list(module.modules())
        self._members = _members(self._modules)
        self._with_buffers = [(f"{name}." if name else "", _BUFFERS(x)) for name, x in module.named_modules()]

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [each for each in self._module.named_parameters() if each[0] not in self._ignored]

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        buffers = (each for each in self._module.named_buffers() if each[0] not in self._ignored)
        return [*self._parameters(), *buffers]

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers that there are now."""
        named = ((path + name, x) for path, held in self._with_buffers for name, x in held.items() if x is not None)
        return [x for name, x in named if name not in self._ignored]

    def is_changed(self) -> bool:
        """Return whether parameters have come to require a gradient, or require none any more."""
        return [x.requires_grad for x in self._trained] != [trained for *_, trained in self._known]

    def arrays(self) -> list[Array]:
        """Return all parameters. Buffers are no arrays: torch resizes no tensor of which there has been one."""
        return [stored_array(x, name) for name, x in self._parameters()]

    def words(self) -> list[str]:
        """Return the parameters and buffers in words."""
        return [
            f"{name} {x.dtype} {tuple(x.shape)}{_where(x)}{'' if x.requires_grad else ' without gradient'}"
            f"{' with a sparse gradient' if any(x is each for each in self.sparse) else ''}"
            for name, x in self._tensors()
        ]

    def names(self) -> list[str]:
        """Return the names of the parameters that require gradients."""
        sparse = set(map(id, self.sparse))
        return [name for name, x, *_, trained in self._known if trained and id(x) not in sparse]

    def unsynced(self, under_way: Callable[[], bool | None]) -> UnsyncedParameters:
        """Return what keeps optimizers from steps with gradients that are not aggregated."""
        return UnsyncedParameters([x for _, x, *_, trained in self._known if trained], under_way)

    def stream(self) -> AbstractContextManager[object]:
        """Return a block in which devices are asked in torch's present streams."""
        return nullcontext() if self._accelerated is None else stream_of(self._accelerated)

    def check(self) -> None:
        """Raise ValueError if a parameter was replaced, moved, or converted, or has come to require a gradient."""
        # To walk through the module's names takes longer than a short step's gradients do on their way.
        members = _members(self._modules)
        same = len(members) == len(self._members) and all(map(is_, members, self._members))
        if same and list(map(_STATE, self._trained)) == self._states:
            return
        now = dict(self._parameters())
        if now.keys() != {name for name, *_ in self._known}:
            raise ValueError("the module has other parameters now; free() DDP and make it again")
        for name, known, dtype, device, trained in self._known:
            tensor = now[name]
            if tensor is not known:
                raise ValueError(f"parameter {name} was replaced; free() DDP and make it again")
            if tensor.requires_grad and not trained:
                raise ValueError(f"parameter {name} has come to require a gradient; free() DDP and make it again")
            if tensor.dtype != dtype:
                raise ValueError(f"parameter {name} has become {tensor.dtype}; change dtypes by DDP.to()")
            if tensor.device != device:
                raise ValueError(f"parameter {name} has moved to {tensor.device}; move modules by DDP.to()")

    def destination(self, *args: Any, **kwargs: Any) -> str:
        """Return what ``module.to`` with these arguments does in words; raise TypeError if it goes where DDP cannot."""
        device = kwargs.get("tensor", kwargs.get("device", args[0] if args else None))
        others: list[Any] = [
            *args[1:],
            *(value for key, value in sorted(kwargs.items()) if key not in ("device", "tensor")),
        ]
        if isinstance(device, torch.Tensor):
            others.append(device.dtype)
            device = device.device
        if device is None or isinstance(device, torch.dtype):
            return f"{device} {others}"
        # Which of a rank's devices it is matters to that rank alone.
        kind = torch.device(device).type
        if kind not in DEVICES:
            raise TypeError(f"DDP trains on the CPU or CUDA devices, not on {device}")
        return f"{kind} {others}"


_STATE: Final = attrgetter("requires_grad", "dtype", "device")

# Of a traced module they are not in its own dictionary.
_BUFFERS: Final = attrgetter("_buffers")
_PARAMETERS_AND_MODULES: Final = attrgetter("_parameters", "_modules")


def _members(modules: Iterable[torch.nn.Module]) -> list[object]:
    """Return the parameters and modules that modules have of their own."""
    return [each for module in modules for held in _PARAMETERS_AND_MODULES(module) for each in held.values()]


def _where(tensor: torch.Tensor) -> str:
    """Return on what a tensor lies, in words: which of a rank's devices it is matters to that rank alone."""
    return "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
