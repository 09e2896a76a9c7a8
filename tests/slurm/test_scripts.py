"""The scripts in slurm/, submitted as they are, on two nodes."""

import json
import re
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.thorough


@pytest.fixture
def submit(slurm, mpi_type):
    """Return a function that submits a script for the MPI library at hand."""
    return lambda script, *arguments, **keywords: slurm.submit(script, *arguments, MPI_TYPE=mpi_type, **keywords)


def test_cpu_script_trains(slurm, submit, tmp_path):
    # The demo draws its loss curve into the folder that the job starts in.
    job = slurm.wait(submit("cpu.sbatch", options=[f"--chdir={tmp_path}"]))
    assert job.state == "COMPLETED", job.printed
    assert re.search(r"test accuracy\W+0\.9", job.printed)
    assert re.search(r"2 ranks: weights .*, largest error 0\.0", job.printed)


def test_a_script_says_where_it_looked_for_mpiagg(slurm, submit, tmp_path):
    job = slurm.wait(submit("cpu.sbatch", VENV=str(tmp_path), PATH="/usr/sbin:/usr/bin:/sbin:/bin"))
    assert job.state == "FAILED"
    assert job.printed == f"found no mpiagg in {tmp_path}: install it there, or set VENV=/path/to/venv\n"


@pytest.mark.skipif(find_spec("torch") is None, reason="torch, an extra, is not installed")
def test_torch_script_trains(slurm, submit):
    job = slurm.wait(submit("torch.sbatch"))
    assert job.state == "COMPLETED", job.printed
    assert job.printed.count("% right") == 3


def test_scripts_load_modules_and_run_in_containers(slurm, submit, tmp_path):
    # There is no Apptainer here: what it is called with is written down, and then run as it is.
    stand_in = tmp_path / "bin" / "apptainer"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/called\nshift 5\nexec "$@"\n')
    stand_in.chmod(0o755)
    module = f'() {{ echo "module $*: $UNSET" >> {tmp_path}/called; }}'
    environment = {
        "BASH_FUNC_module%%": module,
        "MODULES": "openmpi/5.0 python",
        "CONTAINER": "train.sif",
        "SRUN_OPTIONS": "--label --unbuffered",
        "PATH": f"{stand_in.parent}:{slurm.environment['PATH']}",
    }
    options = ["--array=0", "--ntasks-per-node=1"]
    job = slurm.wait(submit("array.sbatch", "--epochs", "1", options=options, **environment))
    assert job.state == "COMPLETED", job.printed
    first, second, *calls = (tmp_path / "called").read_text().splitlines()
    assert (first, second) == ("module purge: ", "module load openmpi/5.0 python: ")
    assert calls
    assert all(re.match(r"exec --nv --bind \S+ train.sif mpiagg demo ", call) for call in calls)
    assert re.search(r"(?m)^0: ", job.printed)


def test_gpu_script_gets_gpus(slurm, submit):
    # The cluster's GPUs are only counted, so nothing runs on them; but Slurm takes what the script asks for.
    options = ["--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=2"]
    number = submit("gpu.sbatch", options=options)
    job = slurm.wait(number)
    assert slurm.facts(number, "TresPerNode") == ["gres:gpu:2"]
    assert "2 on 1 node" in job.printed


def test_gpu_script_runs_as_it_is_and_says_what_is_missing(slurm, submit):
    job = slurm.wait(submit("gpu.sbatch"))
    assert job.state == "FAILED"
    assert "4 on 1 node" in job.printed
    assert "CuPy" in job.printed or "cupy" in job.printed


def test_what_can_never_run_is_refused(slurm):
    told = slurm.run("sbatch", "--nodes=3", "slurm/cpu.sbatch", status=1)
    assert "Node count specification invalid" in told


def test_sweep_saves_each_measurement(slurm, submit, tmp_path):
    arguments = ["--message-size", "64:1K", "--factor", "16", "--time-limit", "0.1", "--algorithm", "ring"]
    job = slurm.wait(submit("sweep.sbatch", *arguments, COLLECTIVES="allreduce", options=["--ntasks-per-node=1"]))
    assert job.state == "COMPLETED", job.printed
    for nodes in (1, 2):
        saved = json.loads((tmp_path / f"allreduce-{nodes}x1.json").read_text())
        assert [row["size"] for row in saved["rows"] if row["algorithm"] == "ring"] == [64, 1024]
        assert saved["ranks"] == nodes
        assert all(row["wrong"] == 0 for row in saved["rows"])


def test_sweep_fails_where_a_measurement_does(slurm, submit):
    job = slurm.wait(submit("sweep.sbatch", COLLECTIVES="nonsense", options=["--nodes=1", "--ntasks-per-node=1"]))
    assert job.state == "FAILED"
    assert "'nonsense' is not one of" in job.printed


def test_tasks_of_an_array_save_their_own(slurm, submit, tmp_path):
    job = slurm.wait(submit("array.sbatch", "--epochs", "1", options=["--array=3,5", "--ntasks-per-node=1"]))
    assert job.state == "COMPLETED"
    names = ["local-sgd-0", "sparsified-topk-1"]
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == names
    for name in names:
        settings = json.loads((tmp_path / f"{name}.json").read_text())["settings"]
        assert f"{settings['aggregator']}-{settings['seed']}" == name
