"""What measurements were taken on and with."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np

import mpiagg
from mpiagg.launch import job


def facts() -> dict[str, Any]:
    """Return the machine and the versions of the software, for a rank of a job; torch's, if it takes part."""
    torch = sys.modules.get("torch")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "mpi": job.vendor(),
        "mpiagg": mpiagg.__version__,
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "torch": None if torch is None else str(torch.__version__),
    }


def _cpu_model() -> str:
    """Return what the processor calls itself."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
