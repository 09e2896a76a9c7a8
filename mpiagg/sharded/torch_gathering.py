"""Parameters of a module of torch's that are divided: gathered before a submodule computes with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final
from weakref import WeakMethod

import torch
from torch.utils._pytree import tree_flatten

from mpiagg.errors import PlanError
from mpiagg.sharded.storage import Divided, Storage

Owners = Sequence[tuple[torch.nn.Module, Sequence[int]]]
"""Submodules with the numbers of the parameters that they compute with."""

AS_ONE: Final = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
"""Modules of torch's that compute with the parameters of those within without calling these."""


def owners_of(
    module: torch.nn.Module, tensors: Sequence[torch.nn.Parameter], listed: Sequence[torch.nn.Module] = ()
) -> Owners:
    """Return the submodules that compute with parameters themselves, and those listed, with the numbers of these.

    What has no ``forward``, as a ``ParameterList``, is not called: who computes with its parameters is who it is in.
    """
    number = {id(tensor): index for index, tensor in enumerate(tensors)}
    found, seen = dict[int, tuple[torch.nn.Module, dict[int, None]]](), set[tuple[int, int]]()

    def visit(each: torch.nn.Module, owner: torch.nn.Module) -> None:
        is_called = type(each).forward is not torch.nn.Module.forward or "forward" in vars(each)
        owner = each if is_called else owner
        if (id(each), id(owner)) in seen:
            return
        seen.add((id(each), id(owner)))
        as_one = isinstance(each, AS_ONE)
        own = [number[id(x)] for x in each.parameters(recurse=as_one) if id(x) in number]
        if own:
            found.setdefault(id(owner), (owner, {}))[1].update(dict.fromkeys(own))
        for child in () if as_one else each.children():
            visit(child, owner)

    visit(module, module)
    inside = ((each, [number[id(x)] for x in each.parameters()]) for each in listed)
    return [*((each, list(own)) for each, own in found.values()), *inside]


def units_with(own: Sequence[int], unit_of: Mapping[int, int]) -> list[int]:
    """Return the units of some parameters."""
    return list(dict.fromkeys(unit_of[index] for index in own))


def wait_for(storage: Storage, units: Sequence[int], *_: Any) -> None:
    """Wait for units that are published in the background, before a module computes."""
    for k in units:
        storage.wait(k)


def before_forward(module: torch.nn.Module, call: Callable[..., object]) -> Callable[[], None]:
    """Call this before a module computes, and before the user's own hooks do; return what ends that."""
    end: Callable[[], None] = module.register_forward_pre_hook(ModuleHook(call), prepend=True).remove
    return end


class ModuleHook:
    """A hook of a module; copies of the module have one that does nothing."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call it."""
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes the hook of a copy."""
        return ModuleHook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def call_if_there(method: WeakMethod[Callable[[int], None]], index: int, *_: Any) -> None:
    """Call a method of an object with a number, if the object is still there."""
    if (call := method()) is not None:
        call(index)


def writes_to(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how often torch's operations have written into each tensor."""
    return [x._version for x in tensors]  # noqa: SLF001 - it has no public name


def check_layers(module: torch.nn.Module, layers: Any) -> Sequence[torch.nn.Module]:
    """Return the layers that were given; ValueError unless they are submodules of the module, in a list."""
    listed = [] if layers is None else layers
    inside = {id(each) for each in module.modules()}
    if not isinstance(listed, list | tuple) or not all(id(x) in inside for x in listed):
        raise ValueError("layers must be submodules of the module, in a list")
    return listed


def layers_of(
    module: torch.nn.Module, tensors: Sequence[torch.nn.Parameter], cap: int, given: Sequence[torch.nn.Module]
) -> tuple[list[list[int]], set[int]]:
    """Return which parameters are gathered together, and the numbers of the layers that stay gathered for a while.

    Parameters
    ----------
    module : torch.nn.Module
        The whole.
    tensors : sequence of torch.nn.Parameter
        Its parameters.
    cap : int
        How many bytes a layer has at most, where submodules are put together.
    given : sequence of torch.nn.Module
        Submodules whose parameters are gathered together.

    Notes
    -----
    A module that has parameters of its own, and others within, computes with its own before and after theirs. So these
    are a layer for themselves, and so are those that several submodules have.
    """
    taken: set[int] = set()
    layers: list[list[int]] = []
    kept: set[int] = set()

    def add(members: Sequence[int], *, keep: bool = False) -> None:
        for trains in (True, False):  # what has no gradient is never reduced
            part = [i for i in members if i not in taken and tensors[i].requires_grad == trains]
            if part:
                kept.update({len(layers)} if keep else ())
                layers.append(part)
        taken.update(members)

    number = {id(tensor): index for index, tensor in enumerate(tensors)}
    owners = owners_of(module, tensors)
    uses = Counter(index for _, own in owners for index in own)
    outer = [own for each, own in owners if any(number[id(x)] not in own for x in each.parameters())]
    add(sorted({i for own in outer for i in own} | {i for i, times in uses.items() if times > 1}), keep=True)
    for each in given:
        add([number[id(x)] for x in each.parameters() if id(x) in number])
    filling: list[int] = []
    for _, own in owners:
        more = [i for i in own if i not in taken]
        if filling and sum(_nbytes(tensors[i]) for i in (*filling, *more)) > cap:
            add(filling)
            filling = []
        filling += more
    add(filling)
    order = sorted(range(len(layers)), key=lambda layer: min(layers[layer]))
    return [sorted(layers[layer]) for layer in order], {place for place, layer in enumerate(order) if layer in kept}


