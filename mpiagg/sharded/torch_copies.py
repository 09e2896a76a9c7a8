"""Gradients of modules on a GPU: copied together to where they are sent from, in the streams that computed them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from mpiagg.arrays import Accelerator, Array
from mpiagg.ddp.torch_modules import tensor_of
from mpiagg.ddp.torch_streams import TorchSource, present_source


class DeviceCopies:
    """Copies the gradients of parameters to their places in vectors.

    Parameters
    ----------
    device : Accelerator
        Where both lie.
    views : dict of int to array
        For each parameter its place.
    ordinal : int
        The device's number, as torch counts.
    """

    def __init__(self, device: Accelerator, views: Mapping[int, Array], ordinal: int) -> None:
        self._into = {index: tensor_of(view) for index, view in views.items()}
        self._copied, self._ordinal = device.stream(), ordinal
        self._sources: dict[int, TorchSource] = {}
        self._taken: dict[TorchSource, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def note_source(self, index: int) -> None:
        """Remember that the present stream has computed the gradient of a parameter."""
        self._sources[index] = present_source(self._ordinal)

    def take(self, index: int, gradient: torch.Tensor) -> None:
        """Have a gradient copied, together with others of its stream.

        Torch gives its memory away again to what comes next in that stream.
        """
        source = self._sources.pop(index, None) or present_source(self._ordinal)
        self._taken.setdefault(source, []).append((self._into[index], gradient))

    @contextmanager
    def done(self) -> Iterator[None]:
        """Return a block in which what is asked of the device comes after the copies of all that was taken."""
        taken, self._taken = self._taken, {}
        # What the vector is reduced to may still be read there, also where no gradient comes from there.
        taken.setdefault(present_source(self._ordinal), [])
        for source, pairs in taken.items():
            source.copy(pairs)
            with source.inside():
                self._copied.follow()
        with self._copied:
            yield

    def clear(self) -> None:
        """Forget where gradients came from: the step is over."""
        self._sources.clear()
