"""``bench/prediction.py`` on measurements that are made up: by the model itself, and by the model but for an error."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpiagg.schedules import Cluster, Layout, price

BENCH = Path(__file__).parents[2] / "bench"
ONE_NODE = Cluster(alpha=60e-6, beta=1e-8, gamma=2e-10)
TRUE = Cluster(alpha=60e-6, beta=1e-8, gamma=2e-10, node_alpha=4e-6, node_beta=1e-10)
OPTIONS = ["--bandwidth", "100MB/s", "--gamma", "5GB/s", "--node-alpha", "4us", "--node-bandwidth", "10GB/s"]
NAMES = ("ring", "recursive_doubling", "hierarchical")


@pytest.fixture
def prediction(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    import prediction

    return prediction


def made_up(layout, names=NAMES, factor=1.0, **flags):
    """Return what a benchmark would save: times of the model, all but recursive doubling's ``factor`` times as long."""
    cluster = TRUE if len(layout.nodes) > 1 else ONE_NODE
    longer = dict.fromkeys(names, factor) | {"recursive_doubling": 1}
    rows = [
        {
            "size": size,
            "algorithm": name,
            "time_us": 1e6 * longer[name] * price(name, "allreduce", layout, size, cluster),
        }
        for size in (64, 1024, 65536, 2**20)
        for name in names
    ]
    others = [{"size": 64, "algorithm": name, "time_us": 1.0} for name in ("native", "auto", "gloo", "link")]
    known = {"collective": "allreduce", "dtype": "float32", "root": 0, **flags}
    return {"ranks": layout.size, "layout": str(layout), "flags": known, "rows": rows + others}


def run(prediction, tmp_path, saved, *options):
    path = tmp_path / "measured.json"
    path.write_text(saved if isinstance(saved, str) else json.dumps(saved))
    return CliRunner().invoke(prediction.main, [str(path), *options])


@pytest.mark.parametrize("sizes", [[1] * 4, [2, 2], [3, 1], [4]])
def test_times_of_the_model_are_predicted_without_error(prediction, tmp_path, sizes):
    pytest.importorskip("matplotlib")
    done = run(prediction, tmp_path, made_up(Layout.of(sizes)), *OPTIONS)
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "measured-prediction.json").read_text())
    assert told["cluster"]["alpha"] == pytest.approx(TRUE.alpha)
    assert {row["algorithm"] for row in told["rows"]} == set(NAMES)
    assert [row["error"] for row in told["rows"]] == pytest.approx([0] * len(told["rows"]), abs=1e-6)
    assert "median absolute error, all: 0.0 %" in done.output
    assert (tmp_path / "measured-prediction.png").read_bytes().startswith(b"\x89PNG")


def test_an_error_is_stated(prediction, tmp_path):
    """A negative control: measurements that take 1.25 times as long are predicted 20 % too short."""
    pytest.importorskip("matplotlib")
    saved = made_up(Layout.of([1] * 4), factor=1.25)
    done = run(prediction, tmp_path, saved, *OPTIONS, "--output", str(tmp_path / "told"))
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["median_absolute_error"] == pytest.approx(
        {"ring": 20, "hierarchical": 20, "recursive_doubling": 0, "all": 20}, abs=1e-6
    )
    assert "-20.0" in done.output


def test_the_links_rate_is_that_of_the_measurement_unless_told(prediction):
    saved = made_up(Layout.of([1, 1]), link_rate=1e9)
    assert prediction.bandwidth_of(saved, None) == 125e6
    assert prediction.bandwidth_of(saved, "119.6MB/s") == pytest.approx(119.6e6)


def test_reduction_is_measured(prediction):
    assert 0 < prediction.measure_gamma("float32", seconds=0) < 1e-6


@pytest.mark.parametrize(
    ("saved", "options", "words"),
    [
        ("bees", OPTIONS, "is no result of mpiagg bench"),
        ("[]", OPTIONS, "is no result of mpiagg bench"),
        (made_up(Layout.of([1, 1]), collective="reduce"), OPTIONS, "is of reduce; recursive_doubling"),
        (made_up(Layout.of([1, 1]), names=("ring",)), OPTIONS, "recursive_doubling was not measured"),
        (made_up(Layout.of([1, 1])), OPTIONS[2:], "does not say the links' rate: give --bandwidth"),
        (made_up(Layout.of([1, 1])), ["--bandwidth", "3"], "'3' is not a rate"),
        (made_up(Layout.of([1, 1])), [*OPTIONS, "--bandwidth", "1B/s"], "faster than bandwidth"),
    ],
)
def test_what_is_wrong_is_told(prediction, tmp_path, saved, options, words):
    done = run(prediction, tmp_path, saved, *options)
    assert done.exit_code == 1
    assert words in done.output
