"""``bench/goals.py``, ``plot.py`` and the lists of sweeps: what is saved, held against the goals, and drawn."""

import json
from pathlib import Path

import pytest

from mpiagg.schedules import algorithms

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def goals(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    import goals

    return goals


def row(size, algorithm, time_us, wrong=0):
    return {"size": size, "algorithm": algorithm, "time_us": time_us, "wrong": wrong}


def save(folder, setting, library, rows):
    (folder / f"allreduce-{setting}-{library}.json").write_text(json.dumps({"rows": rows}))


@pytest.fixture
def goal(goals):
    return goals.Goal("a case", "auto", "native", 0.5, ("n2-any",), 1024, 4096)


def test_the_worst_size_of_the_range_counts(goals, goal, tmp_path):
    times = {64: 9, 1024: 4, 2048: 5, 4096: 3, 16384: 9}
    rows = [r for size, us in times.items() for r in (row(size, "native", 10), row(size, "auto", us))]
    save(tmp_path, "n2-any", "mpich", rows)
    found = goals.find(goal, "n2-any", "mpich", tmp_path)
    assert found == (0.5, 2048)
    assert goals.cell(found, goal.limit("mpich")) == "0.500 at 2 KiB: met"
    assert goals.cell(found, 0.49) == "0.500 at 2 KiB: NOT met"


@pytest.mark.parametrize(
    "rows",
    [
        [row(1024, "native", 10), row(1024, "auto", 1), row(4096, "native", 10)],  # one row is missing
        [row(1024, "native", 10), row(1024, "auto", 1)],  # the end of the range is
        [row(2048, "native", 10), row(2048, "auto", 1)],  # both ends are
        [row(size, name, 1, wrong) for size in (1024, 4096) for name, wrong in (("native", 0), ("auto", 3))],
    ],
)
def test_what_was_not_measured_is_not_met(goals, goal, tmp_path, rows):
    assert goals.find(goal, "n2-any", "mpich", tmp_path) is None
    save(tmp_path, "n2-any", "mpich", rows)
    assert goals.find(goal, "n2-any", "mpich", tmp_path) is None
    assert goals.cell(None, 0.5) == "not measured"


def test_goals_may_be_about_the_best_and_the_limit(goals, tmp_path):
    rows = [
        *(row(1024, name, us) for name, us in (("native", 1), ("auto", 6), ("ring", 5), ("tree", 4), ("gloo", 2))),
        *(row(1024, name, us) for name, us in (("auto-u8", 3), ("link", 2))),
    ]
    save(tmp_path, "4x1-any", "mpich", rows)
    for over, ratio in ((goals.BEST, 1.5), (goals.LIMIT, 3)):
        goal = goals.Goal("a case", "auto", over, 1.1, ("4x1-any",))
        assert goals.find(goal, "4x1-any", "mpich", tmp_path) == (ratio, 1024)


def test_goals_may_differ_by_library(goals):
    goal = goals.Goal("a case", "auto", "native", {"mpich": 1.0, "openmpi": 1.3}, ())
    assert (goal.limit("mpich"), goal.limit("openmpi")) == (1.0, 1.3)


def test_the_table_has_a_line_for_every_goal_and_setting(goals, tmp_path):
    empty = goals.table(tmp_path)
    assert len(empty) == 1 + sum(len(goal.settings) for goal in goals.GOALS)
    assert {cell for line in empty[1:] for cell in line[3:]} == {"not measured"}
    sizes = [64 * 4**power for power in range(11)]
    names = [("native", 100), ("auto", 10), ("ring", 20), ("hierarchical", 10), ("auto-bf16", 5), ("auto-u8", 3)]
    rows = [row(size, name, us) for size in sizes for name, us in [*names, ("gloo", 1000), ("copy", 10)]]
    for setting in goals.EVERYWHERE:
        for library in goals.LIBRARIES:
            save(tmp_path, setting, library, rows)
    full = goals.table(tmp_path)
    assert all(cell.endswith(": met") for line in full[1:] for cell in line[3:])


def test_every_goal_can_be_measured(goals):
    import network
    import node
    import tuned

    names = {**node.SWEEPS, **network.SWEEPS, **tuned.SWEEPS}
    saved = {name.removeprefix("allreduce-") for name in names if name.startswith("allreduce-")} - {"4x2-any"}
    assert set(goals.EVERYWHERE) == saved
    assert {setting for goal in goals.GOALS for setting in goal.settings} == saved


def test_pictures_are_small_and_styles_tell_algorithms_apart(goals, tmp_path):
    pytest.importorskip("matplotlib")
    del goals  # it has put bench/ on the path
    import plot

    assert set(algorithms("allreduce")) <= set(plot.STYLES)
    looks = [tuple(sorted(plot.style(name).items())) for name in plot.STYLES if name != "link"]
    assert len(set(looks)) == len(looks)
    lines = {name: [{"size": 4, "time_us": 1 + place}] for place, name in enumerate(reversed(plot.STYLES))}
    shown = plot.drawn(lines, "time_us")
    assert len(shown) == plot.MOST
    assert set(plot.FIRST) <= set(shown)
    assert set(shown) - set(plot.FIRST) == {"auto-u8", "auto-bf16", "auto-fp16"}  # the fastest, as it was made up
    flags = {"collective": "allreduce", "dtype": "float32", "buffer": "any", "link_rate": None, "beside": ["gloo"]}
    for protocol in plot.VIEWS:
        rows = [
            {"size": 4**power, "algorithm": name, "time_us": power + 1, "mean_us": power + 1, "busbw": 1.0}
            for power in range(1, 12)
            for name in plot.STYLES
        ]
        saved = {"machine": {"mpi": "MPI 1", "cpu": "a processor", "cores": 2}, "ranks": 2, "layout": "1 x 2"}
        path = tmp_path / f"{protocol}.json"
        path.write_text(json.dumps({**saved, "flags": {**flags, "protocol": protocol}, "rows": rows}))
        picture = plot.draw(path)
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size < 100_000
