"""Indices of a data set for each rank, of which some are processed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
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
    >>> sampler.record_batch(0, 1)  # one item is done
    >>> sampler.reset()
    >>> len(sampler) == -(-11 // size)
    True
    """

    def __init__(self, dataset: Dataset, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing is processed.

        Parameters
        ----------
        epoch : int
            Its number.
        """
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Say that a batch was processed.

        Parameters
        ----------
        batch_idx : int
            The number of the batch in what was left when the indices were cut.
        batch_size : int
            How many indices a batch of this rank has.
        """
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Any) -> None:
        """Say that some indices were processed.

        Parameters
        ----------
        indices : iterable of int
            Indices of the data set.
        """
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of a batch.

        Parameters
        ----------
        batch_idx, batch_size : int
            As for :meth:`record_batch`.

        Returns
        -------
        list of int
            Indices of the data set, fewer in the last batch.
        """
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and what is processed of it.

        Returns
        -------
        dict
            What :meth:`load_state_dict` takes.
        """
        return {"epoch": self.epoch, "processed_indices": self.processed_indices}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state.

        Parameters
        ----------
        state_dict : dict
            What :meth:`state_dict` has returned.
        """
        self.epoch, self.processed_indices = state_dict["epoch"], set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Cut what is left into parts for the ranks, equally long."""
        self.num_replicas, self.rank = size(), rank()
        left = [i for i in range(len(self.dataset)) if i not in self.processed_indices]
        self.remaining_indices = left
        self.num_samples = -(-len(left) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self._cut()

    def _cut(self) -> None:
        order = list(self.remaining_indices)
        if self.shuffle and order:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = [order[i] for i in torch.randperm(len(order), generator=generator).tolist()]
        while order and len(order) < self.total_size:
            order += order[: self.total_size - len(order)]
        self.indices: list[int] = order[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        """Return the indices of this rank."""
        self._cut()
        return iter(self.indices)

    def __len__(self) -> int:
        """Return how many they are."""
        return self.num_samples
