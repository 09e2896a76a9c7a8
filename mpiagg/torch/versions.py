"""What the versions of torch differ in, as far as the process group must know it."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist


class _Done(dist.Work):  # type: ignore[misc]  # mypy sees no classes of torch's where torch is not installed
    """Work with a future, by which it is known."""

    def get_future(self) -> Any:
        """Return a future."""
        return torch.futures.Future()


class _Group(dist.ProcessGroup):  # type: ignore[misc]  # as above
    """A group that hands work to torch."""

    def barrier(self, *_: object) -> Any:
        """Return work that nobody else refers to."""
        return _Done()


def _torch_keeps_works() -> bool:
    """Whether what torch's C++ code is given by a group written in Python stays what it is, as from torch 2.7 on.

    Before that it ends when the method returns, if nobody refers to it, and who waits for it waits for ever.
    """
    try:
        dist.ProcessGroup.barrier(_Group(0, 1)).get_future()
    except RuntimeError:
        return False
    return True


KEPT: Final[set[Any] | None] = None if _torch_keeps_works() else set()
"""The works for which nobody has waited or asked yet, where torch does not keep them; None where it does."""

HAVE_RECORDERS: Final[set[str]] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
"""The backends that record their calls themselves. torch 2.15 attaches its recorder to groups of others, which must be
written in C++; those before it have no such recorder."""

SPLITS: Final = bool(HAVE_RECORDERS)
"""Whether ``dist.split_group`` takes groups that are written in Python, and without a GPU: from torch 2.15 on."""
