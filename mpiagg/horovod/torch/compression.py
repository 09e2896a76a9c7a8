"""Tensors in fewer bytes while they travel."""

from __future__ import annotations

from typing import ClassVar

import torch


class Compressor:
    """Says how tensors travel: in this class as they are."""

    dtype: ClassVar[torch.dtype | None] = None
    """In which dtype floating-point tensors travel; None for their own."""

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return a tensor as it travels.

        Parameters
        ----------
        tensor : torch.Tensor
            Of any dtype; those that are not floating-point travel as they are.

        Returns
        -------
        tuple
            What travels, and what :meth:`decompress` must know.
        """
        if cls.dtype is None or not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return what has travelled in the dtype that it had.

        Parameters
        ----------
        tensor : torch.Tensor
            What has travelled.
        ctx : torch.dtype or None
            What :meth:`compress` has returned beside it.

        Returns
        -------
        torch.Tensor
            A tensor of the former dtype.
        """
        return tensor if ctx is None else tensor.to(ctx)


class NoneCompressor(Compressor):
    """Lets tensors travel as they are."""


class FP16Compressor(Compressor):
    """Lets floating-point tensors travel in float16."""

    dtype = torch.float16


class BF16Compressor(Compressor):
    """Lets floating-point tensors travel in bfloat16."""

    dtype = torch.bfloat16


class Compression:
    """The ways in which gradients can travel.

    Attributes
    ----------
    none : Compressor
        In their own dtype.
    fp16 : Compressor
        Those that are floating-point in float16.
    bf16 : Compressor
        The same in bfloat16.

    Examples
    --------
    >>> hvd.allreduce(torch.ones(3), op=hvd.Sum, compression=hvd.Compression.bf16).tolist() == [size] * 3
    True
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
