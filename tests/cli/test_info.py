"""``mpiagg info``: what it finds, what it calls a problem, and how it tells it."""

import json
import sys
from types import ModuleType

import pytest

from mpiagg import placement
from mpiagg.cli import launch
from mpiagg.cli.info import MOST_HOSTS, Rank, Report, _take_device, _tell, problems
from mpiagg.cli.probe import Probed
from mpiagg.errors import DeviceError

A, B, C = "00000000-a", "00000000-b", "00000000-c"


def report(*ranks, probe=None, nodes=None):
    return Report("0", "4", "Some MPI 1.0", "5.0", "multiple", nodes or [list(range(len(ranks)))], list(ranks), probe)


def rank(number=0, device=None, visible=(), **more):
    return Rank(
        number, "node", **{"reason": "a reason", "cupy": "14", "visible": list(visible), "device": device, **more}
    )


def told(found):
    return [f"{problem.what} -> {problem.remedy}" for problem in problems(found)]


# -- what is a problem


@pytest.mark.parametrize(
    "found",
    [
        report(rank(cupy="cannot be imported: No module named 'cupy'")),
        report(rank(0, 0, [A, B], able=True), rank(1, 1, [A, B], able=True)),
        # Fewer GPUs than ranks: shared on purpose.
        report(*(rank(number, number % 2, [A, B]) for number in range(4))),
        report(rank(0, 0, [A]), rank(1, 0, [A])),
        # One a rank, but on two nodes.
        report(rank(0, 0, [A]), rank(1, 0, [B]), nodes=[[0], [1]]),
        report(rank(), probe=Probed(None, "there is no GPU")),
        report(rank(able=True), probe=Probed(able=True, reason="all came through")),
        report(rank(), probe=Probed(able=True, reason="all came through", memory="host")),
    ],
)
def test_what_is_well_is_no_problem(found):
    assert told(found) == []


@pytest.mark.parametrize(
    ("found", "what", "remedy"),
    [
        (
            report(rank(0, able=True), rank(1), rank(2)),
            "messages of ranks 1, 2 do not reach device memory (a reason), and those of the others do",
            "the same environment",
        ),
        (
            report(rank(0, 0, [A, B]), rank(1, 0, [A, B])),
            "ranks 0, 1 share a GPU, though they see one",
            "--gpu-bind=none",
        ),
        (report(rank(0, 0, [A]), rank(1, 0, [B])), "ranks 0, 1 see one GPU each", "--gpu-bind=none"),
        (report(rank(), probe=Probed(able=True, reason="")), "messages do reach device memory", "MPIAGG_CUDA_AWARE=1"),
        (
            report(rank(able=True), probe=Probed(able=False, reason="")),
            "messages do not reach device memory",
            "MPIAGG_CUDA_AWARE=0",
        ),
        (
            report(rank(0), rank(1, troubles=[("it rained", "wait")]), rank(2, troubles=[("it rained", "wait")])),
            "ranks 1, 2: it rained",
            "wait",
        ),
    ],
)
def test_problems_are_told_with_remedies(found, what, remedy):
    (problem,) = told(found)
    before, _, after = problem.partition(" -> ")
    assert what in before
    assert remedy in after


def test_ranks_go_by_the_least_of_their_answers():
    assert report(rank(0, able=True), rank(1, able=True)).able
    mixed = report(rank(0, able=True, reason="yes"), rank(1, reason="no"))
    assert not mixed.able
    assert mixed.reason == "no"


# -- how it is told


def test_all_is_told(capsys):
    ranks = [
        rank(number, number % 2, [A, B], reason="pip install mpiagg[cuda12]", troubles=[("it rained", "wait")])
        for number in range(3)
    ]
    _tell(report(*ranks, probe=Probed(able=False, reason="signal 11")), as_json=False)
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "Some MPI 1.0 (MPI 5.0)",
        "4, thread level multiple",
        "3 on 1 node (node: 3)",
        "no: pip install mpiagg[cuda12]",
        "probe of cuda memory │ no: signal 11",
        "GPUs │ 2 for more ranks: shared",
        f"│ 2 │ node │ 0 │ 2 │ {A} │ 0 │",
        f"│ 1 │ node │ 1 │ 2 │ {B} │ - │",
        "Problem: ranks 0, 1, 2: it rained. Remedy: wait.",
    ):
        assert words in out


