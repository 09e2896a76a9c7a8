"""What ``torch.compile`` leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=type)


def not_compiled(function: F) -> F:
    """Have ``torch.compile`` leave a function alone: compiled code ends before a call, and goes on after.

    This is what ``torch.compiler.disable`` does, which would import the compiler where nobody compiles.
    """

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        before = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **named)
        finally:
            eval_frame.set_eval_frame(before)

    vars(call)["_torchdynamo_disable"] = True  # by which torch knows it where it is called
    _skip(cast("FunctionType", call).__code__)  # and where it runs
    return cast("F", call)


def _skip(code: CodeType) -> None:
    """Have the compiler leave a function's code alone, but not what that calls."""
    names: Any = eval_frame
    if hasattr(names, "skip_code"):  # in older versions of torch
        names.skip_code(code)
    elif hasattr(names, "set_code_exec_strategy"):
        actions = names._FrameAction  # noqa: SLF001 - torch's only names
        names.set_code_exec_strategy(code, names._FrameExecStrategy(actions.SKIP, actions.DEFAULT))  # noqa: SLF001 - torch has no public name for it


def methods_not_compiled(cls: M) -> M:
    """Have ``torch.compile`` leave the methods of a class alone that torch calls."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and (not name.startswith("_") or name.endswith("_base")):
            setattr(cls, name, not_compiled(method))
    return cls
