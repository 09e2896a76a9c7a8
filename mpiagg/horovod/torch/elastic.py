"""States that are kept, and taken again when a collective has failed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import wraps
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from mpiagg.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from mpiagg.horovod.process_sets import global_process_set, state
from mpiagg.horovod.torch.functions import allgather_object, broadcast_object
from mpiagg.horovod.world import rank, size

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


class State:
    """What a program keeps of its training: to be made into classes that say how.

    Examples
    --------
    >>> class Steps(hvd.elastic.State):
    ...     steps = kept = 0
    ...     def save(self):
    ...         self.kept = self.steps
    ...     def restore(self):
    ...         self.steps = self.kept
    ...     def sync(self):
    ...         self.steps = self.kept = hvd.broadcast_object(self.steps)
    >>> state = Steps()
    >>> state.steps = 3
    >>> state.commit()
    >>> state.steps = 4
    >>> state.restore()
    >>> state.steps
    3
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], object]]) -> None:
        """Have functions called after a failure, before training goes on.

        Parameters
        ----------
        callbacks : list of callable
            Called without arguments, in this order, after those that were registered before.
        """
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Prepare for training to go on."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def commit(self) -> None:
        """Keep the state, and look whether the hosts have changed."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: the hosts of an MPI job stay as they are."""

    def save(self) -> None:
        """Keep the state.

        Raises
        ------
        NotImplementedError
            In this class: subclasses say how.
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Take the state that was kept.

        Raises
        ------
        NotImplementedError
            In this class: subclasses say how.
        """
        raise NotImplementedError

    def sync(self) -> None:
        """Take the state of rank 0; collective.

        Raises
        ------
        NotImplementedError
            In this class: subclasses say how.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for other ranks."""


class ObjectState(State):
    """A state of attributes that can be pickled.

    Parameters
    ----------
    **kwargs
        The attributes.

    Examples
    --------
    >>> state = hvd.elastic.ObjectState(epoch=0)
    >>> state.epoch = 1
    >>> state.commit()
    >>> state.epoch = 2
    >>> state.restore()
    >>> state.epoch
    1
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._kept: dict[str, Any] = kwargs
        vars(self).update(deepcopy(kwargs))

    def save(self) -> None:
        """Keep the attributes."""
        self._kept = {name: deepcopy(getattr(self, name)) for name in self._kept}

    def restore(self) -> None:
        """Take the attributes that were kept."""
        vars(self).update(deepcopy(self._kept))

    def sync(self) -> None:
        """Take the attributes of rank 0."""
        if self._kept:
            own = {name: getattr(self, name) for name in self._kept}
            self._kept = deepcopy(broadcast_object(own, 0, f"state of {type(self).__name__}"))
            vars(self).update(deepcopy(self._kept))


class TorchState(ObjectState):
    """A state of a model, an optimizer, samplers, and attributes.

    Parameters
    ----------
    model, optimizer
        What has ``state_dict`` and ``load_state_dict``.
    **kwargs
        More of these, and other attributes.

    Examples
    --------
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> state = hvd.elastic.TorchState(model, optimizer, epoch=0)
    >>> state.sync()  # the weights and the epoch of rank 0
    >>> with torch.no_grad():
    ...     kept = model.weight.clone()
    ...     _ = model.weight.zero_()
    >>> state.restore()
    >>> torch.equal(model.weight, kept)
    True
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        self._parts = {name: x for name, x in given.items() if hasattr(x, "load_state_dict")}
        super().__init__(**{name: x for name, x in given.items() if x is not None and name not in self._parts})
        vars(self).update(self._parts)
        self._states: dict[str, Any] = {}
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a part's is what is kept from now on."""
        super().__setattr__(name, value)
        if name in vars(self).get("_parts", ()):
            self._parts[name] = value

    def save(self) -> None:
        """Keep the states of all parts."""
        self._states = {name: deepcopy(part.state_dict()) for name, part in self._parts.items()}
        super().save()

    def restore(self) -> None:
        """Take the states that were kept."""
        for name, part in self._parts.items():
            part.load_state_dict(deepcopy(self._states[name]))
        super().restore()

    def sync(self) -> None:
        """Take the states of rank 0; of samplers, what all ranks have processed."""
        for name, part in self._parts.items():
            if isinstance(part, ElasticSampler):
                parts = allgather_object(part.state_dict(), f"sampler {name}")
                processed = set[int]().union(*(each["processed_indices"] for each in parts))
                part.load_state_dict({**parts[0], "processed_indices": processed})
            else:
                part.load_state_dict(broadcast_object(part.state_dict(), 0, f"state of {name}"))
        super().sync()
        self.save()

    def reset(self) -> None:
        """Let samplers cut what is left for the ranks that there are."""
        for part in self._parts.values():
            if isinstance(part, ElasticSampler):
                part.reset()


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


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function of a state train again from what was kept, when a collective has failed on all ranks.

    The environment variable HOROVOD_ELASTIC_RESET_LIMIT says how often at most.

    Parameters
    ----------
    func : callable
        Called with a :class:`State`, and with more arguments that it is given.

    Returns
    -------
    callable
        A function of the same arguments, which returns what ``func`` does.

    Raises
    ------
    RuntimeError
        If ranks have died, or do not come: :class:`mpiagg.Loop` goes on without them. Also if training was begun anew
        too often.

    Examples
    --------
    >>> @hvd.elastic.run
    ... def train(state):
    ...     for state.epoch in range(state.epoch, 3):
    ...         hvd.allreduce(torch.ones(2))
    ...         state.commit()
    ...     return state.epoch
    >>> train(hvd.elastic.ObjectState(epoch=0))
    2
    """

    @wraps(func)
    def wrapper(state_: State, *args: Any, **kwargs: Any) -> Any:
        limit, resets, skip = os.environ.get("HOROVOD_ELASTIC_RESET_LIMIT"), 0, False
        while True:
            if not skip:
                state_.sync()
            try:
                return func(state_, *args, **kwargs)
            except HorovodInternalError as error:
                if not state().engines[global_process_set.process_set_id or 0].usable:
                    raise RuntimeError(
                        "ranks have died or do not come; to go on without them, train by mpiagg.Loop (docs/failures.md)"
                    ) from error
                state_.restore()
                skip = False
            except HostsUpdatedInterrupt as interrupt:
                skip = interrupt.skip_sync
            resets += 1
            if limit is not None and resets > int(limit):
                raise RuntimeError(f"training was reset more than {limit} times")
            state_.on_reset()

    return wrapper
