"""Hold what the model predicts against what was measured, and state the error.

    python bench/prediction.py FILE.json [--bandwidth 119.6MB/s] [--gamma 10GB/s] [--output NAME]

FILE.json is a saved ``mpiagg bench``, as of the virtual cluster. Little is taken from it: the latency between nodes,
from two times of recursive doubling, at the smallest size and at 1 KiB (or the size next to it), as the mean of what
they tell. The bandwidth is the links' rate; the rate of reduction is measured here, by NumPy. All else is predicted.
NAME.json, with every prediction, and NAME.png are saved, by default beside FILE.json.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
import numpy as np

from mpiagg.cli.quantities import parse_nodes, parse_rate, parse_time
from mpiagg.schedules import Cluster, Collective, Layout, algorithm, price

FITTED = "recursive_doubling"
FITTED_SIZE = 1024


@dataclass(frozen=True)
class Prediction:
    """One algorithm at one size; times in microseconds, the error in percent of what was measured."""

    size: int
    algorithm: str
    predicted_us: float
    measured_us: float

    @property
    def error(self) -> float:
        """By how much the prediction is too long, in percent."""
        return 100 * (self.predicted_us / self.measured_us - 1)


def predictable(saved: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of algorithms that the model knows."""
    collective = Collective(saved["flags"]["collective"])

    def known(name: str) -> bool:
        with suppress(ValueError):
            return collective in algorithm(name).schedules
        return False

    return [row for row in saved["rows"] if known(row["algorithm"])]


def fit_alpha(saved: dict[str, Any], layout: Layout, cluster: Cluster) -> float:
    """Return the latency between nodes that two times of recursive doubling tell, in seconds.

    Raises
    ------
    click.ClickException
        If recursive doubling was not measured, or is faster than the rest of the model alone.
    """
    times = {row["size"]: row["time_us"] / 1e6 for row in predictable(saved) if row["algorithm"] == FITTED}
    if not times:
        raise click.ClickException(f"{FITTED} was not measured, to tell the latency")
    sizes = {min(times), min(times, key=lambda size: abs(size - FITTED_SIZE))}

    return mean(_alpha_for(size, times[size], layout, cluster) for size in sizes)


def _alpha_for(size: int, seconds: float, layout: Layout, cluster: Cluster) -> float:
    """Return the latency with which recursive doubling takes so long; its price grows with it."""

    def priced(alpha: float) -> float:
        return price(FITTED, Collective.ALLREDUCE, layout, size, replace(cluster, alpha=alpha))

    low, high = 0.0, seconds
    if priced(low) >= seconds:
        raise click.ClickException(f"{FITTED} is faster than bandwidth, reduction and nodes alone say: check these")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if priced(middle) < seconds else (low, middle)
    return high


