"""Checkpoints: the state of a job in a folder, there as a whole or not at all, and read with checks."""

from mpiagg.checkpoints.per_rank import PerRank
from mpiagg.checkpoints.together import load_checkpoint, save_checkpoint

__all__ = ["PerRank", "load_checkpoint", "save_checkpoint"]
