"""What a module has returned, with hooks for the backward passes through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map


def watched(found: Any, call: Callable[[object], None], passed: set[torch.Tensor] | None) -> Any:
    """Call this in every pass of autograd through what a module has returned, and return that.

    Parameters
    ----------
    found : object
        What the module has returned.
    call : callable
        Called with a gradient.
    passed : set of torch.Tensor, optional
        Each backward pass adds a tensor; torch.autograd.grad adds none. So a rank that has used no parameter knows of
        the pass.
    """
    if passed is not None:
        mark = torch.zeros((), requires_grad=True)
        mark.register_post_accumulate_grad_hook(passed.add)
        found = tree_map(lambda x: _Marked.apply(x, mark) if _has_graph(x) else x, found)
    for x in tree_flatten(found)[0]:
        if _has_graph(x):
            x.register_hook(call)
    return found


def _has_graph(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.grad_fn is not None


class _Marked(torch.autograd.Function):  # type: ignore[misc,unused-ignore]  # without torch it has no type
    """The identity; a backward pass brings its second input a gradient, which torch.autograd.grad is not asked for."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch's form
        """Return a copy: a view could not be changed in place."""
        ctx.set_materialize_grads(False)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor]:  # noqa: ARG004 - torch's
        """Hand the gradient on."""
        return gradient, torch.zeros(())
