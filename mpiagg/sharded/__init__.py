"""Sharded training: optimizer states, gradients and parameters divided over the ranks."""

from mpiagg.sharded.sharded import Sharded

__all__ = ["Sharded"]
