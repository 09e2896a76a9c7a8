"""Sharded training of modules of torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final
from weakref import WeakMethod

import numpy as np
import torch

from mpiagg.arrays import Array, Form, accelerator_of, form_of, to_host
from mpiagg.collectives.moving_functions import broadcast
from mpiagg.ddp.torch_modules import array_of, require_threads, tensor_of
from mpiagg.ddp.torch_streams import TorchSource, present_source, stream_of
from mpiagg.errors import PlanError
from mpiagg.sharded.sharded import Sharded, check_split
from mpiagg.sharded.states import write_shards
from mpiagg.sharded.storage import Divided, Storage, Whole, storage_for
from mpiagg.sharded.torch_gathering import Gathering, layers_of, owners_of

WHOLE: Final = ("Muon", "Adafactor")
"""The optimizers of torch's that need whole tensors."""


class TorchSharded(Sharded):
    """Sharded training of a ``torch.nn.Module``; ``mpiagg.Sharded(module, ...)`` is one.

    Gradients set out while the backward pass runs, as with :class:`mpiagg.DDP`; :meth:`step` takes the place of
    ``optimizer.step()`` and ``optimizer.zero_grad()``. After the backward pass the parameters' ``grad`` is None.

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
        for name, x in (*module.named_parameters(), *module.named_buffers()):
            if torch.nn.parameter.is_lazy(x):
                raise ValueError(f"{name} is not initialised; run the module once first")
            if x.device != named[0][1].device:
                raise TypeError(f"{name} is on {x.device}, and {named[0][0]} on {named[0][1].device}")
        require_threads(module.parameters())
        self._make = optimizer
        self._known = [(name, x, x.requires_grad) for name, x in module.named_parameters()]
        self._names_of = [name for name, _ in named]
        self._tensors = [x for _, x in named]
        self._first = self._tensors[0]
        self._resident: set[int] = set()
        self._syncing, self._sent = True, set[int]()
        self._waited_for = False
        # Of a module on a GPU: in which streams gradients come, and which are to be copied there: (to, from).
        self._sources: dict[int, TorchSource] = {}
        self._taken: dict[TorchSource, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        inside = {id(each) for each in module.modules()}
        if layers is not None and not all(isinstance(x, torch.nn.Module) and id(x) in inside for x in layers):
            raise ValueError("layers must be submodules of the module")
        if self.stage == 3:
            self._layers_asked, self._resident = layers_of(module, self._tensors, self._cap, layers)
        forms = [form_of(array_of(x, f"parameter {name}")) for name, x in named]
        accelerator = accelerator_of(array_of(self._first, self._names_of[0]))
        self._copied = None if accelerator is None else accelerator.stream()  # which follows these copies
        return forms

    def _stream(self) -> AbstractContextManager[object]:
        return stream_of(self._first)

    def _split_for(self, split: str | None) -> str:
        self._whole = check_split(split, "elements") == "tensors"
        return "tensors" if self._whole else "elements"

    def _describe_optimizer(self) -> str:
        trained = [x.requires_grad for x in self._tensors]
        return f"an optimizer of torch's, of {self._names_of}, of which {trained} are trained"

    def _lay_out(self) -> None:
        module: torch.nn.Module = self.module
        for name, x in (*module.named_parameters(), *module.named_buffers()):
            array = array_of(x.view(torch.uint8) if x.dtype == torch.bool else x, name)
            broadcast(array, root=0, out=array, comm=self.comm)
        arrays = [array_of(x, name) for name, x in zip(self._names_of, self._tensors, strict=True)]
        before = [x.data for x in self._tensors]
        units = self._units
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
        self._places = [x.data_ptr() for x in self._tensors]
        self._gathering: Gathering | None = None
        if isinstance(storage, Divided):
            owners, stream = owners_of(module, self._tensors), partial(stream_of, self._first)
            self._gathering = Gathering(storage, owners, unit_of, stream, ahead=self._turns > 1)
            self._open.append(self._gathering.remove)
        self._take_up(storage, trained, self._names_of)
        views = self._gradients.views if self._copied is not None else {}
        self._into = {index: tensor_of(view) for index, view in views.items()}
        for index in self._flag:
            told = partial(_arrived, WeakMethod(self._arrive), index)
            hook = self._tensors[index].register_post_accumulate_grad_hook(told)
            self._open.append(hook.remove)
        try:
            self._channel.agree_on(self._make_optimizer)
        except Exception:
            for x, old in zip(self._tensors, before, strict=True):
                x.data = old
            self._tensors = []
            raise

    def _make_optimizer(self) -> str:
        """Make the optimizer of this rank's parts, and return in words how it steps."""
        self._shards: dict[int, torch.nn.Parameter] = {}
        for index in self._flag:
            k = self._unit_of[index]
            part, values = self._parts[k][index], self._values(k)
            own = self._shaped(index, values[part.within])
            self._shards[index] = torch.nn.Parameter(own)
        self.optimizer = self._make(list(self._shards.values()))
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(f"the function has made a {type(self.optimizer).__name__}, and no optimizer of torch's")
        name = type(self.optimizer).__name__
        if name in WHOLE and not self._whole:
            raise ValueError(f"{name} needs whole tensors: split='tensors'")
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
        if self._copied is not None:
            self._sources[index] = present_source(self._tensors[index].device.index)
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
        given: dict[int, Any] = {}
        for index in self._units[k].members:
            gradient, self._tensors[index].grad = self._tensors[index].grad, None
            given[index] = gradient
        self._send(k, given, background=background)

    def _checked_gradient(self, index: int, gradient: torch.Tensor) -> Array:
        name = f"the gradient of {self._names_of[index]}"
        if self._copied is None:
            return array_of(gradient.resolve_conj().resolve_neg(), name)
        if gradient.layout is not torch.strided or gradient.device != self._tensors[index].device:
            raise TypeError(f"{name} must be a dense tensor where the parameter is, not {gradient.layout}")
        # In the stream that has computed it: torch gives its memory away again to what comes next there.
        source = self._sources.pop(index, None) or present_source(gradient.device.index)
        self._taken.setdefault(source, []).append((self._into[index], gradient))
        return self._gradients.views[index]

    @contextmanager
    def _when_copied(self) -> Iterator[None]:
        if self._copied is None:
            yield
            return
        taken, self._taken = self._taken, {}
        for source, pairs in taken.items():
            source.copy(pairs)
            with source.inside():
                self._copied.follow()
        with self._copied:
            yield

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
            while self._gradients.waiting:
                self._send_unit(background=False)
            self._sent.clear()
            if not wait and self.stage < 3 and not self._waited_for:
                self._wait_in_forward()
            try:
                return self._finish(wait=wait)
            finally:
                for x in self._tensors:
                    x.grad = None

    def _wait_in_forward(self) -> None:
        """Let submodules wait for their parameters before they compute."""
        self._waited_for = True
        for module, own in owners_of(self.module, self._tensors):
            units = list(dict.fromkeys(self._unit_of[index] for index in own))
            self._open.append(module.register_forward_pre_hook(partial(_wait_for, self._storage, units)).remove)

    def _look_for_changes(self) -> None:
        """Validate that parameters lie where they did, and require a gradient, or none, as they did."""
        changed = [name for name, x, trained in self._known if x.requires_grad != trained]
        if [x.data_ptr() for x in self._tensors] != self._places:
            places = zip(self._names_of, self._tensors, self._places, strict=True)
            changed += [name for name, x, place in places if x.data_ptr() != place]
        if changed:
            self._note(
                ValueError(
                    f"{changed[0]} was moved, converted, or has come to require a gradient, or none; "
                    "free() Sharded and make it again"
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
        named = self.module.named_buffers()
        return {name: array_of(x.view(torch.uint8) if x.dtype == torch.bool else x, name) for name, x in named}

    def _kept(self, index: int, k: int) -> dict[str, Any]:
        del k
        shard, found = self._shards[index], dict[str, Any]()
        for name, x in self.optimizer.state.get(shard, {}).items():
            if isinstance(x, torch.Tensor):
                array = array_of(x, name)
                found[name] = array.reshape(-1) if x.shape == shard.shape and name != "step" else to_host(array)
            else:
                found[name] = x
        return found

    def _check_kept(self, index: int, kept: Mapping[str, Any]) -> None:
        for name, value in kept.items():
            if value is not None and not isinstance(value, list | bool | int | float | str | np.ndarray):
                raise ValueError(f"{name} of {self._names_of[index]} cannot be a {type(value).__name__}")

    def _keep(self, index: int, k: int, kept: Mapping[str, Any]) -> None:
        shard, device = self._shards[index], self._units[k].form.device
        self.optimizer.state.pop(shard, None)
        group = next(each for each in self.optimizer.param_groups if any(x is shard for x in each["params"]))
        for name, value in kept.items():
            state = self.optimizer.state[shard]
            if isinstance(value, list):
                array = device.empty(shard.numel(), value[0].read().dtype)
                write_shards(array, value)
                state[name] = tensor_of(array).reshape(shard.shape)
            elif isinstance(value, np.ndarray):
                # Steps are counted on the host, but where all of a step is computed on a device: as torch loads them.
                there = name != "step" or group.get("capturable") or group.get("fused")
                state[name] = tensor_of(value.copy()).to(shard.device if there else "cpu")
            else:
                state[name] = value

    def _hyperparameters(self) -> Any:
        groups = [
            {key: _plain(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        return {"name": type(self.optimizer).__name__, "groups": groups}

    def _load_hyperparameters(self, given: Any) -> None:
        own = self._hyperparameters()
        if not isinstance(given, Mapping) or given.keys() != own.keys() or given["name"] != own["name"]:
            raise ValueError(f"the state is not one of {own['name']}: its optimizer is {given!r}")
        groups = given["groups"]
        good = isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)
        if not good or len(groups) != len(own["groups"]):
            raise ValueError(f"the optimizer has {len(own['groups'])} groups of parameters, the state others")
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in saved.items():
                if key == "params":
                    raise ValueError("parameters are in no group of a state")
                before = group.get(key)
                if isinstance(before, torch.Tensor):
                    before.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(before, tuple) else value

    def _close(self) -> None:
        super()._close()
        self._shards, self._into = {}, {}
        self.__dict__.pop("optimizer", None)  # what it has of the parameters lies in memory that is to be given back
        if self.stage == 3:
            for x in self._tensors:
                x.data = torch.empty(0, dtype=x.dtype, device=x.device)


def _arrived(arrive: WeakMethod[Callable[[int], None]], index: int, _: torch.Tensor) -> None:
    if (method := arrive()) is not None:
        method(index)


def _wait_for(storage: Storage, units: Sequence[int], *_: Any) -> None:
    for k in units:
        storage.wait(k)


def _plain(value: Any) -> Any:
    """Return a setting of an optimizer's as it is saved."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value
