"""Ranks that srun starts, on two nodes."""

import json
import re

import pytest

pytestmark = pytest.mark.thorough

FACTS = """
import json, os, sys
from pathlib import Path
import numpy as np
from mpi4py import MPI
import mpiagg
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
facts = {
    "slurm": os.environ["SLURMD_NODENAME"],
    "processor": MPI.Get_processor_name(),
    "node": node.allgather(world.rank),
    "sum": float(mpiagg.allreduce(np.array([world.rank + 1.0]))[0]),
    "hierarchical": mpiagg.allreduce(np.arange(100_000) * world.rank, algorithm="hierarchical").tolist()[-1],
}
Path(sys.argv[1], f"{world.rank}.json").write_text(json.dumps(facts))
node.Free()
"""

LEAVES = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
import mpiagg
world = MPI.COMM_WORLD
mpiagg.allreduce(np.ones(1))
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else os._exit(3)
mpiagg.allreduce(np.ones(1))
print("this cannot be")
"""


@pytest.fixture
def srun(slurm, mpi_type, tmp_path):
    """Return a function that runs a script on two nodes."""

    def srun(script, *arguments, ranks=2, **keywords):
        path = tmp_path / "script.py"
        path.write_text(script)
        words = ["srun", f"--mpi={mpi_type}", "--kill-on-bad-exit=1", "--nodes=2", f"--ntasks-per-node={ranks}"]
        return slurm.run(*words, "python", str(path), *arguments, **keywords)

    return srun


def test_ranks_are_on_two_nodes(srun, tmp_path):
    srun(FACTS, str(tmp_path))
    for rank in range(4):
        name = f"node{1 + rank // 2}"
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "slurm": name,
            "processor": name,
            "node": [0, 1] if rank < 2 else [2, 3],
            "sum": 10.0,
            "hierarchical": 6 * 99_999,
        }


def test_demo_runs_across_nodes(srun, tmp_path):
    script = "import sys, mpiagg.cli; sys.exit(mpiagg.cli.main())"
    printed = srun(script, "demo", "--epochs", "1", "--plot", str(tmp_path / "loss.png"), ranks=1)
    assert re.search(r"largest difference\W+", printed), printed


@pytest.mark.parametrize("how", ["killed", "exits"])
def test_a_rank_that_dies_ends_the_step(srun, how):
    # Without --kill-on-bad-exit the others wait for it until the job's time is up: there is no such limit here.
    printed = srun(LEAVES, how, status=None)
    assert "this cannot be" not in printed
    # Open MPI's rank 0 may be found dead together with rank 1.
    assert re.search(r"tasks? \S*1: (Killed|Exited with exit code 3)", printed), printed
