"""Who started this process, and that copies of a job of one are refused."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.errors import Error
from mpiagg.launch import launchers

SRUN = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
PMI2 = {**SRUN, "PMI_SIZE": "4", "PMI_RANK": "2"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "PMIX_NAMESPACE": "prterun-1"}
BATCH = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        (SRUN, "srun"),
        (PMI2, "srun"),
        (HYDRA, "an mpiexec of the MPICH family"),
        (OPEN_MPI, "the mpiexec of Open MPI"),
        ({"ROLE_WORLD_SIZE": "4", "RANK": "2"}, "torchrun"),
        # Inside of Slurm's steps, by which they reach other nodes, mpiexec's words count.
        ({**SRUN, **OPEN_MPI}, "the mpiexec of Open MPI"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2", **HYDRA}, "an mpiexec of the MPICH family"),
    ],
)
def test_launchers_are_known(environment, name):
    found = launchers.launch(environment)
    assert (found.name, found.size, found.rank) == (name, 4, 2)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH,
        # A shell of salloc, and a batch script whose step has a number.
        {**SRUN, "SLURM_STEP_ID": "4294967290"},
        {**SRUN, "SLURM_STEP_ID": "4294967291"},
        {"PMI_SIZE": "many"},
        {"WORLD_SIZE": "4", "RANK": "0"},
    ],
)
def test_what_no_launcher_started_is_alone(environment):
    assert launchers.launch(environment) is None
    assert launchers.copies(1, environment) is None


@pytest.mark.parametrize("environment", [SRUN, PMI2, HYDRA, OPEN_MPI])
def test_copies_are_found(environment):
    assert launchers.copies(1, environment).size == 4
    assert launchers.copies(4, environment) is None
    assert launchers.copies(1, {**environment, launchers.ALONE: "0"}).size == 4
    assert launchers.copies(1, {**environment, launchers.ALONE: "1"}) is None


@pytest.mark.parametrize("variable", launchers.VARIABLES)
def test_a_job_of_one_is_no_copy(variable):
    assert launchers.launch({variable: "1"}).size == 1
    assert launchers.copies(1, {variable: "1"}) is None


@given(
    st.dictionaries(st.sampled_from([*launchers.VARIABLES, "PMI_RANK", "SLURM_STEP_ID", launchers.ALONE]), st.text())
)
def test_any_environment_can_be_read(environment):
    found = launchers.copies(1, environment)
    assert found is None or found.size > 1


@pytest.mark.parametrize(
    ("vendor", "library", "environment", "ends"),
    [
        ("MPICH", "MPICH Version: 5.0.2", OPEN_MPI, True),
        ("MPICH", "MPICH configure: --with-pmix=/usr", OPEN_MPI, False),
        ("MPICH", "MPICH Version: 5.0.2", HYDRA, False),
        ("Open MPI", "Open MPI v5.0.11", OPEN_MPI, False),
    ],
)
def test_whether_mpi_can_start(vendor, library, environment, ends):
    assert launchers.ends_in_start(vendor, library, environment) is ends


@pytest.mark.parametrize(
    ("vendor", "environment", "words"),
    [
        ("MPICH", {}, "start it with the mpiexec of MPICH; under Slurm, with srun --mpi=pmi2"),
        ("MPICH", BATCH, "start it with srun --mpi=pmi2, or with the mpiexec of MPICH"),
        ("Open MPI", BATCH, "start it with srun --mpi=pmix, or with the mpiexec of Open MPI"),
        ("Cray", BATCH, "srun --mpi=list"),
    ],
)
def test_the_remedy_is_the_librarys(vendor, environment, words):
    assert words in launchers.remedy(vendor, environment=environment)


def test_copies_are_refused_in_words(monkeypatch):
    for variable in launchers.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    launchers.refuse_copies(1, "MPICH")
    for variable, value in SRUN.items():
        monkeypatch.setenv(variable, value)
    launchers.refuse_copies(4, "MPICH")
    with pytest.raises(
        Error, match=r"one of 4 that srun started .*sees a job of one rank.*srun --mpi=pmi2.*MPIAGG_ALONE=1"
    ):
        launchers.refuse_copies(1, "MPICH")
    monkeypatch.setenv(launchers.ALONE, "1")
    launchers.refuse_copies(1, "MPICH")


@pytest.mark.parametrize(("tasks", "refused"), [("4", True), ("1", False)])
def test_the_first_use_of_a_communicator_refuses(tasks, refused, monkeypatch):
    for variable in launchers.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
    script = "import mpiagg, numpy; print(mpiagg.allreduce(numpy.ones(2)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert ("this process is one of 4 that srun started" in done.stderr) is refused
    assert (done.returncode != 0) is refused


TELL = "from mpiagg.launch.launchers import started_by; print(started_by())"


@pytest.mark.parametrize(
    ("told", "found"),
    [({}, False), (HYDRA, True), (OPEN_MPI, True)],
)
def test_the_launcher_is_found_above_shells(told, found):
    variables = [f"{name}={value}" for name, value in told.items()]
    # The second shell is no launcher: it was told the same rank as its child.
    command = ["env", *variables, "sh", "-c", f'"{sys.executable}" -c "{TELL}"; true']
    clean = {name: value for name, value in os.environ.items() if name not in launchers.VARIABLES}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) == (os.getpid() if found else 0)


@pytest.mark.parametrize(
    ("told", "here"),
    [
        ({}, False),
        ({**HYDRA, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}, True),
        ({**HYDRA, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, False),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, False),
        (OPEN_MPI, False),
        ({**PMI2, "SLURM_STEP_NUM_NODES": "1"}, True),
        ({**PMI2, "SLURM_STEP_NUM_NODES": "2"}, False),
        (SRUN, False),
    ],
)
def test_a_job_on_one_node_is_known(told, here):
    assert launchers.on_one_node(told) is here
