"""An optimizer that steps with the gradients of all ranks."""

# ruff: noqa: PLR0917 - Horovod's arguments

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import WeakMethod

import torch

from mpiagg.horovod.exceptions import HorovodInternalError
from mpiagg.horovod.process_sets import ProcessSet, global_process_set
from mpiagg.horovod.torch.allreduce_ops import allreduce
from mpiagg.horovod.torch.compression import Compression, Compressor
from mpiagg.horovod.torch.handles import Adasum, Average, op_of, reduction, synchronize
from mpiagg.horovod.torch.reducing_ops import spare_allreduce_async_, sparse_allreduce_async

Named = Iterable[tuple[str, torch.Tensor]]


class _Distributed(torch.optim.Optimizer):  # type: ignore[misc]  # mypy sees no classes of torch's
    """What an optimizer is beside its own class: hooks start the reductions, and ``step`` waits for them."""

    def begin(self, named: Named | None, passes: int, how: dict[str, Any], groups: Any) -> None:
        """Take what :func:`DistributedOptimizer` was given."""
        self._how, self._set = how, how["process_set"]
        self._names = _names_of(self.param_groups, named)
        self.set_backward_passes_per_step(passes)
        self._handles: dict[Any, tuple[Any, list[Any]]] = {}
        self._sparse_dims: dict[torch.Tensor, int] = {}
        self._should_synchronize, self._synchronized = True, False
        self._groups = _groups_of(groups, [p for p in self._names if p.requires_grad])
        self._ready: Counter[tuple[torch.Tensor, ...]] = Counter()
        self._wanted: set[torch.Tensor] = set()
        self._active = bool(self._set.included()) and self._set.size() != 1 and how["op"] != Adasum
        self._await(self._names)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters; all ranks do so.

        Parameters
        ----------
        param_group : dict
            As for the optimizer's own class.
        """
        super().add_param_group(param_group)
        new = {p: name for p, name in _names_of(self.param_groups, None).items() if p not in self._names}
        self._names.update(new)
        self._left.update(dict.fromkeys(new, self.backward_passes_per_step))
        self._await(new)

    def _await(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have gradients reduced when they are there, while there is this optimizer: parameters may outlive it."""
        hook = WeakMethod(self._gradient_is_there)

        def gradient_is_there(p: torch.Tensor) -> None:
            if (call := hook()) is not None:
                call(p)

        for p in parameters if self._active else ():
            if p.requires_grad:
                self._wanted.add(p)
                p.register_post_accumulate_grad_hook(gradient_is_there)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Let gradients be of so many backward passes, added up.

        Parameters
        ----------
        passes : int
            How many.
        """
        self.backward_passes_per_step = passes
        self._left = dict.fromkeys(self._names, passes)

    def _gradient_is_there(self, p: torch.Tensor) -> None:
        if self._left[p] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._left[p] -= 1
        if self._left[p] == 0:
            group = self._groups.get(p, (p,))
            self._ready[group] += 1
            if self._ready[group] == len(group):
                self._start(group)

    def _start(self, group: tuple[torch.Tensor, ...]) -> None:
        """Start to reduce the gradients of some parameters; those that have none are zeros."""
        compression, op, predivide = (self._how[key] for key in ("compression", "op", "predivide"))
        name, factors, small = self._names[group[0]], (1 / predivide, predivide), []
        alone = len(group) == 1
        missing = [p for p in group if p.grad is None]
        for p in missing:
            p.grad = torch.zeros_like(p)
        for p in group:
            if p.grad.is_sparse and self._how["sparse_as_dense"]:
                self._sparse_dims[p] = p.grad.sparse_dim()
                p.grad = p.grad.to_dense()
            if not p.grad.is_sparse:
                small.append(compression.compress(p.grad))
            elif not alone:
                raise ValueError("sparse gradients go in no group; pass sparse_as_dense=True")
        tensors = [x for x, _ in small]
        handle: int
        if not small:
            handle = sparse_allreduce_async(group[0].grad, name, op, self._set)
        elif missing and alone:
            handle = spare_allreduce_async_(tensors[0], name, op, factors, self._set)
        else:
            handle = reduction("allreduce", tensors, name, op, factors, self._set, in_place=True)
        self._handles[group] = handle, small

    def synchronize(self) -> None:
        """Wait for the gradients of all ranks."""
        if self._active:
            self._start_the_rest()
            try:
                for group, (handle, small) in self._handles.items():
                    self._take(group, synchronize(handle), small)
            finally:
                self._forget()
        self._synchronized = True

    def _start_the_rest(self) -> None:
        """Start what no hook has: where parameters have no gradients, or are trained only since they were wrapped."""
        self._await([p for p in self._names if p not in self._wanted])
        for group in dict.fromkeys(self._groups.get(p, (p,)) for p in self._names if p in self._wanted):
            if group not in self._handles:
                self._start(group)

    def _take(self, group: tuple[torch.Tensor, ...], found: Any, small: list[Any]) -> None:
        if isinstance(found, torch.Tensor) and found.is_sparse:
            group[0].grad = found
            return
        with torch.no_grad():
            for p, sent in zip(group, small, strict=True):
                if sent[0] is not p.grad:
                    p.grad.copy_(self._how["compression"].decompress(*sent))
                if p in self._sparse_dims:
                    p.grad = p.grad.to_sparse(self._sparse_dims[p])

    def _forget(self) -> None:
        """Let what is under way end, whatever comes of it, and begin anew."""
        for handle, _ in self._handles.values():
            with suppress(HorovodInternalError):
                synchronize(handle)
        self._handles.clear()
        self._ready.clear()
        self._left = dict.fromkeys(self._names, self.backward_passes_per_step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state; gradients that are under way are forgotten.

        Parameters
        ----------
        state_dict : dict
            What ``state_dict`` has returned.
        """
        if self._handles:  # other ranks may have started others, and wait for them
            with suppress(HorovodInternalError):
                self._start_the_rest()
        self._forget()
        self._should_synchronize, self._synchronized = True, False
        super().load_state_dict(state_dict)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` not wait, in this block: ``synchronize`` was called before."""
        if self._how["op"] == Adasum and self._set.size() != 1:
            raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients of all ranks, and take a step.

        Parameters
        ----------
        closure : callable, optional
            As for the optimizer's own class. Each time it has been called, its gradients are waited for.

        Returns
        -------
        object
            What the closure returns; None without one.
        """
        if self._how["op"] == Adasum:
            return self._step_by_adasum(closure)
        if self._should_synchronize and (closure is None or self._handles):
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        if closure is not None and self._should_synchronize:
            closure = partial(self._synchronized_after, closure)
        return super().step(closure)

    def _synchronized_after(self, closure: Callable[[], Any]) -> Any:
        found = closure()
        self.synchronize()
        self._synchronized = False
        return found

    # torch would wrap it once more, and call the hooks of steps twice.
    step.hooked = True  # type: ignore[attr-defined]  # torch's own mark

    def _step_by_adasum(self, closure: Callable[[], Any] | None) -> Any:
        """Take a step alone, and then the ranks' steps together."""
        before = {p: p.detach().clone() for p in self._names if p.requires_grad}
        found = super().step(closure)
        with torch.no_grad():
            for p, start in before.items():
                how = {"compression": self._how["compression"], "op": Adasum, "process_set": self._set}
                change = allreduce(p.detach() - start, name=self._names[p], **how)
                p.copy_(start + change)
        return found

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget the gradients; AssertionError if they are on their way."""
        if self._handles:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)


def _names_of(param_groups: list[dict[str, Any]], named: Named | None) -> dict[torch.Tensor, str]:
    """Return the names of an optimizer's parameters, in order."""
    own = [p for group in param_groups for p in group["params"]]
    if named is None:
        return {
            p: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(param_groups)
            for j, p in enumerate(group["params"])
        }
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    if twice := [name for name, many in Counter(name for name, _ in pairs).items() if many > 1]:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    names = {p: name for name, p in pairs}
    if unnamed := [id(p) for p in own if p not in names]:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"Python object ids: {', '.join(map(str, unnamed))}"
        )
    return {p: names[p] for p in own}


def _groups_of(groups: Any, parameters: list[torch.Tensor]) -> dict[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the group of each parameter that is in one."""
    if isinstance(groups, int) and groups < 0:
        raise ValueError(f"there cannot be {groups} groups")
    if isinstance(groups, int):
        cut = min(groups, len(parameters))
        size, more = divmod(len(parameters), cut) if cut else (0, 0)
        ends = [size * i + min(i, more) for i in range(cut + 1)]
        groups = [parameters[start:end] for start, end in pairwise(ends)]
    known = set(parameters)
    if not all(isinstance(p, torch.Tensor) for group in groups or () for p in group):
        raise ValueError("groups must consist of torch.Tensor.")
    lists = [tuple(p for p in group if p in known) for group in groups or ()]
    if len({p for group in lists for p in group}) != sum(map(len, lists)):
        raise ValueError("a parameter appears in more than one of groups")
    return {p: group for group in lists for p in group}


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Named | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the class of another, which steps with the gradients of all ranks.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        What it is made from; its parameters, options and state are taken over.
    named_parameters : iterable of (str, torch.Tensor), optional
        The names by which ranks know the parameters; all of them, each once.
    compression : Compressor
        How gradients travel.
    backward_passes_per_step : int
        How many backward passes add up to a gradient.
    op : {Average, Sum, Adasum, ...}
        How gradients are combined; by Adasum the steps are, which each rank takes alone.
    gradient_predivide_factor : float
        What an average is divided by before the sum; the rest after it.
    num_groups, groups : int or list of lists of torch.Tensor
        Which gradients go together.
    sparse_as_dense : bool
        Whether sparse gradients are made dense.
    process_set : ProcessSet
        The ranks.

    Returns
    -------
    torch.optim.Optimizer
        One of the same class, whose ``step`` waits for the gradients of all ranks. Its method ``synchronize`` waits
        for them before, and ``step`` does not wait inside ``with optimizer.skip_synchronize()``.

    Raises
    ------
    ValueError
        For an unknown op, for names that are missing or there twice, for a predivide factor with another op than
        Average, for no backward passes, and for groups of anything but tensors.

    Examples
    --------
    >>> model = torch.nn.Linear(3, 1)
    >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    >>> model(torch.ones(8, 3)).square().mean().backward()
    >>> optimizer.step()
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if groups is not None and not isinstance(groups, int | list | tuple):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    own = type(optimizer)
    made: Any = object.__new__(type(own.__name__, (_Distributed, own), {}))
    # A scheduler that was made before has replaced the method of that object.
    made.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    how = {"compression": compression, "op": op_of(op, None), "predivide": gradient_predivide_factor}
    how.update(sparse_as_dense=sparse_as_dense, process_set=process_set)
    made.begin(named_parameters, backward_passes_per_step, how, groups if groups is not None else num_groups)
    return made
