"""A list of arrays with the interface of a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpiagg.arrays import Array, is_array, load, to_host


class Unmatched(NamedTuple):
    """The keys that loading a state has not matched, named as torch names them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class ArrayList:
    """A list of arrays as a module: the arrays are named "0", "1", and so on.

    Attributes
    ----------
    training : bool
        What :meth:`train` and :meth:`eval` set; it has no other effect.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays
        self.training = True

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a list of arrays computes nothing."""
        raise TypeError("a list of arrays cannot be called; the program computes with the arrays itself")

    def parameters(self) -> Iterator[Array]:
        """Return the arrays."""
        return iter(self._arrays)

    def named_parameters(self) -> Iterator[tuple[str, Array]]:
        """Return the arrays with their names."""
        return ((str(index), array) for index, array in enumerate(self._arrays))

    def train(self, mode: bool = True) -> ArrayList:
        """Set ``training``."""
        self.training = mode
        return self

    def eval(self) -> ArrayList:
        """Set ``training`` to False."""
        return self.train(False)

    def state_dict(self) -> dict[str, Array]:
        """Return copies of the arrays under their names."""
        return {name: to_host(array) for name, array in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Array], strict: bool = True) -> Unmatched:
        """Copy what :meth:`state_dict` returned into the arrays, once all of it is found good.

        Raises
        ------
        KeyError
            If it is strict, and names are missing or unexpected.
        ValueError
            For an array of another shape.
        TypeError
            For what is not an array, or of a dtype that the list's cannot hold.
        """
        arrays = dict(self.named_parameters())
        unmatched = Unmatched(sorted(arrays.keys() - state.keys()), sorted(state.keys() - arrays.keys()))
        if strict and any(unmatched):
            raise KeyError(f"missing: {unmatched.missing_keys}, unexpected: {unmatched.unexpected_keys}")
        matched = [(name, array, state[name]) for name, array in arrays.items() if name in state]
        for name, array, saved in matched:
            if not is_array(saved):
                raise TypeError(f"{name} must be a NumPy array, not {type(saved).__name__}")
            if saved.shape != array.shape:
                raise ValueError(f"{name} has shape {array.shape}, its saved state {saved.shape}")
            if not np.can_cast(saved.dtype, array.dtype, "same_kind"):
                raise TypeError(f"{name} has dtype {array.dtype}, its saved state {saved.dtype}")
        for _, array, saved in matched:
            load(array, to_host(saved))
        return unmatched
