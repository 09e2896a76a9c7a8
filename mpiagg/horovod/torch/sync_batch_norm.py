"""Batch normalisation over the batches of all ranks."""

# ruff: noqa: PLR0917 - Horovod's arguments

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from mpiagg.horovod.process_sets import ProcessSet, global_process_set
from mpiagg.horovod.torch.allreduce_ops import allreduce
from mpiagg.horovod.torch.handles import Sum
from mpiagg.horovod.torch.moving_ops import allgather


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]  # mypy sees no classes of torch's
    """Batch normalisation whose means and variances are those of all ranks' batches together.

    Parameters
    ----------
    num_features, eps, momentum, affine, track_running_stats
        As for ``torch.nn.BatchNorm2d``. The input is of any number of dimensions from 2 on.
    process_set : ProcessSet
        The ranks.

    Raises
    ------
    ValueError
        For an input of fewer than 2 dimensions, or a batch with no more than one value a channel in all.
    RuntimeError
        For a gradient of a gradient, where there are several ranks: there is none.

    Examples
    --------
    >>> layer = hvd.SyncBatchNorm(2)
    >>> normalised = layer(torch.full((4, 2), float(rank)))
    >>> means = hvd.allreduce(normalised.detach().mean(0))
    >>> bool(means.abs().max() < 1e-5)
    True
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {x.dim()}D input)")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise a batch, by the means and variances of all ranks' batches while training.

        Parameters
        ----------
        x : torch.Tensor
            This rank's batch, of any length; channels are the second dimension.

        Returns
        -------
        torch.Tensor
            The normalised batch, of the same shape and dtype.

        Raises
        ------
        ValueError
            As the class says.
        """
        self._check_input_dim(x)
        alone = self.process_set.size() in (None, 1)
        if alone or not (self.training or self.running_mean is None):
            result: torch.Tensor = super().forward(x)
            return result
        normalised, mean, variance, count = _Normalise.apply(x, self.weight, self.bias, self.eps, self.process_set)
        if self.training and self.track_running_stats:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                part = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean), part)
                unbiased = variance * (count / (count - 1))
                self.running_var.lerp_(unbiased.to(self.running_var), part)
        return normalised


class _Normalise(torch.autograd.Function):  # type: ignore[misc]  # mypy sees no classes of torch's
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, process_set: ProcessSet) -> Any:
        exact = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        axes = [axis for axis in range(x.dim()) if axis != 1]
        many = torch.tensor(float(x.numel() // x.shape[1]), dtype=exact.dtype, device=x.device)
        mean = exact.sum(axes) / many.clamp(min=1)
        squares = (exact - _wide(mean, x)).square().sum(axes)
        told = allgather(torch.cat([mean, squares, many[None]])[None], process_set=process_set)
        counts, means = told[:, -1:], told[:, : len(mean)]
        count = counts.sum()
        if count <= 1:
            raise ValueError("Expected more than 1 value per channel when training")
        mean = (means * counts).sum(0) / count
        variance = (told[:, len(mean) : -1] + counts * (means - mean).square()).sum(0) / count
        inverse = (variance + eps).rsqrt()
        normal = (exact - _wide(mean, x)) * _wide(inverse, x)
        ctx.save_for_backward(normal, weight, inverse, count)
        ctx.process_set, ctx.axes, ctx.biased = process_set, axes, bias is not None
        # What is saved for the backward pass stays as it is, whatever is done to the result in place.
        result = normal.clone() if weight is None else normal * _wide(weight, x)
        result = result if bias is None else result + _wide(bias, x)
        ctx.mark_non_differentiable(mean, variance, count)
        return result.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        # A constant, too, has gradients that depend on x, and so on what must not be differentiated.
        return _backward(ctx, gradient.detach().requires_grad_(torch.is_grad_enabled()))


@once_differentiable  # type: ignore[untyped-decorator]  # torch's decorators have no types
def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    normal, weight, inverse, count = ctx.saved_tensors
    exact = gradient.to(normal.dtype)
    of_bias, of_weight = exact.sum(ctx.axes), (exact * normal).sum(ctx.axes)
    sums = allreduce(torch.stack([of_bias, of_weight]), op=Sum, process_set=ctx.process_set) / count
    scale = inverse if weight is None else inverse * weight
    of_x = (exact - _wide(sums[0], normal) - normal * _wide(sums[1], normal)) * _wide(scale, normal)
    own = None if weight is None else of_weight.to(weight.dtype)
    return of_x.to(gradient.dtype), own, of_bias.to(weight.dtype) if ctx.biased else None, None, None


def _wide(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a number for each channel in a shape that goes with a tensor."""
    return vector.view(1, -1, *[1] * (like.dim() - 2))
