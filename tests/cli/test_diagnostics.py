"""What the diagnostics call a problem, from facts that are made up: every check with what it must find and not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.cli import diagnostics
from mpiagg.cli.diagnostics import JobReport, by_value, problems, said
from mpiagg.cli.facts import Problem, Rank
from mpiagg.cli.probe import Probed

A, B = "00000000-a", "00000000-b"
MIB = 2**20


def rank(number=0, **facts):
    """Return a rank that is well, but for what is said of it."""
    well = {
        "size": 4,
        "host": "node",
        "launcher": "srun",
        "launched": 4,
        "vendor": "MPICH",
        "mpi": "MPICH 5.0.2",
        "yields": True,
        "cpus": [0, 1, 2, 3],
        "processors": 4,
        "shm": [900 * MIB, 1000 * MIB],
        "window": 4 * MIB,
        "versions": {"mpiagg": "1", "NumPy": "2"},
        "tuning": "the default table",
        "reason": "a reason",
    }
    return Rank(number, **well | facts)


def job(count=4, each=None, probe=None, **facts):
    """Return what is known of a job whose ranks have facts, and some of them (``each``) facts of their own."""
    return JobReport("4.1", [rank(number, **facts, **(each or {}).get(number, {})) for number in range(count)], probe)


def alone(**facts):
    return job(1, **{"size": 1, "launcher": None, "launched": None} | facts)


def devices(*chosen):
    """Return facts of ranks: the device of each and what it sees."""
    return {number: {"device": device, "visible": list(visible)} for number, (device, visible) in enumerate(chosen)}


NODES_2_2 = {"environment": {"MPIAGG_NODES": "2,2"}}
WRONG_WARN = {"environment": {"MPIAGG_WARN": "soon", "MPIAGG_RECORD": "rounds", "MPIAGG_ABORT": "0"}}
WRONG_FLAG = {"environment": {"MPIAGG_CHECK": "yes", "MPIAGG_WARN": "2.5"}}
WRONG_NAME = {"environment": {"MPIAGG_CHEK": "1"}}
UCX = {"transport": "ch4:ucx ofi", "environment": {"SLURM_MPI_TYPE": "pmi2"}}
TWO_NODES = {2: {"machine": 2}, 3: {"machine": 2}}
TROUBLE = {"troubles": [Problem("warning", "weather", "it rained", "wait")]}

FAULTY = [
    (job(each={1: WRONG_WARN}), "error", "settings", "MPIAGG_WARN=soon on rank 1 is not a number", "unset it"),
    (job(**WRONG_NAME), "warning", "settings", "MPIAGG_CHEK on ranks 0-3 is no variable", "unset it"),
    (job(**WRONG_FLAG), "error", "settings", "MPIAGG_CHECK=yes on ranks 0-3 is not 0 or 1", "make it 0 or 1"),
    (job(environment={"MPIAGG_RECORD": "all"}), "error", "settings", "not one of operations, rounds, off", "unset it"),
    (alone(stopped="MPI is tired", mpiexec="let it sleep", size=0), "error", "cannot-start", "tired", "sleep"),
    (
        alone(launcher="srun", launched=4, mpiexec="srun --mpi=pmi2"),
        "error",
        "copies",
        "srun started 4",
        "MPIAGG_ALONE=1",
    ),
    (
        alone(launcher="the mpiexec of Open MPI", launched=1),
        *("warning", "wrong-mpiexec", "mpi4py loads MPICH 5.0.2", "the mpiexec of MPICH"),
    ),
    (
        alone(launcher="an mpiexec of the MPICH family", launched=1, vendor="Open MPI"),
        *("warning", "wrong-mpiexec", "would not find each other", "the mpiexec of Open MPI"),
    ),
    (job(**UCX, each=TWO_NODES), "warning", "addresses", "lines that are at times too long", "=ofi, or make 'from"),
    (
        job(**UCX | {"transport": "ch4:ucx"}, each=TWO_NODES),
        "warning",
        "addresses",
        "fails in MPI_Init",
        "make 'from mpi4py",
    ),
    (alone(tasks=4), "note", "not-launched", "for 4 tasks", "start it with srun"),
    (job(each={1: {"threads": "serialized"}}), "warning", "thread-level", "rank 1: ", "MPI4PY_RC_THREAD_LEVEL"),
    (job(processors=2, cpus=[0, 1]), "note", "crowded", "ranks 0-3 on node share 2 processors", "tests"),
    (
        job(processors=2, cpus=[0, 1], yields=False, vendor="Open MPI"),
        *("warning", "crowded", "do not yield", "OMPI_MCA_mpi_yield_when_idle=1"),
    ),
    (job(processors=3, cpus=[1]), "note", "crowded", "ranks 0-3 on node share 1 processor;", "tests"),
    (job(processors=2, cpus=[0, 1], yields=None, vendor="Other"), "warning", "crowded", "do not yield", "setting"),
    (job(cpus=[3]), "warning", "binding", "ranks 0-3 on node may only run on processor 3,", "--cpus-per-task"),
    (
        job(each={0: {"cpus": [1]}, 2: {"cpus": [1]}}),
        *("warning", "binding", "ranks 0, 2 on node may only run on processor 1,", "--bind-to none"),
    ),
    (job(linear=2), "warning", "threads", "take 8 threads for linear algebra", "OMP_NUM_THREADS=1"),
    (job(2, linear=4), "warning", "threads", "take 8 threads for linear algebra", "OMP_NUM_THREADS=2"),
    (job(shm=[15 * MIB, 64 * MIB]), "warning", "shared-memory", "15 MiB of 64 MiB left", "--shm-size"),
    (job(shm=[0, 2**31]), "warning", "shared-memory", "0 MiB of 2.0 GiB left", "delete what is left"),
    (job(shm=[64 * MIB, 64 * MIB]), "note", "shared-memory", "64 MiB in all", "--shm-size"),
    (job(environment={"MPIAGG_NODES": "2,1"}), "error", "nodes", "4 in all", "unset it"),
    (job(environment={"MPIAGG_NODES": "two"}), "error", "nodes", "4 in all", "unset it"),
    (job(each={0: NODES_2_2}), "error", "nodes", "rank 0: 2,2; ranks 1-3: unset", "the same environment"),
    (job(**NODES_2_2), "note", "nodes", "MPIAGG_NODES=2,2", "except for tests"),
    (job(each={3: {"mpi": "MPICH 4"}}), "error", "versions", "ranks 0-2: MPICH 5.0.2; rank 3: MPICH 4", "installation"),
    (
        job(each={3: {"versions": {"mpiagg": "2", "NumPy": "2"}}}),
        "error",
        "versions",
        "ranks 0-2: 1; rank 3: 2",
        "same",
    ),
    (job(each={3: {"versions": {"mpiagg": "1"}}}), "warning", "versions", "ranks 0-2: 2; rank 3: none", "same"),
    (job(each={3: {"tuning": "t.json"}}), "error", "tuning", "ranks 0-2: the default table; rank 3: t.json", "same"),
    (job(each={0: TROUBLE, 1: TROUBLE}), "warning", "weather", "ranks 0-1: it rained", "wait"),
    (
        job(each={0: {"able": True}}),
        *(
            "warning",
            "cuda-aware",
            "messages of ranks 1-3 do not reach device memory (a reason)",
            "the same environment",
        ),
    ),
    (
        alone(probe=Probed(able=True, reason="")),
        "warning",
        "cuda-aware",
        "do reach device memory",
        "MPIAGG_CUDA_AWARE=1",
    ),
    (
        alone(able=True, probe=Probed(able=False, reason="")),
        *("error", "cuda-aware", "messages do not reach device memory", "MPIAGG_CUDA_AWARE=0"),
    ),
    (
        job(2, each=devices((0, [A, B]), (0, [A, B]))),
        *("warning", "devices", "ranks 0-1 share a GPU, though they see one", "--gpu-bind=none"),
    ),
    (job(2, each=devices((0, [A]), (0, [B]))), "warning", "devices", "ranks 0-1 see one GPU each", "--gpu-bind=none"),
]

WELL = [
    job(**UCX),
    job(transport="ch4:ucx ofi", each=TWO_NODES, launcher="an mpiexec of the MPICH family"),
    job(**UCX | {"environment": {"SLURM_MPI_TYPE": "pmi2", "MPIR_CVAR_CH4_NETMOD": "ofi"}}, each=TWO_NODES),
    alone(),
    alone(launcher="srun", launched=1, tasks=4),
    alone(launcher="srun", launched=4, environment={"MPIAGG_ALONE": "1"}),
    alone(launcher="an mpiexec of the MPICH family", launched=1),
    alone(launcher="the mpiexec of Open MPI", launched=1, vendor="Open MPI"),
    alone(tasks=1),
    job(),
    # MPICH with PMIx, which can be started so.
    job(launcher="the mpiexec of Open MPI"),
    job(5, processors=8, cpus=list(range(8))),
    job(4, cpus=[0, 1], each={number: {"machine": number // 2} for number in range(4)}, processors=2),
    job(each={number: {"cpus": [number]} for number in range(4)}),
    job(2, linear=2),
    job(2, linear=4, each={1: {"machine": 1}}),
    job(shm=None),
    job(shm=[16 * MIB, 65 * MIB]),
    alone(shm=[64 * MIB, 64 * MIB]),
    job(cupy="cannot be imported: No module named 'cupy'"),
    job(able=True),
    job(2, each=devices((0, [A, B]), (1, [A, B]))),
    # Fewer GPUs than ranks: shared on purpose.
    job(4, each=devices(*((number % 2, [A, B]) for number in range(4)))),
    job(2, each=devices((0, [A]), (0, [A]))),
    # One a rank, but on two nodes.
    JobReport("4.1", [rank(0, device=0, visible=[A]), rank(1, device=0, visible=[B], machine=1)]),
    alone(probe=Probed(None, "there is no GPU")),
    alone(able=True, probe=Probed(able=True, reason="all came through")),
    alone(probe=Probed(able=True, reason="all came through", memory="host")),
]


@pytest.mark.parametrize(("report", "level", "name", "what", "remedy"), FAULTY)
def test_problems_are_told_with_remedies(report, level, name, what, remedy):
    (problem,) = problems(report)
    assert (problem.level, problem.name) == (level, name)
    assert what in problem.what
    assert remedy in problem.remedy
    assert not problem.what.endswith(".")
    assert not problem.remedy.endswith(".")


@pytest.mark.parametrize("report", WELL)
def test_what_is_well_is_no_problem(report):
    assert problems(report) == []


def test_every_check_finds_something():
    for check in diagnostics.CHECKS:
        assert any(list(check(report)) for report, *_ in FAULTY), check.__name__


def test_the_worst_comes_first():
    report = job(linear=2, shm=[64 * MIB, 64 * MIB], environment={"MPIAGG_NODES": "two"})
    assert [problem.level for problem in problems(report)] == ["error", "warning", "note"]


def test_nodes_are_those_that_mpiagg_takes():
    assert job().nodes == [[0, 1, 2, 3]]
    assert job(**NODES_2_2).nodes == [[0, 1], [2, 3]]
    assert job(environment={"MPIAGG_NODES": "two"}).nodes == [[0, 1, 2, 3]]
    assert job(each={1: {"machine": 1}, 3: {"machine": 1}}).nodes == [[0, 2], [1, 3]]


def test_ranks_go_by_the_least_of_their_answers():
    assert job(able=True).able
    mixed = job(each={0: {"able": True}, 1: {"reason": "no"}})
    assert not mixed.able
    assert mixed.reason == "no"


@given(st.sets(st.integers(0, 60), min_size=1))
def test_ranks_in_words_are_those_ranks(numbers):
    word, _, text = said([Rank(number) for number in numbers]).partition(" ")
    assert word == ("rank" if len(numbers) == 1 else "ranks")
    found = set()
    for run in text.split(", "):
        first, _, last = run.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == numbers


def test_what_all_say_is_said_once():
    assert by_value(job().ranks, lambda rank: rank.host) == "node"
    assert (
        by_value(job(each={1: {"host": "other"}}).ranks, lambda rank: rank.host) == "ranks 0, 2-3: node; rank 1: other"
    )