def _nbytes(tensor: torch.Tensor) -> int:
    nbytes: int = tensor.numel() * tensor.element_size()
    return nbytes


class Gathering:
    """Gathers units before submodules compute with them, forward and backward, and the next one meanwhile.

    The parameters' tensors always lie in the same memory, which units take in turn. So what autograd has saved of a
    parameter is right again when its unit is gathered for the backward pass.

    Parameters
    ----------
    storage : Divided
        Where the parameters are.
    owners : sequence of (torch.nn.Module, list of int)
        The submodules that compute with parameters, with the numbers of these.
    tensors : sequence of torch.nn.Parameter
        The parameters, where they lie when they are gathered.
    unit_of : dict of int to int
        For each parameter its unit.
    stream : callable
        Returns a block in which devices are asked in the stream in which a submodule computes.
    ahead : bool
        Whether the unit that followed the last time is gathered while one is in use.
    """

    def __init__(
        self,
        storage: Divided,
        owners: Owners,
        tensors: Sequence[torch.nn.Parameter],
        unit_of: Mapping[int, int],
        stream: Callable[[], AbstractContextManager[object]],
        *,
        ahead: bool,
    ) -> None:
        self._storage, self._stream, self._ahead = storage, stream, ahead
        self._following: dict[tuple[bool, int], int] = {}
        self._last: tuple[bool, int] | None = None
        self._ends: list[Callable[[], None]] = []
        self._memory = {x.untyped_storage().data_ptr() for x in tensors if x.numel()}
        for module, own in owners:
            units = units_with(own, unit_of)
            self._ends.append(before_forward(module, self._before(units)))
            self._ends.append(module.register_forward_hook(ModuleHook(self._after(units))).remove)

    def _before(self, units: Sequence[int]) -> Any:
        def hook(*_: Any) -> None:
            with self._stream():
                self.bring(units, backward=False)

        return hook

    def _after(self, units: Sequence[int]) -> Any:
        def gather(_: torch.Tensor) -> None:
            with self._stream():
                self.bring(units, backward=True)

        def hook(module: torch.nn.Module, _: Any, found: Any) -> None:
            tensors = [x for x in tree_flatten(found)[0] if isinstance(x, torch.Tensor)]
            name = type(module).__name__
            if any(x.layout is torch.strided and x.untyped_storage().data_ptr() in self._memory for x in tensors):
                raise PlanError(f"{name} returns a view of its parameters, which make room for others: return a copy")
            if torch.is_grad_enabled():
                if not tensors:
                    raise PlanError(f"{name} returns tensors in an object that torch.utils._pytree does not know")
                for x in tensors:
                    if x.grad_fn is not None:
                        x.register_hook(gather)

        return hook

    def bring(self, units: Sequence[int], *, backward: bool) -> None:
        """Have units gathered; begin with the one that followed them the last time."""
        for k in reversed(units) if backward else units:
            self._storage.bring(k)
            here = backward, k
            if self._last is not None and self._last != here and self._last[0] == backward:
                self._following[self._last] = k
            self._last = here
        if not all(self._storage.has(k) for k in units):
            raise PlanError(f"units {list(units)} are needed at the same time; make Sharded with more prefetch")
        following = self._following.get(self._last) if self._ahead and self._last else None
        if following is not None and not any(self._storage.take_turns(following, k) for k in units):
            self._storage.start(following)

    def check(self, k: int, name: str) -> None:
        """Raise PlanError if a unit is not there, at the moment at which a gradient of it has been computed."""
        if not self._storage.has(k):
            raise PlanError(
                f"{name} made room for other parameters before its gradient was computed: submodules are not used in "
                "one order, or a module computes with another one's parameters; make Sharded with more prefetch, or "
                "with layers that are used together"
            )

    def remove(self) -> None:
        """Gather no more."""
        while self._ends:
            self._ends.pop()()
