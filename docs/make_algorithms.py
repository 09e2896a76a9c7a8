"""Write docs/algorithms.md from the schedules: their docstrings, and pictures drawn from what they yield.

Run it after a change to the schedules: ``python docs/make_algorithms.py``.
"""

from __future__ import annotations

import inspect
from collections import Counter
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

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
docstrings, the pictures are drawn from the schedules themselves. Each schedule is proved right for every number of
ranks up to 64 by the tests, and for 256, 1000 and 1024 in the slow lane.

## How to read the pictures

A row is a round and a column a rank. Within a round all messages are posted together, and reductions come after them.

| sign | meaning |
|---|---|
| `2>1` | send chunk 2 to rank 1 |
| `1<0` | receive chunk 1 from rank 0, in place of our own |
| `1+0` | receive chunk 1 from rank 0 and reduce it into our own |
| `1~0` | receive chunk 1 from rank 0 and keep it aside: it stands to the left of what is reduced into chunk 1 next |
| `1=0` | receive chunk 1 from rank 0, in place of our own when the round is over: our own is sent in it |
| `1!` | every rank's contribution is in chunk 1: divide, if it is an average |
| `2-4` | chunks 2 to 4 |

In an all-to-all of n ranks, chunk t n + s is what rank s has for rank t.

## Which collective by which

{table}

`algorithm="native"` is the MPI library's own collective; `algorithm="auto"` takes a row of a table: see
[tuning.md](tuning.md).

## What they cost, side by side

![Rounds and bytes of all algorithms](algorithms.png)

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


SHARED = """\
## shared

**Shared: the schedules of `direct`, through memory that the ranks of a node have mapped.**

Where all vectors lie in such memory (`mpiagg.empty`, the buckets of `DDP`), every rank reduces its chunk of all of
them and writes the result into all of them, between two barriers at which the ranks wait for one another. Of B bytes on
n ranks each rank reads B and writes B: no copy into messages and out of them. Other arrays go through mailboxes, a
segment after the other, with two barriers for each; `"auto"` takes messages for the longer of them. All-reduces of up
to 4 KiB take the schedule of `one_shot`, which computes the same fold with one barrier. Scratch: two mailboxes of a
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
    """Draw the rounds and bytes of all algorithms; needs matplotlib."""
    from matplotlib import colormaps  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(16, 12), layout="constrained")
    axes = figure.subplots(3, 4).ravel()
    names = [name for name in TABLE if name != "shared"]
    handles: dict[str, Any] = {}
    for axis, collective in zip(axes, Collective, strict=False):
        beside: Counter[int] = Counter()
        for name in (name for name in names if collective in TABLE[name].schedules):
            one, other = (cost(name, collective, ranks) for ranks in (RANKS, RANKS - 1))
            worse = other.rounds > one.rounds or other.sent > 1.02 * one.sent
            place = one.rounds * 1.09 ** beside[one.rounds]  # those with as many rounds stand side by side
            beside[one.rounds] += 1
            number = names.index(name)
            axis.plot(
                [place, place], [one.sent, one.sent * one.crossing], color=colormaps["tab20"](number), label=name,
                marker="D" if worse else "o", markevery=[0], lw=2, zorder=-number,
            )  # fmt: skip
        found = zip(*reversed(axis.get_legend_handles_labels()), strict=True)
        handles |= {label: handle for label, handle in found if label not in handles}
        axis.set(title=collective.value, xlabel="rounds", ylabel="vectors sent by a rank")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    for axis in axes[len(Collective) :]:
        axis.axis("off")
    axes[-2].legend(handles.values(), handles, loc="upper left", ncols=2, fontsize=9, frameon=False)
    axes[-2].text(
        0, 0.02, f"{RANKS} ranks. Top of a line: sent at most by a rank;\nbottom: how much of it leaves groups of "
        f"{GROUP} ranks.\nCircle: as good for any number of ranks;\ndiamond: best for powers of two.",
    )  # fmt: skip
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
    if entry.name == "hierarchical":
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
