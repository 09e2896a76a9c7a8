"""``bench/calls.py``: every kind of call is made, and has its times."""

import json
from pathlib import Path

import pytest

from mpiagg.launch import start as launch

TOP = Path(__file__).parents[2]

WITH_FUNCTION = {"mpi", "comm", "function"}
WITH_PLAN = WITH_FUNCTION | {"plan"}
ALONE = {"mpi", "comm"}


def measured(tmp_path, *options):
    """Return the names of the times of all cells, by verb, bytes and kind."""
    saved = tmp_path / "calls.json"
    arguments = ["-m", "mpi4py", "bench/calls.py", "-o", str(saved), "--seconds", "0.01", *options]
    env = launch.environment({"PYTHONPATH": str(TOP), "MPIAGG_RECORD_DIR": str(tmp_path)})
    ended = launch.run_within(120, 2, arguments, env, cwd=TOP)
    assert ended.status == 0, ended.printed
    told = json.loads(saved.read_text())
    assert told["ranks"] == 2
    assert all(us > 0 for row in told["rows"] for us in row["us"].values())
    return {(row["verb"], row["bytes"], row["arrays"]): set(row["us"]) for row in told["rows"]}


@pytest.mark.parametrize(
    ("verb", "kinds"),
    [
        (
            "Allreduce",
            {
                **dict.fromkeys(("plain", "mixed", "registered"), WITH_PLAN),
                **dict.fromkeys(("typed", "own-op", "nonblocking", "persistent"), ALONE),
                **dict.fromkeys(("many", "lengths"), WITH_FUNCTION),
            },
        ),
        ("Gatherv", dict.fromkeys(("plain", "apart", "many"), ALONE)),
        ("Scatter", {"columns": ALONE, "lengths": WITH_FUNCTION}),
    ],
)
def test_every_kind_has_its_times(tmp_path, verb, kinds):
    found = measured(tmp_path, "--verbs", verb, "--bytes", "64,100000", "--kinds", ",".join(kinds))
    assert found == {(verb, nbytes, kind): names for nbytes in (64, 100_000) for kind, names in kinds.items()}


def test_what_a_verb_is_not_called_with_is_left_out(tmp_path):
    assert measured(tmp_path, "--verbs", "Barrier,Bcast", "--bytes", "64", "--kinds", "own-op,plain") == {
        ("Barrier", 0, "plain"): ALONE,
        ("Bcast", 64, "plain"): WITH_PLAN,
    }
