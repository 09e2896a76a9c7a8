"""What the user of ``mpiagg demo`` can choose of the training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoSettings:
    """What the user can choose of the training."""

    aggregator: str
    algorithm: str
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int
