"""Hold what the model predicts against what was measured, and state the error.

    python bench/prediction.py FILE.json... [--bandwidth 119.6MB/s] [--gamma 10GB/s] [--cores 2] [--output NAME]

Each FILE.json is a saved ``mpiagg bench``, as of the virtual cluster. One number is taken from them, for each layout:
what a message costs a processor, from an all-reduce of the smallest size by ``recursive_doubling`` (where each rank has
a core, by ``direct``, in which each has several messages at once). Latencies are options; ``bench/cluster_links.py``
measures them with one message at a time. The bandwidth is the links' rate; the rate of reduction is measured here, by
NumPy. All else is predicted, for all algorithms and collectives.

The benchmark makes one call after the other, and the links of the virtual cluster carry in advance what they have been
idle for. So a call takes its messages or its bytes, whichever is longer. The bytes are those of the busiest link, and
where they are more than it can make up for, what the model says. The messages take what the model says, where
ranks that are done begin the next call. Where all ranks share the cores of one machine, these also have to handle all
messages, which is in part hidden behind latencies, and in part delays them: the two are the sides of a right
triangle, and the time is its longest side.

How well the fastest three algorithms are ranked is said for each collective, layout and size: the ranking is right if
none of them is predicted to be slower than another that takes over 10 % longer. What is predicted to be the same within
2 %, as many are that fill the links, is no ranking.

With ``--before DIRECTORY``, where files of the same names have earlier measurements, these stand in for predictions in
the same ranking: how well times rank that were measured is as well as a prediction can.

NAME.json, with every prediction, and NAME.png are saved, by default as ``bench/results/prediction-<library>``.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import click
import numpy as np

from mpiagg.benchmarks.flags import parse_size
from mpiagg.cli.price_plot import COLOURS
from mpiagg.cli.quantities import parse_nodes, parse_rate, parse_time
from mpiagg.schedules import Action, Cluster, Collective, Layout, algorithm, schedules
from mpiagg.schedules.model import Pricing

RANKED = 3
NEAR = 1.1
SAME = 1.02
CALLS = 16
IDLE = 1e-3
"""Seconds that the links of the virtual cluster can have been idle for and carry in advance (``bench/cluster.py``)."""
SEND: Final = Action.SEND


@dataclass(frozen=True)
class Prediction:
    """One algorithm at one size; times in microseconds, the error in percent of what was measured."""

    collective: str
    layout: str
    size: int
    algorithm: str
    predicted_us: float
    measured_us: float

    @property
    def error(self) -> float:
        """By how much the prediction is too long, in percent."""
        return 100 * (self.predicted_us / self.measured_us - 1)


class Place(NamedTuple):
    """A cluster, and the cores of the machine that plays it, if there is one."""

    cluster: Cluster
    cores: int | None


class Case(NamedTuple):
    """A collective, and the ranks that call it."""

    collective: Collective
    layout: Layout
    root: int


@dataclass(frozen=True)
class Saved:
    """A file of ``mpiagg bench``."""

    library: str
    case: Case
    dtype: str
    link_rate: float | None
    times: dict[tuple[str, int], float]
    """Seconds of each algorithm that the model knows, at each size."""


def read(file: Path) -> Saved:
    """Return what a file of ``mpiagg bench`` holds.

    Raises
    ------
    click.ClickException
        If it is none.
    """
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        flags, ranks = found["flags"], found["ranks"]
        collective = Collective(flags["collective"])
        times = {(row["algorithm"], row["size"]): row["time_us"] / 1e6 for row in found["rows"]}
        return Saved(
            found["machine"]["mpi"].rsplit(" ", 1)[0].replace(" ", "").lower(),
            Case(collective, parse_nodes(found.get("layout") or f"{ranks}x1", ranks), flags["root"]),
            flags["dtype"],
            flags.get("link_rate"),
            {key: seconds for key, seconds in times.items() if _serves(key[0], collective)},
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        raise click.ClickException(f"{file} is no result of mpiagg bench") from None


def _serves(name: str, collective: Collective) -> bool:
    with suppress(ValueError):
        return collective in algorithm(name).schedules
    return False


@cache
def parts(name: str, case: Case, place: Place) -> tuple[float, Pricing]:
    """Return what the messages of a call take, in seconds; and the prices of its bytes."""
    (collective, layout, root), (cluster, cores) = case, place
    within, for_free = ({"node_beta": 0.0}, {"node_alpha": 0.0}) if cluster.node_alpha is not None else ({}, {})
    late = replace(cluster, beta=0, gamma=0, eager=float("inf"), **within)
    wide = replace(cluster, alpha=0, overhead=0, node_overhead=0, **for_free)
    of_messages, of_bytes = (Pricing(name, collective, layout, costs, root=root) for costs in (late, wide))
    busy = 0.0
    for rank, program in enumerate(schedules(name, collective, layout, root) if cores else ()):
        for peer in (steps[0].peer for a_round in program for steps in a_round.messages if steps[0].action is SEND):
            across = cluster.node_alpha is None or layout.node_of(rank) != layout.node_of(peer)
            busy += 2 * (cluster.overhead if across else cluster.node_overhead) / (cores or 1)
    return math.hypot(of_messages.in_a_row(0, CALLS), busy), of_bytes


def seconds_of(name: str, case: Case, nbytes: int, place: Place) -> float:
    """Return what a call takes in a row of them, on links that carry in advance what they have been idle for."""
    late, of_bytes = parts(name, case, place)
    wide = place.cluster.beta * of_bytes.predict(nbytes).busiest
    if wide > IDLE:
        wide = max(wide, of_bytes.in_a_row(nbytes, CALLS))
    return max(late, wide)


def telling(cores: int | None) -> str:
    """Return the algorithm whose time tells what a message costs a processor."""
    return "recursive_doubling" if cores else "direct"


def _tells(saved: Saved, cores: int | None) -> bool:
    """Whether a file tells what messages cost."""
    return saved.case.collective is Collective.ALLREDUCE and telling(cores) in {name for name, _ in saved.times}


def fit(saved: Saved, place: Place) -> Place:
    """Return the place with what a message between nodes costs a processor, as an all-reduce tells.

    Raises
    ------
    click.ClickException
        If it is faster than the rest of the model alone.
    """
    smallest, name = min(size for _, size in saved.times), telling(place.cores)

    def with_overhead(overhead: float) -> Place:
        return place._replace(cluster=replace(place.cluster, overhead=overhead))

    seconds, low, high = saved.times[name, smallest], 0.0, saved.times[name, smallest]
    if seconds_of(name, saved.case, smallest, with_overhead(0.0)) >= seconds:
        raise click.ClickException(f"{name} is faster than latencies and bandwidth alone say: check these")
    for _ in range(40):
        middle = (low + high) / 2
        shorter = seconds_of(name, saved.case, smallest, with_overhead(middle)) < seconds
        low, high = (middle, high) if shorter else (low, middle)
    return with_overhead(high)


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


def predict(saved: Saved, place: Place) -> list[Prediction]:
    """Return the prediction for every measured time that the model can price."""
    return beside(saved, {(name, size): seconds_of(name, saved.case, size, place) for name, size in saved.times})


def beside(saved: Saved, times: Mapping[tuple[str, int], float]) -> list[Prediction]:
    """Return other times of each algorithm at each size, in seconds, as predictions of those that were measured."""
    collective, layout, _ = saved.case
    return [
        Prediction(collective.value, str(layout), size, name, 1e6 * times[name, size], 1e6 * seconds)
        for (name, size), seconds in saved.times.items()
        if (name, size) in times
    ]


def medians(predictions: Iterable[Prediction], what: Callable[[Prediction], str]) -> dict[str, float]:
    """Return the median of the absolute errors in percent, of each kind of predictions."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for prediction in predictions:
        by_kind[what(prediction)].append(abs(prediction.error))
    return {kind: median(errors) for kind, errors in by_kind.items()}


