"""A real Slurm with two nodes on this machine, and jobs on it; skipped with the reason where there can be none."""

import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs import MARK, all_gone, end_processes

from mpiagg.launch import start as launch

TOP = Path(__file__).parents[2]
SCRIPT = TOP / "slurm" / "local_cluster"
JOB_SECONDS = 120
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
TYPES = {"MPICH": "pmi2", "Open MPI": "pmix"}
"""What srun calls the way in which it starts the ranks of a library."""


@pytest.fixture(scope="session")
def local_cluster():
    """Return the script as a module, if this machine can do what it does."""
    loader = importlib.machinery.SourceFileLoader("local_cluster", str(SCRIPT))
    loaded = importlib.util.module_from_spec(importlib.util.spec_from_loader("local_cluster", loader))
    loader.exec_module(loaded)
    try:
        loaded.check(2, 4)
    except loaded.Failure as failure:
        pytest.skip(f"no Slurm can be started here: {failure}")
    return loaded


class Job(NamedTuple):
    """A job that has ended."""

    state: str
    restarts: int
    printed: str


class Cluster:
    """A cluster for tests: commands of Slurm, in an environment of which jobs take what a user would have set."""

    def __init__(self, configuration, folder):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        path = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
        self.environment = launch.environment(
            {
                "SLURM_CONF": configuration,
                "VENV": sys.prefix,
                "PATH": path,
                MARK: self.mark,
                "OUT": str(folder),
                "MPIR_CVAR_CH4_NETMOD": "ofi",  # docs/slurm.md says why
            }
        )

    def run(self, *words, seconds=JOB_SECONDS, status=0, **environment):
        """Run a command, which has to end with a status, and return what it has printed."""
        done = subprocess.run(
            words,
            env={**self.environment, **environment},
            cwd=TOP,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert status is None or done.returncode == status, done.stdout
        return done.stdout

    def submit(self, script, *arguments, options=(), **environment):
        """Submit a script as from the top of the repository, and return the job's number."""
        output = f"--output={self.folder}/%j.out"
        words = ("sbatch", "--parsable", output, *options, str(TOP / "slurm" / script), *arguments)
        return self.run(*words, **environment).strip()

    def printed(self, job):
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def facts(self, job, name):
        """Return what Slurm says of a job under a name, for each task of an array."""
        return re.findall(rf"\b{name}=(\S+)", self.run("scontrol", "show", "job", "--oneliner", job))

    def ended(self, job):
        return set(self.facts(job, "JobState")) <= ENDED

    def wait_until(self, what, job):
        """Wait until something is so of a job, and fail if the job ends before."""
        deadline = time.monotonic() + JOB_SECONDS
        while not what():
            over = self.ended(job)
            if what():
                return
            assert not over, self.printed(job)
            assert time.monotonic() < deadline, f"{self.run('scontrol', 'show', 'job', job)}\n{self.printed(job)}"
            time.sleep(0.1)

    def wait(self, job):
        """Wait until a job has ended, with all its tasks if it is an array."""
        self.wait_until(lambda: self.ended(job), job)
        (state,) = set(self.facts(job, "JobState"))
        return Job(state, int(self.facts(job, "Restarts")[0]), self.printed(job))


@pytest.fixture(scope="session")
def configuration(local_cluster):
    """Return where the configuration of a running cluster is."""
    started = subprocess.run([SCRIPT, "start"], capture_output=True, text=True, check=False, timeout=100)
    assert started.returncode == 0, started.stderr
    path = started.stdout.strip().removeprefix("export SLURM_CONF=")
    yield path
    stopped = subprocess.run(
        [SCRIPT, "stop", Path(path).parent], capture_output=True, text=True, check=False, timeout=100
    )
    assert stopped.returncode == 0, stopped.stderr
    assert not Path(path).exists()
    assert local_cluster.keepers(Path(path).parent) == {}


@pytest.fixture
def slurm(configuration, tmp_path):
    """Return the cluster; when a test is over, no process of its jobs may be left."""
    cluster = Cluster(configuration, tmp_path)
    yield cluster
    cluster.run("scancel", "--partition=all")
    left = not all_gone(cluster.mark, seconds=20)
    end_processes(cluster.mark)
    assert not left, "a job has left processes behind"


@pytest.fixture(scope="session")
def mpi_type(configuration):
    """Return the word for ``srun --mpi`` of the MPI library that mpi4py loads."""
    vendor = launch.mpi_vendor()
    if vendor not in TYPES:
        pytest.skip(f"how srun starts ranks of {vendor} is not known here")
    tried = subprocess.run(
        [shutil.which("srun"), f"--mpi={TYPES[vendor]}", "true"],
        env={**os.environ, "SLURM_CONF": configuration},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "can not load PMIx library" in tried.stderr:
        pytest.skip("srun --mpi=pmix finds no libpmix.so; on Debian: apt-get install libpmix-dev")
    assert tried.returncode == 0, tried.stderr
    return TYPES[vendor]
