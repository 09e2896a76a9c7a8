"""Write docs/algorithms.md from the schedules: their docstrings, and pictures drawn from what they yield.

Run it after a change to the schedules: ``python docs/make_algorithms.py``.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from mpiagg.schedules import (
    TABLE,
    Action,
    Algorithm,
    Cluster,
    Collective,
    Layout,
    algorithms,
    count,
    picture,
    schedules,
)
from mpiagg.schedules.model import Pricing

PAGE = Path(__file__).with_name("algorithms.md")
CHART = PAGE.with_suffix(".png")

RANKS = 64
GROUP = 8

HEAD = """\
# The algorithms

This page is written by `docs/make_algorithms.py` from the modules in `mpiagg/schedules`: the words are their
docstrings, the pictures are drawn from the schedules themselves. Each schedule is model-checked for every number of
ranks up to 64 by the tests, and for 256, 1000 and 1024 in the slow lane.

## How to read the pictures

A row is a round and a column a rank. Within a round all messages are posted together, and reductions come after them.

| sign | meaning |
|---|---|
| `2>1` | send chunk 2 to rank 1 |
| `1<0` | receive chunk 1 from rank 0, in place of our own |
| `1+0` | receive chunk 1 from rank 0 and reduce it into our own |
| `1~0` | receive chunk 1 from rank 0 and keep it aside: it stands to the left of what is reduced into chunk 1 next |
| `1&0` | receive chunk 1 from rank 0, reduce it into our own, and keep it, too |
| `1=` | take what was kept of chunk 1 in place of our own, which may be sent in the same round |
| `1!` | every rank's contribution is in chunk 1: divide, if it is an average |
| `2-4` | chunks 2 to 4 |

In an all-to-all of n ranks, chunk t n + s is what rank s has for rank t.

## Which collective by which

{table}

`algorithm="native"` is the MPI library's own collective; `algorithm="auto"` takes a row of a table: see
[tuning.md](tuning.md).

## What they cost, side by side

![Rounds and bytes of all algorithms](algorithms.png)

*On 64 ranks: fewest rounds on top. The blue point is what the rank sends that sends most, the orange bar how much of
that leaves groups of 8 ranks. A hollow point: on 63 ranks there are more rounds, or more is sent.*

On 64 ranks, and on 63: the most messages that follow one another (*rounds*), the most messages of a rank, and the most
that it sends, in vectors. *Crossing* is how much of what all of them send leaves groups of 8 ranks that follow one
another, as the ranks of a node do.
In an all-to-all, a vector is what one rank has for all.
Algorithms that cut a vector into blocks have {blocks}.

{costs}
"""


DRAWN = {
    "halving_doubling": ("halving_doubling", 6),
    "recursive_doubling": ("recursive_doubling", 6),
    "circulant": ("circulant", 5),
    "pat": ("pat", 5),
    "swing": ("swing", 6),
    "bine": ("bine", 6),
    "knomial": ("knomial-3", 6),
    "recursive_multiplying": ("recursive_multiplying-3", 4),
    "multi_radix": ("multi_radix-3x2", 6),
    "double_tree": ("double_tree-2", 5),
    "circulant_blocks": ("circulant_blocks-3", 5),
}
"""By what name, and for how many ranks, an algorithm is drawn, if not by its own for four."""


LEFT = (Collective.ALLREDUCE, Collective.REDUCE)
"""The collectives in the left half of the chart: as many rows as the others."""

SHARED = """\
## shared

**Shared: the schedules of `direct`, through memory that the ranks of a node have mapped.**

