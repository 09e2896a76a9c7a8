"""Error feedback: what a codec loses of the values this time is added to them the next time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from mpiagg.aggregation.all_reduce import AllReduce
from mpiagg.aggregation.memory import AggregationMemory, Remembering
from mpiagg.aggregation.packing import Packing, TensorLayout
from mpiagg.arrays import Array, codec_of
from mpiagg.plans.choices import ENCODING_ONCE
from mpiagg.plans.plan import Plan
from mpiagg.plans.program import Program, in_turn


class Residuals(AggregationMemory):
    """What was lost of one list of tensors, and the plan that reduces them.

    Attributes
    ----------
    tensors : sequence of numpy.ndarray
        The tensors that the plan aggregates when it runs next.
    residuals : list of numpy.ndarray
        For each vector that the tensors are packed into, what was lost of it.
    worth : float
        How much the mean of that over the ranks counts for in the results.
    plan : Plan
        Adds it to the tensors, and reduces them.
    """

    def __init__(
        self,
        tensors: Sequence[Array],
        packing: Packing,
        bind: Callable[[Array, Array], Program],
        plan: Callable[[Program], Plan[None]],
        *,
        worth: float,
    ) -> None:
        self.tensors, self.worth = tensors, worth
        self.residuals: list[Array] = []
        parts: list[Program | Callable[[], object]] = []
        for group in packing.groups:
            vector = group.pack(tensors)
            residual = group.device.empty(vector.size, vector.dtype)
            residual.fill(0)
            self.residuals.append(residual)
            parts.append(partial(self._apply, group.pack))
            parts.append(bind(vector, residual))
            parts.append(partial(self._apply, partial(group.unpack, vector)))
        self.plan = plan(in_turn(*parts))

    def _apply(self, call: Callable[[Sequence[Array]], object]) -> None:
        call(self.tensors)

    def kept(self) -> dict[str, list[Array]]:
        """Return what was lost."""
        return {"residuals": self.residuals}

    def more(self) -> dict[str, Any]:
        """Return what the mean of that counts for."""
        return {"worth": self.worth}


def check_reduction(reduction: object) -> str:
    """Raise TypeError or ValueError if error feedback is not for this; return in words what it is for."""
    if not isinstance(reduction, AllReduce):
        raise TypeError(f"error feedback is for an AllReduce, not for {type(reduction).__name__}")
    if codec_of(reduction.wire) is None or reduction.op not in ("sum", "avg"):
        raise ValueError("error feedback is for sums and averages with a wire that rounds")
    if reduction.choice(np.empty(0)).algorithm != ENCODING_ONCE:
        raise ValueError(f"error feedback is for algorithm {ENCODING_ONCE!r}, not {reduction.algorithm!r}")
    return f"ErrorFeedback for wire {reduction.wire}"


class ErrorFeedback(Remembering[Residuals]):
    """Reduce by an :class:`AllReduce` with a wire, and make good the next time for what the codec loses.

    What a rank's values lose on their way to the rank that adds them up stays with the rank; what the result
    loses on its way back stays with the rank that has added it up. Both are added to the next values. So over time
    nothing is lost: the results of all steps and what is left add up to the values of all steps. What is not finite
    shows in the result, and is not remembered.

    Parameters
    ----------
    reduction : AllReduce
        With a wire, for a sum or an average, by algorithm ``"direct"``, which ``wire="u8"``, ``"u4"`` and ``"u2"``
        take by themselves: others encode a partial sum on many ranks.

    Raises
    ------
    TypeError
        If it is not an AllReduce.
    ValueError
        If it has no wire, another algorithm, or another op.

    Notes
    -----
    Costs what the reduction costs; memory: two vectors as long as the tensors, one of them for what is lost. What is
    lost of gradients does not know of the learning rate: if that changes, it is applied with the new one.

    Source: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; with both ways, Tang et al.,
    "DoubleSqueeze", ICML 2019.

    Examples
    --------
    What 4 bits a value lose of one step is in the results of the next ones:

    >>> x, total = np.linspace(-1, 1, 100), np.zeros(100)
    >>> with mpiagg.AllReduce(wire="u4") as reduction, mpiagg.ErrorFeedback(reduction) as feedback:
    ...     for _ in range(20):
    ...         gradients = [x.copy()]
    ...         feedback.aggregate(gradients)
    ...         total += gradients[0]
    >>> bool(np.allclose(total / 20, x, atol=0.02))
    True
    """

    averaged: ClassVar[tuple[str, ...]] = ("residuals",)

    def __init__(self, reduction: AllReduce) -> None:
        super().__init__(getattr(reduction, "comm", None))
        self.reduction = reduction

        self._channel.agree_on(partial(check_reduction, reduction))
        self.op, self.denom = reduction.op, reduction.denom

    def _new_memory(self, layout: TensorLayout, tensors: Sequence[Array]) -> Residuals:
        packing = Packing(layout, in_place=False, by_layer=self.reduction.by_layer)

        def bind(vector: Array, residual: Array) -> Program:
            return self.reduction.bind(
                vector, self._channel.tags.in_turn(self.reduction.choice(vector).lanes), residual
            )

        return Residuals(tensors, packing, bind, self._plan, worth=self._worth())

    def _worth(self) -> float:
        # An average divides the sum; one that divides before has in what is lost what it is in the result.
        divided = self.op == "avg" and not self.reduction.divide_before
        return self._channel.size / (self.denom if divided else 1)

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        self.reduction.check_dtype(dtype)
