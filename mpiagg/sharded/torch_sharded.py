"""Sharded training of modules of torch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch

from mpiagg.arrays import Accelerator, Array, Form, form_of
from mpiagg.collectives.moving_functions import broadcast
from mpiagg.ddp.torch_buffers import broadcast_buffers
from mpiagg.ddp.torch_modules import array_of, check_tensors, on_gradient, stored_array, tensor_of
from mpiagg.ddp.torch_streams import require_threads, stream_of
from mpiagg.errors import PlanError
from mpiagg.sharded import torch_states as states
from mpiagg.sharded.division import check_split
from mpiagg.sharded.sharded import Sharded
from mpiagg.sharded.storage import Divided, Storage, Whole, storage_for
from mpiagg.sharded.torch_copies import DeviceCopies
from mpiagg.sharded.torch_gathering import (
    Gathering,
    before_forward,
    call_if_there,
    check_layers,
    layers_of,
    owners_of,
    units_with,
    wait_for,
    writes_to,
)


class TorchSharded(Sharded):
    """Sharded training of a ``torch.nn.Module``; ``mpiagg.Sharded(module, ...)`` is one.

    Gradients set out while the backward pass runs, as with :class:`mpiagg.DDP`; :meth:`step` takes the place of
    ``optimizer.step()`` and ``optimizer.zero_grad()``. From the backward pass to :meth:`step` gradients are not the
    parameters': do not clip them (``clip_norm`` does) or set them to zero (:meth:`zero_grad` discards them).

    Parameters
    ----------
    module : torch.nn.Module
        Rank 0's parameters and buffers are given to all. Its parameters stay the same objects, and their ``data`` lies
        in other memory. At stage 3 it is theirs while their submodule computes, where not all ranks are on one node.
    optimizer : callable
        ``lambda params: torch.optim.AdamW(params, lr=1e-3)``: is given a parameter for each of the module's that
        requires a gradient, in the order of ``module.parameters()``, which is this rank's part of it: a vector, which
        may have no elements; with ``split="tensors"`` the whole or a vector of no elements. So groups can be made
        by place in the list. It returns a ``torch.optim.Optimizer``, which is ``sharded.optimizer``.
    split : {"elements", "tensors"}, optional
        ``"elements"``, the default, is for optimizers that update each element by itself (SGD, Adam, AdamW, RMSprop,
        Adagrad); whatever looks at a whole tensor (Muon, Adafactor, LAMB) needs ``"tensors"``.
    layers : list of torch.nn.Module, optional
        Submodules whose parameters are gathered together at stage 3, as the blocks of a transformer. What is in none of
        them, and by default all, is put together by submodules up to ``bucket_bytes``.
    others
        As for :class:`Sharded`.

    Raises
    ------
    TypeError, ValueError, MismatchError
        As for :class:`Sharded`; TypeError for a module that is not on the CPU or one GPU, or what the function returns;
        ValueError for an optimizer that needs whole tensors and is to have parts; PlanError for a module on a GPU where
        MPI was not initialised for ``MPI.THREAD_SERIALIZED`` or more.

    Notes
    -----
    Parameters that require no gradient are only gathered, at stage 3; those that several submodules share are there
    once. Buffers are each rank's own after the start. At stage 3, where not all ranks are on one node, a parameter is
    there in the ``forward`` of the submodule that has it, and in its backward pass; submodules are called in one order
    on all ranks. A gradient that was computed with a parameter that had made room is an error of :meth:`step`.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(3, 1)
    >>> with mpiagg.Sharded(model, lambda params: torch.optim.AdamW(params, lr=1e-3), stage=2) as sharded:
    ...     for step in range(3):
    ...         sharded(torch.randn(8, 3)).square().mean().backward()
    ...         sharded.step()
    ...     weight = sharded.weights()["weight"]
    >>> bool((mpiagg.broadcast(weight) == weight).all())
    True
    """

    optimizer: torch.optim.Optimizer

    def _check(self, module: torch.nn.Module, optimizer: Any, layers: Any) -> list[Form]:
        if not callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer must be a function that makes one of parameters, not {kind}")
        named = [(name, x) for name, x in module.named_parameters() if self.stage == 3 or x.requires_grad]
        if not any(x.requires_grad for _, x in named):
            raise ValueError("the module has no parameters that require a gradient")
        all_of_them = (*module.named_parameters(), *module.named_buffers())
        check_tensors(all_of_them)
        for name, x in all_of_them:
            if x.device != named[0][1].device:
                raise TypeError(f"{name} is on {x.device}, and {named[0][0]} on {named[0][1].device}")
        require_threads(module.parameters())
        self._make = optimizer
        self._known = [(name, x, x.requires_grad) for name, x in module.named_parameters()]
        self._names_of = [name for name, _ in named]
        self._tensors = [x for _, x in named]
        self._first = self._tensors[0]
        self._resident: set[int] = set()
        self._syncing, self._waited_for, self._sent = True, False, set[int]()
        self._copies: DeviceCopies | None = None
        self._listed = check_layers(module, layers)
        if self.stage == 3:
            self._layers_asked, self._resident = layers_of(module, self._tensors, self._cap, self._listed)
        return [form_of(array_of(x, f"parameter {name}")) for name, x in named]

    def _stream(self) -> AbstractContextManager[object]:
        return stream_of(self._first)

    def _split_for(self, split: str | None) -> str:
        self._whole = check_split(split, "elements") == "tensors"
        return "tensors" if self._whole else "elements"

    def _describe_optimizer(self) -> str:
        trained = [x.requires_grad for x in self._tensors]
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        forms = [(name, x.dtype, tuple(x.shape), x.layout) for name, x in named]
        return f"an optimizer of torch's, of {self._names_of}, of which {trained} are trained, of a module of {forms}"

    def _lay_out(self) -> None:
        module: torch.nn.Module = self.module
        before = [x.data for x in self._tensors]
        try:
            for name, x in module.named_parameters():
                array = stored_array(x, name)
                broadcast(array, root=0, out=array, comm=self.comm)
            broadcast_buffers(module.buffers(), self.comm, 0)
            self._divide()
            self._channel.agree_on(self._make_optimizer)
        except Exception:
            for x, old in zip(self._tensors, before, strict=True):
                x.data = old
            self._tensors = []
            raise

    def _divide(self) -> None:
        """Move the parameters to where they are trained, and have the module ask for them and tell of gradients."""
        module, units = self.module, self._units
        arrays = [array_of(x, name) for name, x in zip(self._names_of, self._tensors, strict=True)]
        trained = [k for k, unit in enumerate(units) if self._tensors[unit.members[0]].requires_grad]
        storage: Storage
        if self.stage < 3:
            storage = Whole(self._traffic, units, arrays)
        else:
            alone = {k for layer in self._resident for k in self._layers[layer]}
            # A submodule may have trained parameters and frozen ones, which are there at the same time.
            apart = [(k in trained, k if k in alone else None) for k in range(len(units))]
            storage = storage_for(self._traffic, units, arrays, self._turns, apart, share=self._share)
        unit_of = {index: k for k, unit in enumerate(units) for index in unit.members}
        for index, x in enumerate(self._tensors):
            k = unit_of[index]
            place = storage.place(k) if isinstance(storage, Divided) else storage.views(k)
            x.data = tensor_of(place[index])
        self._places, self._written = [x.data_ptr() for x in self._tensors], writes_to(self._tensors)
        self._gathering: Gathering | None = None
        if isinstance(storage, Divided):
            owners, stream = owners_of(module, self._tensors, self._listed), partial(stream_of, self._first)
            self._gathering = Gathering(storage, owners, self._tensors, unit_of, stream, ahead=self._turns > 1)
            self._open.append(self._gathering.remove)
        self._take_up(storage, trained, self._names_of)
        device = units[0].form.device
        if isinstance(device, Accelerator):
            self._open.append(device.finish)  # before memory is given back that torch's streams may still read
            self._copies = DeviceCopies(device, self._gradients.views, self._first.device.index)
        for index in self._flag:
            told = partial(call_if_there, WeakMethod(self._arrive), index)
            self._open.append(on_gradient(self._tensors[index], told))

    def _make_optimizer(self) -> str:
        """Make the optimizer of this rank's parts, and return in words how it steps."""
        self._shards: dict[int, torch.nn.Parameter] = {}
        for index in self._flag:
            k = self._unit_of[index]
            part, values = self._parts[k][index], self._values(k)
            self._shards[index] = torch.nn.Parameter(self._shaped(index, values[part.within]))
        self.optimizer = self._make(list(self._shards.values()))
        states.check_optimizer(self.optimizer, self.module, whole=self._whole)
        return f"{self._hyperparameters()}"

    def _shaped(self, index: int, own: Array) -> torch.Tensor:
        shape = self._tensors[index].shape
        return tensor_of(own.reshape(tuple(shape)) if self._whole and own.size else own)

    # -- steps

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the module."""
        return self.module(*inputs, **keywords)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of backward passes in this block add up, whole, on this rank; the next one sends all."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def _arrive(self, index: int) -> None:
        """Take note of a gradient that a backward pass has computed, and send the units whose turn has come."""
        k = self._unit_of[index]
        try:
            if self._gathering is not None:
                self._gathering.check(k, self._names_of[index])
        except PlanError as error:
            self._note(error)
        if index in self._sent:
            self._note(
                PlanError(
                    f"{self._names_of[index]} got a gradient twice before step(); to add up those of several backward "
                    "passes, run all but the last inside no_sync()"
                )
            )
        if self._copies is not None:
            self._copies.note_source(index)
        if not self._syncing:
            return
        self._sent.add(index)
        waiting = self._gradients.waiting
        while waiting and all(member in self._sent for member in self._units[waiting[-1]].members):
            if len(waiting) == 1:  # the last has nothing left to hide behind
                break
            self._send_unit(background=True)
        self._gradients.drive()

    def _send_unit(self, *, background: bool) -> None:
        k = self._gradients.waiting[-1]
        members = self._units[k].members
        self._send(k, {index: self._tensors[index].grad for index in members}, background=background)
        for index in members:
            self._tensors[index].grad = None

    def _checked_gradient(self, index: int, gradient: torch.Tensor) -> Array:
        name = f"the gradient of {self._names_of[index]}"
        if self._copies is None:
            return array_of(gradient.resolve_conj().resolve_neg(), name)
        if gradient.layout is not torch.strided or gradient.device != self._tensors[index].device:
            where = f"{gradient.layout} on {gradient.device}"
            raise TypeError(f"{name} must be a dense tensor where the parameter is, not {where}")
        self._copies.take(index, gradient)
        return self._gradients.views[index]

    def _when_copied(self) -> AbstractContextManager[object]:
        return super()._when_copied() if self._copies is None else self._copies.done()

    def step(self, *, wait: bool = True) -> float | None:
        """Update the parameters with the gradients of all ranks; collective.

        Parameters
        ----------
        wait : bool
            Whether parameters are there when it returns. Otherwise they are on their way at stages 1 and 2, and the
            ``forward`` of a submodule waits for its own. Call :meth:`wait` before other code reads them, as
            ``state_dict()`` of the module or an average of weights does.

        Returns
        -------
        float or None
            The norm of all gradients before it was clipped, with ``clip_norm``.

        Raises
        ------
        PlanError
            If it is freed; on a rank where a parameter got a gradient twice, or made room too early.
        TypeError
            On the ranks where a gradient is sparse.
        ValueError
            On the ranks where a parameter was moved or converted, or has come to require a gradient, or none.
        MismatchError
            On the other ranks then; the parameters are as they were, and the gradients are lost.
        StallError
            If a message does not complete within the timeout.
        """
        self._require_open()
        with self._at_work():
            self._look_for_changes()
            self._send_rest()
            if not wait and self.stage < 3 and not self._waited_for:
                self._wait_in_forward()
            try:
                return self._finish(wait=wait)
            finally:
                for x in self._tensors:
                    x.grad = None

    def _send_rest(self) -> None:
        """Send the units that have not set out in the backward pass."""
        while self._gradients.waiting:
            self._send_unit(background=False)
        self._sent.clear()
        if self._copies is not None:
            self._copies.clear()

    def zero_grad(self) -> None:
        """Discard the gradients of backward passes since the last :meth:`step`, on all ranks; collective.

        A batch can be left out so, or tried again after an error in the backward pass (of all ranks at stage 3).

        Raises
        ------
        PlanError
            If it is freed.
        StallError
            If a message does not complete within the timeout.
        """
        self._require_open()
        with self._at_work():
            for x in self._tensors:
                x.grad = None
            self._send_rest()
            self._discard()

    def _wait_in_forward(self) -> None:
        """Let submodules wait for their parameters before they compute."""
        self._waited_for = True
        for module, own in owners_of(self.module, self._tensors):
            self._open.append(before_forward(module, partial(wait_for, self._storage, units_with(own, self._unit_of))))

    def _look_for_changes(self) -> None:
        """Take note of parameters that lie elsewhere, require a gradient, or none, in turn, or were written in vain."""
        changed = [name for name, x, trained in self._known if x.requires_grad != trained]
        places = zip(self._names_of, self._tensors, self._places, strict=True)
        changed += [name for name, x, place in places if x.data_ptr() != place]
        if changed:
            self._note(
                ValueError(
                    f"{changed[0]} was moved, converted, or has come to require a gradient, or none; "
                    "free() Sharded and make it again"
                )
            )
        if (self._masters or isinstance(self._storage, Divided)) and self._written != writes_to(self._tensors):
            self._written = writes_to(self._tensors)
            self._note(
                ValueError(
                    "parameters were written, by load_state_dict() of the module or in place, which is lost at stage 3 "
                    "between nodes and with master_dtype: load before Sharded is made, or with load_state_dict() of it"
                )
            )

    def _update(self, present: Sequence[bool], *, wait: bool) -> None:
        here = dict(zip(self._flag, present, strict=True))
        for index, shard in self._shards.items():
            k = self._unit_of[index]
            own = self._gradients.own[k][self._parts[k][index].within]
            shard.grad = self._shaped(index, own) if here[index] and own.size else None
        fault: Exception | None = None
        try:
            self.optimizer.step()
        except Exception as error:  # noqa: BLE001 - raised when all have been given what they wait for
            fault = error
        for k in self._trained:
            if any(here[index] for index in self._units[k].members):
                self._publish(k, background=not wait)
        if fault is not None:
            raise fault

    # -- states

    def _buffers(self) -> dict[str, Array]:
        return states.copies_of(self.module.named_buffers())

    def _load_buffers(self, given: Mapping[str, Array]) -> None:
        states.load_tensors(self.module.named_buffers(), given)

    def _kept(self, index: int, k: int) -> dict[str, Any]:
        del k
        return states.kept_of(self.optimizer, self._shards[index])

    def _check_kept(self, index: int, kept: Mapping[str, Any]) -> None:
        states.check_kept(kept, self._names_of[index])

    def _keep(self, index: int, k: int, kept: Mapping[str, Any]) -> None:
        states.keep(self.optimizer, self._shards[index], kept, self._units[k].form.device)

    def _hyperparameters(self) -> Any:
        return states.settings_of(self.optimizer)

    def _load_hyperparameters(self, given: Any) -> None:
        states.load_settings(self.optimizer, given)

    def _close(self) -> None:
        super()._close()
        self._shards, self._copies = {}, None
        self.__dict__.pop("optimizer", None)  # what it has of the parameters lies in memory that is to be given back
        if self.stage == 3:
            for x in self._tensors:
                x.data = torch.empty(0, dtype=x.dtype, device=x.device)
