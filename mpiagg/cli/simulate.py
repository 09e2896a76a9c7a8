"""``mpiagg simulate``: what collectives cost on a described cluster, by the model of the schedules."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
from rich import box
from rich.table import Table

from mpiagg.benchmarks.flags import parse_size
from mpiagg.cli import price_plot
from mpiagg.cli.progress import progress
from mpiagg.cli.quantities import (
    MOST_RANKS,
    Written,
    format_size,
    format_time,
    parse_network,
    parse_rate,
    parse_slow,
    parse_stragglers,
    parse_time,
    read_layout,
    refuse_given,
)
from mpiagg.launch import job
from mpiagg.schedules import Cluster, Collective, Layout, algorithms, comparable
from mpiagg.schedules import algorithm as find_algorithm
from mpiagg.schedules.cluster import Links, Noise
from mpiagg.schedules.model import Prediction, Pricing
from mpiagg.schedules.networks import Groups, Torus

ALL: Final = "all"
RUNS: Final = 10
"""How many runs with noise there are."""


def _read_algorithm(text: str) -> str:
    return text if text == ALL else find_algorithm(text, (ALL,)).name


_TIME, _RATE = Written("time", parse_time), Written("rate", parse_rate)


@dataclass(frozen=True)
class Question:
    """What is to be priced: the algorithms, for which collective and vector, where, and what comes late there."""

    names: tuple[str, ...]
    collective: Collective
    nbytes: int
    layout: Layout
    cluster: Cluster
    noise: Noise
    seed: int

    @property
    def where(self) -> str:
        """The ranks and their nodes, in words."""
        nodes = "a link each" if self.cluster.node_alpha is None else f"nodes: {self.layout}"
        return f"ranks: {self.layout.size:,}, {nodes}"

    def pricing(self, name: str) -> Pricing:
        """Return the prices of an algorithm."""
        return Pricing(name, self.collective, self.layout, self.cluster)

    def sample(self, pricing: Pricing) -> list[float]:
        """Return what an algorithm takes with noise, in each of the runs."""
        runs = RUNS if self.noise.jitter or self.noise.stragglers else 0
        return pricing.sample(self.nbytes, self.noise, range(self.seed, self.seed + runs))

    def smaller(self) -> Iterator[Question]:
        """Yield the question for fewer ranks: those of the first 1, 2, 4, ... nodes, or of one node fewer.

        A torus is halved along its longest side, as long as one can be.
        """
        ranks, nodes = self.layout.size, len(self.layout.nodes)
        whole = ranks if nodes == 1 else nodes
        networks: dict[int, tuple[Groups, ...] | Torus] = {whole: self.cluster.network}
        for power in range(whole.bit_length()) if not isinstance(self.cluster.network, Torus) else ():
            networks.setdefault(2**power, self.cluster.network)
        while isinstance(torus := networks[min(networks)], Torus) and any(side % 2 == 0 for side in torus.sides):
            longest = max((side, index) for index, side in enumerate(torus.sides) if side % 2 == 0)[1]
            sides = tuple(side // 2 if index == longest else side for index, side in enumerate(torus.sides))
            networks[math.prod(sides)] = replace(torus, sides=sides)
        for number in sorted(number for number in networks if number <= whole):
            layout = Layout.of([number]) if nodes == 1 else Layout(self.layout.nodes[:number])
            links = self.cluster.links if nodes == 1 else self.cluster.links[:number]
            cluster = replace(self.cluster, links=links, network=networks[number])
            yield replace(self, layout=layout, cluster=cluster)


_VERBS: Final = [collective.value for collective in Collective]
_EXAMPLES: Final = """\b
mpiagg simulate ring -n 1024 --bytes 100M --alpha 2us --bandwidth 25GB/s
mpiagg simulate all -n 1024 --nodes 128 --node-alpha 0.3us --node-bandwidth 50GB/s
mpiagg simulate all --nodes 8,8,4 --slow-node 2:1GB/s --plot prices.png
mpiagg simulate all --nodes 512x8 --network fat-tree:32:2,256:4 --hop 0.5us
mpiagg simulate all -n 512 --network torus:8x8x8 --jitter 1us --stragglers 1:1ms
"""


@click.command(epilog=_EXAMPLES)
@click.argument("algorithm", type=Written("algorithm", _read_algorithm))
@click.option("-n", "ranks", type=click.IntRange(1, MOST_RANKS), help="How many ranks.")
@click.option(
    "--collective", type=click.Choice(_VERBS), default=_VERBS[0], metavar="NAME", help=", ".join(_VERBS) + "."
)
@click.option(
    "--bytes", "nbytes", type=Written("size", parse_size), default="100M", help="Of the vector; suffixes K, M, G."
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
    type=Written("node:rate", parse_slow),
    multiple=True,
    help="A node (without --nodes, a rank) whose link has another bandwidth, like 3:1GB/s; repeatable.",
)
@click.option("--overhead", type=_TIME, default="0.3us", help="Of a rank for each message beside the first of a round.")
@click.option("--node-overhead", type=_TIME, default="0.1us", help="The same for messages within a node.")
@click.option(
    "--eager",
    type=Written("size", lambda text: 0 if text.strip() == "0" else parse_size(text)),
    default="8K",
    help="Shorter messages are sent without waiting for their receivers.",
)
@click.option(
    "--network",
    type=Written("network", parse_network),
    metavar="KIND:SIZES",
    help="Between nodes: fat-tree:32:2,512:4 (32 nodes a switch, half of their bandwidth to others; 512 a pod, a "
    "quarter), dragonfly:64:2 or torus:16x8x8.  [default: nothing that messages share]",
)
@click.option("--hop", type=_TIME, default="0us", help="More latency for each level of the network, or further hop.")
@click.option("--jitter", type=_TIME, default="0us", help="By how much each message takes longer, on average.")
@click.option(
    "--stragglers",
    type=Written("number:time", parse_stragglers),
    default=None,
    help="So many ranks, picked by chance, start so much later, like 2:5ms.",
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the first run with jitter or stragglers.")
@click.option(
    "--plot",
    type=job.PictureFile(),
    help="Draw time against size and ranks, of all algorithms, as .png, .pdf or .svg; no jitter, no stragglers.",
)
@click.option("--json", "json_file", type=job.OutputFile(), help="Save the numbers.")
def simulate(plot: Path | None, json_file: Path | None, **options: Any) -> None:
    """Price collectives on a described cluster.

    A message takes a latency, and its bytes over the bandwidth; messages that use a link in the same round share it.
    Reductions take their bytes over a rate. The table says how long each ALGORITHM takes, in how many rounds that
    follow one another, how many bytes leave or enter by the busiest link, and what the time is made of; with --nodes
    or --network a second one says how many bytes cross each level. With --jitter or --stragglers there are ten
    runs more, and their median and longest time. ALGORITHM is a name of docs/algorithms.md (ring, tree, knomial,
    knomial-8, ...), or all.
    """
    question = _question(**options)
    if plot is not None and question.layout.size == 1:
        raise click.UsageError("--plot is for two ranks and more: one alone takes no time")
    figure = None if plot is None else price_plot.figure()
    found = _predicted(question, alone=options["algorithm"] != ALL)
    question = replace(question, names=tuple(found))
    for table in _tables(question, found):
        job.show(table)
    if json_file is not None:
        job.write(json_file, json.dumps(_record(question, found), indent=1) + "\n")
    if figure is not None:
        _draw(figure, question)
        figure.savefig(plot, dpi=120)
        click.echo(f"Saved the plot to {plot}")


class PricedRow(NamedTuple):
    """What an algorithm takes, and the times of runs with noise."""

    prediction: Prediction
    sample: list[float]


def _predicted(question: Question, *, alone: bool) -> dict[str, PricedRow]:
    """Return what algorithms take; what cannot be said is left out, and is an error where it was asked for ``alone``.

    Raises
    ------
    click.UsageError
        If it cannot be said of an algorithm that is asked for by its name.
    """
    found = {}
    with progress("pricing", len(question.names), "algorithms") as advance:
        for name in question.names:
            try:
                pricing = question.pricing(name)
                found[name] = PricedRow(pricing.predict(question.nbytes), question.sample(pricing))
            except ValueError as error:
                if alone:
                    raise click.UsageError(str(error)) from None
                click.echo(f"Left out: {error}", err=True)
            advance()
    return found


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
    overhead: float,
    node_overhead: float,
    eager: int,
    network: tuple[Groups, ...] | Torus | None,
    hop: float,
    jitter: float,
    stragglers: Noise | None,
    seed: int,
) -> Question:
    """Return what is asked.

    Raises
    ------
    click.UsageError
        If it is not said how many ranks there are or where, or what is said does not fit together.
    """
    layout = read_layout(ranks, nodes)
    count = len(layout.nodes)
    if nodes is None:
        refuse_given(("node_alpha", "node_bandwidth", "node_overhead"), "is about what is within --nodes: give them")
    if not jitter and stragglers is None:
        refuse_given(("seed",), "is for --jitter and --stragglers")
    if slow and nodes is not None and count == 1:
        raise click.UsageError("--slow-node is about links between nodes, and there is one")
    if hop and network is None:
        raise click.UsageError("--hop is a latency of a --network, and none is given")
    links = [1 / bandwidth] * count
    for node, rate in slow:
        if node >= count:
            raise click.UsageError(f"--slow-node must be from 0 to {count - 1}, not {node}")
        links[node] = 1 / rate
    cluster = Cluster(
        alpha, 1 / bandwidth, 1 / gamma, links=tuple(links) if slow else (), overhead=overhead, eager=eager
    )
    if nodes is not None:
        cluster = replace(cluster, node_alpha=node_alpha, node_beta=1 / node_bandwidth, node_overhead=node_overhead)
    if network is not None:
        cluster = _with_network(cluster, network, hop, layout)
    noise = replace(stragglers or Noise(), jitter=jitter)
    if noise.stragglers > layout.size:
        raise click.UsageError(f"--stragglers: there are {layout.size:,} ranks, not {noise.stragglers:,}")
    names = _serving(algorithm, Collective(collective), layout)
    return Question(names, Collective(collective), nbytes, layout, cluster, noise, seed)


def _with_network(cluster: Cluster, network: tuple[Groups, ...] | Torus, hop: float, layout: Layout) -> Cluster:
    """Return the cluster with the network between its nodes, and the latencies of that.

    Raises
    ------
    click.UsageError
        If it does not fit the nodes.
    """
    if len(layout.nodes) == 1:
        raise click.UsageError("--network is between nodes, and there is one")
    if isinstance(network, Torus):
        cluster = replace(cluster, network=replace(network, alpha=hop))
    else:
        cluster = replace(cluster, network=tuple(replace(groups, alpha=hop) for groups in network))
    try:
        Links.between(layout, cluster)
    except ValueError as error:
        raise click.UsageError(f"--network: {error}") from None
    return cluster


def _serving(algorithm: str, collective: Collective, layout: Layout) -> tuple[str, ...]:
    """Return the algorithms that are asked for."""
    if algorithm == ALL:
        return comparable(collective, layout)
    if collective not in find_algorithm(algorithm).schedules:
        known = ", ".join(algorithms(collective))
        raise click.UsageError(f"{algorithm!r} does not serve {collective.value}; these do: {known}")
    return (algorithm,)


def _tables(question: Question, found: dict[str, PricedRow]) -> Iterator[Table]:
    """Yield what is told, the fastest first."""
    rows = sorted(found.items(), key=lambda entry: entry[1].prediction.seconds)
    title = f"{question.collective.value} of {format_size(question.nbytes)}, {question.where}"
    table = _empty(title, "time", "rounds", "busiest\nlink", "latency", "band-\nwidth", "reduc-\ntion")
    for name, (prediction, _) in rows:
        parts = (prediction.latency, prediction.bandwidth, prediction.reduction)
        shares = [f"{100 * part / prediction.seconds if prediction.seconds else 0:.1f}%" for part in parts]
        table.add_row(
            name,
            format_time(prediction.seconds),
            f"{prediction.rounds:,}",
            format_size(prediction.busiest),
            *shares,
        )
    yield table
    if len(question.layout.nodes) > 1 and (question.cluster.network or question.cluster.node_alpha is not None):
        table = _empty("bytes that cross, in all", *_levels(question.cluster.network))
        for name, (prediction, _) in rows:
            table.add_row(name, *map(format_size, prediction.crossing))
        yield table
    if question.noise.jitter or question.noise.stragglers:
        table = _empty(f"{RUNS} runs with chance, from seed {question.seed}", "median", "longest", "of the\nquiet time")
        for name, (prediction, sample) in rows:
            typical = statistics.median(sample)
            ratio = typical / prediction.seconds if prediction.seconds else 1.0
            table.add_row(name, format_time(typical), format_time(max(sample)), f"{ratio:.3g}")
        yield table


def _empty(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("algorithm", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _levels(network: tuple[Groups, ...] | Torus) -> list[str]:
    """Return the names of the levels that bytes can cross."""
    if isinstance(network, Torus):
        return ["between\nnodes", "in hops of\nthe torus"]
    return ["between\nnodes", *(f"groups of\n{groups.nodes:,}" for groups in network)]


def _draw(figure: Any, question: Question) -> None:
    """Draw time against size and against ranks, for all algorithms that can be priced."""
    sizes = [64 * 4**power for power in range(13)]
    fewer = [smaller for smaller in question.smaller() if smaller.layout.size > 1]
    names = [*dict.fromkeys((*comparable(question.collective, question.layout), *question.names))]
    by_size, by_ranks = {}, {}
    with progress("drawing", len(names), "algorithms") as advance:
        for name in names:
            with suppress(ValueError):  # too many messages, as was told of those in the table
                pricing = question.pricing(name)
                pricings = [*(smaller.pricing(name) for smaller in fewer[:-1]), pricing]  # the last are all ranks
                along_ranks = [each.seconds(question.nbytes) for each in pricings]
                by_size[name], by_ranks[name] = [pricing.seconds(size) for size in sizes], along_ranks
            advance()
    shown = price_plot.fastest([by_size, by_ranks], question.names)
    by_size, by_ranks = ({name: curves[name] for name in shown} for curves in (by_size, by_ranks))
    left, right = figure.subplots(1, 2)
    price_plot.draw(left, "size", {size: format_size(size) for size in sizes}, by_size, question.where)
    ranks = [smaller.layout.size for smaller in fewer]
    price_plot.draw(right, "ranks", {count: f"{count:,}" for count in ranks}, by_ranks, format_size(question.nbytes))
    fewer_shown = "" if len(shown) == len(names) else f": the fastest {len(shown)} of {len(names)} algorithms"
    figure.suptitle(question.collective.value + fewer_shown)
    handles = {
        label: line for axes in (left, right) for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")


def _record(question: Question, found: dict[str, PricedRow]) -> dict[str, Any]:
    chance = {"noise": asdict(question.noise), "seed": question.seed}
    return {
        "collective": question.collective.value,
        "size": question.nbytes,
        "ranks": question.layout.size,
        "layout": str(question.layout),
        "cluster": asdict(question.cluster),
        **(chance if question.noise != Noise() else {}),
        "rows": [
            {"algorithm": name, **asdict(prediction), **({"runs": sample} if sample else {})}
            for name, (prediction, sample) in found.items()
        ],
    }
