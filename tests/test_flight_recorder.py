"""Recordings of real ranks, analysed by torch's own ``torchfrtrace``."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from mpiagg.launch import start as launch

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("torch.distributed.flight_recorder") is None,
    reason="torch with its analyser of flight records, an extra, is not installed",
)

SCRIPT = """
import sys, datetime
import torch, torch.distributed as dist
import mpiagg.torch

mpiagg.torch.init_process_group(timeout=datetime.timedelta(seconds=2))
rank = dist.get_rank()
x = torch.ones(4, 3)
dist.all_reduce(x)
dist.broadcast(x, 0)
dist.all_gather_into_tensor(torch.empty(8, 3), x)
dist.all_gather([torch.empty(2), torch.empty(3)], torch.ones(2 + rank))
dist.all_to_all_single(torch.empty(3), torch.ones(3), *([[1, 2], [1, 2]], [[2, 1], [2, 1]])[rank])
dist.all_reduce(torch.ones(3).to_sparse())
dist.barrier()
try:
    if sys.argv[1] == "missing" and rank == 0:
        dist.all_reduce(torch.ones(7))
    elif sys.argv[1] == "size":
        dist.all_reduce(torch.ones(7 + rank))
except Exception as error:
    print(type(error).__name__)
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
from mpiagg.transport.process import ending
ending().dump("asked")
MPI.COMM_WORLD.Barrier()
import os; os._exit(0)
"""


@pytest.mark.parametrize(
    ("fault", "told", "untold"),
    [
        ("none", [], ["Not all ranks", "has errors", "rror"]),
        ("missing", ["Not all ranks joining collective", "nccl:all_reduce", "missing ranks: {1}", "[[7]]"], []),
        ("size", ["has errors", "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH", "[[8]]"], []),
    ],
)
def test_torchfrtrace_names_who_is_missing_or_differs(tmp_path, fault, told, untold):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = launch.environment({"OMP_NUM_THREADS": "1", "MPIAGG_RECORD_DIR": str(tmp_path / "recordings")})

    def run(*words):
        done = subprocess.run(
            words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run(*launch.command(2, ["-m", "mpi4py", str(tmp_path / "script.py"), fault]))
    assert "torchfrtrace" in run(sys.executable, "-m", "mpiagg", "trace", "recordings", "--torch", "flight")
    assert sorted(path.name for path in (tmp_path / "flight").iterdir()) == ["rank_0", "rank_1"]
    said = run(sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "flight", "-v")
    assert "all_to_all" in said
    for words in told:
        assert words in said
    for words in untold:
        assert words not in said