def ranking(predictions: Iterable[Prediction]) -> tuple[int, int]:
    """Return in how many cases the fastest three are predicted, and of how many."""
    cases: dict[tuple[str, str, int], list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        cases[prediction.collective, prediction.layout, prediction.size].append(prediction)
    ranked = [case for case in cases.values() if len(case) > RANKED]
    return sum(map(_ranked, ranked)), len(ranked)


def _ranked(case: list[Prediction]) -> bool:
    fastest = sorted(case, key=lambda entry: entry.measured_us)[:RANKED]
    return not any(
        NEAR * entry.measured_us < other.measured_us and SAME * other.predicted_us < entry.predicted_us
        for entry in fastest
        for other in case
    )


def table(predictions: Sequence[Prediction]) -> str:
    """Return the predictions beside the measurements, and how far they are from them, as text."""
    lines = [
        f"{'collective':15}{'layout':8}{'algorithm':22}{'size (B)':>10}{'predicted (us)':>16}{'measured (us)':>15}"
    ]
    order = sorted(predictions, key=lambda p: (p.collective, p.layout, p.algorithm, p.size))
    lines += [
        f"{p.collective:15}{p.layout:8}{p.algorithm:22}{p.size:10d}{p.predicted_us:16.1f}{p.measured_us:15.1f}"
        f"{p.error:+9.1f} %"
        for p in order
    ]
    for what in (lambda p: p.algorithm, lambda p: f"{p.collective} on {p.layout}", lambda _: "all"):
        lines += [f"median absolute error, {kind}: {error:.1f} %" for kind, error in medians(order, what).items()]
    right, cases = ranking(order)
    return "\n".join([*lines, f"the fastest three are predicted in {right} of {cases} cases"])


def draw(predictions: Sequence[Prediction], title: str, path: Path) -> None:
    """Draw predicted against measured times, a panel for each collective; on the diagonal they are alike."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra that need not be installed

    names = sorted({prediction.collective for prediction in predictions})
    columns = min(len(names), 4)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(2.4 * columns, 0.6 + 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    ends = [function(p.measured_us for p in predictions) for function in (min, max)]
    for axes, name in zip_longest(panels.flat, names):
        if name is None:
            axes.remove()
            continue
        own = [prediction for prediction in predictions if prediction.collective == name]
        axes.plot([p.measured_us for p in own], [p.predicted_us for p in own], ".", color=COLOURS[0], alpha=0.7)
        axes.plot(ends, ends, color="black", linestyle="--", linewidth=1)
        axes.set(xscale="log", yscale="log", title=name)
    figure.suptitle(title)
    figure.supxlabel("measured (us)")
    figure.supylabel("predicted (us)")
    figure.savefig(path, dpi=120)


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--bandwidth", help="The links' rate.  [default: that of the files]")
@click.option("--gamma", help="Rate of reduction.  [default: measured here]")
@click.option("--cores", type=click.IntRange(1), help="Of the machine that all ranks share.  [default: a core each]")
@click.option("--eager", default="128K", show_default=True, help="Shorter messages do not wait for their receivers.")
@click.option("--alpha", default="15us", show_default=True, help="Latency between nodes.")
@click.option("--node-alpha", default="4.6us", show_default=True, help="Latency within a node.")
@click.option("--node-overhead", default="1us", show_default=True, help="What such a message costs a processor.")
@click.option("--node-bandwidth", default="13GB/s", show_default=True, help="Of a rank within its node.")
@click.option("--before", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Earlier measurements.")
@click.option("--output", type=click.Path(path_type=Path), help="Without its ending.")
def main(*, files: tuple[Path, ...], before: Path | None, output: Path | None, **options: Any) -> None:
    """Predict the times of files, and save and tell how far that is from the measurements."""
    saved = [read(file) for file in files]
    if len({one.library for one in saved}) > 1:
        raise click.ClickException("the files are of several MPI libraries")
    tell = [one for one in saved if _tells(one, options["cores"])]
    if len({one.case.layout for one in tell}) < len(tell):
        raise click.ClickException("several files tell what messages cost on one layout: give one of them")
    try:
        places = {one.case.layout: _place(one, **options) for one in tell}
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if unknown := {str(one.case.layout) for one in saved if one.case.layout not in places}:
        name, layouts = telling(options["cores"]), ", ".join(sorted(unknown))
        raise click.ClickException(f"no file has an allreduce by {name} on {layouts}, to tell what messages cost")
    predictions = [found for one in saved for found in predict(one, places[one.case.layout])]
    print(table(predictions))
    stem = output or Path(__file__).parent / "results" / f"prediction-{saved[0].library}"
    right, cases = ranking(predictions)
    found: dict[str, Any] = {
        "files": [file.name for file in files],
        "clusters": {str(layout): asdict(place.cluster) for layout, place in places.items()},
        "cores": options["cores"],
        "median_absolute_error": {
            "by algorithm": medians(predictions, lambda p: p.algorithm),
            "by collective": medians(predictions, lambda p: f"{p.collective} on {p.layout}"),
            **medians(predictions, lambda _: "all"),
        },
        "fastest_three": {"predicted": right, "cases": cases},
        "rows": [{**asdict(prediction), "error": prediction.error} for prediction in predictions],
    }
    if before is not None:
        pairs = [(one, before / file.name) for one, file in zip(saved, files, strict=True)]
        others = [(one, read(old).times) for one, old in pairs if old.exists()]
        again = [each for one, times in others if times != one.times for each in beside(one, times)]
        if not again:
            raise click.ClickException(f"no file in {before} has other times than these")
        right, cases = ranking(again)
        print(f"earlier measurements rank them in {right} of {cases} cases")
        found["ranked_by_earlier_measurements"] = {
            "right": right,
            "cases": cases,
            "median_absolute_error": medians(again, lambda _: "all")["all"],
        }
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(predictions, f"{saved[0].library}, {len(predictions)} times", stem.with_name(f"{stem.name}.png"))


def _place(
    saved: Saved,
    *,
    bandwidth: str | None,
    gamma: str | None,
    cores: int | None,
    eager: str,
    alpha: str,
    node_alpha: str,
    node_overhead: str,
    node_bandwidth: str,
) -> Place:
    """Return what is known of the cluster that an all-reduce was measured on."""
    if bandwidth is None and saved.link_rate is None:
        raise click.ClickException("the file does not say the links' rate: give --bandwidth, like 1Gbit/s")
    cluster = Cluster(
        alpha=parse_time(alpha),
        beta=8 / saved.link_rate if bandwidth is None and saved.link_rate else 1 / parse_rate(bandwidth or ""),
        gamma=measure_gamma(saved.dtype) if gamma is None else 1 / parse_rate(gamma),
        eager=parse_size(eager),
    )
    if saved.case.layout.widest > 1 and len(saved.case.layout.nodes) > 1:
        within = {"node_alpha": node_alpha, "node_overhead": node_overhead}
        cluster = replace(
            cluster,
            node_beta=1 / parse_rate(node_bandwidth),
            **{field: parse_time(text) for field, text in within.items()},
        )
    return fit(saved, Place(cluster, cores))


if __name__ == "__main__":
    main()