def measure_gamma(dtype: str, seconds: float = 0.5) -> float:
    """Return the seconds a byte that NumPy takes to add a vector of 4 MiB to another, the median over repeats."""
    own = np.zeros(4 * 2**20 // np.dtype(dtype).itemsize, dtype)
    received = own.copy()
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        np.add(own, received, out=own)
        times.append(time.perf_counter() - start)
    return median(times) / own.nbytes


def predict(saved: dict[str, Any], layout: Layout, cluster: Cluster) -> list[Prediction]:
    """Return the prediction for every measured row that the model can price."""
    goal, root = Collective(saved["flags"]["collective"]), saved["flags"]["root"]
    return [
        Prediction(
            row["size"],
            row["algorithm"],
            1e6 * price(row["algorithm"], goal, layout, row["size"], cluster, root=root),
            row["time_us"],
        )
        for row in predictable(saved)
    ]


def summary(predictions: list[Prediction]) -> dict[str, float]:
    """Return the median of the absolute errors, for each algorithm and for all, in percent."""
    by_name: dict[str, list[float]] = {}
    for prediction in predictions:
        by_name.setdefault(prediction.algorithm, []).append(abs(prediction.error))
    by_name["all"] = [error for errors in by_name.values() for error in errors]
    return {name: median(errors) for name, errors in by_name.items()}


def table(predictions: list[Prediction]) -> str:
    """Return the predictions beside the measurements, as text."""
    lines = [f"{'algorithm':20}{'size (B)':>12}{'predicted (us)':>16}{'measured (us)':>16}{'error (%)':>12}"]
    lines += [
        f"{p.algorithm:20}{p.size:12d}{p.predicted_us:16.1f}{p.measured_us:16.1f}{p.error:+12.1f}"
        for p in sorted(predictions, key=lambda p: (p.algorithm, p.size))
    ]
    lines += [f"median absolute error, {name}: {error:.1f} %" for name, error in summary(predictions).items()]
    return "\n".join(lines)


def draw(predictions: list[Prediction], title: str, path: Path) -> None:
    """Draw predicted against measured times; where they are alike, points are on the diagonal."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra that need not be installed

    figure = Figure(figsize=(6.5, 5), layout="constrained")
    axes = figure.subplots()
    for name in sorted({prediction.algorithm for prediction in predictions}):
        own = [prediction for prediction in predictions if prediction.algorithm == name]
        axes.plot([p.measured_us for p in own], [p.predicted_us for p in own], marker=".", label=name)
    ends = [function(p.measured_us for p in predictions) for function in (min, max)]
    axes.plot(ends, ends, color="black", linestyle="--", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="measured (us)", ylabel="predicted (us)", title=title)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)


def read(file: Path) -> dict[str, Any]:
    """Return what a file of ``mpiagg bench`` holds.

    Raises
    ------
    click.ClickException
        If it is none, or of a collective whose latency cannot be told.
    """
    try:
        saved: dict[str, Any] = json.loads(file.read_text())
        _ = saved["ranks"], saved["rows"][0]["time_us"], saved["flags"]["root"], saved["flags"]["dtype"]
        collective = saved["flags"]["collective"]
    except (ValueError, LookupError, TypeError):
        raise click.ClickException(f"{file} is no result of mpiagg bench") from None
    if collective != Collective.ALLREDUCE.value:
        raise click.ClickException(f"{file} is of {collective}; {FITTED}, which tells the latency, is an allreduce")
    return saved


def bandwidth_of(saved: dict[str, Any], written: str | None) -> float:
    """Return the links' bytes a second: as written, or as the measurement was told.

    Raises
    ------
    click.ClickException
        If neither says.
    """
    told = saved["flags"].get("link_rate")
    if written is None and told is None:
        raise click.ClickException("the file does not say the links' rate: give --bandwidth, like 1Gbit/s")
    return told / 8 if written is None else parse_rate(written)


@click.command(help=__doc__)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--bandwidth", help="The links' rate.  [default: that of the file]")
@click.option("--gamma", help="Rate of reduction.  [default: measured here]")
@click.option("--node-alpha", default="4.6us", show_default=True, help="Latency within a node.")
@click.option("--node-bandwidth", default="13GB/s", show_default=True, help="Of a rank within its node.")
@click.option("--output", type=click.Path(path_type=Path), help="Without its ending.  [default: FILE-prediction]")
def main(
    *, file: Path, bandwidth: str | None, gamma: str | None, node_alpha: str, node_bandwidth: str, output: Path | None
) -> None:
    """Predict the rows of a file, and save and tell how far that is from the measurements."""
    saved = read(file)
    try:
        layout = parse_nodes(saved.get("layout") or f"{saved['ranks']}x1", saved["ranks"])
        cluster = Cluster(
            beta=1 / bandwidth_of(saved, bandwidth),
            gamma=measure_gamma(saved["flags"]["dtype"]) if gamma is None else 1 / parse_rate(gamma),
        )
        if len(layout.nodes) > 1:
            cluster = replace(cluster, node_alpha=parse_time(node_alpha), node_beta=1 / parse_rate(node_bandwidth))
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    cluster = replace(cluster, alpha=fit_alpha(saved, layout, cluster))
    predictions = predict(saved, layout, cluster)
    print(table(predictions))
    stem = output or file.with_name(f"{file.stem}-prediction")
    found = {
        **{name: saved[name] for name in ("machine", "ranks", "layout", "flags") if name in saved},
        "cluster": asdict(cluster),
        "median_absolute_error": summary(predictions),
        "rows": [{**asdict(prediction), "error": prediction.error} for prediction in predictions],
    }
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(predictions, f"{layout}, {saved['flags']['collective']}", stem.with_name(f"{stem.name}.png"))


if __name__ == "__main__":
    main()
