"""``bench/faults.py``: its judge, on outcomes that are made up; its list of cases; and the table of docs/faults.md."""

import json
import runpy
from pathlib import Path

import click
import pytest

TOP = Path(__file__).parents[2]
MISMATCH = "ranks disagree in operation 2: ranks 0, 2: allreduce; rank 1: broadcast"


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.syspath_prepend(TOP)
    from bench import faults

    return faults


@pytest.fixture
def judge(faults):
    """Return a function that judges an outcome of three ranks, made of what they have said."""
    cases, jobs = faults.fault_cases, faults.fault_jobs

    def judge(name, said, **more):
        case = next(case for case in cases.cases() if case.name == name)
        fields = {"status": 1, "seconds": 1.0, **more}
        outcome = jobs.Outcome(said=tuple(jobs.Said(rank, **each) for rank, each in enumerate(said)), **fields)
        return jobs.complaints(case, 3, outcome, faults.LIMITS)

    return judge


def error(kind="MismatchError", text=MISMATCH, **more):
    return {"kind": kind, "text": text, "results": ("right",), **more}


DONE = {"results": ("right",), "done": True}
WARNED = {**DONE, "printed": "mpiagg: operation 2 of 3 ranks, allreduce:\n  rank 1: has not come"}
STALL = error("StallError", "waited 6 s in vain\n  rank 1: has not come: it computes")
RAISED = {"printed": "mpiagg: rank 1 of 3, on node, raised RuntimeError: on purpose\nTraceback"}


@pytest.mark.parametrize(
    ("name", "said", "more"),
    [
        ("shape: short", [error()] * 3, {}),
        ("missing: short", [STALL, {}, STALL], {"seconds": 7.0}),
        ("late: short", [WARNED, DONE, DONE], {"status": 0}),
        ("exception: before a call", [{}, RAISED, {}], {}),
        ("missing: native", [{}, {}, {"printed": "waited 6 s in vain"}], {}),
        ("SIGKILL: computing", [{}, {}, {}], {"status": 9}),
    ],
)
def test_what_is_expected_is_ok(judge, name, said, more):
    assert judge(name, said, **more) == []


@pytest.mark.parametrize(
    ("name", "said", "more", "words"),
    [
        ("shape: short", [error()] * 3, {"status": None, "seconds": 20.0}, "had to be ended after 20.0 s"),
        ("shape: short", [error()] * 3, {"seconds": 9.0}, "it took 9.0 s, and had 8.0"),
        ("shape: short", [error()] * 3, {"left": 2}, "2 processes were left"),
        ("shape: short", [error()] * 3, {"status": 0}, "its exit status is 0"),
        ("SIGKILL: computing", [{}, {}, {}], {"brought_about": False}, "the fault did not come about"),
        ("shape: short", [error()] * 2, {}, "2 of 3 processes have started"),
        ("shape: short", [error(), DONE, error()], {}, "rank 1 has noticed nothing"),
        ("shape: short", [error(), {}, error()], {}, "rank 1 does not say it"),
        ("shape: short", [error(results=("right", "wrong")), error(), error()], {}, "rank 0 had a wrong result"),
        ("shape: short", [error(), error(), error("StallError")], {}, "rank 2 says StallError"),
        ("shape: short", [error(text="ranks disagree in operation 1")] * 3, {}, "rank 0 says MismatchError"),
        ("shape: short", [error(), error(), error(text=f"{MISMATCH}!")], {}, "ranks have different errors"),
        ("missing: short", [STALL, {}, error("StallError", "waited 6 s")], {}, "rank 2 says StallError: 'waited 6 s'"),
        ("missing: short", [STALL, {}, STALL], {"seconds": 15.0}, "it took 15.0 s"),
        ("late: short", [WARNED, DONE, DONE], {"status": 1}, "its exit status is 1"),
        ("late: short", [DONE, DONE, DONE], {"status": 0}, "nobody was warned"),
        ("late: short", [WARNED, DONE, STALL], {"status": 0}, "rank 2 has not gone on: StallError"),
        ("late: short", [WARNED, {**DONE, "results": ("wrong",)}, DONE], {"status": 0}, "rank 1 had a wrong result"),
        ("exception: before a call", [RAISED, {}, {}], {}, "rank 1 does not say it"),
        ("missing: native", [{}, {}, {}], {}, "no rank says why"),
        ("SIGKILL: computing", [{}, {}, {}], {"status": 0}, "its exit status is 0"),
    ],
)
def test_what_is_not_expected_is_not_ok(judge, name, said, more, words):
    assert any(complaint.startswith(words) or words in complaint for complaint in judge(name, said, **more))


def test_every_case_has_its_name_and_something_that_brings_it_about(faults):
    found = list(faults.fault_cases.cases())
    assert len({case.name for case in found}) == len(found)
    # What a rank does is looked at as a text: to import it as a rank does would start MPI here.
    text = (TOP / "bench" / "fault_rank.py").read_text()
    for fault in {case.fault for case in found} - set(faults.fault_cases.MISMATCHES):
        assert f'"{fault}"' in text


def test_cases_are_chosen_by_the_beginning_of_their_names(faults):
    assert [case.way for case in faults.chosen(["NaN", "SIGSTOP: for"])] == ["for ever", "DDP(check_finite=True)"]
    with pytest.raises(click.BadParameter, match=r"there are: .*NaN"):
        faults.chosen(["nonsense"])


@pytest.mark.parametrize("text", ["", "1", "2,x", "2,,4"])
def test_numbers_of_ranks_are_checked(faults, text):
    assert faults.parse_ranks("4, 2,4") == [2, 4]
    with pytest.raises(click.BadParameter, match="from 2 on"):
        faults.parse_ranks(text)


def test_the_table_tells_what_each_rank_says_and_what_was_not_ok(faults, tmp_path):
    made = runpy.run_path(str(TOP / "docs" / "make_faults.py"))
    case = faults.chosen(["shape: short"])[0]
    jobs = faults.fault_jobs
    said = tuple(jobs.Said(rank, **error(text=f"{MISMATCH} | {'x' * 999}")) for rank in (0, 1))
    rows = [faults.record(case, 2, faults.LIMITS, jobs.Outcome(status, 1.25, said)) for status in (1, None)]
    saved = {"machine": {"mpi": "MPI 1", "cores": 2}, "limits": faults.LIMITS._asdict(), "rows": rows}
    (tmp_path / "faults-mpich.json").write_text(json.dumps(saved))
    made["page"].__globals__["RESULTS"] = tmp_path
    page = made["page"]()
    assert "1 of 2 jobs did what is expected; 1 hung, 0 ranks had wrong results" in page
    line = next(line for line in page.splitlines() if line.startswith("| shape | short"))
    assert "all: `MismatchError: ranks disagree in operation 2" in line
    assert line.endswith("| 2: 1.2<br>2: 1.2 **not ok** |")
    assert len(line) < 600
