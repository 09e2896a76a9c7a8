"""What an optimizer of torch's keeps for parts of tensors, and how it steps: taken for a checkpoint, and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any, Final

import numpy as np
import torch

from mpiagg.arrays import Array, Device, load, to_host
from mpiagg.ddp.torch_modules import array_of, stored_array, tensor_of
from mpiagg.sharded.states import WHOLE, write_shards

WHOLE_TENSORS: Final = ("Muon", "Adafactor")
"""The optimizers of torch's that need whole tensors."""


def check_optimizer(optimizer: Any, module: torch.nn.Module, *, whole: bool) -> None:
    """Raise TypeError or ValueError if an optimizer cannot step parts of a module's parameters."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"the function has made a {name}, and no optimizer of torch's")
    theirs = {id(x) for x in module.parameters()}
    if any(id(x) in theirs for group in optimizer.param_groups for x in group["params"]):
        raise ValueError("the optimizer has the module's parameters, and not those that the function was given")
    if name in WHOLE_TENSORS and not whole:
        raise ValueError(f"{name} needs whole tensors: split='tensors'")
    taken = signature(optimizer.step).parameters.values()
    if any(each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in taken):
        raise ValueError(f"{name} needs arguments in step(), such as a closure, which Sharded does not have")


def kept_of(optimizer: torch.optim.Optimizer, shard: torch.nn.Parameter) -> dict[str, Any]:
    """Return what an optimizer keeps for a part of a tensor; what has an element for each of the part's as vectors."""
    found = dict[str, Any]()
    for name, x in optimizer.state.get(shard, {}).items():
        if isinstance(x, torch.Tensor):
            array = array_of(x, name)
            if x.shape == shard.shape and name != "step":
                found[name] = array.reshape(-1)
            else:
                found[name] = {WHOLE: to_host(array)} if x.ndim else to_host(array)
        else:
            found[name] = x
    return found


def check_kept(kept: Mapping[str, Any], name: str) -> None:
    """Raise ValueError if this cannot be what an optimizer keeps for a part of a tensor."""
    for key, value in kept.items():
        if value is not None and not isinstance(value, list | bool | int | float | str | np.ndarray):
            raise ValueError(f"{key} of {name} cannot be a {type(value).__name__}")


def keep(optimizer: torch.optim.Optimizer, shard: torch.nn.Parameter, kept: Mapping[str, Any], device: Device) -> None:
    """Let an optimizer keep this for a part of a tensor, which lies on a device."""
    optimizer.state.pop(shard, None)
    of_shard = (each for each in optimizer.param_groups if any(x is shard for x in each["params"]))
    group: dict[str, Any] = next(of_shard, {})  # the function that made it may have left it out
    for name, value in kept.items():
        state = optimizer.state[shard]
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


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return how an optimizer steps: its name, and the settings of its groups."""
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return {"name": type(optimizer).__name__, "groups": groups}


def load_settings(optimizer: torch.optim.Optimizer, given: Any) -> None:
    """Let an optimizer step as :func:`settings_of` has said; ValueError if these are no settings of it, nothing set."""
    own = settings_of(optimizer)
    if not isinstance(given, Mapping) or given.keys() != own.keys() or given["name"] != own["name"]:
        raise ValueError(f"the state is not one of {own['name']}: its optimizer is {given!r}")
    groups = given["groups"]
    good = isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)
    if not good or len(groups) != len(own["groups"]):
        raise ValueError(f"the optimizer has {len(own['groups'])} groups of parameters, the state others")
    arguments = signature(type(optimizer)).parameters
    usual = {name: _plain(each.default) for name, each in arguments.items() if each.default is not each.empty}
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            likes = [] if key == "params" else [_plain(group.get(key)), *([usual[key]] if key in usual else [])]
            if not any(_fits(value, like) for like in likes):
                raise ValueError(f"{key} of an optimizer cannot be {value!r}")
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            before = group.get(key)
            if isinstance(before, torch.Tensor):
                before.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(before, tuple) else value
        for key in group.keys() - saved.keys() - optimizer.defaults.keys() - {"params"}:
            del group[key]  # as torch's: what schedulers and others have added belongs to a state


def _plain(value: Any) -> Any:
    """Return a setting of an optimizer's as it is saved."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _fits(value: Any, before: Any) -> bool:
    """Whether this may take the place of a setting of an optimizer's."""
    if isinstance(before, list):
        return isinstance(value, list) and len(value) == len(before) and all(map(_fits, value, before))
    if isinstance(before, bool):  # torch sets what is None to what it takes for best
        return value is None or isinstance(value, bool)
    if before is None:
        return value is None or isinstance(value, bool | int | float | str)
    numbers = isinstance(value, int | float) and not isinstance(value, bool)
    return numbers if isinstance(before, int | float) else isinstance(value, type(before))


def copies_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Array]:
    """Return copies as NumPy arrays: of a tensor of which there was an array, torch resizes the memory no more."""
    return {name: to_host(stored_array(x.clone(), name)) for name, x in tensors}


def load_tensors(tensors: Iterable[tuple[str, torch.Tensor]], given: Mapping[str, Array]) -> None:
    """Write NumPy arrays like the copies to tensors."""
    for name, x in tensors:
        copy = x.clone()
        load(stored_array(copy, name), given[name])
        x.data.copy_(copy)
