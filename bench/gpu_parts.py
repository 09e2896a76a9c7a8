"""What ranks measure for ``bench/gpu.py``: a part of it, by name, whose rows are saved as they come.

    mpiexec -n 2 python -m bench.gpu_parts PART FILE.json [--device cuda] [--quick] [--seconds 60]

It runs at the top of the repository.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import click

from bench.gpu_setting import CHUNK, KIB, MIB, Setting
from mpiagg.cli import job, machine
from mpiagg.errors import DeviceError
from mpiagg.placement import bind_device

SIZES = [KIB * 4**power for power in range(11)]
"""1 KiB to 1 GiB."""

SHORT = [4 * KIB * 2**power for power in range(9)]
"""4 KiB to 1 MiB: where vectors go by way of the host, or by messages."""

PIECED = [16 * MIB, 64 * MIB, 256 * MIB]
PIECES = [256 * KIB * 2**power for power in range(6)]
"""256 KiB to 8 MiB."""
