"""``mpiagg bench``: sizes, bandwidths, columns, and results that are checked."""

import json

import pytest
from click.testing import CliRunner

from mpiagg.cli import columns, launch, main
from mpiagg.cli.flags import LARGEST, SMALLEST, parse_range, parse_size
from mpiagg.schedules import Collective, algorithms


@pytest.mark.parametrize(
    ("text", "nbytes"), [("64", 64), ("4K", 4096), ("1m", 2**20), ("2G", 2**31), ("8KiB", 8192), ("3KB", 3072)]
)
def test_sizes_have_suffixes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-4", "4X", "K", "1.5M", "1 2"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size; write 64, 4K, 1M or 2G"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("1K:1M", (1024, 2**20)),
        ("1M", (SMALLEST, 2**20)),
        ("1K:", (1024, LARGEST)),
        ("8", (8, 8)),
        ("8:8", (8, 8)),
        (":", (SMALLEST, LARGEST)),
    ],
)
def test_ranges_are_osus(text, ends):
    assert parse_range(text) == ends


@pytest.mark.parametrize("text", ["1M:1K", "1:2:3", "128M:"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(ValueError, match="size"):
        parse_range(text)


def test_sizes_grow_by_the_factor():
    assert list(parse_range("64:1K").sizes(4)) == [64, 256, 1024]
    assert list(parse_range("3:20").sizes(2)) == [3, 6, 12]


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("allreduce", 1.5), ("reduce_scatter", 0.75), ("allgather", 0.75), ("broadcast", 1), ("reduce", 1)],
)
def test_bus_bandwidth_factors_are_nccls(collective, factor):
    assert columns.bus_factor(Collective(collective), 4) == factor


ROW = columns.Row(
    size=2**26,
    count=2**24,
    type="complex128",
    redop="prod",
    root=-1,
    algorithm="recursive_doubling",
    time_us=123456.789,
    algbw=1.25,
    busbw=2.5,
    wrong=0,
    ratio=0.5,
    min_us=1,
    max_us=2,
    p50_us=3,
    p99_us=4,
    iterations=20,
)


@pytest.mark.parametrize("full", [False, True])
def test_rows_stand_under_their_titles(full):
    titles, units = columns.header(full=full).splitlines()
    line = columns.line(ROW, full=full)
    assert len(titles) == len(units) == len(line)
    assert titles.startswith("#")
    assert units.startswith("#")
    for title, value in (("size", "67108864"), ("algorithm", "recursive_doubling"), ("time", "123456.79")):
        end = titles.index(title) + len(title)
        assert line[:end].endswith(value)
    assert ("p99" in titles) == full
    assert len(line.split()) == len(titles[1:].split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-a", "bees"], "known: auto, native, ring, tree"),
        (["allgather", "-a", "tree"], "no algorithm 'tree' for allgather; known: auto, native, ring, circulant"),
        (["bees"], "'allreduce', 'reduce', 'broadcast'"),
        (["-m", "bees"], "'bees' is not a size"),
        (["reduce", "--root", "2"], "--root must be a rank from 0 to 1, not 2"),
    ],
)
def test_bad_arguments_are_told_with_the_known_names(monkeypatch, arguments, words):
    for variable in launch._LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code == 2
    assert words in done.output


# -- the ranks


def test_the_command_measures_and_saves(mpiagg, tmp_path):
    path = tmp_path / "bench.json"
    done = mpiagg("bench", "-m", "64:1K", "-i", "7", "-x", "1", "-f", "--json", str(path))
    assert done.status == 0, done.err
    names = ["native", *algorithms("allreduce")]
    lines = [line for line in done.out.splitlines() if not line.startswith("#")]
    assert [line.split()[5] for line in lines] == names * 3
    told = json.loads(path.read_text())
    assert told["ranks"] == 2
    assert told["machine"]["mpi"].startswith(launch.mpi_vendor())
    assert {"cpu", "cores", "mpiagg", "mpi4py", "numpy", "python"} <= set(told["machine"])
    assert told["flags"]["iterations"] == 7
    assert [(row["size"], row["algorithm"]) for row in told["rows"]] == [(s, a) for s in (64, 256, 1024) for a in names]
    for row in told["rows"]:
        assert row["count"] == row["size"] // 4
        assert (row["type"], row["redop"], row["root"], row["wrong"]) == ("float32", "sum", -1, 0)
        assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"])  # 2 (n-1)/n is 1 for two ranks
        assert 0 < row["min_us"] <= row["p50_us"] <= row["p99_us"] <= row["max_us"]
        assert row["iterations"] == 7
        native = next(other for other in told["rows"] if other["size"] == row["size"])
        assert row["ratio"] == pytest.approx(row["time_us"] / native["time_us"])


EVERYTHING = """
import sys
from mpiagg.cli import job, sweep
from mpiagg.cli.flags import Flags, SizeRange
from mpiagg.schedules import Collective, algorithms
world = job.join()
usual = Flags("allreduce", (), SizeRange(4, 1000), 16, 2, 1, 1.0, False, "float32", "sum", 0, None, True)
others = (
    dict(dtype="float16", op="avg"), dict(dtype="int32", op="prod"), dict(dtype="complex64"), dict(dtype="uint8"),
    dict(dtype="float64", op="min", planned=False), dict(op="max", lanes=2), dict(op="avg"),
)
runs = [usual._replace(collective=collective.value) for collective in Collective]
runs += [usual._replace(collective=collective, root=world.size - 1) for collective in ("reduce", "broadcast")]
runs += [usual._replace(**changed) for changed in others]
for flags in runs:
    # Blind checks would pass everything: doing nothing must be seen, by every collective.
    task = sweep._task(world, flags, 400)
    if sweep._wrong(task, [sweep.Competitor("nothing", lambda: None, None)])[0] == 0:
        raise AssertionError(f"a call that does nothing passes as {flags}")
    for row in sweep.sweep(world, flags, algorithms(flags.collective), None):
        if row.wrong:
            raise AssertionError(f"{row} of {flags}")
if world.rank == 0:
    sys.stdout.write("all right")
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_collectives_are_right_and_doing_nothing_is_wrong(run_ranks, ranks):
    done = run_ranks(ranks, EVERYTHING)
    assert done.status == 0, done.err
    assert done.out == "all right"


BROKEN = """
import sys
from dataclasses import replace
from mpiagg.cli import main
from mpiagg.schedules import TABLE, Collective
ring = TABLE["ring"]
half_of_it = {Collective.ALLREDUCE: ring.schedules[Collective.REDUCE_SCATTER]}
TABLE["broken"] = replace(ring, name="broken", schedules=half_of_it)
main(["bench", "-a", "broken", "-m", "1K:1K", "-i", "2", "--json", sys.argv[1]])
"""


def test_an_algorithm_that_is_wrong_is_told_and_fails(run_ranks, tmp_path):
    path = tmp_path / "broken.json"
    done = run_ranks(2, BROKEN, str(path))
    assert done.status == 1
    native, broken = json.loads(path.read_text())["rows"]
    assert (native["algorithm"], native["wrong"]) == ("native", 0)
    # On each of two ranks half of 256 elements, before and after the timing.
    assert (broken["algorithm"], broken["wrong"]) == ("broken", 512)
    assert "Error: 512 elements are wrong" in done.err
