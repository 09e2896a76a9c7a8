"""``mpiagg plan-training``: what is told, saved and refused."""

import json

import pytest
from click.testing import CliRunner

from mpiagg.cli import main
from mpiagg.cli.plan_training import parse_count, parse_shapes, shapes_of
from mpiagg.cli.quantities import format_size
from mpiagg.schedules import Cluster, Collective, Layout
from mpiagg.tables.files import text_of
from mpiagg.tables.rows import Choice, Origin, Row, Table
from mpiagg.tables.times import Modelled
from mpiagg.tables.training import Training, plan_training

SLOW = ("--parameters", "125M", "--step-time", "300ms", "-n", 4, "--bandwidth", "100Mbit/s", "--alpha", "1ms")


def plan(*arguments, columns=160):
    return CliRunner().invoke(main, ["plan-training", *map(str, arguments)], env={"COLUMNS": str(columns)})


@pytest.mark.parametrize(
    ("text", "number"), [("7000", 7000), ("125M", 125_000_000), ("1.3B", 1_300_000_000), ("2k", 2000)]
)
def test_numbers_of_parameters(text, number):
    assert parse_count(text) == number
    assert sum(x[0] * (x[1] if len(x) > 1 else 1) for x in shapes_of(number)) == number


def test_shapes():
    assert parse_shapes("4096x1024, 7,2x3x4") == [(4096, 1024), (7,), (2, 3, 4)]


@pytest.mark.parametrize("read", [parse_count, parse_shapes])
@pytest.mark.parametrize("text", ["", "x", "-3", "3x", "1e9", ",", "0.5x3"])
def test_what_is_not_written_so_is_refused(read, text):
    with pytest.raises(ValueError, match="write"):
        read(text)


def test_the_table_and_the_file_say_what_the_function_does(tmp_path):
    path = tmp_path / "plan.json"
    done = plan(*SLOW, "--json", path, "--gamma", "5GB/s")
    assert done.exit_code == 0, done.output
    times = Modelled(Layout.by_name(range(4)), Cluster(1e-3, 8 / 100e6, 1 / 5e9))
    wanted = plan_training(Training(0.3, shapes_of(125_000_000)), times)
    saved = json.loads(path.read_text())
    assert [each["name"] for each in saved["aggregations"]] == [each.name for each in wanted]
    assert [each["seconds"] for each in saved["aggregations"]] == pytest.approx([each.seconds for each in wanted])
    assert (saved["ranks"], saved["parameters"]) == (4, 125_000_000)
    assert "125,000,000 parameters, 300 ms a step, 4 ranks" in done.output
    assert f"Take {saved['advised']}: the ranks compute for" in done.output
    assert "(none reaches 90%)" in done.output
    assert "Take another one if ranks see very different data" in done.output
    for each in wanted:
        assert each.name[:20] in done.output


@pytest.mark.parametrize("parameters", ["1", "125M", "1000M"])
@pytest.mark.parametrize("columns", [40, 80])
def test_names_and_numbers_are_whole_in_80_columns(tmp_path, parameters, columns):
    """In fewer columns a terminal wraps the lines."""
    path = tmp_path / "plan.json"
    done = plan("--parameters", parameters, "--step-time", "1us", "-n", 4, "--json", path, columns=columns)
    lines = done.output.splitlines()
    for number, each in enumerate(json.loads(path.read_text())["aggregations"], 1):
        assert f"{number:2} {each['name']}" in lines
        (row,) = (line for line in lines if line.split()[:1] == [str(number)] and line.count("%") == 2)
        assert format_size(each["bytes_a_step"]) in row
        assert row.rstrip().endswith(format_size(each["memory"]))
        assert len(row) <= 80


def test_fast_links_are_for_the_plain_all_reduce():
    done = plan("--shapes", "1000x1000,1000", "--step-time", "1s", "--nodes", "2x2", "--bandwidth", "10GB/s")
    assert "Take AllReduce(): the ranks compute for 100.0% of the time." in done.output


def test_measured_links(tmp_path):
    times = {4096: {"ring": 1e-3}, 2**20: {"ring": 0.1}}
    rows = tuple(Row(Collective(name), Choice("ring"), times=times) for name in ("allreduce", "allgather"))
    path = tmp_path / "tuning.json"
    path.write_text(text_of(Table("tuning", rows, Origin(Layout.of([1, 1, 1]), "MPICH", {}))))
    done = plan("--parameters", "1M", "--step-time", "300ms", "--tuning", path)
    assert done.exit_code == 0, done.output
    assert "3 ranks" in done.output
    for more in (["-n", 2], ["--nodes", "2x2"], ["--node-alpha", "1s"], ["--gamma", "1GB/s"]):
        refused = plan("--parameters", "1M", "--step-time", "1s", "--tuning", path, *more)
        assert f"--tuning says what ranks and links there are: give no {more[0]}" in refused.output
    path.write_text("{}")
    assert "--tuning: " in plan("--parameters", "1M", "--step-time", "1s", "--tuning", path).output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing option"),
        (["--step-time", "1s", "-n", 2], "what is trained?"),
        (["--step-time", "1s", "-n", 2, "--parameters", 3, "--shapes", "3"], "what is trained?"),
        (["--step-time", "1s", "--parameters", "1M"], "how many ranks?"),
        (["--step-time", "0s", "--parameters", "1M", "-n", 2], "more than 0 seconds"),
        (["--step-time", "1s", "--parameters", "1M", "-n", 2, "--delay", 30], "less than the period"),
        (["--step-time", "1s", "--parameters", "1M", "-n", 2, "--period", 4], "not period 4, fragments 3, delay 5"),
        (["--step-time", "1s", "--parameters", "1M", "-n", 2, "--target", "nan"], "nan is no part of the time"),
        (["--step-time", "1s", "--parameters", "1000000B", "-n", 2], "at most 10000B"),
        (["--step-time", "1s", "--parameters", "none", "-n", 2], "is no number of parameters"),
        (["--step-time", "1s", "--shapes", "3x", "-n", 2], "are no shapes"),
        (["--step-time", "1s", "--parameters", "1M", "--nodes", "2x2", "-n", 3], "--nodes"),
    ],
)
def test_what_cannot_be_said_is_refused(arguments, words):
    done = plan(*arguments)
    assert done.exit_code == 2
    assert words in done.output
