"""What a method of a process group is given beside tensors: torch's options, or what stands for them one by one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch.distributed as dist

NOT_SET: Final = timedelta(milliseconds=-1)
"""How torch says that a call has no timeout of its own."""


class Options(NamedTuple):
    """What torch's own options say."""

    reduceOp: Any = dist.ReduceOp.SUM  # noqa: N815 - torch's name
    rootRank: int = 0  # noqa: N815 - torch's name
    timeout: timedelta = NOT_SET
    asyncOp: bool = True  # noqa: N815 - torch's name


_BY_KIND: Final = {
    int: "rootRank",
    timedelta: "timeout",
    dist.ReduceOp: "reduceOp",
    dist.ReduceOp.RedOpType: "reduceOp",
}


def read(*given: Any, **named: Any) -> Any:
    """Return the options that a method was given: as torch's object, or a root, an op and a timeout.

    Raises
    ------
    TypeError
        For what is none of these.
    """
    values = [value for value in (*given, *named.values()) if value is not None]
    if len(values) == 1 and hasattr(values[0], "timeout"):
        return values[0]
    found: dict[str, Any] = {}
    for value in values:
        name = _BY_KIND.get(type(value))
        if name is None or name in found:
            raise TypeError(f"a collective takes options, or a root, an op and a timeout; not {value!r}")
        found[name] = value
    return Options(**found)
