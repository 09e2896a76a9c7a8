"""Data-parallel training: gradients in buckets, aggregated across the ranks."""

from mpiagg.ddp.ddp import DDP

__all__ = ["DDP"]
