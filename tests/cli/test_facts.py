"""What a rank finds out about itself."""

import sys
from types import ModuleType

import pytest

from mpiagg.cli import facts
from mpiagg.cli.facts import Problem, Rank, take_device
from mpiagg.cuda import placement
from mpiagg.errors import DeviceError

A, B = "00000000-a", "00000000-b"


def test_a_rank_is_told_whole():
    trouble = Problem("note", "weather", "it rained", "wait")
    # Variables of the environment may hold bytes that are no UTF-8.
    mine = Rank(3, "node", visible=[A], device=0, environment={"A": "b\udcff"}, troubles=[trouble])
    assert Rank.of_text(mine.as_text()) == mine
    with pytest.raises(ValueError, match=r"Expected `int`, got `str` - at `\$.rank`"):
        Rank.of_text('{"rank": "3"}')


def test_what_is_there_is_found(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "7")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "2")
    monkeypatch.setenv("PMI_SIZE", "")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "")
    mine = Rank()
    facts.of_process(mine)
    assert (mine.tasks, mine.launcher, mine.launched, mine.rank) == (7, "srun", 4, 2)
    assert 0 < len(mine.cpus) <= mine.processors
    assert mine.versions["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert mine.shm is None or 0 <= mine.shm[0] <= mine.shm[1]


@pytest.mark.parametrize(
    ("library", "transport"),
    [
        ("MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\nMPICH CC: cc", "ch4:ucx ofi"),
        ("Open MPI v5.0.11, package: Open MPI", "chosen when the job starts (pml and btl)"),
        ("Another 1.0", "not known"),
    ],
)
def test_transports_are_what_the_library_says(library, transport):
    assert facts.transport_of(library) == transport


def test_settings_are_the_users():
    settings = {"MPIAGG_TIMEOUT": "5", "OMPI_MCA_pml": "ob1", "UCX_TLS": "tcp"}
    launchers = {"OMPI_MCA_num_procs": "2", "OMPI_MCA_PREFIXES": "mca", "MPIAGG_TERMINAL_WIDTH": "80"}
    assert facts.settings_of({**launchers, **settings, "HOME": "/", "MV2_COMM_WORLD_RANK": "0"}) == settings


@pytest.mark.parametrize(
    ("environment", "torch", "threads"),
    [
        ({}, False, 8),
        ({"OMP_NUM_THREADS": "2"}, True, 2),
        ({"OMP_NUM_THREADS": "2,1"}, True, 2),
        ({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "4"}, False, 4),
        ({"OPENBLAS_NUM_THREADS": "1"}, False, 1),
        # What is OpenBLAS's is nothing to torch.
        ({"OPENBLAS_NUM_THREADS": "1"}, True, 8),
        ({"MKL_NUM_THREADS": "1"}, True, 1),
        ({"OMP_NUM_THREADS": "0"}, False, 8),
        ({"OMP_NUM_THREADS": "many"}, False, 8),
    ],
)
def test_threads_of_linear_algebra(environment, torch, threads):
    assert facts.threads_of(environment, 8, torch=torch) == threads


# -- the device of a rank


class Runtime:
    """Two devices, of which the first is taken."""

    def count(self):
        return 2

    def identity(self, ordinal):
        return (A, B)[ordinal]

    def use(self, ordinal):
        assert ordinal == 0


@pytest.fixture
def take(monkeypatch):
    """Return a function that takes a device, where CUDA is as it is said, and returns what is known of the rank."""
    for launcher in placement._LAUNCHERS:
        monkeypatch.delenv(launcher.rank, raising=False)
    for variable in placement._RANKS:
        monkeypatch.delenv(variable, raising=False)

    def take(cupy, of_node=None, runtime=None):
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        if runtime is not None:
            monkeypatch.setattr(placement, "runtime", lambda: runtime)
        monkeypatch.setattr(placement, "devices_of_node", lambda: of_node)
        mine = Rank(rank=0, host="node")
        take_device(mine)
        return mine

    return take


def cupy():
    module = ModuleType("cupy")
    module.__version__ = "14.2"
    return module


def test_a_rank_takes_its_device(take):
    mine = take(cupy(), runtime=Runtime())
    assert (mine.cupy, mine.visible, mine.device, mine.identity) == ("14.2", [A, B], 0, A)
    assert mine.troubles == []


def test_a_missing_cupy_matters_where_there_is_a_gpu(take):
    mine = take(None)
    assert mine.cupy.startswith("cannot be imported: ")
    assert mine.troubles == []
    assert mine.identity == ""
    (trouble,) = take(None, of_node=2).troubles
    assert "install 'cupy-cuda12x[ctk]'" in trouble.what


def test_a_device_that_cannot_be_used_is_told(take):
    class Broken(Runtime):
        def use(self, ordinal):
            raise DeviceError(f"{ordinal} is exclusive")

    mine = take(cupy(), runtime=Broken())
    assert mine.cupy == "14.2"
    assert mine.visible == [A, B]
    assert mine.device is None
    assert mine.troubles[0].what == "0 is exclusive"
