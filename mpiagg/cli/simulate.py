"""``mpiagg simulate``: what collectives cost on a cluster that need not be there, by the model of the schedules."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
from rich import box
from rich.table import Table

from mpiagg.benchmarks.flags import parse_size
from mpiagg.launch import job
from mpiagg.schedules import Cluster, Collective, Layout, algorithms
from mpiagg.schedules import algorithm as find_algorithm
from mpiagg.schedules.model import Prediction, Pricing

MOST_RANKS: Final = 2**16
ALL: Final = "all"

_TIMES: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_RATES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_NUMBER: Final = r"(\d+(?:\.\d*)?|\.\d+)"


def parse_time(text: str) -> float:
    """Return the seconds that are written like 2us, 0.3us, 1ms or 1s.

    Raises
    ------
    ValueError
        If it is not written so.
    """
    match = re.fullmatch(rf"{_NUMBER}\s*([mun]?s)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time; write 300ns, 2us, 1ms or 1s")
    return float(match[1]) * _TIMES[match[2]]


def parse_rate(text: str) -> float:
    """Return the bytes a second that are written like 25GB/s, 100MB/s or 1Gbit/s; a GB has 10**9 bytes.

    Raises
    ------
    ValueError
        If it is not written so, or zero.
    """
    match = re.fullmatch(rf"{_NUMBER}\s*([kmgtKMGT]?)(?:B/s|(bit)(?:/s)?)", text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a rate; write 25GB/s, 100MB/s or 1Gbit/s")
    return float(match[1]) * _RATES[match[2].lower()] / (8 if match[3] else 1)


def parse_nodes(text: str, ranks: int | None = None) -> Layout:
    """Return the layout that is written as a number of nodes, as ``4 x 2``, or as ``8,8,4`` or ``8 + 8 + 4``.

    Raises
    ------
    ValueError
        If it is not written so, or not of so many ranks.
    """
    if re.fullmatch(r"\s*\d+\s*([,+]\s*\d+\s*)+", text):
        sizes = [int(part) for part in re.split("[,+]", text)]
    elif match := re.fullmatch(r"\s*(\d+)\s*(?:x\s*(\d+)\s*)?", text):
        nodes = int(match[1])
        if match[2] is None and ranks is None:
            raise ValueError(f"how many ranks are on the {nodes} nodes? Give -n too, or write {nodes}x8 or 8,8,4")
        total = ranks if match[2] is None else nodes * int(match[2])
        if max(nodes, total or 0) > MOST_RANKS:
            raise ValueError(f"at most {MOST_RANKS:,} ranks, not {max(nodes, total or 0):,}")
        sizes = [total * (node + 1) // nodes - total * node // nodes for node in range(nodes)] if total else []
    else:
        raise ValueError(f"{text!r} is no layout of nodes; write 128, 4x2 or 8,8,4")
    if not sizes or min(sizes) == 0:
        raise ValueError(f"{text!r} leaves nodes without ranks")
    if sum(sizes) > MOST_RANKS:
        raise ValueError(f"at most {MOST_RANKS:,} ranks, not {sum(sizes):,}")
    if ranks not in (None, sum(sizes)):
        raise ValueError(f"{text!r} is a layout of {sum(sizes)} ranks, not of {ranks}")
    return Layout.by_name([node for node, size in enumerate(sizes) for _ in range(size)])


class _Written(click.ParamType):  # type: ignore[type-arg]  # generic in new releases of click only
    """Something that a function reads from text, and refuses with ValueError."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _read_slow(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"(\d+):(.+)", text)
    if match is None:
        raise ValueError(f"{text!r} is no slow node; write 3:1GB/s")
    return int(match[1]), parse_rate(match[2])


def _read_algorithm(text: str) -> str:
    return text if text == ALL else find_algorithm(text, (ALL,)).name


_TIME, _RATE = _Written("time", parse_time), _Written("rate", parse_rate)


@dataclass(frozen=True)
class Question:
    """What is to be priced: the algorithms, for which collective and vector, where."""

    names: tuple[str, ...]
    collective: Collective
    nbytes: int
    layout: Layout
    cluster: Cluster

    @property
    def where(self) -> str:
        """The ranks and their nodes, in words."""
        nodes = "a link each" if self.cluster.node_alpha is None else f"nodes: {self.layout}"
        return f"ranks: {self.layout.size:,}, {nodes}"

    def pricing(self, name: str) -> Pricing:
        """Return the prices of an algorithm."""
        return Pricing(name, self.collective, self.layout, self.cluster)

    def smaller(self) -> Iterator[Question]:
        """Yield the question for fewer ranks: those of the first 1, 2, 4, ... nodes, or of one node fewer."""
        ranks, nodes = self.layout.size, len(self.layout.nodes)
        whole = ranks if nodes == 1 else nodes
        for number in [2**power for power in range(whole.bit_length()) if 2**power < whole] + [whole]:
            layout = Layout.of([number]) if nodes == 1 else Layout(self.layout.nodes[:number])
            links = self.cluster.links if nodes == 1 else self.cluster.links[:number]
            yield replace(self, layout=layout, cluster=replace(self.cluster, links=links))


