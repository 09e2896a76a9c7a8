"""Hooks: gradients go into their buckets, and buckets on their way, while the backward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod, ref

from mpiagg.arrays import Array
from mpiagg.ddp.adapters import HookedParameter, Unsynced
from mpiagg.ddp.launching import Launcher
from mpiagg.errors import PlanError
from mpiagg.plans.background import threads_allowed


class Hooks:
    """Takes gradients from the parameters as a backward pass completes them, and launches their buckets.

    A gradient that is on its way belongs to the aggregation: the parameter's is None until the step is finished, so
    that nobody else writes there. What is wrong with a gradient is left with the launcher until all ranks can learn of
    it: raised in the middle of a backward pass, it would keep them waiting.

    Parameters
    ----------
    parameters : sequence of HookedParameter
        Where gradients come from.
    views : sequence of numpy.ndarray
        Each parameter's gradient in its bucket.
    launcher : Launcher
        Where they go.
    begin : weakref.WeakMethod
        Of a method that is called before each; returns whether this backward pass is one to be aggregated.
    """

    def __init__(
        self,
        parameters: Sequence[HookedParameter],
        views: Sequence[Array],
        launcher: Launcher,
        begin: WeakMethod[Callable[[], bool]],
    ) -> None:
        self._parameters, self._views, self._launcher, self._begin = parameters, views, launcher, begin
        # What is left to a thread wherever that may call MPI: a device computes while this thread asks for more.
        self._drives = not threads_allowed()
        self._ends = [parameter.on_gradient(partial(self._arrive, index)) for index, parameter in enumerate(parameters)]

    def _arrive(self, index: int) -> None:
        """Take the gradient of a parameter."""
        again = index in self._launcher.placed
        begin = self._begin()
        if begin is None or not (begin() or again):
            return
        parameter = self._parameters[index]
        if again:
            self._launcher.fault = PlanError(
                f"parameter {index} got a gradient twice before sync_gradients(); "
                "to add up those of several backward passes, run all but the last inside no_sync(); "
                "an error that ended a backward pass early has this effect on the next one, too"
            )
        elif parameter.on_host:
            self._place(index, parameter)
        else:
            source, pair = parameter.source(), parameter.pair(self._views[index])
            if pair is None:
                with source.inside():
                    self._place(index, parameter)
            else:
                self._launcher.take(index, pair, source)
        parameter.grad = None
        if parameter.on_host or self._drives:
            self._launcher.drive()

    def _place(self, index: int, parameter: HookedParameter) -> None:
        gradient = None
        try:
            gradient = parameter.brought_to(self._views[index])
        except TypeError as error:
            self._launcher.fault = error
        else:
            if gradient is None and not parameter.has_other_hooks:  # a function's backward gave none: it is missing
                return
            if gradient is None:
                self._launcher.fault = PlanError(
                    "a gradient is missing that a backward pass has brought: another hook has taken it away before it "
                    "could be aggregated, or a function has given none for it"
                )
        self._launcher.place(index, gradient)

    def end(self) -> None:
        """Take no more gradients; a second call does nothing."""
        while self._ends:
            self._ends.pop()()


def end(*hooks: Hooks | Unsynced | None) -> None:
    """Look for gradients no more."""
    for each in hooks:
        if each is not None:
            each.end()


def under_way(ddp: ref[Any]) -> bool | None:
    """Return whether a DDP's gradients are on their way; None where it does not aggregate them at present."""
    here = ddp()
    return None if here is None or not here._syncing else here._steps.begun  # noqa: SLF001 - of this subpackage
