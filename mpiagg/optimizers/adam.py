"""Adam, AdamW and LAMB: steps by the first two moments of the gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from mpiagg.arrays import Array
from mpiagg.optimizers.base import (
    Item,
    Optimizer,
    OptimizerState,
    Total,
    alone,
    blocks,
    check_not_negative,
    check_share,
    count_step,
    square_of,
)


class _Moments(Optimizer):
    """What the optimizers with two moments have in common."""

    kept = ("exp_avg", "exp_avg_sq")
    settings: ClassVar[tuple[str, ...]] = ("beta1", "beta2", "eps", "weight_decay")

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(lr)
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers from 0 up to 1, not {betas!r}")
        (self.beta1, self.beta2), self.eps, self.weight_decay = betas, eps, weight_decay
        self._check_settings()

    def _check_settings(self) -> None:
        self.beta1, self.beta2 = check_share("betas[0]", self.beta1), check_share("betas[1]", self.beta2)
        self.eps = check_not_negative("eps", self.eps)
        self.weight_decay = check_not_negative("weight_decay", self.weight_decay)

    def _take_in(self, g: Array, state: OptimizerState) -> None:
        """Bring a gradient into the moments."""
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m += (g - m) * (1 - self.beta1)
        v *= self.beta2
        v += g * (1 - self.beta2) * g

    def _denominator(self, state: OptimizerState, step: int) -> Any:
        """Return the root of the second moment without its bias, and eps."""
        found = np.sqrt(state["exp_avg_sq"])
        found /= math.sqrt(1 - self.beta2**step)
        found += self.eps
        return found


class Adam(_Moments):
    """Adam (Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015).

    ``m = beta1 m + (1 - beta1) g``, ``v = beta2 v + (1 - beta2) g^2``,
    ``x -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)`` at step t, in the order of operations of
    ``torch.optim.Adam``.

    Parameters
    ----------
    lr : float
        The learning rate.
    betas : tuple of two floats
        How much of the moments stays from step to step.
    eps : float
        Added to the root of the second moment.
    weight_decay : float
        What is added to the gradient, in units of the values.

    Raises
    ------
    ValueError
        For a number out of range.

    Notes
    -----
    Memory: twice the values' bytes. Steps: one pass, in blocks. Squares of gradients below 3e-4, and an ``eps`` below
    6e-8, are 0 in float16: give :class:`mpiagg.Sharded` a ``master_dtype`` there.

    Examples
    --------
    >>> weights, gradients = [np.ones(3)], [np.full(3, 2.0)]
    >>> mpiagg.optimizers.Adam(lr=0.1).step(weights, gradients)
    >>> print(weights[0].round(6))
    [0.9 0.9 0.9]
    """

    decoupled: ClassVar[bool] = False

    def update(self, items: Sequence[Item], total: Total = alone) -> None:
        """Step some tensors in place; see :meth:`Optimizer.update`.

        Parameters
        ----------
        items, total
            As for :meth:`Optimizer.update`.
        """
        del total
        for item in items:
            step = count_step(item)
            size = self.lr / (1 - self.beta1**step)
            for x, gradient, state in blocks(item):
                g = gradient
                if self.weight_decay and self.decoupled:
                    np.multiply(x, 1 - self.lr * self.weight_decay, out=x)
                elif self.weight_decay:
                    g = gradient + x * self.weight_decay
                self._take_in(g, state)
                np.subtract(x, state["exp_avg"] * size / self._denominator(state, step), out=x)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019): ``x *= 1 - lr weight_decay`` first.

    Parameters
    ----------
    lr, betas, eps
        As for :class:`Adam`.
    weight_decay : float
        How much the values shrink in a step, in units of ``lr``.

    Raises
    ------
    ValueError
        For a number out of range.

    Examples
    --------
    >>> weights, gradients = [np.ones(3)], [np.full(3, 2.0)]
    >>> mpiagg.optimizers.AdamW(lr=0.1, weight_decay=0.1).step(weights, gradients)
    >>> print(weights[0].round(6))
    [0.89 0.89 0.89]
    """

    decoupled: ClassVar[bool] = True

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(lr, betas, eps, weight_decay)


class LAMB(_Moments):
    """LAMB (You et al., "Large batch optimization for deep learning", ICLR 2020, algorithm 2).

    ``r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay x``, and ``x -= lr q r``, where q is
    ``|x| / |r|`` of the whole tensor, and 1 where one of these is 0.

    Parameters
    ----------
    lr, betas, eps
        As for :class:`Adam`; eps is 1e-6, as in the paper.
    weight_decay : float
        What is added to the direction of the step, in units of the values.

    Raises
    ------
    ValueError
        For a number out of range.

    Notes
    -----
    Memory: twice the values' bytes. Steps: two passes, in blocks. Where ranks have parts of tensors, two numbers of
    float64 a tensor are added up over them between the passes; so the last bits depend on how tensors are divided.

    Examples
    --------
    >>> weights, gradients = [np.full(3, 10.0)], [np.full(3, 2.0)]
    >>> mpiagg.optimizers.LAMB(lr=0.1).step(weights, gradients)  # by a tenth of the tensor's norm
    >>> print(weights[0].round(6))
    [9. 9. 9.]
    """

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(lr, betas, eps, weight_decay)

    def update(self, items: Sequence[Item], total: Total = alone) -> None:
        """Step some tensors in place; see :meth:`Optimizer.update`.

        Parameters
        ----------
        items, total
            As for :meth:`Optimizer.update`.
        """
        squares = np.zeros((len(items), 2))
        steps = [count_step(item) for item in items]
        fault: Exception | None = None
        try:
            for index, item in enumerate(items):
                for x, gradient, state in blocks(item):
                    self._take_in(gradient, state)
                    r = self._direction(x, state, steps[index])
                    squares[index] += square_of(x), square_of(r)
        except Exception as error:  # noqa: BLE001 - such as FloatingPointError; the others wait for this rank's sums
            squares[:], fault = np.nan, error
        norms = np.sqrt(total(squares))
        if fault is not None:
            raise fault
        for (size, length), item, step in zip(norms.tolist(), items, steps, strict=True):
            if math.isnan(size):  # another rank has raised, or the values are NaN as they are
                continue
            trust = size / length if size > 0 and length > 0 else 1.0
            for x, _, state in blocks(item):
                np.subtract(x, self._direction(x, state, step) * (self.lr * trust), out=x)

    def _direction(self, x: Array, state: OptimizerState, step: int) -> Any:
        found = state["exp_avg"] / (1 - self.beta1**step) / self._denominator(state, step)
        return found + x * self.weight_decay if self.weight_decay else found
