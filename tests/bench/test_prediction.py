"""``bench/prediction.py`` on measurements that are made up: by its own rules, and by these but for an error."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpiagg.schedules import Cluster, Collective, Layout

BENCH = Path(__file__).parents[2] / "bench"
ONE_EACH = Cluster(alpha=60e-6, beta=1e-8, gamma=2e-10, overhead=20e-6, eager=1000)
TRUE = Cluster(60e-6, 1e-8, 2e-10, 4e-6, 1e-10, overhead=20e-6, node_overhead=1e-6, eager=1000)
OPTIONS = ["--bandwidth", "100MB/s", "--gamma", "5GB/s", "--node-alpha", "4us", "--node-bandwidth", "10GB/s"]
OPTIONS += ["--alpha", "60us", "--node-overhead", "1us", "--eager", "1000"]
NAMES = ("ring", "tree", "recursive_doubling", "hierarchical", "direct")
FITTED = ("recursive_doubling", "direct")


@pytest.fixture
def prediction(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    import prediction

    return prediction


def made_up(prediction, sizes, names=NAMES, factor=1.0, cores=4, **flags):
    """Return what a benchmark would save: times by the rules, those not fitted ``factor`` times as long."""
    layout = Layout.of(sizes)
    known = {"collective": "allreduce", "dtype": "float32", "root": 0, **flags}
    collective = Collective(known["collective"])
    cluster = TRUE if layout.widest > 1 and len(layout.nodes) > 1 else ONE_EACH
    place = prediction.Place(cluster, cores)
    case = prediction.Case(collective, layout, 0)
    rows = [
        {
            "size": size,
            "algorithm": name,
            "time_us": 1e6 * (1 if name in FITTED else factor) * prediction.seconds_of(name, case, size, place),
        }
        for size in (64, 1024, 65536, 2**20)
        for name in names
    ]
    others = [{"size": 64, "algorithm": name, "time_us": 1.0} for name in ("native", "auto", "gloo", "link", "auto-u8")]
    machine = {"mpi": "Open MPI 5.0.8"}
    return {"machine": machine, "ranks": layout.size, "layout": str(layout), "flags": known, "rows": rows + others}


def run(prediction, tmp_path, *saved, options=OPTIONS):
    paths = [tmp_path / f"measured-{number}.json" for number in range(len(saved))]
    for path, found in zip(paths, saved, strict=True):
        path.write_text(found if isinstance(found, str) else json.dumps(found))
    return CliRunner().invoke(prediction.main, [*map(str, paths), *options, "--output", str(tmp_path / "told")])


@pytest.mark.parametrize("cores", [None, 2])
@pytest.mark.parametrize("sizes", [[1] * 4, [2, 2], [3, 1]])
def test_times_of_the_model_are_predicted_without_error(prediction, tmp_path, sizes, cores):
    pytest.importorskip("matplotlib")
    others = made_up(prediction, sizes, ("ring", "direct"), collective="allgather", cores=cores)
    options = [*OPTIONS, *(["--cores", str(cores)] if cores else [])]
    done = run(prediction, tmp_path, made_up(prediction, sizes, cores=cores), others, options=options)
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "told.json").read_text())
    (cluster,) = told["clusters"].values()
    assert cluster["overhead"] == pytest.approx(TRUE.overhead, rel=1e-3)
    assert {row["algorithm"] for row in told["rows"]} == set(NAMES)
    assert {row["collective"] for row in told["rows"]} == {"allreduce", "allgather"}
    assert [row["error"] for row in told["rows"]] == pytest.approx([0] * len(told["rows"]), abs=0.1)
    assert told["fastest_three"] == {"predicted": 4, "cases": 4}
    assert "median absolute error, all: 0.0 %" in done.output
    assert "the fastest three are predicted in 4 of 4 cases" in done.output
    assert (tmp_path / "told.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("cores", "expected"), [(None, 120e-6), (2, math.hypot(120e-6, 80e-6)), (1, 200e-6)])
def test_messages_take_their_latencies_and_the_cores_time(prediction, cores, expected):
    """A ring of two: two rounds of 60 us, and four messages of twice 20 us on the cores that there are."""
    case, place = prediction.Case(Collective.ALLREDUCE, Layout.of([1, 1]), 0), prediction.Place(ONE_EACH, cores)
    assert prediction.seconds_of("ring", case, 8, place) == pytest.approx(expected)


def test_bytes_take_the_links_time_and_from_a_millisecond_on_the_models(prediction):
    """A reduce and a broadcast through rank 0 use its link once in each direction, one after the other."""
    case, place = prediction.Case(Collective.ALLREDUCE, Layout.of([1, 1]), 0), prediction.Place(ONE_EACH, None)
    for nbytes, times in ((50_000, 1), (1_000_000, 2)):
        expected = times * nbytes * 1e-8 + (times - 1) * nbytes * 2e-10
        assert prediction.seconds_of("parameter_server", case, nbytes, place) == pytest.approx(expected)


def test_an_error_is_stated(prediction, tmp_path):
    """A negative control: measurements that take 1.25 times as long are predicted 20 % too short."""
    pytest.importorskip("matplotlib")
    done = run(prediction, tmp_path, made_up(prediction, [1] * 4, factor=1.25, cores=None))
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "told.json").read_text())["median_absolute_error"]
    expected = {"tree": 20, "recursive_doubling": 0, "direct": 0, "ring": 20, "hierarchical": 20}
    assert told["by algorithm"] == pytest.approx(expected, abs=0.1)
    assert told["by collective"] == pytest.approx({"allreduce on 4 x 1": 20}, abs=0.1)
    assert "-20.0 %" in done.output


def test_a_wrong_ranking_is_stated(prediction):
    """One of the fastest three is predicted to be slower than another, which takes over a tenth longer."""

    def case(*times):
        return [
            prediction.Prediction("allreduce", "4 x 1", 64, str(place), predicted, measured)
            for place, (predicted, measured) in enumerate(times)
        ]

    assert prediction.ranking(case((1, 10), (2, 12), (3, 14), (4, 16))) == (1, 1)
    assert prediction.ranking(case((2, 10), (1, 12), (3, 14), (4, 16))) == (0, 1)
    assert prediction.ranking(case((2, 10), (1, 10.5), (3, 14), (4, 16))) == (1, 1)
    assert prediction.ranking(case((1.01, 10), (1, 12), (3, 14), (4, 16))) == (1, 1)
    assert prediction.ranking(case((1, 10), (2, 12), (4, 14), (3, 16))) == (0, 1)
    assert prediction.ranking(case((1, 10), (2, 12), (3, 14), (5, 16), (4, 30))) == (1, 1)
    assert prediction.ranking(case((1, 10), (2, 12), (3, 14))) == (0, 0)


def test_earlier_measurements_are_ranked_likewise(prediction, tmp_path):
    """Times in proportion rank all as they are; not if the slowest was the fastest, at one of four sizes."""
    saved = made_up(prediction, [1] * 4, cores=None)
    before = tmp_path / "before"
    before.mkdir()
    options = [*OPTIONS, "--before", str(before)]
    slower = {**saved, "rows": [{**row, "time_us": 2 * row["time_us"]} for row in saved["rows"]]}
    of_ring = next(row for row in slower["rows"] if (row["size"], row["algorithm"]) == (64, "ring"))
    for changed, right in ((False, 4), (True, 3)):
        if changed:
            of_ring["time_us"] = 1.0
        (before / "measured-0.json").write_text(json.dumps(slower))
        done = run(prediction, tmp_path, saved, options=options)
        assert f"earlier measurements rank them in {right} of 4 cases" in done.output
        told = json.loads((tmp_path / "told.json").read_text())["ranked_by_earlier_measurements"]
        assert (told["right"], told["cases"]) == (right, 4)
        assert told["median_absolute_error"] == pytest.approx(100)
    (before / "measured-0.json").write_text(json.dumps(saved))
    done = run(prediction, tmp_path, saved, options=options)
    assert "no file" in done.output


def test_reduction_is_measured(prediction):
    assert 0 < prediction.measure_gamma("float32", seconds=0) < 1e-6


@pytest.mark.parametrize(
    ("flags", "options", "words"),
    [
        ("bees", OPTIONS, "is no result of mpiagg bench"),
        ("[]", OPTIONS, "is no result of mpiagg bench"),
        (
            {"collective": "allgather", "names": ["ring"]},
            OPTIONS,
            "no file has an allreduce by direct on 2 x 1",
        ),
        ({"names": ["ring", "tree"]}, OPTIONS, "no file has an allreduce by direct on 2 x 1"),
        ({}, OPTIONS[2:], "does not say the links' rate: give --bandwidth"),
        ({}, [*OPTIONS, "--bandwidth", "3"], "'3' is not a rate"),
        ({}, [*OPTIONS, "--eager", "bees"], "'bees' is not a size"),
        ({}, [*OPTIONS, "--alpha", "1s"], "direct is faster than latencies and bandwidth"),
    ],
)
def test_what_is_wrong_is_told(prediction, tmp_path, flags, options, words):
    saved = flags if isinstance(flags, str) else made_up(prediction, [1, 1], **flags)
    done = run(prediction, tmp_path, saved, options=options)
    assert done.exit_code == 1
    assert words in done.output


def test_two_files_that_tell_what_messages_cost_are_refused(prediction, tmp_path):
    saved = made_up(prediction, [1, 1])
    done = run(prediction, tmp_path, saved, saved)
    assert done.exit_code == 1
    assert "several files tell what messages cost" in done.output


def test_files_of_two_libraries_are_refused(prediction, tmp_path):
    saved = made_up(prediction, [1, 1])
    done = run(prediction, tmp_path, saved, {**saved, "machine": {"mpi": "MPICH 5.0.2"}})
    assert done.exit_code == 1
    assert "of several MPI libraries" in done.output
