"""The cluster on this machine: what it refuses, and that nothing of it stays."""

import os
import subprocess
import uuid
from pathlib import Path

import pytest
from jobs import MARK, all_gone, end_processes, processes

SCRIPT = Path(__file__).parents[2] / "slurm" / "local_cluster"


def run(*words, **environment):
    return subprocess.run(
        [SCRIPT, *words],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.usefixtures("local_cluster")
class TestOnThisMachine:
    def test_runs_a_command_and_leaves_nothing(self):
        mark = uuid.uuid4().hex
        # A job that would go on for long, and a process of it that has left the job's session and its parent.
        job = "#!/bin/sh\nsetsid sleep 1000 &\nsleep 1000\n"
        script = f"""
            sbatch --output=/dev/null --parsable <<'END'\n{job}END
            while [ "$(squeue --noheader --format=%T)" != RUNNING ]; do sleep 0.1; done
            sinfo --noheader --Node --format="%N %c"
            echo "$SLURM_CONF"
            exit 7
        """
        done = run("run", "--nodes", "3", "--cpus", "5", "sh", "-c", script, **{MARK: mark})
        assert done.returncode == 7, done.stderr
        *told, configuration = done.stdout.splitlines()
        assert told == ["1", "node1 5", "node2 5", "node3 5"]
        assert all_gone(mark, seconds=0), processes(mark)
        assert not Path(configuration).parent.exists()

    def test_a_daemon_that_does_not_start_is_told_with_its_log(self, tmp_path):
        mark = uuid.uuid4().hex
        broken = tmp_path / "slurmctld"
        broken.write_text("#!/bin/sh\necho this is broken\nexit 1\n")
        broken.chmod(0o755)
        done = run("start", "here", cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", **{MARK: mark})
        assert done.returncode == 1
        assert "a daemon has ended" in done.stderr
        assert "this is broken" in done.stderr
        try:
            assert all_gone(mark, seconds=0), processes(mark)
        finally:
            end_processes(mark)

    def test_a_folder_that_the_user_names_is_kept(self, tmp_path):
        # In /tmp, for Slurm wants a short path.
        folder = tmp_path / "c"
        started = run("start", "--nodes", "1", str(folder))
        assert started.returncode == 0, started.stderr
        try:
            again = run("start", str(folder))
            assert again.returncode == 1
            assert "is not empty" in again.stderr
        finally:
            stopped = run("stop", str(folder))
        assert stopped.returncode == 0, stopped.stderr
        assert (folder / "slurmctld.log").exists()
        assert run("stop", str(folder)).returncode == 0

    @pytest.mark.parametrize(
        ("words", "complaint"),
        [
            (["start", "--nodes", "0"], "1 to 64 nodes"),
            (["start", "--cpus", "0"], "1 to 1024 CPUs"),
            (["run"], "no command to run"),
            (["start", "/tmp/a name with spaces"], "without spaces"),
            (["stop", "/nowhere"], "holds no cluster"),
        ],
    )
    def test_bad_input_is_told(self, words, complaint):
        done = run(*words)
        assert done.returncode == 1
        assert complaint in done.stderr


def test_lacking_programs_are_told(tmp_path):
    (tmp_path / "python3").symlink_to("/usr/bin/env")
    done = subprocess.run(
        [os.sys.executable, SCRIPT, "run", "true"], env={"PATH": ""}, capture_output=True, text=True, check=False
    )
    print(done.stderr)
