"""The cluster on this machine: what it refuses, and that nothing of it stays."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from jobs import MARK, end_processes, processes

SCRIPT = Path(__file__).parents[2] / "slurm" / "local_cluster"
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("local_cluster")]


@pytest.fixture
def run():
    """Return a function that runs the script; whatever it has started must be gone in the end."""
    mark = uuid.uuid4().hex

    def run(*words, **environment):
        return subprocess.run(
            [sys.executable, SCRIPT, *words],
            env={**os.environ, **environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    yield run
    left = processes(mark)
    end_processes(mark)
    assert left == []


@pytest.fixture
def folder():
    """Return a short path to a folder that is not there yet."""
    parent = tempfile.mkdtemp()
    yield Path(parent, "cluster")
    shutil.rmtree(parent)


def test_runs_a_command_and_leaves_nothing(run):
    # A job that would go on for long, with a process that has left the job's session and its parent.
    script = """
        printf '#!/bin/sh\nsetsid sleep 1000 &\nsleep 1000\n' | sbatch --output=/dev/null --parsable
        while [ "$(squeue --noheader --format=%T)" != RUNNING ]; do sleep 0.1; done
        sinfo --noheader --Node --format="%N %c"
        echo "$SLURM_CONF"
        exit 7
    """
    done = run("run", "--nodes", "3", "--cpus", "5", "sh", "-c", script)
    assert done.returncode == 7, done.stderr
    *told, configuration = done.stdout.splitlines()
    assert told == ["1", "node1 5", "node2 5", "node3 5"]
    assert not Path(configuration).parent.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_all(run, number):
    # The command, which would go on for long, sends the signal when the cluster is up.
    script = f'echo "$SLURM_CONF" >&2; kill -{number:d} $PPID; exec srun sleep 1000'
    done = run("run", "--nodes", "1", "--", "sh", "-c", script)
    assert done.returncode == 128 + number
    assert "Traceback" not in done.stderr
    assert not Path(done.stderr.splitlines()[0]).parent.exists()


def test_what_the_command_leaves_is_ended_too(run):
    # It holds the pipes of its standard streams, so that nobody would see their end.
    done = run("run", "--nodes", "1", "sh", "-c", "setsid sleep 1000 & exit 3")
    assert done.returncode == 3, done.stderr


def test_starts_and_stops_in_a_folder_that_is_kept(run, folder):
    started = run("start", "--nodes", "1", str(folder))
    assert started.returncode == 0, started.stderr
    assert started.stdout == f"export SLURM_CONF={folder}/slurm.conf\n"
    again = run("start", str(folder))
    stopped = run("stop", str(folder))
    assert again.returncode == 1
    assert "is not empty" in again.stderr
    assert stopped.returncode == 0, stopped.stderr
    assert (folder / "slurmctld.log").exists()
    assert run("stop", str(folder)).returncode == 0


def test_a_node_may_fail_and_the_others_go_on(run):
    script = """
        pkill -KILL -f "[s]lurmd -D -N node2 -f $SLURM_CONF"  # and not this command
        while ! sinfo --noheader --Node --format="%N %T" | grep -q "node2 down"; do sleep 0.2; done
        srun --nodelist=node1 hostname
        sbatch --nodes=2 --output=/dev/null --wrap=true --quiet
        squeue --noheader --format=%T --states=PENDING
    """
    done = run("run", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["node1", "PENDING"], done.stderr


def test_nodes_know_each_others_names(run):
    done = run("run", "--nodes", "3", "srun", "--nodes=3", "getent", "hosts", "node2")
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == 3 * [["127.0.0.1", "node1", "node2", "node3"]]


def test_a_daemon_that_does_not_start_is_told_with_its_log(run, tmp_path, folder):
    broken = tmp_path / "slurmctld"
    broken.write_text("#!/bin/sh\necho this is broken\nexit 1\n")
    broken.chmod(0o755)
    done = run("start", str(folder), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert "a daemon has ended" in done.stderr
    assert "-- slurmctld.log\nthis is broken" in done.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["start", "--nodes", "0"], "1 to 64 nodes"),
        (["start", "--cpus", "0"], "1 to 1024 CPUs"),
        (["start", "/nowhere/a name with spaces"], "without spaces"),
        (["run"], "no command to run"),
        (["stop", "/nowhere"], "holds no cluster"),
    ],
)
def test_bad_input_is_told(run, words, complaint):
    done = run(*words)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert not Path("/nowhere").exists()


def test_lacking_programs_are_told_with_their_packages(run):
    done = run("start", PATH="/nowhere")
    assert done.returncode == 1
    assert "found no sbatch, unshare" in done.stderr
    assert "apt-get install" in done.stderr
    assert "slurm-wlm" in done.stderr
