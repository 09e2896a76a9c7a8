"""What measurements were taken on and with."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import mpi4py
import numpy as np

import mpiagg
from mpiagg.common.machine import processor
from mpiagg.launch import job


def facts() -> dict[str, Any]:
    """Return the machine and the versions of the software, for a rank of a job; torch's, if it takes part."""
    torch = sys.modules.get("torch")
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "mpi": job.vendor(),
        "mpiagg": mpiagg.__version__,
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "torch": None if torch is None else str(torch.__version__),
    }