Where all vectors lie in such memory (`mpiagg.empty`, the buckets of `DDP`), every rank reduces its chunk of all of
them and writes the result into all of them, between two barriers at which the ranks wait for one another. Of B bytes
on n ranks each rank reads B and writes B: no copy into messages and out of them. Other arrays go through mailboxes, a
segment after the other, with two barriers for each. `"auto"` has long ones of some collectives read where they lie,
in the memory of the other processes: there every rank writes to its own vectors alone, and after a barrier more reads
what the others have reduced. Vectors of up to 32 KiB take schedules of one round, that is one barrier: those of
`one_shot` for reductions to all ranks and to one, which compute the same fold, of `parameter_server` for a broadcast,
and of `direct` for the others. All-reduces of more than two ranks do so up to 4 KiB. Scratch: two mailboxes of a
segment (1 MiB); none for registered memory, save a block for what is held aside. Ranks without memory to share (other
nodes, nonblocking calls, wires) send the messages of `direct`: the same bits.
"""


def page() -> str:
    """Return the text of the page."""
    blocks = " and ".join(
        f"{TABLE[name].chunks(Collective.BROADCAST, RANKS)} (`{name}`)" for name in ("double_tree", "circulant_blocks")
    )
    head = HEAD.format(table=_table(), blocks=blocks, costs=_costs_of_all())
    return "\n".join([head, *(_section(entry) for entry in TABLE.values())])


class Cost(NamedTuple):
    """The rounds, of a rank the most messages and vectors sent, and how much of what all send leaves a group."""

    rounds: int
    messages: int
    sent: float
    crossing: float


@cache
def cost(name: str, collective: Collective, ranks: int) -> Cost:
    """Count what the schedules of all ranks do, on groups of ranks that follow one another."""
    layout = Layout.by_name([rank // GROUP for rank in range(ranks)])
    programs = schedules(name, collective, layout)
    counts = [count(program) for program in programs]
    crossing = sum(
        step.count
        for rank, program in enumerate(programs)
        for a_round in program
        for step in a_round
        if step.action is Action.SEND and layout.node_of(step.peer) != layout.node_of(rank)
    )
    return Cost(
        Pricing(name, collective, layout, Cluster()).predict(1).rounds,
        max(each.messages for each in counts),
        max(each.sent for each in counts) / TABLE[name].pieces(collective, layout),
        crossing / sum(each.sent for each in counts),
    )


def _costs_of_all() -> str:
    lines = ["| collective | algorithm | rounds | messages | sent | crossing |", "|---|---|---|---|---|---|"]
    for collective in Collective:
        for name in algorithms(collective):
            if name == "shared":
                continue
            one, other = (cost(name, collective, ranks) for ranks in (RANKS, RANKS - 1))
            both = [(f"{each.rounds:,}", f"{each.messages:,}", f"{each.sent:.3g}") for each in (one, other)]
            words = ["; ".join(dict.fromkeys(pair)) for pair in zip(*both, strict=True)]
            lines.append(f"| {collective.value} | `{name}` | {' | '.join(words)} B | {one.crossing:.0%} |")
    return "\n".join(lines)


def chart() -> None:
    """Draw the rounds and bytes of all algorithms, a row each; needs matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    served = {each: [name for name in algorithms(each) if name != "shared"] for each in Collective}
    halves = [[each for each in Collective if (each in LEFT) is left] for left in (True, False)]
    figure = Figure(figsize=(15, 9.5), layout="constrained")
    for half, part in zip(halves, figure.subfigures(1, 2), strict=True):
        axes = part.subplots(
            len(half), 2, sharex="col", squeeze=False, height_ratios=[len(served[c]) + 1 for c in half]
        )
        for (rounds, sent), collective in zip(axes, half, strict=True):
            names = sorted(served[collective], key=lambda name: -cost(name, collective, RANKS).rounds)
            for row, name in enumerate(names):
                one, other = (cost(name, collective, ranks) for ranks in (RANKS, RANKS - 1))
                worse = other.rounds > one.rounds or other.sent > 1.02 * one.sent
                look = {"marker": "o", "color": "#0072B2", "markerfacecolor": "white" if worse else "#0072B2"}
                rounds.plot(one.rounds, row, **look)
                sent.plot([one.sent * one.crossing, one.sent], [row, row], color="#999999", zorder=1)
                sent.plot(one.sent * one.crossing, row, marker="|", color="#D55E00", markersize=11, markeredgewidth=2.5)
                sent.plot(one.sent, row, **look)
            rounds.set(yticks=range(len(names)), yticklabels=names, ylabel=collective.value)
            sent.set(yticks=range(len(names)), yticklabels=[])
            for axis in (rounds, sent):
                axis.set_xscale("log", base=2)
                axis.set_ylim(-0.7, len(names) - 0.3)
                axis.xaxis.set_major_formatter("{x:.2g}")
                axis.grid(alpha=0.3)
        axes[-1, 0].set_xlabel("rounds")
        axes[-1, 1].set_xlabel("vectors sent by a rank, at most")
    figure.savefig(CHART, dpi=110)


def _table() -> str:
    lines = [
        "| algorithm | " + " | ".join(c.value for c in Collective) + " | needs |",
        "|---" * (len(Collective) + 2) + "|",
    ]
    for entry in TABLE.values():
        marks = ["yes" if collective in entry.schedules else "" for collective in Collective]
        lines.append(f"| `{entry.name}` | " + " | ".join(marks) + f" | {entry.needs} |")
    return "\n".join(lines)


def _section(entry: Algorithm) -> str:
    if entry.name == "shared":
        return SHARED
    text = inspect.getdoc(import_module(f"mpiagg.schedules.{entry.name}")) or ""
    title, rest = text.split("\n", 1)
    parts = [f"## {entry.name}\n\n**{title}**\n{_markdown(rest)}\n"]
    if entry.by_nodes:
        drawn = {"two nodes of two ranks": [2, 2], "a node of two ranks and one of one": [2, 1]}
        for words, sizes in drawn.items():
            for collective in entry.schedules:
                drawing = picture(entry.name, collective, Layout.of(sizes))
                parts.append(f"{collective.value}, {words}:\n\n```text\n{drawing}\n```\n")
        return "\n".join(parts)
    name, size = DRAWN.get(entry.name, (entry.name, 4))
    for collective in entry.schedules:
        of = f"`{name}`, " if name != entry.name else ""
        parts.append(f"{of}{collective.value}, {size} ranks:\n\n```text\n{picture(name, collective, size)}\n```\n")
    return "\n".join(parts)


def _markdown(text: str) -> str:
    """Turn the docstrings' tables into fenced blocks; nothing else in them differs between the two markups."""
    lines: list[str] = []
    rules = 0
    for line in text.splitlines():
        if not line.startswith("====="):
            lines.append(line.replace("``", "`"))
            continue
        rules += 1
        fence = {1: ["```text", line], 2: [line], 0: [line, "```"]}[rules % 3]
        lines += fence
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
    chart()
