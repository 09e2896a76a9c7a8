"""What is kept of training: objects, models, optimizers, samplers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from mpiagg.horovod.torch.elastic.sampler import ElasticSampler
from mpiagg.horovod.torch.functions import broadcast_object, on_host


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
        super().__init__(**{name: x for name, x in given.items() if name not in self._parts})
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
        """Take the states of rank 0."""
        for name, part in self._parts.items():
            part.load_state_dict(broadcast_object(on_host(part.state_dict()), 0, f"state of {name}"))
        super().sync()
        self.save()

    def reset(self) -> None:
        """Let samplers cut what is left for the ranks that there are."""
        for part in self._parts.values():
            if isinstance(part, ElasticSampler):
                part.reset()
