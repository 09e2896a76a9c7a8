"""MPI jobs whose ranks share one GPU and run those tests in tests/gpu that are for ranks."""

import subprocess
import sys
from functools import cache
from pathlib import Path

from jobs import JOB_SECONDS, run_job

TESTS = Path(__file__).parent / "gpu"

GPU = "from mpiagg.arrays import find_device; find_device('cuda')"
TORCH = "import torch; assert torch.cuda.is_available()"


@cache
def trouble(script):
    """Return why a script fails, or None. Other processes look at GPUs: this one stays without."""
    looked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    return (looked.stderr.strip().splitlines() or ["?"])[-1] if looked.returncode else None


def run_gpu_job(folder, ranks, seconds=JOB_SECONDS):
    """Run the tests on a number of ranks, all of them though some fail, and return the job."""
    left_out = ["test_device.py"]  # which needs no ranks
    if trouble(TORCH):
        left_out += [path.name for path in TESTS.glob("test_torch_*.py")]
    assert all((TESTS / name).exists() for name in left_out)
    return run_job(folder, ranks, TESTS, stop=False, seconds=seconds, leave_out=[TESTS / name for name in left_out])
