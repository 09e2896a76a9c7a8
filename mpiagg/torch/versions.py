"""What the versions of torch differ in, as far as the process group must know it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch._C._dynamo.eval_frame import set_eval_frame

M = TypeVar("M", bound=type)


def not_compiled(cls: M) -> M:
    """Have ``torch.compile`` leave methods that torch calls alone: compiled code ends before a call, and goes on after.

    This is what ``torch.compiler.disable`` does, which would import the compiler where nobody compiles.
    """
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and (not name.startswith("_") or name.endswith("_base")):
            setattr(cls, name, _not_compiled(method))
    return cls


def _not_compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return method(*args, **named)
        finally:
            set_eval_frame(before)

    vars(call)["_torchdynamo_disable"] = True  # by which torch knows it
    return call


HAVE_RECORDERS: Final[set[str]] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
"""The backends that record their calls themselves. torch 2.15 attaches its recorder to groups of others, which must be
written in C++; those before it have no such recorder."""

SPLITS: Final = bool(HAVE_RECORDERS)
"""Whether ``dist.split_group`` takes groups that are written in Python, and without a GPU: from torch 2.15 on."""
