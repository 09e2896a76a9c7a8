"""DDP's face as a module: what a training loop asks of its module, passed on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from mpiagg.ddp.array_list import ArrayList

Self = TypeVar("Self", bound="ModuleFace")


class ModuleFace:
    """Passes on to the module what DDP does not do itself; a list of arrays gets the same face.

    Attributes
    ----------
    module : object
        The module, or the list of arrays.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._inner = ArrayList(module) if isinstance(module, list | tuple) else module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; TypeError for a list of arrays."""
        return self._inner(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, as calling DDP does."""
        return self(*args, **kwargs)

    def parameters(self) -> Iterator[Any]:
        """Return the parameters, as the module has them."""
        return iter(self._inner.parameters())

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Return the parameters with their names; the arrays of a list are named "0", "1", and so on."""
        return iter(self._inner.named_parameters())

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return bool(self._inner.training)

    def train(self: Self, mode: bool = True) -> Self:  # noqa: PYI019 - typing.Self needs Python 3.11
        """Put the module in training mode, or in evaluation mode; return DDP."""
        self._inner.train(mode)
        return self

    def eval(self: Self) -> Self:  # noqa: PYI019 - typing.Self needs Python 3.11
        """Put the module in evaluation mode; return DDP."""
        return self.train(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state: no prefix says that it was trained by DDP. For a list of arrays, copies."""
        return self._inner.state_dict(*args, **kwargs)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state of the module's into its parameters, which stay the same objects.

        It is loaded on this rank alone: load it on all, or call :meth:`DDP.broadcast_parameters` afterwards.

        Returns
        -------
        named tuple
            ``missing_keys`` and ``unexpected_keys``.

        Raises
        ------
        KeyError, ValueError, TypeError
            For a list of arrays, if the state does not fit; nothing is written then. A module raises its own errors.
        """
        return self._inner.load_state_dict(state, strict)

    def __reduce__(self) -> NoReturn:
        """Refuse copies, which would share messages."""
        raise TypeError(f"{type(self).__name__} can be neither copied nor saved; its module can")

    def __getattr__(self, name: str) -> Any:
        """Return what the module has and DDP has not."""
        if name == "module" or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.module, name)
