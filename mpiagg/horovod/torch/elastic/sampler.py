"""Indices of a data set for each rank, of which some are processed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

from torch.utils.data import Dataset, Sampler

from mpiagg.horovod.world import rank, size


class ElasticSampler(Sampler):  # type: ignore[misc]  # mypy sees no classes of torch's
    """Indices of a data set for each rank, without those that were processed in this epoch.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset
        What the indices are of.
    shuffle : bool
        Whether they are in a random order, which is another in each epoch.
    seed : int
        The same on all ranks.

    Examples
    --------
    >>> sampler = hvd.elastic.ElasticSampler(range(12), shuffle=False)
    >>> len(list(sampler)) == -(-12 // size)
    True
    >>> sampler.record_batch(0, 1)  # one item of each rank is done
    >>> sampler.reset()
    >>> len(sampler) == -(-(12 - size) // size)
    True
    """

    def __init__(self, dataset: Dataset, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing is processed.

        Parameters
        ----------
        epoch : int
            Its number.
        """
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Say that all ranks have processed a batch.

        Parameters
        ----------
        batch_idx : int
            Not needed: batches are processed in order.
        batch_size : int
            How many indices a batch of each rank has.
        """
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and how much is processed of it.

        Returns
        -------
        dict
            What :meth:`load_state_dict` takes, on any rank: ``"epoch"`` and ``"processed_num"``.
        """
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state.

        Parameters
        ----------
        state_dict : dict
            What :meth:`state_dict` has returned.
        """
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Cut what is left into parts for the ranks, equally long."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Return the indices of this rank; the first come once more where there are too few."""
        again = islice(cycle(self.remaining_indices), self.total_size) if self.remaining_indices else ()
        self.indices = list(again)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        """Return how many they are."""
        return self.num_samples
