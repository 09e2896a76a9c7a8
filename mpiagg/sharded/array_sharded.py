"""Sharded training of lists of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from mpiagg.arrays import Array, Form, as_input, device_of, form_of, is_array, same_memory, working_dtype, writeable
from mpiagg.collectives.functions import allreduce
from mpiagg.collectives.moving_functions import broadcast
from mpiagg.errors import PlanError
from mpiagg.optimizers.base import Item, Optimizer, OptimizerState
from mpiagg.plans.background import threads_allowed
from mpiagg.sharded.division import check_layers, check_split
from mpiagg.sharded.sharded import Sharded
from mpiagg.sharded.states import write_shards
from mpiagg.sharded.storage import Divided, Scattered, Storage, storage_for


class ArraySharded(Sharded):
    """Sharded training of a list of arrays; ``mpiagg.Sharded(weights, ...)`` is one. See :class:`Sharded`.

    Examples
    --------
    Stage 3, where parameters are gathered layer by layer and gradients are sent as soon as they are computed:

    >>> weights, sgd = [np.full(4, 2.0), np.full(4, 3.0)], mpiagg.optimizers.SGD(lr=0.5)
    >>> with mpiagg.Sharded(weights, sgd, stage=3, layers=[[0], [1]]) as sharded:
    ...     x = np.ones(4)
    ...     for layer, (w,) in sharded.in_order():
    ...         x = x * w
    ...     for layer, (w,) in sharded.in_order(reverse=True):
    ...         sharded.reduce(layer, [x / w])
    ...     sharded.step()
    ...     print(sharded.weights())
    {'0': array([0.5, 0.5, 0.5, 0.5]), '1': array([2., 2., 2., 2.])}
    """

    def _check(self, module: Any, optimizer: Any, layers: Any) -> list[Form]:
        if not isinstance(module, list | tuple) or not module:
            kind = "an empty list" if isinstance(module, list | tuple) else type(module).__name__
            raise TypeError(f"a list of arrays or a module of torch's is trained, not {kind}")
        for index, x in enumerate(module):
            if not is_array(x):
                raise TypeError(f"parameter {index} must be a NumPy array, not {type(x).__name__}")
            working_dtype(x.dtype)
            if not writeable(x):
                raise ValueError(f"parameter {index} is read-only")
            for other in range(index):
                on_host = isinstance(x, np.ndarray) and isinstance(module[other], np.ndarray)
                if np.may_share_memory(x, module[other]) if on_host else same_memory(x, module[other]):
                    raise ValueError(f"parameters {other} and {index} share memory: give tied ones once")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be one of mpiagg.optimizers, not {type(optimizer).__name__}")
        self.optimizer = optimizer
        self._forms = [form_of(x) for x in module]
        self._layers_asked = None if layers is None else check_layers(layers, len(module))
        return self._forms

    def _split_for(self, split: str | None) -> str:
        how = check_split(split, "tensors" if self.optimizer.whole else "elements")
        if self.optimizer.whole and how != "tensors":
            raise ValueError(f"{type(self.optimizer).__name__} needs whole tensors: split='tensors'")
        return how

    def _describe_optimizer(self) -> str:
        return str(self.optimizer.hyperparameters())

    def _lay_out(self) -> None:
        arrays = [as_input(x) for x in self.module]
        for array in arrays:
            broadcast(array, root=0, out=array, comm=self.comm)
        everything = list(range(len(self._units)))
        storage: Storage
        if self.stage < 3:
            storage = Scattered(self._traffic, self._units, arrays, self._turns)
        else:
            storage = storage_for(self._traffic, self._units, arrays, self._turns, share=self._share)
            self.module = None  # the caller's arrays are the caller's, and may go
        self._states: dict[int, OptimizerState] = {}
        self._take_up(storage, everything, [str(index) for index in range(len(arrays))])

    # -- steps

    def step(self, gradients: Sequence[Array | None] | None = None, *, wait: bool = True) -> float | None:
        """Update the parameters with the gradients of all ranks; collective.

        Parameters
        ----------
        gradients : list of numpy.ndarray or None, optional
            An array for each parameter, of its shape, and its dtype or ``master_dtype``; None counts as zeros, and
            where it is None on all ranks the parameter stays as it is. They are read, and not changed. Without the list
            all must have been given by :meth:`reduce`.
        wait : bool
            Whether parameters are there when it returns. Otherwise the last 1 + ``prefetch`` units may still be on
            their way at stages 1 and 2; :meth:`gathered` waits for its layer, :meth:`wait` for all. The caller's arrays
            must not be used until then.

        Returns
        -------
        float or None
            The norm of all gradients before it was clipped, with ``clip_norm``.

        Raises
        ------
        TypeError, ValueError
            On the ranks where a gradient is not of its parameter's form, or of a layer that has been given already, or
            a layer is missing. The parameters and the state are as they were then.
        MismatchError
            On the other ranks then.
        PlanError
            If it is freed.
        StallError
            If a message does not complete within the timeout.
        """
        self._require_open()
        with self._at_work():
            given: dict[int, Array | None] = {}
            waiting = {index for k in self._gradients.waiting for index in self._units[k].members}
            if gradients is None:
                if waiting:
                    self._note(ValueError(f"the gradients of parameters {sorted(waiting)} are missing"))
            elif not isinstance(gradients, list | tuple) or len(gradients) != len(self._forms):
                self._note(ValueError(f"gradients must be a list with one for each of {len(self._forms)} parameters"))
            else:
                given = dict(enumerate(gradients))
                if any(given[index] is not None for index in given.keys() - waiting):
                    self._note(ValueError("gradients of a layer were given twice"))
            while self._gradients.waiting:
                self._send(self._gradients.waiting[-1], given, background=False)
            return self._finish(wait=wait)

    def reduce(self, layer: int, gradients: Sequence[Array | None]) -> None:
        """Send the gradients of a layer, of which this rank keeps its part until :meth:`step`; collective.

        Layers come from the last to the first, on all ranks, and each once. The gradients may be let go then.

        Parameters
        ----------
        layer : int
            Which.
        gradients : list of numpy.ndarray or None
            An array for each of its parameters, in their order.

        Raises
        ------
        PlanError
            If it is freed. What is wrong with gradients, or with the turn, is raised by :meth:`step`, on all ranks; in
            place of bad ones zeros travel until then.
        """
        self._require_open()
        with self._at_work():
            of_layer = self._layers[layer] if layer in range(len(self._layers)) else []
            units = [k for k in self._gradients.waiting if k in of_layer]
            if not of_layer or units != self._gradients.waiting[-len(of_layer) :]:
                self._note(ValueError(f"it is not the turn of layer {layer}: from the last to the first"))
                return
            members = self._members(layer)
            given: dict[int, Array | None] = {}
            if isinstance(gradients, list | tuple) and len(gradients) == len(members):
                given = dict(zip(members, gradients, strict=True))
            else:
                self._note(
                    ValueError(
                        f"gradients of layer {layer} must be a list with one for each of {len(members)} parameters"
                    )
                )
            for k in reversed(units):
                self._send(k, given, background=True)
            self._gradients.drive()

    def gradient_views(self) -> list[Array]:
        """Return for each parameter an array that lies where its gradient travels; at stage 1 alone.

        What is written there, and given to :meth:`step`, need not be copied. They are of ``master_dtype``, if there is
        one.

        Raises
        ------
        PlanError
            At other stages, where gradients have no place of their own.
        """
        self._require_open()
        if self.stage != 1:
            raise PlanError("at stages 2 and 3 gradients have no place of their own")
        return [self._gradients.views[index] for index in range(len(self._forms))]

    def _checked_gradient(self, index: int, gradient: Any) -> Array:
        form, work = self._forms[index], self._work[self._unit_of[index]]
        if not is_array(gradient):
            raise TypeError(f"gradient {index} must be a NumPy array or None, not {type(gradient).__name__}")
        if device_of(gradient) is not form.device:
            raise ValueError(f"gradient {index} is on {device_of(gradient).name}, its parameter on {form.device.name}")
        if gradient.dtype not in (form.dtype, work):
            raise TypeError(f"gradient {index} has dtype {gradient.dtype}, its parameter {form.dtype}")
        if gradient.shape != form.shape:
            raise ValueError(f"gradient {index} has shape {gradient.shape}, its parameter {form.shape}")
        found: Array = gradient
        return found

    def _update(self, present: Sequence[bool], *, wait: bool) -> None:
        here = dict(zip(self._flag, present, strict=True))
        # On one node gathering takes the same processors as updating does.
        overlaps = self._turns > 1 and threads_allowed() and self._channel.node.size < self._channel.size
        fault: Exception | None = None
        for k in self._trained:
            values, gradients = self._values(k), self._gradients.own[k]
            members = [index for index in self._units[k].members if here[index]]
            if not members:
                continue
            try:
                items = [self._item(index, k, values, gradients) for index in members]
            except Exception as error:  # noqa: BLE001 - as below
                fault = fault or error
                items = [self._no_item(index, k, values) for index in members]  # other ranks may add something up
            try:
                self.optimizer.update(items, self._total)
            except Exception as error:  # noqa: BLE001 - raised when all have been given what they wait for
                fault = fault or error
            self._publish(k, background=overlaps or not wait)
        if fault is not None:
            raise fault

    def _own(self, index: int, k: int, x: Array) -> Array:
        """Return this rank's part of a tensor, in the tensor's shape if the optimizer needs whole ones."""
        own = x[self._parts[k][index].within]
        if not self.optimizer.whole:
            return own
        shape = self._forms[index].shape
        return own.reshape(shape if own.size else (0, *shape[1:]))

    def _item(self, index: int, k: int, values: Array, gradients: Array) -> Item:
        own = self._own(index, k, values)
        if index not in self._states:
            self._states[index] = self.optimizer.new_state(own)
        return Item(own, self._own(index, k, gradients), self._states[index])

    def _no_item(self, index: int, k: int, values: Array) -> Item:
        """Return what a rank has that has no part of a tensor."""
        own = self._own(index, k, values[:0])
        return Item(own, own, self.optimizer.new_state(own))

    def _total(self, numbers: Array) -> Array:
        return allreduce(numbers, comm=self.comm)

    # -- parameters

    def _members(self, layer: int) -> list[int]:
        return sorted(index for k in self._layers[layer] for index in self._units[k].members)

    @property
    def layers(self) -> list[list[int]]:
        """Which parameters each layer has."""
        return [self._members(layer) for layer in range(len(self._layers))]

    @contextmanager
    def gathered(self, layer: int) -> Iterator[list[Array]]:
        """Have the parameters of a layer inside this block; collective at stage 3, where they are not on one node.

        Parameters
        ----------
        layer : int
            Which; ``layers`` says what is in it.

        Yields
        ------
        list of numpy.ndarray
            Its parameters, in their order: at stage 3 read-only, and overwritten after the block.

        Raises
        ------
        ValueError
            If there is no such layer.
        PlanError
            If it is freed, or more layers are in use than 1 + ``prefetch``.
        """
        self._require_open()
        if layer not in range(len(self._layers)):
            raise ValueError(f"layer must be from 0 to {len(self._layers) - 1}, not {layer}")
        found: dict[int, Array] = {}
        with ExitStack() as used:
            for k in self._layers[layer]:
                found |= self._storage.views(k)
                used.callback(self._storage.release, k)
            yield [found[index] if self.stage < 3 else _read_only(found[index]) for index in sorted(found)]

    def in_order(self, *, reverse: bool = False) -> Iterator[tuple[int, list[Array]]]:
        """Yield each layer's number and parameters, as :meth:`gathered` has them, while the next one is gathered.

        Parameters
        ----------
        reverse : bool
            Whether from the last to the first, as backward passes go.
        """
        order = range(len(self._layers))
        for layer in reversed(order) if reverse else order:
            with self.gathered(layer) as weights:
                following = layer + (-1 if reverse else 1)
                if isinstance(self._storage, Divided) and following in order:
                    for k in self._layers[following]:
                        if self._storage.may_start(k):
                            self._storage.start(k)
                yield layer, weights

    # -- states

    def _kept(self, index: int, k: int) -> dict[str, Any]:
        del k
        return {name: x if name == "step" else x.reshape(-1) for name, x in self._states.get(index, {}).items()}

    def _check_kept(self, index: int, kept: Mapping[str, Any]) -> None:
        ndim = len(self._forms[index].shape) if self.optimizer.whole else 1
        wanted = self.optimizer.new_state(np.empty((0,) * max(1, ndim)))
        step = kept.get("step")
        counted = isinstance(step, np.ndarray) and not step.ndim and step.dtype.kind in "iu"
        divided = all(isinstance(value, list) for name, value in kept.items() if name != "step")
        if kept and not (kept.keys() == wanted.keys() and counted and divided):
            raise ValueError(f"of parameter {index} the state has {sorted(kept)}, the optimizer {sorted(wanted)}")

    def _keep(self, index: int, k: int, kept: Mapping[str, Any]) -> None:
        self._states.pop(index, None)  # which may have other arrays, where the optimizer steps in another way now
        if not kept:
            return
        own = self._gradients.own[k]  # which is of the values' form
        item = self._item(index, k, own, own)
        for name, value in kept.items():
            if name == "step":
                item.state["step"][...] = value
            else:
                write_shards(item.state[name], value)

    def _hyperparameters(self) -> Any:
        return self.optimizer.hyperparameters()

    def _load_hyperparameters(self, given: Any) -> None:
        self.optimizer.load_hyperparameters(given)


def _read_only(view: Array) -> Array:
    if isinstance(view, np.ndarray):
        view = view.view()
        view.flags.writeable = False
    return view
