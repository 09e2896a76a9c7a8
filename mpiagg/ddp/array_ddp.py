"""DDP of arrays, with what a training loop asks of its module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from mpiagg.ddp.array_list import ArrayList
from mpiagg.ddp.ddp import DDP

Self = TypeVar("Self", bound="ArrayDDP")


class ArrayDDP(DDP):
    """DDP of a list of arrays, or of an object with ``parameters()``, with what a training loop asks of a module."""

    def __init__(self, module: Any, *args: Any, **keywords: Any) -> None:
        self._inner = ArrayList(module) if isinstance(module, list | tuple) else module
        super().__init__(module, *args, **keywords)

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

    def to(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: arrays are trained as they are."""
        raise TypeError("arrays stay as they are; only a module of torch's can be moved")

    def __reduce__(self) -> NoReturn:
        """Refuse copies, which would share messages."""
        raise TypeError("DDP can be neither copied nor saved; its module can")
