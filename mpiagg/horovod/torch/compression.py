"""Tensors in fewer bytes while they travel."""

from __future__ import annotations

from typing import ClassVar

import torch


class Compressor:
    """Lets tensors travel as they are."""

    dtype: ClassVar[torch.dtype | None] = None
    """In which dtype floating-point tensors travel; None for their own."""

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return what travels, and what :meth:`decompress` must know."""
        if cls.dtype is None or not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return what has travelled in the dtype that it had."""
        return tensor if ctx is None else tensor.to(ctx)


class _Float16(Compressor):
    dtype = torch.float16


class _BFloat16(Compressor):
    dtype = torch.bfloat16


class Compression:
    """The ways in which gradients can travel."""

    none = Compressor
    fp16 = _Float16
    bf16 = _BFloat16
