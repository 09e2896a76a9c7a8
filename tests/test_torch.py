"""Start MPI jobs whose ranks run the tests in tests/mpi_torch, where torch is installed."""

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import run_job
from thorough import slow

from mpiagg.launch import start as launch

TESTS = Path(__file__).parent / "mpi_torch"
DOCS = Path(__file__).parents[1] / "docs"
NEEDED = {"accelerate_loop": "accelerate", "lightning_ddp": "lightning"}
"""What examples need beside torch."""
LEAST = {"sharded": (2, 10), "tensor_parallel": (2, 6)}
"""The torch that examples need: with FSDP2 in memory of a process group, and with DTensor."""


def run_two_ranks(path, **keywords):
    """Return what has become of a job of two ranks that run a script."""
    return subprocess.run(
        launch.command(2, ["-m", "mpi4py", str(path)]),
        env=launch.environment({"OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **keywords,
    )


@pytest.mark.skipif(find_spec("torch") is None, reason="torch, an extra, is not installed")
@pytest.mark.parametrize("ranks", [1, 4, *slow(2, 3)])
def test_all_ranks_pass(tmp_path, ranks):
    if complaints := run_job(tmp_path, ranks, TESTS).complaints():
        pytest.fail(complaints, pytrace=False)


@pytest.mark.skipif(find_spec("torch") is None, reason="torch, an extra, is not installed")
@pytest.mark.parametrize("path", sorted((DOCS / "examples" / "torch").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(path):
    package = NEEDED.get(path.stem, "torch")
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if tuple(map(int, version("torch").split(".")[:2])) < (least := LEAST.get(path.stem, (2, 1))):
        pytest.skip(f"it needs torch {least[0]}.{least[1]}")
    done = run_two_ranks(path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") > 2


SCRIPT = """
import sys
import numpy as np
import mpiagg
with mpiagg.DDP([np.ones(3)]) as ddp:
    ddp.broadcast_parameters()
    ddp.sync_gradients()
print("torch" in sys.modules)
"""


def test_arrays_are_trained_without_torch():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


RAISES = """
import torch.distributed as dist
import mpiagg.torch

mpiagg.torch.init_process_group()
if dist.get_rank() == 1:
    raise ValueError("nobody catches it")
dist.barrier()
"""

TIMES_OUT = """
from datetime import timedelta
from mpi4py import MPI
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import mpiagg.torch

mpiagg.torch.init_process_group()
ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
loss = ddp(torch.ones(1, 2)).sum()
dist.barrier()
dist.group.WORLD._set_default_timeout(timedelta(seconds=0.5))
if MPI.COMM_WORLD.rank == 0:
    try:
        loss.backward()
    except RuntimeError as error:
        print("raised:", str(error)[:200])
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.skipif(find_spec("torch") is None, reason="torch, an extra, is not installed")
def test_the_traceback_of_an_uncaught_error_is_printed(tmp_path):
    """The hook of torch.distributed has what ours prints in memory, and would print it after our end."""
    path = tmp_path / "script.py"
    path.write_text(RAISES)
    done = run_two_ranks(path, cwd=tmp_path)
    assert done.returncode != 0
    assert "rank 1 of 2" in done.stderr
    assert 'script.py", line 7, in <module>' in done.stderr


@pytest.mark.skipif(find_spec("torch") is None, reason="torch, an extra, is not installed")
def test_an_error_of_a_collective_is_one_of_torchs_own_ddp(tmp_path):
    """Its reducer, in C++, takes the tensors of a future that has failed in Python alone."""
    path = tmp_path / "script.py"
    path.write_text(TIMES_OUT)
    done = run_two_ranks(path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "raised: " in done.stdout
    assert "Timed out" in done.stdout
