"""Start MPI jobs whose ranks run the tests in tests/mpi_jax, where JAX is installed."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import run_job
from thorough import slow

from mpiagg.launch import start as launch

TESTS = Path(__file__).parent / "mpi_jax"
PAGE = Path(__file__).parents[1] / "docs" / "jax.md"
pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="JAX, an extra, is not installed")


@pytest.mark.parametrize("ranks", [1, 3, *slow(2, 4)])
def test_all_ranks_pass(tmp_path, ranks):
    if complaints := run_job(tmp_path, ranks, TESTS).complaints():
        pytest.fail(complaints, pytrace=False)


def started(tmp_path, script):
    path = tmp_path / "script.py"
    path.write_text(script)
    return subprocess.run(
        launch.command(2, ["-m", "mpi4py", str(path)]),
        env=launch.environment({"MPIAGG_DUMP_DIR": str(tmp_path)}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


SCRIPT = """
import jax, jax.numpy as jnp
from mpi4py import MPI
import mpiagg.jax
rank = MPI.COMM_WORLD.rank
f = jax.jit(lambda x: mpiagg.jax.allreduce(x))
f(jnp.ones(5)).block_until_ready()
f(jnp.ones(OTHER)).block_until_ready()
print("went on")
"""


def test_ranks_that_disagree_inside_jit_end_the_job_with_the_reason(tmp_path):
    done = started(tmp_path, SCRIPT.replace("OTHER", "3 + rank"))
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "MismatchError" in said
    assert "rank 1" in said
    assert "went on" not in said


def test_ranks_that_agree_go_on(tmp_path):
    done = started(tmp_path, SCRIPT.replace("OTHER", "3"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("went on") == 2


def test_the_script_of_the_page_learns_the_weights(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    done = started(tmp_path, script)
    assert done.returncode == 0, done.stderr
    learned = [float(each) for each in done.stdout.strip(" []\n").split()]
    assert [round(each, 3) for each in learned] == [1, 2, 3]


def test_a_rank_that_raises_beside_a_compiled_program_is_named(tmp_path):
    done = started(tmp_path, SCRIPT.replace("f(jnp.ones(OTHER))", "assert rank == 0, 'no data'\nf(jnp.ones(3))"))
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "rank 1" in said
    assert "no data" in said
    assert "went on" not in said
