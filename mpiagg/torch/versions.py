"""What the versions of torch differ in, as far as the process group must know it."""

from __future__ import annotations

from typing import Final

import torch.distributed as dist

HAVE_RECORDERS: Final[set[str]] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
"""The backends that record their calls themselves. torch 2.15 attaches its recorder to groups of others, which must be
written in C++; those before it have no such recorder."""

SPLITS: Final = bool(HAVE_RECORDERS)
"""Whether ``dist.split_group`` takes groups that are written in Python, and without a GPU: from torch 2.15 on."""