def test_nodes_that_are_many_are_not_all_named(capsys):
    ranks = [rank(number) for number in range(20)]
    _tell(report(*ranks, nodes=[[number] for number in range(20)]), as_json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert "20 on 20 nodes" in out
    assert out.count("node: 1") == MOST_HOSTS


def test_json_has_the_same(capsys):
    found = report(rank(0, 0, [A, B]), rank(1, 0, [A, B]), probe=Probed(able=False, reason="signal 11"))
    _tell(found, as_json=True)
    saved = json.loads(capsys.readouterr().out)
    assert saved["mpi"] == "Some MPI 1.0"
    assert saved["cuda_aware"] == {"able": False, "reason": "a reason"}
    assert saved["probe"] == {"able": False, "reason": "signal 11", "memory": "cuda"}
    assert saved["shared"] == [{"ranks": [0, 1], "accident": True}]
    assert [one["visible"] for one in saved["ranks"]] == [[A, B]] * 2
    assert [problem["what"][:10] for problem in saved["problems"]] == ["ranks 0, 1"]


# -- the command


def test_a_process_alone_is_told_of(mpiagg):
    done = mpiagg("info", "--probe", "--memory", "host", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["mpi"].startswith(launch.mpi_vendor())
    assert len(found["ranks"]) == 1
    assert found["nodes"] == [[0]]
    assert found["probe"] == {
        "able": True,
        "reason": "messages of 8 bytes, 64 KiB, 8 MiB came through",
        "memory": "host",
    }


def test_without_a_gpu_the_probe_says_so(mpiagg):
    done = mpiagg("info", "--probe", "--json", CUDA_VISIBLE_DEVICES="")
    assert done.status == 0, done.err
    probe = json.loads(done.out)["probe"]
    assert probe["able"] is None
    assert "no CUDA device" in probe["reason"] or "CUDA devices need CuPy" in probe["reason"]


def test_a_job_is_told_of_by_one_rank(run):
    done = run(launch.command(3, ["-m", "mpiagg", "info", "--json"]), MPIAGG_NODES="2,1", MPIAGG_CUDA_AWARE="yes")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["nodes"] == [[0, 1], [2]]
    assert [one["rank"] for one in found["ranks"]] == [0, 1, 2]
    assert found["cuda_aware"] == {"able": True, "reason": "MPIAGG_CUDA_AWARE=yes says so"}


def test_a_bad_word_is_a_problem(mpiagg):
    done = mpiagg("info", MPIAGG_CUDA_AWARE="perhaps")
    assert done.status == 0, done.err
    assert "Problem: rank 0: MPIAGG_CUDA_AWARE='perhaps' must be" in done.out


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_ranks_that_do_not_see_each_other_are_told(mpiagg, variable):
    done = mpiagg("info", **{variable: "4"})
    assert done.status == 2
    assert "Error: this process is one of 4" in done.err


def test_a_rank_starts_no_probe(mpiagg):
    done = mpiagg("info", "--probe", PMI_SIZE="4")
    assert done.status == 2
    assert "--probe starts a job of its own" in done.err


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
        _take_device(mine)
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
    ((what, _),) = take(None, of_node=2).troubles
    assert "install mpiagg[cuda12]" in what


def test_a_device_that_cannot_be_used_is_told(take):
    class Broken(Runtime):
        def use(self, ordinal):
            raise DeviceError(f"{ordinal} is exclusive")

    mine = take(cupy(), runtime=Broken())
    assert mine.cupy == "14.2"
    assert mine.visible == [A, B]
    assert mine.device is None
    assert mine.troubles[0][0] == "0 is exclusive"