_EXAMPLES: Final = """\b
mpiagg simulate ring -n 1024 --bytes 100M --alpha 2us --bandwidth 25GB/s
mpiagg simulate all -n 1024 --nodes 128 --node-alpha 0.3us --node-bandwidth 50GB/s
mpiagg simulate all --nodes 8,8,4 --slow-node 2:1GB/s --plot prices.png
"""


@click.command(epilog=_EXAMPLES)
@click.argument("algorithm", type=_Written("algorithm", _read_algorithm))
@click.option("-n", "ranks", type=click.IntRange(1, MOST_RANKS), help="How many ranks.")
@click.option(
    "--collective", type=click.Choice([entry.value for entry in Collective]), default=Collective.ALLREDUCE.value
)
@click.option(
    "--bytes", "nbytes", type=_Written("size", parse_size), default="100M", help="Of the vector; suffixes K, M, G."
)
@click.option("--alpha", type=_TIME, default="2us", help="Latency of a message.")
@click.option("--bandwidth", type=_RATE, default="10GB/s", help="Of a link, in each direction.")
@click.option("--gamma", type=_RATE, default="20GB/s", help="Rate at which a rank reduces what it receives.")
@click.option(
    "--nodes", metavar="N|NxR|R,R,...", help="Nodes, each with one link for its ranks.  [default: a link a rank]"
)
@click.option("--node-alpha", type=_TIME, default="0.3us", help="The latency within a node.")
@click.option("--node-bandwidth", type=_RATE, default="50GB/s", help="Of a rank's link within its node.")
@click.option(
    "--slow-node",
    "slow",
    type=_Written("node:rate", _read_slow),
    multiple=True,
    help="A node (without --nodes, a rank) whose link has another bandwidth, like 3:1GB/s; repeatable.",
)
@click.option("--plot", type=job.OutputFile(), help="Draw time against size and ranks, of all algorithms, into a PNG.")
@click.option("--json", "json_file", type=job.OutputFile(), help="Save the numbers.")
def simulate(plot: Path | None, json_file: Path | None, **options: Any) -> None:
    """Price collectives on a cluster that need not be there.

    A message takes a latency, and its bytes over the bandwidth; messages that use a link in the same round share it.
    Reductions take their bytes over a rate. The table says how long each ALGORITHM takes, in how many rounds that
    follow one another, how many bytes leave or enter by the busiest link, and what the time is made of. ALGORITHM is a
    name of docs/algorithms.md (ring, tree, knomial, knomial-8, ...), or all.
    """
    question = _question(**options)
    if plot is not None and question.layout.size == 1:
        raise click.UsageError("--plot is for two ranks and more: one alone takes no time")
    figure = None if plot is None else _figure()
    predictions = {name: _predicted(question, name, alone=options["algorithm"] != ALL) for name in question.names}
    found = {name: prediction for name, prediction in predictions.items() if prediction is not None}
    question = replace(question, names=tuple(found))
    job.console().print(_table(question, found))
    if json_file is not None:
        json_file.write_text(json.dumps(_record(question, found), indent=1) + "\n")
    if figure is not None:
        _draw(figure, question)
        figure.savefig(plot, dpi=120, format="png")
        click.echo(f"Saved the plot to {plot}")


def _predicted(question: Question, name: str, *, alone: bool) -> Prediction | None:
    """Return what an algorithm takes; None if that cannot be said, which is an error where it is ``alone``.

    Raises
    ------
    click.UsageError
        If it cannot be said of an algorithm that is asked for by its name.
    """
    try:
        return question.pricing(name).predict(question.nbytes)
    except ValueError as error:
        if alone:
            raise click.UsageError(str(error)) from None
        click.echo(f"Left out: {error}", err=True)
        return None


