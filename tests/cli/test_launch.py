"""Starting ranks, and telling how this process was started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from mpiagg.launch import start as launch

HELLO = """
import sys
from mpi4py import MPI
from mpiagg.launch import start as launch
sys.stdout.write(f"{MPI.COMM_WORLD.size} {launch.launched_ranks()}\\n")
"""


@pytest.fixture
def bare(monkeypatch):
    """An environment that no launcher has touched, with nothing remembered of another one."""
    for variable in launch.launchers.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("MPIAGG_MPIEXEC", raising=False)
    launch.mpi_vendor.cache_clear()
    launch.mpiexec_of.cache_clear()
    yield monkeypatch
    launch.mpi_vendor.cache_clear()
    launch.mpiexec_of.cache_clear()


def fake_mpiexec(folder, words):
    folder.mkdir()
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\necho '{words}'\n")
    path.chmod(0o755)
    return path


def test_no_launcher_means_no_ranks(bare):  # noqa: ARG001 - it sets the scene
    assert launch.launched_ranks() is None


@pytest.mark.parametrize("variable", launch.launchers.VARIABLES)
def test_every_launcher_is_known_by_its_variable(bare, variable):
    bare.setenv(variable, "4")
    assert launch.launched_ranks() == 4
    bare.setenv(variable, "many")
    assert launch.launched_ranks() is None


def test_the_vendor_is_one_that_mpi4py_names(bare):  # noqa: ARG001 - it sets the scene
    vendor = launch.mpi_vendor()
    script = "from mpi4py import MPI; print(MPI.get_vendor()[0])"
    asked = subprocess.run(
        launch.command(1, ["-c", script]),
        env=launch.environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert asked.stdout.strip() == vendor


def test_no_mpi_library_is_told(bare, tmp_path):
    # A package of that name without the module stands for an mpi4py that finds no library.
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass")
    bare.setenv("PYTHONPATH", str(tmp_path))
    # The error, and not the traceback before it, nor a part of that.
    with pytest.raises(
        click.ClickException, match=r"mpi4py finds no MPI library\. .*pip install mpich.* ImportError: "
    ):
        launch.mpi_vendor()


def test_the_one_named_in_the_environment_is_taken(bare):
    bare.setenv("MPIAGG_MPIEXEC", "/bin/sh")
    assert launch.mpiexec() == "/bin/sh"
    assert launch.command(3, ["a.py"]) == ["/bin/sh", "-n", "3", sys.executable, "a.py"]


def test_one_that_is_named_and_is_no_program_is_told(bare):
    bare.setenv("MPIAGG_MPIEXEC", "/somewhere/mpiexec")
    with pytest.raises(click.ClickException, match="MPIAGG_MPIEXEC='/somewhere/mpiexec' names no program"):
        launch.mpiexec()


def test_an_mpiexec_of_another_library_is_passed_over(bare, tmp_path):
    wrong = fake_mpiexec(tmp_path / "wrong", "mpirun (Open MPI) 5.0")
    right = fake_mpiexec(tmp_path / "right", "HYDRA build details:")
    bare.setattr(sys, "executable", str(tmp_path / "python"))
    bare.setattr(sys, "prefix", str(tmp_path))
    bare.setenv("PATH", f"{wrong.parent}:{right.parent}:{os.environ['PATH']}")
    assert launch.mpiexec_of("MPICH") == str(right)
    launch.mpiexec_of.cache_clear()
    assert launch.mpiexec_of("Open MPI") == str(wrong)
    # Of a library that we do not know any is taken.
    assert launch.mpiexec_of("Some MPI") == str(wrong)


def test_no_mpiexec_is_told(bare, tmp_path):
    bare.setattr(sys, "executable", str(tmp_path / "python"))
    bare.setattr(sys, "prefix", str(tmp_path))
    bare.setenv("PATH", str(tmp_path))
    with pytest.raises(click.ClickException, match=r"found no mpiexec of MPICH.*MPIAGG_MPIEXEC"):
        launch.mpiexec_of("MPICH")


def test_one_that_does_not_start_is_passed_over(bare, tmp_path):
    broken = fake_mpiexec(tmp_path / "broken", "")
    broken.write_text("#!/does/not/exist\n")
    bare.setattr(sys, "executable", str(tmp_path / "python"))
    bare.setattr(sys, "prefix", str(tmp_path))
    bare.setenv("PATH", str(broken.parent))
    with pytest.raises(click.ClickException, match="found no mpiexec"):
        launch.mpiexec_of("MPICH")


def test_the_environment_is_friendly_but_yields(bare):
    bare.delenv("OMP_NUM_THREADS", raising=False)
    assert launch.environment()["OMP_NUM_THREADS"] == "1"
    bare.setenv("OMP_NUM_THREADS", "7")
    assert launch.environment()["OMP_NUM_THREADS"] == "7"
    assert (
        launch.environment({"OMP_NUM_THREADS": "9", "MORE": "x"}).items()
        >= {"OMP_NUM_THREADS": "9", "MORE": "x"}.items()
    )
    assert launch.environment().items() >= os.environ.items()


KILLED_BEFORE = """
folder=$TMPDIR/ompi.$$ && mkdir -m 700 $folder && touch $folder/pmix.$(hostname).tool && exec "$@"
"""
"""Leaves what a launcher of this process id would have left that was killed, and becomes one."""


@pytest.mark.skipif(launch.mpi_vendor() != "Open MPI", reason="MPICH's launcher leaves no files")
def test_a_job_starts_where_a_killed_launcher_has_left_its_files(bare, tmp_path):  # noqa: ARG001 - it sets the scene
    command = ["/bin/sh", "-c", KILLED_BEFORE, "sh", *launch.command(1, ["-c", ""])]
    env = launch.environment({"TMPDIR": str(tmp_path)})
    assert subprocess.run(command, env=env, check=False, timeout=60).returncode == 0
    del env["PRTE_MCA_prte_local_tmpdir_base"]
    assert subprocess.run(command, env=env, check=False, timeout=60, capture_output=True).returncode != 0


def test_launchers_folders_are_gone_at_the_end(bare, tmp_path):
    bare.setenv("TMPDIR", str(tmp_path))
    bare.delenv("PRTE_MCA_prte_local_tmpdir_base", raising=False)
    folder = "launch.environment()['PRTE_MCA_prte_local_tmpdir_base']"
    script = f"import pathlib; from mpiagg.launch import start as launch; one, two = {folder}, {folder};"
    script += "assert one != two and pathlib.Path(one).is_dir() and pathlib.Path(two).is_dir()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert not list(tmp_path.iterdir())


def test_ranks_run_and_their_status_comes_back(bare, capfd):  # noqa: ARG001 - it sets the scene
    assert launch.run(2, ["-c", HELLO]) == 0
    assert capfd.readouterr().out.splitlines() == ["2 2"] * 2
    assert launch.run(1, ["-c", "raise SystemExit(3)"]) != 0


def test_more_ranks_than_the_machine_should_hold_are_refused(bare):
    started = []

    def command(ranks, *_):
        started.append(ranks)
        return [sys.executable, "-c", ""]

    bare.setattr(launch, "command", command)
    bare.setattr(os, "cpu_count", lambda: 3)
    assert launch.run(48, ["-c", HELLO]) == 0
    with pytest.raises(click.UsageError, match="49 ranks are too many: at most 48"):
        launch.run(49, ["-c", HELLO])
    assert started == [48]


@pytest.mark.parametrize("vendor", ["MPICH", "Open MPI"])
def test_a_job_started_by_the_right_launcher_is_not_blamed(bare, vendor):
    assert launch.wrong_launch(vendor) is None
    assert launch.wrong_launch(vendor, world_size=1) is None
    bare.setenv("PMI_SIZE", "4")
    assert launch.wrong_launch(vendor) is None
    assert launch.wrong_launch(vendor, world_size=4) is None
    bare.setenv("PMI_SIZE", "1")
    assert launch.wrong_launch(vendor, world_size=1) is None


def test_a_job_of_ranks_that_do_not_see_each_other_is_told(bare):
    bare.setenv("MPIAGG_MPIEXEC", "")
    bare.setenv("PMI_SIZE", "4")
    words = launch.wrong_launch("Open MPI", world_size=1)
    assert words.startswith(
        "this process is one of 4 that an mpiexec of the MPICH family started (PMI_SIZE), but mpi4py loads Open MPI, "
        "which sees a job of one rank"
    )
    assert "srun --mpi=pmix" in words


def test_the_remedy_names_the_right_mpiexec(bare):
    vendor = launch.mpi_vendor()
    bare.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert f"start it with {launch.mpiexec_of(vendor)}" in launch.wrong_launch(vendor, world_size=1)
    assert Path(launch.mpiexec_of(vendor)).exists()


def test_mpich_under_the_mpiexec_of_open_mpi_is_told_before_mpi_starts(bare):
    assert launch.wrong_launch("MPICH") is None
    bare.setenv("PMIX_NAMESPACE", "prterun-1")
    bare.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert "but mpi4py loads MPICH" in launch.wrong_launch("MPICH")
    assert launch.wrong_launch("Open MPI") is None


def started(*command, stdout):
    """Run a command that writes there, and return how it ended."""
    command = [sys.executable, "-m", "mpiagg", *command]
    return subprocess.run(command, check=False, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)


@pytest.mark.parametrize("command", [("info",), ("simulate", "ring", "-n", "4")])
def test_output_that_cannot_be_written_is_told_in_one_line(command):
    with Path("/dev/full").open("w") as full:
        done = started(*command, stdout=full)
    assert done.returncode == 1
    assert done.stderr == "Error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("command", [("info",), ("simulate", "all", "-n", "4")])
def test_a_reader_may_leave_before_the_end(command):
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as pipe:
        done = started(*command, stdout=pipe)
    assert done.returncode == 1
    assert not done.stderr


SLEEPING = """
import os, sys, time
from pathlib import Path
from mpi4py import MPI
Path(sys.argv[1], str(os.getpid())).touch()
time.sleep(120)
"""


def alive(pid):
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def within(seconds, holds):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("call", ["sys.exit(start.run(2, {}))", "start.run_within(120, 2, {}, start.environment())"])
def test_ranks_end_with_the_command_that_has_started_them(tmp_path, call, number):
    code = f"import sys; from mpiagg.launch import start; {call.format(['-c', SLEEPING, str(tmp_path)])}"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True) as command:
        assert within(60, lambda: len(list(tmp_path.iterdir())) == 2)
        command.send_signal(number)
        assert command.wait(60) != 0
    ranks = [int(each.name) for each in tmp_path.iterdir()]
    assert within(60, lambda: not any(map(alive, ranks)))


@pytest.mark.parametrize("command", [("info",), ("simulate", "ring", "-n", "4"), ("bench", "-m", "64", "-i", "3")])
def test_a_file_that_cannot_be_written_is_told_in_one_line(command):
    for file, status in (("", 2), ("/dev/full", 1)):
        told = started(*command, "--json", file, stdout=subprocess.PIPE)
        assert told.returncode == status
        assert "Traceback" not in told.stderr
        assert ("empty" if status == 2 else "'/dev/full' cannot be written: No space left") in told.stderr
