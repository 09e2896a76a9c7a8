"""Optimizers for lists of arrays: SGD, Adam, AdamW, LAMB and Muon, each as its paper has it, in NumPy's functions.

By themselves they step lists of arrays in one process; :class:`mpiagg.Sharded` has each rank step its own part.
"""

from mpiagg.optimizers.adam import LAMB, Adam, AdamW
from mpiagg.optimizers.base import Item, Optimizer
from mpiagg.optimizers.muon import Muon
from mpiagg.optimizers.sgd import SGD

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Item", "Muon", "Optimizer"]
