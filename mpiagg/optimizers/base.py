"""What an optimizer is: values, gradients and states in, the same values and states updated in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from mpiagg.arrays import Array, writeable
from mpiagg.common.arguments import check_number

BLOCK: Final = 2**15
"""Elements that are updated at a time: what is computed on the way stays in the cache, and memory stays small."""

OptimizerState = dict[str, Array]
Total = Callable[[Array], Array]
"""Takes an array of numbers of this rank, and returns their sums over all ranks that have a part of the tensors."""


class Item(NamedTuple):
    """A tensor, or the part of one that a rank updates.

    Parameters
    ----------
    values : numpy.ndarray
        The parameter's; of no elements where the rank has no part of it. A part of a tensor is a vector.
    gradient : numpy.ndarray
        Of the same shape and dtype.
    state : dict of str to numpy.ndarray
        What the optimizer keeps for it: what :meth:`Optimizer.new_state` has returned.

    Examples
    --------
    >>> from mpiagg.optimizers import SGD, Item
    >>> sgd, x = SGD(lr=0.5), np.ones(3)
    >>> item = Item(values=x, gradient=np.full(3, 2.0), state=sgd.new_state(x))
    >>> sgd.update([item])
    >>> print(x, item.state["step"])
    [0. 0. 0.] 1
    """

    values: Array
    gradient: Array
    state: OptimizerState


def alone(numbers: Array) -> Array:
    """Return what is the sum over all ranks where one has the whole."""
    return numbers


class Optimizer(ABC):
    """An optimizer of arrays. Subclasses say in :meth:`update` how it steps.

    Parameters
    ----------
    lr : float
        The learning rate, at least 0.

    Attributes
    ----------
    lr : float
        The learning rate; it may be set between steps.
    whole : bool
        Whether it needs whole tensors in their shapes, and not parts of them as vectors.
    kept : tuple of str
        The arrays of the values' form that it keeps for each tensor.
    settings : tuple of str
        The attributes, beside ``lr``, that say how it steps.

    Examples
    --------
    An optimizer of one's own, which steps by the sign of the gradient:

    >>> class SignSGD(mpiagg.optimizers.Optimizer):
    ...     def update(self, items, total=None):
    ...         for item in items:
    ...             item.values[...] -= self.lr * np.sign(item.gradient)
    >>> weights = [np.ones(3)]
    >>> SignSGD(lr=0.5).step(weights, [np.array([3.0, 0.0, -2.0])])
    >>> print(weights[0])
    [0.5 1. 1.5]
    """

    whole: ClassVar[bool] = False
    kept: tuple[str, ...] = ()
    settings: ClassVar[tuple[str, ...]] = ()

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self._states: list[OptimizerState] = []
        self._loaded = False

    @property
    def lr(self) -> float:
        """The learning rate; ValueError if it is set to something that is not a number of at least 0."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        """Set the learning rate."""
        self._lr = check_not_negative("lr", value)

    def new_state(self, values: Array) -> OptimizerState:
        """Return the state of a tensor, or part of one, that has not been stepped: zeros, and a count of steps.

        Parameters
        ----------
        values : numpy.ndarray
            The parameter's, or this rank's part of them.

        Returns
        -------
        dict of str to array
            By the names of what this optimizer keeps.
        """
        return {"step": np.zeros((), np.int64)} | {name: np.zeros_like(values) for name in self.kept}

    @abstractmethod
    def update(self, items: Sequence[Item], total: Total = alone) -> None:
        """Step some tensors, or this rank's parts of them, in place.

        Parameters
        ----------
        items : sequence of Item
            On all ranks the same tensors in the same order.
        total : callable
            Adds numbers up over the ranks; called as often on all of them, also on one that raises.
        """

    def step(self, parameters: Sequence[Array], gradients: Sequence[Array | None]) -> None:
        """Step whole tensors in one process, in place; a tensor without a gradient is left alone.

        Parameters
        ----------
        parameters : sequence of numpy.ndarray
            At each call the same ones, contiguous.
        gradients : sequence of numpy.ndarray or None
            One for each, of its shape and dtype.

        Raises
        ------
        ValueError
            If there are more or fewer gradients than parameters, or they are others than before, or of another shape,
            or a parameter is read-only or not contiguous; nothing is changed then.
        TypeError
            If a gradient is of another dtype, or a parameter is not of real numbers; nothing is changed then.
        """
        known = len(self._states or parameters)
        if not len(parameters) == len(gradients) == known:
            raise ValueError(f"{len(parameters)} parameters, {len(gradients)} gradients, and states of {known}")
        states = self._states
        if self._loaded or not states:  # the settings that were loaded may need other arrays
            new = [self.new_state(each) for each in parameters]
            states = [old if old.keys() == made.keys() else made for old, made in zip(states or new, new, strict=True)]
        given = zip(parameters, gradients, states, strict=True)
        items = [Item(x, g, state) for x, g, state in given if g is not None]
        for x, g, state in items:
            shapes = {g.shape, *(each.shape for name, each in state.items() if name != "step")}
            if shapes != {x.shape}:
                raise ValueError(f"a parameter has shape {x.shape}, its gradient and state {shapes}")
            if g.dtype != x.dtype:
                raise TypeError(f"a parameter has dtype {x.dtype}, its gradient {g.dtype}")
            if x.dtype.kind in "biuc":
                raise TypeError(f"a parameter has dtype {x.dtype}, which cannot be stepped")
            # Of NumPy's arrays most need but one look: they are contiguous, aligned and can be written to.
            if not getattr(x.flags, "carray", False):
                if not writeable(x):
                    raise ValueError("a parameter is read-only")
                if x.size and not np.may_share_memory(x.reshape(-1), x):
                    raise ValueError("an optimizer steps contiguous arrays")
        self._states, self._loaded = states, False  # of parameters that can be stepped
        self.update(items)

    def hyperparameters(self) -> dict[str, Any]:
        """Return how it steps: its name, ``lr`` and its settings, as :func:`mpiagg.save_checkpoint` saves them.

        Returns
        -------
        dict
            ``"name"``, ``"lr"``, and the settings by the names of the class's parameters.
        """
        return {"name": type(self).__name__, "lr": self.lr} | {name: getattr(self, name) for name in self.settings}

    def load_hyperparameters(self, given: Mapping[str, Any]) -> None:
        """Step as :meth:`hyperparameters` has said.

        Parameters
        ----------
        given : dict
            What :meth:`hyperparameters` has returned, of an optimizer of the same kind.

        Raises
        ------
        ValueError
            If they are another optimizer's, or out of range; nothing is set then.
        """
        own = self.hyperparameters()
        if not isinstance(given, Mapping) or given.keys() != own.keys() or given["name"] != own["name"]:
            raise ValueError(f"the state is not one of {own['name']}: its optimizer is {given!r}")
        for name, value in given.items():
            if type(value) is not type(own[name]):
                raise ValueError(f"{name} of {own['name']} must be like {own[name]!r}, not {value!r}")
        before = vars(self).copy()
        try:
            self._load_settings(given)
        except Exception:
            vars(self).update(before)
            raise
        self._loaded = True

    def _load_settings(self, given: Mapping[str, Any]) -> None:
        """Set what :meth:`hyperparameters` says, or raise ValueError when a part of it is set."""
        for name in ("lr", *self.settings):
            setattr(self, name, given[name])
        self._check_settings()

    def _check_settings(self) -> None:  # noqa: B027 - an optimizer of one's own may have no settings to check
        """Raise ValueError if a setting is out of range; bring those into their types that are not.

        Both what makes an optimizer and what loads its settings call this when they have set them.
        """


def count_step(item: Item) -> int:
    """Count a step of a tensor, and return how many there have been."""
    item.state["step"] += 1
    return int(item.state["step"])


def blocks(item: Item) -> Iterator[tuple[Array, Array, OptimizerState]]:
    """Yield values, gradient and state arrays of an item block by block, as views."""
    vectors = {name: x.reshape(-1) for name, x in item.state.items() if name != "step"}
    values, gradient = item.values.reshape(-1), item.gradient.reshape(-1)
    length = BLOCK if isinstance(values, np.ndarray) else max(values.size, 1)
    for start in range(0, values.size, length):
        part = slice(start, start + length)
        yield values[part], gradient[part], {name: x[part] for name, x in vectors.items()}


def square_of(x: Array) -> float:
    """Return the sum of the squares of real numbers, in float64; of a vector, block by block."""
    length = BLOCK if isinstance(x, np.ndarray) else max(x.size, 1)
    total = 0.0
    for start in range(0, x.size, length):
        wide = x[start : start + length].astype(np.float64)
        total += float((wide * wide).sum().item())
    return total


def check_share(name: str, value: object) -> float:
    """Return a number from 0 up to, but not, 1; raise ValueError for anything else."""
    return check_number(name, value, "a number from 0 up to 1", lambda x: 0 <= x < 1)


def check_not_negative(name: str, value: object) -> float:
    """Return a number of at least 0; raise ValueError for anything else."""
    return check_number(name, value, "a number of at least 0", lambda x: x >= 0)
