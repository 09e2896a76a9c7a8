"""Muon: momentum that is made orthogonal, for matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from mpiagg.arrays import Array
from mpiagg.common.arguments import check_flag, check_integer
from mpiagg.optimizers.adam import AdamW
from mpiagg.optimizers.base import (
    Item,
    Optimizer,
    OptimizerState,
    Total,
    alone,
    check_not_negative,
    check_share,
    count_step,
)

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Of the quintic whose iteration brings singular values near 1, from the paper."""

ADJUSTMENTS: Final = ("original", "match_rms_adamw")


class Muon(Optimizer):
    """Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024).

    ``b = momentum b + (1 - momentum) g``; the step is along ``u = (1 - momentum) g + momentum b`` (with ``nesterov``;
    else b), made orthogonal by some steps of a Newton-Schulz iteration. Weights decay as by :class:`AdamW`.
    Tensors of more than two dimensions are matrices with the first for rows; those with fewer are left to ``others``.

    Parameters
    ----------
    lr : float
        The learning rate.
    momentum : float
        From 0 up to 1.
    nesterov : bool
        Whether the momentum is looked ahead of.
    weight_decay : float
        How much the values shrink in a step, in units of ``lr``.
    ns_steps : int
        Steps of the iteration, at least 1.
    adjust : {"original", "match_rms_adamw"}
        By what lr is multiplied for a matrix of A rows and B columns: ``sqrt(max(1, A / B))``, or
        ``0.2 sqrt(max(A, B))`` (Liu et al., "Muon is scalable for LLM training", arXiv:2502.16982).
    others : Optimizer, optional
        What steps the tensors that are no matrices; :class:`AdamW` with its own defaults by default.

    Raises
    ------
    ValueError
        For a number out of range, or an unknown adjustment.
    TypeError
        For others that are no optimizer.

    Notes
    -----
    Memory: the values' bytes once, and four times a matrix's while it is stepped; what ``others`` needs. It needs whole
    matrices, so a rank has whole tensors: where few are large, some ranks have much to do and others little.

    Examples
    --------
    >>> from mpiagg.optimizers import AdamW, Muon
    >>> weights, gradients = [np.zeros((2, 2)), np.ones(3)], [np.diag([3.0, 2.0]), np.ones(3)]
    >>> Muon(lr=0.1, others=AdamW(lr=0.1, weight_decay=0.0)).step(weights, gradients)
    >>> bool(np.allclose(weights[0], -0.1 * np.eye(2), atol=0.05))  # singular values near 1
    True
    >>> print(weights[1].round(6))
    [0.9 0.9 0.9]
    """

    whole: ClassVar[bool] = True
    kept = ("momentum",)
    settings: ClassVar[tuple[str, ...]] = ("momentum", "nesterov", "weight_decay", "ns_steps", "adjust")

    def __init__(
        self,
        lr: float = 2e-2,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        adjust: str = "original",
        others: Optimizer | None = None,
    ) -> None:
        super().__init__(lr)
        self.momentum, self.nesterov, self.weight_decay = momentum, nesterov, weight_decay
        self.ns_steps, self.adjust = ns_steps, adjust
        self._check_settings()
        if others is not None and not isinstance(others, Optimizer):
            raise TypeError(f"others must be an optimizer of mpiagg.optimizers, not {type(others).__name__}")
        self.others = AdamW() if others is None else others

    def _check_settings(self) -> None:
        self.momentum = check_share("momentum", self.momentum)
        self.nesterov = check_flag("nesterov", self.nesterov)
        self.weight_decay = check_not_negative("weight_decay", self.weight_decay)
        self.ns_steps = check_integer("ns_steps", self.ns_steps, 1)
        if self.adjust not in ADJUSTMENTS:
            raise ValueError(f"unknown adjust {self.adjust!r}; known: {', '.join(ADJUSTMENTS)}")

    def new_state(self, values: Array) -> OptimizerState:
        """Return the state of a tensor that has not been stepped.

        Parameters
        ----------
        values : numpy.ndarray
            The parameter's.

        Returns
        -------
        dict of str to array
            That of ``others`` for a vector.
        """
        return super().new_state(values) if values.ndim > 1 else self.others.new_state(values)

    def update(self, items: Sequence[Item], total: Total = alone) -> None:
        """Step some tensors in place; see :meth:`Optimizer.update`.

        Parameters
        ----------
        items, total
            As for :meth:`Optimizer.update`.
        """
        try:
            for item in items:
                if item.values.ndim > 1:
                    count_step(item)
                    if item.values.size:
                        self._step_matrix(item)
        finally:  # a matrix is one rank's, but all ranks call what adds up
            self.others.update([item for item in items if item.values.ndim < 2], total)

    def _step_matrix(self, item: Item) -> None:
        x, g, b = (each.reshape(len(each), -1) for each in (item.values, item.gradient, item.state["momentum"]))
        b += (g - b) * (1 - self.momentum)
        direction = orthogonal(g + (b - g) * self.momentum if self.nesterov else b, self.ns_steps)
        rows, columns = x.shape
        original = self.adjust == "original"
        factor = math.sqrt(max(1, rows / columns)) if original else 0.2 * math.sqrt(max(rows, columns))
        x *= 1 - self.lr * self.weight_decay
        x -= direction * (self.lr * factor)

    def hyperparameters(self) -> dict[str, Any]:
        """Return how it steps, and the others; see :meth:`Optimizer.hyperparameters`.

        Returns
        -------
        dict
            Its own, and those of ``others``.
        """
        return super().hyperparameters() | {"others": self.others.hyperparameters()}

    def _load_settings(self, given: Mapping[str, Any]) -> None:
        super()._load_settings(given)
        self.others.load_hyperparameters(given["others"])  # last: what it refuses it does not set


def orthogonal(matrix: Array, steps: int) -> Any:
    """Return a matrix with the singular vectors of another, and singular values near 1.

    Parameters
    ----------
    matrix : numpy.ndarray
        Of shape (A, B), float32 or wider; half precision is computed in float32.
    steps : int
        How often ``X = a X + (b X X' + c (X X')^2) X`` is done, with a, b and c of :data:`COEFFICIENTS`.
    """
    a, b, c = COEFFICIENTS
    x: Any = matrix.astype(np.float32) if matrix.dtype.itemsize < 4 else matrix
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    x = x / max(math.sqrt((x * x).sum().item()), 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if turned else x
