"""A job whose optimizer's state does not fit what one rank may have trains on four ranks."""

import re
import subprocess
import sys

import pytest

from mpiagg.launch import start as launch

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set as Linux has them"),
]

SCRIPT = """
import re, resource, sys
from pathlib import Path
import numpy as np
from mpi4py import MPI
import mpiagg

how = sys.argv[1]
say = lambda text: (sys.stdout.write(text + "\\n"), sys.stdout.flush())
weights = [np.zeros(2**16, np.float32) for _ in range(64)]  # 16 MiB, of which Adam keeps 32 MiB
gradients = [np.ones(2**16, np.float32) for _ in range(64)]
mpiagg.allreduce(np.ones(4))  # what MPI and the watching need is there
used = int(re.search(r"VmData:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 30 * 2**20,) * 2)
try:
    if how == "whole":
        optimizer = mpiagg.optimizers.Adam()
        optimizer.step(weights, gradients)
    else:
        with mpiagg.Sharded(weights, mpiagg.optimizers.Adam(1.0), stage=int(how), bucket_bytes=2**20) as training:
            for _ in range(3):
                training.step(gradients)
            say(f"state {training.memory()['state']}")
    say(f"trained {all(abs(x + 3).max() < 1e-5 for x in weights)}")
except MemoryError:
    say("no memory")
"""


def run(ranks, how, folder):
    """Return what a job on some ranks has printed."""
    script = folder / "limited.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        launch.command(ranks, ["-m", "mpi4py", str(script), how]),
        env=launch.environment({"MPIAGG_DUMP_DIR": str(folder), "MPIAGG_ABORT": "0"}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("how", ["1", "2"])
def test_four_ranks_train_what_one_cannot(how, tmp_path):
    printed, said = run(4, how, tmp_path)
    assert printed.count("trained True") == 4, said
    assert all(8 * 2**20 <= int(x) <= 9 * 2**20 for x in re.findall(r"state (\d+)", printed)), said
    printed, said = run(1, how, tmp_path)
    assert "trained" not in printed, said
    assert "no memory" in said, said


def test_the_limit_is_one_for_a_whole_optimizer(tmp_path):
    """A control: four ranks that keep the whole state each come to the same limit."""
    printed, said = run(4, "whole", tmp_path)
    assert printed.count("no memory") == 4, said
