"""Write docs/algorithms.md from the schedules: their docstrings, and pictures drawn from what they yield.

Run it after a change to the schedules: ``python docs/make_algorithms.py``.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

from mpiagg.schedules import TABLE, Algorithm, Collective, Layout, picture

PAGE = Path(__file__).with_name("algorithms.md")

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
| `1!` | every rank's contribution is in chunk 1: divide, if it is an average |
| `2-4` | chunks 2 to 4 |

## Which collective by which

{table}

`algorithm="native"` is the MPI library's own collective; `algorithm="auto"` takes a row of a table: see
[tuning.md](tuning.md).
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
    "double_tree": ("double_tree-2", 5),
    "circulant_blocks": ("circulant_blocks-3", 5),
}
"""By what name, and for how many ranks, an algorithm is drawn, if not by its own for four."""


SHARED = """\
## shared

**Shared: the schedules of `direct`, through memory that the ranks of a node have mapped.**

Where all vectors lie in such memory (`mpiagg.empty`, the buckets of `DDP`), every rank reduces its chunk of all of
them and writes the result into all of them, between two gates at which the ranks wait for one another. Of B bytes on
n ranks each rank reads B and writes B: no copy into messages and out of them. Other arrays go through mailboxes, a
segment after the other, with two gates for each; `"auto"` takes messages for the longer of them. All-reduces of up to
4 KiB take the schedule of `one_shot`, which computes the same fold with one gate. Scratch: two mailboxes of a segment
(1 MiB); none for registered memory, save a block for what is held aside. Ranks without memory to share (other nodes,
nonblocking calls, wires) send the messages of `direct`: the same bits.
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([HEAD.format(table=_table()), *(_section(entry) for entry in TABLE.values())])


def _table() -> str:
    lines = ["| algorithm | " + " | ".join(c.value for c in Collective) + " | needs |", "|---" * 7 + "|"]
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
            drawing = picture(entry.name, Collective.ALLREDUCE, Layout.of(sizes))
            parts.append(f"allreduce, {words}:\n\n```text\n{drawing}\n```\n")
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