def _question(
    *,
    algorithm: str,
    ranks: int | None,
    collective: str,
    nbytes: int,
    alpha: float,
    bandwidth: float,
    gamma: float,
    nodes: str | None,
    node_alpha: float,
    node_bandwidth: float,
    slow: tuple[tuple[int, float], ...],
) -> Question:
    """Return what is asked.

    Raises
    ------
    click.UsageError
        If it is not said how many ranks there are or where, or what is said does not fit together.
    """
    layout = _layout(ranks, nodes)
    count = len(layout.nodes)
    links = [1 / bandwidth] * count
    for node, rate in slow:
        if node >= count:
            raise click.UsageError(f"--slow-node must be from 0 to {count - 1}, not {node}")
        links[node] = 1 / rate
    cluster = Cluster(alpha, 1 / bandwidth, 1 / gamma, links=tuple(links) if slow else ())
    if nodes is not None:
        cluster = replace(cluster, node_alpha=node_alpha, node_beta=1 / node_bandwidth)
    return Question(_serving(algorithm, collective), Collective(collective), nbytes, layout, cluster)


def _layout(ranks: int | None, nodes: str | None) -> Layout:
    if nodes is None:
        if ranks is None:
            raise click.UsageError("how many ranks? Give -n, or --nodes with the ranks of each")
        return Layout.by_name(range(ranks))
    try:
        layout = parse_nodes(nodes, ranks)
    except ValueError as error:
        raise click.UsageError(f"--nodes: {error}") from None
    if layout.size > MOST_RANKS:
        raise click.UsageError(f"--nodes: at most {MOST_RANKS:,} ranks, not {layout.size:,}")
    return layout


def _serving(algorithm: str, collective: str) -> tuple[str, ...]:
    """Return the algorithms that are asked for."""
    serving = algorithms(collective)
    if algorithm != ALL and Collective(collective) not in find_algorithm(algorithm).schedules:
        raise click.UsageError(f"{algorithm!r} does not serve {collective}; these do: {', '.join(serving)}")
    return serving if algorithm == ALL else (algorithm,)


def _table(question: Question, found: dict[str, Prediction]) -> Table:
    title = f"{question.collective.value} of {_size(question.nbytes)}, {question.where}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("algorithm", no_wrap=True)
    for column in ("time", "rounds", "busiest\nlink", "latency", "band-\nwidth", "reduc-\ntion"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, prediction in sorted(found.items(), key=lambda entry: entry[1].seconds):
        parts = (prediction.latency, prediction.bandwidth, prediction.reduction)
        shares = [f"{100 * part / prediction.seconds if prediction.seconds else 0:.1f}%" for part in parts]
        table.add_row(name, _time(prediction.seconds), f"{prediction.rounds:,}", _size(prediction.busiest), *shares)
    return table


def _time(seconds: float) -> str:
    unit = next((unit for unit, length in _TIMES.items() if seconds >= length), "ns")
    return f"{seconds / _TIMES[unit]:,.4g} {unit}" if seconds < 10_000 else f"{seconds:,.0f} s"


def _size(nbytes: float) -> str:
    power = min(4, int(math.log2(nbytes) // 10)) if nbytes >= 1 else 0
    return f"{nbytes / 2 ** (10 * power):,.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _record(question: Question, found: dict[str, Prediction]) -> dict[str, Any]:
    return {
        "collective": question.collective.value,
        "size": question.nbytes,
        "ranks": question.layout.size,
        "layout": str(question.layout),
        "cluster": asdict(question.cluster),
        "rows": [{"algorithm": name, **asdict(prediction)} for name, prediction in found.items()],
    }


def _figure() -> Any:
    """Return an empty figure.

    Raises
    ------
    click.ClickException
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra that need not be installed
    except ImportError:
        raise click.ClickException('--plot needs matplotlib: pip install "mpiagg[plot]"') from None
    return Figure(figsize=(11, 4.5), layout="constrained")


def _draw(figure: Any, question: Question) -> None:
    """Draw time against size and against ranks, for all algorithms that serve, and those that are asked for."""
    by_size, by_ranks = figure.subplots(1, 2)
    sizes = [64 * 4**power for power in range(13)]
    fewer = [smaller for smaller in question.smaller() if smaller.layout.size > 1]
    names = dict.fromkeys((*algorithms(question.collective), *question.names))
    for number, name in enumerate(names):
        style = {"color": f"C{number % 10}", "marker": ".ox^v"[number // 10 % 5]}
        pricing = question.pricing(name)
        by_size.plot(sizes, [pricing.seconds(size) for size in sizes], label=name, **style)
        times = [smaller.pricing(name).seconds(question.nbytes) for smaller in fewer]
        by_ranks.plot([smaller.layout.size for smaller in fewer], times, **style)
    by_size.set(xscale="log", yscale="log", xlabel="bytes", ylabel="predicted time (s)", title=question.where)
    by_ranks.set(xscale="log", yscale="log", xlabel="ranks", ylabel="predicted time (s)", title=_size(question.nbytes))
    figure.suptitle(question.collective.value)
    figure.legend(*by_size.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
