"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from mpiagg.common.arguments import check_flag
from mpiagg.optimizers.base import Item, Optimizer, Total, alone, blocks, check_not_negative, check_share, count_step


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum and Nesterov's momentum.

    ``b = momentum b + (1 - dampening) g``, with b = g at the first step; ``x -= lr b``, or with ``nesterov``
    ``x -= lr (g + momentum b)``, as ``torch.optim.SGD`` has it (Sutskever et al., "On the importance of initialization
    and momentum in deep learning", ICML 2013).

    Parameters
    ----------
    lr : float
        The learning rate.
    momentum : float
        From 0 up to 1; without it nothing is kept.
    dampening : float
        From 0 up to 1.
    weight_decay : float
        What is added to the gradient, in units of the values.
    nesterov : bool
        Whether the momentum is looked ahead of.

    Raises
    ------
    ValueError
        For a number out of range, or ``nesterov`` without momentum, or with dampening.

    Notes
    -----
    Memory: with momentum the values' bytes once. Steps: one pass.

    Examples
    --------
    >>> weights, gradients = [np.ones(3)], [np.full(3, 2.0)]
    >>> sgd = mpiagg.optimizers.SGD(lr=0.1, momentum=0.9)
    >>> for step in range(2):
    ...     sgd.step(weights, gradients)
    ...     print(weights[0].round(6))
    [0.8 0.8 0.8]
    [0.42 0.42 0.42]
    """

    settings: ClassVar[tuple[str, ...]] = ("momentum", "dampening", "weight_decay", "nesterov")

    def __init__(
        self,
        lr: float,
        momentum: float = 0.0,
        *,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(lr)
        self.momentum, self.dampening, self.weight_decay, self.nesterov = momentum, dampening, weight_decay, nesterov
        self._check_settings()

    def _check_settings(self) -> None:
        self.momentum = check_share("momentum", self.momentum)
        self.dampening = check_share("dampening", self.dampening)
        self.weight_decay = check_not_negative("weight_decay", self.weight_decay)
        self.nesterov = check_flag("nesterov", self.nesterov)
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError("nesterov wants a momentum, and no dampening")
        self.kept = ("momentum",) if self.momentum else ()

    def update(self, items: Sequence[Item], total: Total = alone) -> None:
        """Step some tensors in place; see :meth:`Optimizer.update`.

        Parameters
        ----------
        items, total
            As for :meth:`Optimizer.update`.
        """
        del total
        for item in items:
            first = count_step(item) == 1
            for x, gradient, state in blocks(item):
                g = gradient if not self.weight_decay else gradient + x * self.weight_decay
                if self.momentum:
                    b = state["momentum"]
                    if first:
                        b[...] = g
                    else:
                        b *= self.momentum
                        b += g * (1 - self.dampening)
                    g = g + b * self.momentum if self.nesterov else b
                np.subtract(x, g * self.lr, out=x)
