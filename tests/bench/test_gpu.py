"""``bench/gpu.py``: everything through the stand-in, quickly; parts that crash; goals on numbers that are made up."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpiagg.cli import launch

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
    for variable in launch._LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)
    from bench import gpu

    return gpu


@pytest.fixture
def report(gpu):
    return gpu.gpu_report


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
    ways = {
        "allreduce": {"staged", "ipc", "native", "by hand", "by hand, mpiagg", "limit"},
        "messages": {"staged", "aware"},
        "library": {"staged", "mpi"},
        "threshold": {"by way of the host", "messages", "ipc"},
        "pieces": {"pieces of 64 KiB", "pieces of 256 KiB", "in one piece", "by hand", "by hand, mpiagg"},
        "memory": {"on the device", "to the host", "from the host"},
        "folds": {"fold", "limit"},
        "codecs": {"encode", "decode", "limit"},
    }
    for part in saved["parts"]:
        assert part["how"] == "done"
        assert part["machine"]["device"]["name"] == "standin:0"
        assert part["rows"]
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


def test_tests_that_need_more_than_there_is_are_not_run(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name == "pytest_mpi" else 1)
    run = gpu.Run(tmp_path, [2])
    run.measure(gpu.Part("tests", 2, 30))
    assert run.record["parts"][0]["how"] == "not run: pytest_mpi missing"


def test_every_part_comes_and_all_of_it_may_take_less_than_eight_minutes(gpu):
    found = list(gpu.parts([2, 4], able=True, tests=True))
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
    monkeypatch.setattr(gpu, "info", lambda: {"ranks": [{"visible": [], "cupy": "14"}]})
    done = CliRunner().invoke(gpu.main, [str(tmp_path / "saved")])
    assert done.exit_code == 1
    assert "this process sees no GPU; CuPy: 14" in done.output
    assert not (tmp_path / "saved").exists()


# -- goals


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
            {"part": "training", "ranks": ranks, "how": "done", "rows": [dict(trained)]},
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


def spoil(record, what):
    """Spoil one number of what was saved."""
    parts = {(part["part"], part["ranks"]): part for part in record["parts"]}
    if what in ("ipc", "staged"):
        times_of(record, 4, 1024 * MIB, what)["us"] *= 1.01
    elif what == "limit":
        times_of(record, 2, 64 * MIB, what)["us"] *= 0.99
    elif what == "wrong":
        parts["allreduce", 2]["rows"][1]["wrong"]["ipc"] = 1
    elif what == "a size":
        del parts["allreduce", 4]["rows"][2]
    elif what == "a way":
        del parts["allreduce", 2]["rows"][2]["times"]["by hand"]
    elif what == "a part":
        record["parts"].remove(parts["allreduce", 4])
    elif what in ("difference", "between_ranks"):
        parts["training", 4]["rows"][0][what] += 1e-7
    elif what == "a training":
        parts["training", 2]["rows"] = []
    elif what == "a test":
        parts["tests", 3]["how"] = "FAILED"
    else:
        record["parts"].remove(parts["tests", 1])


@pytest.mark.parametrize(
    ("what", "verdicts"),
    [
        ("ipc", ["MISSED", "MISSED", "met", "met", "met"]),
        ("staged", ["met", "met", "MISSED", "met", "met"]),
        ("limit", ["met", "MISSED", "met", "met", "met"]),
        ("wrong", ["not measured", "not measured", "met", "met", "met"]),
        ("a size", ["not measured"] * 3 + ["met", "met"]),
        ("a way", ["met", "met", "not measured", "met", "met"]),
        ("a part", ["not measured"] * 3 + ["met", "met"]),
        ("difference", ["met"] * 3 + ["MISSED", "met"]),
        ("between_ranks", ["met"] * 3 + ["MISSED", "met"]),
        ("a training", ["met"] * 3 + ["not measured", "met"]),
        ("a test", ["met"] * 4 + ["MISSED"]),
        ("tests", ["met"] * 4 + ["not measured"]),
    ],
)
def test_a_goal_that_is_missed_is_told(report, what, verdicts):
    record = made_up()
    spoil(record, what)
    assert [goal.verdict for goal in report.goals(record)] == verdicts
    page = report.page(record)
    assert all(goal.found in page for goal in report.goals(record))
    assert ("WRONG" in page) == (what == "wrong")


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
