"""Lists of gradients that have been found good: what was settled for one is kept for it, and for others like it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter, is_
from typing import Any, Final
from weakref import ref

import numpy as np

from mpiagg.arrays import Array, same_memory

_FORM: Final = attrgetter("__class__", "dtype", "shape", "flags.num")


class Settled:
    """What is known of the lists of gradients that come step after step.

    Two kinds of lists are told at once: of arrays like none but the program's own (NumPy's, each the owner of its
    memory, contiguous, to be written to), and of the very arrays that came last. Checks have nothing to add to these.

    Parameters
    ----------
    views : sequence of numpy.ndarray
        Each parameter's gradient in its bucket.
    """

    def __init__(self, views: Sequence[Array]) -> None:
        self._views = views
        on_host = all(isinstance(view, np.ndarray) for view in views)
        self._owned = [_FORM(np.empty(view.shape, view.dtype)) for view in views] if on_host else None
        self._all = range(len(views))
        self._forms: list[Any] = []
        self._last: list[Callable[[], object]] = []
        self._copied: Collection[int] = ()

    def copied(self, gradients: Sequence[Any]) -> Collection[int] | None:
        """Return which gradients of a list are copied to the buckets and back; None for a list that is not known."""
        try:
            forms = list(map(_FORM, gradients))
        except AttributeError:  # None, for one that is missing, or what is no array
            return None
        if forms == self._owned:
            return self._all
        if forms == self._forms and all(map(is_, (last() for last in self._last), gradients)):
            return self._copied
        return None

    def keep(self, gradients: Sequence[Any]) -> Collection[int] | None:
        """Remember a list that has been found good; return as :meth:`copied` does, None where any is missing."""
        if not all(isinstance(gradient, np.ndarray) for gradient in gradients):
            return None
        self._forms, self._last = list(map(_FORM, gradients)), list(map(ref, gradients))
        apart = [i for i in self._all if not same_memory(gradients[i], self._views[i])]
        self._copied = self._all if len(apart) == len(self._views) else frozenset(apart)
        return self._copied
