"""``bench/gpu.py``: everything through the stand-in, quickly; parts that crash; goals on numbers that are made up."""

import copy
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mpiagg.launch import start as launch

TOP = Path(__file__).parents[2]
MIB = 2**20

INSTALL = f"""
import sys
sys.path.append({str(TOP / "tests")!r})
import standin
standin.install()
"""
"""Python runs this when it starts: so all ranks know the stand-in."""


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(TOP)
    for variable in launch.launchers.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    from bench import gpu

    return gpu


@pytest.fixture
def report(gpu):
    return gpu.gpu_report


@pytest.mark.thorough
def test_everything_is_measured_and_saved(gpu, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(INSTALL)
    paths = os.pathsep.join([str(tmp_path), str(TOP)])
    environment = {**os.environ, "PYTHONPATH": paths, "MPIAGG_CUDA_AWARE": "1"}
    command = [sys.executable, "-m", "bench.gpu", str(tmp_path / "saved"), "--quick", "--no-tests"]
    done = subprocess.run(
        [*command, "--device", "standin", "--ranks", "2"],
        env=environment,
        cwd=TOP,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    saved = json.loads((tmp_path / "saved" / "gpu.json").read_text())
    assert saved["info"]["cuda_aware"]["able"]
    assert {part["part"] for part in saved["parts"]} == set(gpu.PARTS)
    assert "measured: allreduce, 2 ranks; " in done.stdout
    assert "not measured: tests: --no-tests" in done.stdout
    ways = {
        "allreduce": {"staged", "slots", "ipc", "native", "by hand", "by hand, mpiagg", "limit"},
        "messages": {"staged", "aware"},
        "library": {"staged", "mpi"},
        "threshold": {"by way of the host", "messages", "slots", "ipc"},
        "pieces": {
            "pieces of 64 KiB",
            "pieces of 256 KiB",
            "in one piece",
            "pieces as they are",
            "by hand",
            "by hand, mpiagg",
        },
        "memory": {"on the device", "to the host", "from the host"},
        "folds": {"fold", "limit"},
        "codecs": {"encode", "decode", "limit"},
    }
    for part in saved["parts"]:
        assert part["how"] == "done"
        assert part["machine"]["device"]["name"] == "standin:0"
        assert part["rows"]
        if part["part"] == "training":
            assert [row["way"] for row in part["rows"]] == list(gpu.gpu_report.TRAINED)
        for row in part["rows"]:
            assert set(row.get("times", ())) == ways.get(part["part"], set())
            assert all(times["us"] > 0 for times in row.get("times", {}).values())
            wrong = row.get("wrong", 0)
            assert not any(wrong.values() if isinstance(wrong, dict) else [wrong])
    goals = {goal["name"]: goal["met"] for goal in saved["goals"]}
    assert list(goals.values()) == [None, None, None, True, None]  # short vectors say nothing
    assert "met          DDP on the device as on the host" in done.stdout
    page = (tmp_path / "saved" / "gpu.md").read_text()
    assert all(f"## {part['part']}, " in page for part in saved["parts"])


# -- parts that do not end well


SLEEP = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("script", "how", "words"),
    [
        ("print('all is well')", "done", "all is well"),
        ("import os; os.abort()", "FAILED with status", ""),
        ("raise ValueError('this is wrong')", "FAILED with status", "this is wrong"),
        (f"import faulthandler; faulthandler.dump_traceback_later(0.5, exit=True); {SLEEP}", "ENDED after 1 s", "File"),
        (SLEEP, "ENDED after 2 s", ""),
    ],
)
def test_how_a_job_ends_is_told(gpu, monkeypatch, script, how, words):
    monkeypatch.setattr(gpu, "GRACE", 1 if how == "ENDED after 2 s" else 60)
    outcome = gpu.job(1, ["-c", script], 1)
    assert outcome.how.startswith(how)
    assert words in outcome.printed


def test_after_a_part_that_fails_the_others_go_on_and_what_it_had_is_kept(gpu, monkeypatch, tmp_path):
    def job(ranks, arguments, limit):
        assert (ranks, limit <= 30) == (2, True)
        Path(arguments[3]).write_text(json.dumps({"rows": [{"size": 1024, "times": {"ipc": {"us": 1.0}}}]}))
        return gpu.Outcome("done" if arguments[2] == "pieces" else "FAILED with status 9", "a crash\n" * 10_000)

    monkeypatch.setattr(gpu, "job", job)
    run = gpu.Run(tmp_path, [2])
    for name in ("allreduce", "pieces"):
        run.measure(gpu.Part(name, 2, 30))
    saved = json.loads((tmp_path / "gpu.json").read_text())
    assert [(part["part"], part["how"]) for part in saved["parts"]] == [
        ("allreduce", "FAILED with status 9"),
        ("pieces", "done"),
    ]
    assert all(part["rows"] and len(part["printed"]) == gpu.PRINTED for part in saved["parts"])
    page = (tmp_path / "gpu.md").read_text()
    assert page.count("a crash") == 30  # of the part that failed alone
    assert "| 1 KiB | 1.0" in page


def test_what_there_is_no_time_for_is_not_begun(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "job", lambda *_: pytest.fail("it was begun"))
    run = gpu.Run(tmp_path, [2], seconds=1)
    run.measure(gpu.Part("allreduce", 2, 30))
    run.measure(gpu.Part("tests", 2, 30))
    assert [part["how"] for part in run.record["parts"]] == ["not run: no time was left"] * 2


def test_without_pytest_tests_are_not_run(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name == "pytest" else 1)
    run = gpu.Run(tmp_path, [2])
    run.measure(gpu.Part("tests", 2, 30))
    assert run.record["parts"][0]["how"] == "not run: pytest is missing"
    assert list(gpu.gpu_report.summary(run.record)) == [
        "measured: nothing",
        "not measured, or not all of it: tests, 2 ranks: not run: pytest is missing",
    ]


BARE = """
import sys
for name in ("hypothesis", "ml_dtypes", "pytest_mpi", "pytest_timeout"):
    sys.modules[name] = None
"""
"""With this Python finds none of them when it starts, as where they are not installed."""


@pytest.mark.usefixtures("gpu")
def test_ranks_start_the_tests_without_any_plugin_of_pytest(monkeypatch, tmp_path):
    from gpu_jobs import GPU, run_gpu_job, trouble

    if not trouble(GPU):
        pytest.skip("there is a GPU: its tests would run")
    (tmp_path / "sitecustomize.py").write_text(BARE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(TOP)]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    job = run_gpu_job(tmp_path, 2, seconds=100)
    ended = [rank for rank, outcomes in job.outcomes.items() if outcomes is not None]
    assert ended, job.complaints()  # of both ranks maybe one: that no test was run is a failure, which ends the job
    for rank in ended:
        assert job.read(rank, "out").rstrip().splitlines()[-1].startswith("2 skipped"), job.complaints()


class Finished:
    """What is known of a job of tests."""

    def __init__(self, outcomes, told):
        self.outcomes, self.complaints = {0: outcomes}, lambda: told

    def read(self, rank, ending):
        assert (rank, ending) == (0, "tests")
        return "test_one passed\ntest_two passed\ntest_three skipped\n"


@pytest.mark.parametrize(
    ("job", "how", "saved", "verdict"),
    [
        (({"one": "passed", "two": "passed"}, "", 1), "done", {"passed": 2}, "met"),
        (({"one": "passed", "two": "failed"}, "no", 1), "FAILED", {"passed": 1}, "MISSED"),
        ((None, "cut", 30), "ENDED after 30 s", {"passed_until_then": 2}, "met in part"),
        ((None, "a crash", 1), "FAILED", {"passed_until_then": 2}, "MISSED"),
    ],
)
def test_tests_that_are_cut_are_no_tests_that_fail(  # noqa: PLR0917 - three of them are fixtures
    gpu, monkeypatch, tmp_path, job, how, saved, verdict
):
    (outcomes, told, took), now = job, [0.0]

    def run_gpu_job(_folder, _ranks, seconds):
        assert seconds == 30
        now[0] += took
        return Finished(outcomes, told)

    monkeypatch.setitem(sys.modules, "gpu_jobs", types.SimpleNamespace(run_gpu_job=run_gpu_job))
    monkeypatch.setattr(gpu, "find_spec", lambda _: True)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("PYTHONPATH", "")
    run = gpu.Run(tmp_path, [2])
    for ranks in (1, 2, 3, 4):
        run.measure(gpu.Part("tests", ranks, 30))
    for part in run.record["parts"]:
        assert part["how"] == how
        assert {key: part[key] for key in part if key.startswith("passed")} == saved
    assert gpu.gpu_report.goals(run.record)[4].verdict == verdict


def test_what_goes_wrong_here_ends_one_part_alone(gpu, monkeypatch, tmp_path):
    def job(*_):
        raise subprocess.TimeoutExpired("looking", 120)

    monkeypatch.setattr(gpu, "job", job)
    run = gpu.Run(tmp_path, [2])
    run.measure(gpu.Part("allreduce", 2, 30))
    monkeypatch.setattr(gpu, "job", lambda *_: gpu.Outcome("done"))
    run.measure(gpu.Part("pieces", 2, 30))
    failed, done = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert failed["how"] == "FAILED: TimeoutExpired: Command 'looking' timed out after 120 seconds"
    assert done["how"] == "done"


@pytest.mark.parametrize("raised", [subprocess.TimeoutExpired("info", 60), click.ClickException("no MPI")])
def test_without_information_all_is_measured_and_it_is_told(gpu, monkeypatch, tmp_path, raised):
    def info():
        raise raised

    monkeypatch.setattr(gpu, "info", info)
    monkeypatch.setattr(gpu, "warm_up", lambda: None)
    monkeypatch.setattr(gpu, "job", lambda *_: gpu.Outcome("done"))
    done = CliRunner().invoke(gpu.main, [str(tmp_path / "saved"), "--no-tests"])
    assert done.exit_code == 1
    assert f"info: FAILED: {type(raised).__name__}" in done.output
    saved = json.loads((tmp_path / "saved" / "gpu.json").read_text())
    assert {part["part"] for part in saved["parts"]} == {*gpu.PARTS} - {"messages", "library"}
    assert "mpiagg info: FAILED" in (tmp_path / "saved" / "gpu.md").read_text()


def test_tests_alone_run_beside_each_other_where_they_can(gpu, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(gpu, "job", lambda _, arguments, __: asked.append(arguments) or gpu.Outcome("done"))
    for able in (True, False):
        monkeypatch.setattr(gpu, "find_spec", lambda name, able=able: name != "xdist" or able or None)
        gpu.Run(tmp_path, [2]).measure(gpu.Part("tests alone", 1, 30))
    assert ["-n" in arguments for arguments in asked] == [True, False]
    assert all({"--timeout=60", "-rfE", "--tb=short"} < set(arguments) for arguments in asked)


KNOWN = """
from types import SimpleNamespace
from bench.gpu_collectives import MPI, built_with, channel_of
from mpiagg.plans import bound
from mpiagg.plans import choices as tuning
comm = MPI.COMM_SELF
calls = channel_of(comm).calls
freed = []
calls.find("call", lambda: SimpleNamespace(nbytes=0, free=lambda: freed.append("worked out before")))

def build(task):
    assert not calls
    calls.find("call", lambda: SimpleNamespace(nbytes=0, free=lambda: freed.append("with another constant")))
    return (bound.BY_WAY_OF_HOST, tuning.BY_WAY_OF_HOST)

assert built_with(SimpleNamespace(comm=comm), build, BY_WAY_OF_HOST=-1) == (-1, -1)
assert not calls
assert freed == ["worked out before", "with another constant"]
assert bound.BY_WAY_OF_HOST == tuning.BY_WAY_OF_HOST > 0
"""


def test_no_way_is_built_with_what_is_known_of_another(gpu):
    outcome = gpu.job(1, ["-c", KNOWN], 60)
    assert outcome.how == "done", outcome.printed


def test_every_part_comes_and_all_of_it_may_take_less_than_eight_minutes(gpu):
    found = list(gpu.parts([2, 4], able=True, tests=True))
    order = list(dict.fromkeys(part.name for part in found))
    assert order == [
        *("allreduce", "training", "folds", "memory", "codecs", "threshold", "pieces", "tests", "messages", "library"),
        "tests alone",
    ]
    assert [part.ranks for part in found[:2]] == [2, 4]
    assert {part.name for part in found} == {*gpu.PARTS, "tests", "tests alone"}
    assert {part.ranks for part in found if part.name == "tests"} == {1, 2, 3, 4}
    assert {part.name for part in found} - {part.name for part in gpu.parts([2], able=False, tests=False)} == {
        *("messages", "library", "tests", "tests alone")
    }
    assert gpu.DEADLINE + 2 * gpu.GRACE < 480


@pytest.mark.parametrize("ranks", ["", "1", "2,", "two", "2;4"])
def test_what_is_no_list_of_ranks_is_refused(gpu, tmp_path, ranks):
    done = CliRunner().invoke(gpu.main, [str(tmp_path / "saved"), "--ranks", ranks])
    assert done.exit_code == 2
    assert "is no list of numbers of ranks" in done.output


def test_without_a_gpu_nothing_is_begun(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "warm_up", lambda: None)
    monkeypatch.setattr(gpu, "info", lambda: {"ranks": [{"visible": [], "cupy": "14"}]})
    done = CliRunner().invoke(gpu.main, [str(tmp_path / "saved")])
    assert done.exit_code == 1
    assert "this process sees no GPU; CuPy: 14" in done.output
    assert not (tmp_path / "saved").exists()


# -- goals


TRAINED = ("by way of the host", "by mapped memory or messages")


def made_up():
    """Return what a run would save in which all goals are met, barely."""
    sizes = [1024, 64 * MIB, 1024 * MIB]
    times = {"staged": 200.0, "ipc": 20.0, "by hand": 300.0, "limit": 10.0}
    rows = [
        {"size": size, "times": {way: {"us": us} for way, us in times.items()}, "wrong": dict.fromkeys(times, 0)}
        for size in sizes
    ]
    rows[0]["times"]["ipc"]["us"] = 1e6  # short vectors do not count
    step_us = {"on the device": 1.0, "on the host": 1.0}
    trained = {
        "epochs": 1,
        "difference": 4e-6,
        "rounding": 1e-6,
        "between_ranks": 0.0,
        "accuracy": 1,
        "step_us": step_us,
    }
    parts = [
        part
        for ranks in (2, 4)
        for part in (
            {"part": "allreduce", "ranks": ranks, "how": "done", "sizes": sizes, "rows": copy.deepcopy(rows)},
            {"part": "training", "ranks": ranks, "how": "done", "rows": [{"way": way, **trained} for way in TRAINED]},
        )
    ]
    parts += [{"part": "tests", "ranks": ranks, "how": "done", "passed": 9} for ranks in (1, 2, 3, 4)]
    return {"ranks": [2, 4], "parts": parts}


def test_goals_that_are_met_are_met(report):
    found = report.goals(made_up())
    assert [goal.verdict for goal in found] == ["met"] * 5
    assert [goal.found for goal in found[:3]] == [f"{x} at 64 MiB on 2 ranks" for x in ("10.00", "0.50", "1.50")]
    assert found[4].found == "36 passed"


def times_of(record, ranks, size, way):
    (part,) = (one for one in record["parts"] if (one["part"], one["ranks"]) == ("allreduce", ranks))
    (row,) = (one for one in part["rows"] if one["size"] == size)
    return row["times"][way]


def slower(record, ranks, size, way, factor):
    times_of(record, ranks, size, way)["us"] *= factor


def cut(part):
    part["how"] = "ENDED after 150 s"
    part["passed_until_then"] = part.pop("passed")


def without(record, name, ranks):
    record["parts"] = [part for part in record["parts"] if part["part"] != name or part["ranks"] not in ranks]


def spoil(record, what):
    """Spoil one number of what was saved, or take something away."""
    parts = {(part["part"], part["ranks"]): part for part in record["parts"]}
    {
        "ipc": lambda: slower(record, 4, 1024 * MIB, "ipc", 1.01),
        "staged": lambda: slower(record, 4, 1024 * MIB, "staged", 1.01),
        "limit": lambda: slower(record, 2, 64 * MIB, "limit", 0.99),
        "wrong": lambda: parts["allreduce", 2]["rows"][1]["wrong"].update(ipc=1),
        "a size": lambda: parts["allreduce", 4]["rows"].pop(2),
        "slow, and a size": lambda: (spoil(record, "a size"), slower(record, 2, 64 * MIB, "ipc", 1.01)),
        "a way": lambda: parts["allreduce", 2]["rows"][2]["times"].pop("by hand"),
        "a part": lambda: without(record, "allreduce", [4]),
        "all sizes": lambda: without(record, "allreduce", [2, 4]),
        "difference": lambda: parts["training", 4]["rows"][1].update(difference=4.1e-6),
        "between_ranks": lambda: parts["training", 4]["rows"][1].update(between_ranks=1e-7),
        "a training": lambda: parts["training", 2]["rows"].pop(1),
        "all trainings": lambda: without(record, "training", [2, 4]),
        "a test": lambda: parts["tests", 3].update(how="FAILED"),
        "tests": lambda: without(record, "tests", [1]),
        "all tests": lambda: without(record, "tests", [1, 2, 3, 4]),
        "cut": lambda: cut(parts["tests", 2]),
    }[what]()


@pytest.mark.parametrize(
    ("what", "verdicts"),
    [
        ("ipc", ["MISSED", "MISSED", "met", "met", "met"]),
        ("staged", ["met", "met", "MISSED", "met", "met"]),
        ("limit", ["met", "MISSED", "met", "met", "met"]),
        ("wrong", ["MISSED", "MISSED", "met", "met", "met"]),
        ("a size", ["met in part"] * 3 + ["met", "met"]),
        ("a way", ["met", "met", "met in part", "met", "met"]),
        ("a part", ["met in part"] * 3 + ["met", "met"]),
        ("slow, and a size", ["MISSED", "MISSED", "met in part", "met", "met"]),
        ("all sizes", ["not measured"] * 3 + ["met", "met"]),
        ("difference", ["met"] * 3 + ["MISSED", "met"]),
        ("between_ranks", ["met"] * 3 + ["MISSED", "met"]),
        ("a training", ["met"] * 3 + ["met in part", "met"]),
        ("all trainings", ["met"] * 3 + ["not measured", "met"]),
        ("a test", ["met"] * 4 + ["MISSED"]),
        ("tests", ["met"] * 4 + ["met in part"]),
        ("all tests", ["met"] * 4 + ["not measured"]),
        ("cut", ["met"] * 4 + ["met in part"]),
    ],
)
def test_a_goal_that_is_missed_is_told(report, what, verdicts):
    record = made_up()
    spoil(record, what)
    assert [goal.verdict for goal in report.goals(record)] == verdicts
    page = report.page(record)
    assert all(goal.found in page for goal in report.goals(record))
    assert ("WRONG" in page) == (what == "wrong")


def test_what_is_missing_is_told_beside_the_worst_of_what_is_not(report):
    record = made_up()
    spoil(record, "slow, and a size")
    assert report.goals(record)[0].found == "9.90 at 64 MiB on 2 ranks; not measured at 1 GiB on 4 ranks"


@pytest.mark.parametrize(
    ("slow", "fast", "size"),
    [([3, 3, 3], [1, 1, 1], 1), ([3, 3, 3], [4, 2, 2], 2), ([3, 3, 3], [1, 4, 1], 4), ([3, 3, 3], [1, 1, 3], None)],
)
def test_a_way_is_faster_from_where_it_stays_so(report, slow, fast, size):
    rows = [
        {"size": 2**power, "times": {"slow": {"us": one}, "fast": {"us": other}}}
        for power, (one, other) in enumerate(zip(slow, fast, strict=True))
    ]
    assert report.crossing(rows[::-1], "slow", "fast") == size
