"""Hold the saved measurements against the goals, and print the table.

    python bench/goals.py

Every goal is about a ratio of two times that were measured in one run, at every size of a range; the worst of them
counts. ``auto`` stands for this package: it is what a user gets without asking.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
LIBRARIES = {"mpich": "MPICH", "openmpi": "Open MPI"}
KIB, MIB = 2**10, 2**20
EVER = 2**62

BEST = "best"
"""In place of an algorithm: the fastest of this package's, at each size."""

LIMIT = "limit"
"""In place of an algorithm: the copy or the link."""

NOT_OURS = ("native", "auto", "gloo", "copy", "link")
NODE = ("n2", "n4")
NETWORK = ("4x1", "2x2")


class Goal(NamedTuple):
    """At most ``most`` times the time of ``over``, at sizes from ``smallest`` to ``largest`` bytes.

    ``settings`` are the parts of the files' names that say where; ``most`` may differ by library. In those that are
    ``tuned``, a table was measured first.
    """

    case: str
    algorithm: str
    over: str
    most: float | Mapping[str, float]
    settings: tuple[str, ...]
    smallest: int = 0
    largest: int = EVER

    def limit(self, library: str) -> float:
        """Return what is allowed with a library."""
        return self.most[library] if isinstance(self.most, Mapping) else self.most


def on(layouts: tuple[str, ...], *buffers: str) -> tuple[str, ...]:
    """Return the settings of layouts with kinds of memory."""
    return tuple(f"{layout}-{buffer}" for layout in layouts for buffer in buffers)


REGISTERED = on(NODE, "registered")
ANY = on(NODE, "any")
FOUR_NODES = on(("4x1",), "any", "tuned")
TWO_BY_TWO = on(("2x2",), "any", "registered")
EVERYWHERE = (*on(NODE, "any", "registered"), *FOUR_NODES, *TWO_BY_TWO, *on((*NETWORK, *NODE), "quick"))

GOALS = (
    Goal("node, registered, 64 KiB to 1 MiB", "auto", "native", 0.5, REGISTERED, 64 * KIB, 1 * MIB),
    Goal("node, registered, 4 MiB and more", "auto", "native", 0.4, REGISTERED, 4 * MIB),
    Goal("node, registered, 64 MiB", "auto", "native", 0.25, REGISTERED, 64 * MIB, 64 * MIB),
    Goal("2 ranks, registered, 4 MiB and more", "auto", LIMIT, 1.1, on(("n2",), "registered"), 4 * MIB),
    Goal("node, any memory, 1 to 16 MiB", "auto", "native", 0.95, ANY, 1 * MIB, 16 * MIB),
    Goal("node, any memory, 64 MiB", "auto", "native", 0.7, ANY, 64 * MIB, 64 * MIB),
    Goal("node, plan, up to 1 KiB", "auto", "native", {"mpich": 1.0, "openmpi": 1.3}, (*ANY, *REGISTERED), 0, 1 * KIB),
    Goal("node, every size", "auto", "gloo", 0.3, (*ANY, *REGISTERED)),
    Goal("4 nodes, 1 MiB and more", "auto", LIMIT, 1 / 0.95, FOUR_NODES, 1 * MIB),
    Goal("4 nodes, 1 MiB and more", "auto", "gloo", 1.0, FOUR_NODES, 1 * MIB),
    Goal("4 nodes, 16 MiB", "auto", "native", 0.6, FOUR_NODES, 16 * MIB, 16 * MIB),
    Goal("4 nodes, up to 16 KiB", "auto", "native", 1.1, FOUR_NODES, 0, 16 * KIB),
    Goal("4 nodes, up to 16 KiB", "auto", "gloo", 0.1, FOUR_NODES, 0, 16 * KIB),
    Goal("2 nodes of 2 ranks, 4 MiB and more", "hierarchical", "ring", 0.72, TWO_BY_TWO, 4 * MIB),
    Goal("everywhere, every size", "auto", BEST, 1.1, EVERYWHERE),
    Goal("network, bf16, 4 MiB and more", "auto-bf16", "auto", 0.55, FOUR_NODES, 4 * MIB),
    Goal("network, u8, 4 MiB and more", "auto-u8", "auto", 0.32, FOUR_NODES, 4 * MIB),
)


class Finding(NamedTuple):
    """The worst ratio of a goal in one file, and the size in bytes where it was measured."""

    ratio: float
    size: int


def times_by_size(rows: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the median of each algorithm, at each size; with what `BEST` and `LIMIT` stand for.

    Times of wrong results do not count.
    """
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["wrong"]:
            continue
        found.setdefault(row["size"], {})[row["algorithm"]] = row["time_us"]
    for times in found.values():
        ours = [time for name, time in times.items() if name not in NOT_OURS and not name.startswith("auto-")]
        limits = [times[name] for name in ("copy", "link") if name in times]
        times.update({BEST: min(ours)} if ours else {}, **({LIMIT: limits[0]} if limits else {}))
    return found


def find(goal: Goal, setting: str, library: str, results: Path = RESULTS) -> Finding | None:
    """Return the worst ratio in the saved file of a setting; None if there is no file, or rows are missing."""
    path = results / f"allreduce-{setting}-{library}.json"
    if not path.exists():
        return None
    measured = times_by_size(json.loads(path.read_text())["rows"])
    if not {end for end in (goal.smallest, goal.largest) if 0 < end < EVER} <= set(measured):
        return None
    found = []
    for size, times in measured.items():
        if goal.smallest <= size <= goal.largest:
            if goal.algorithm not in times or goal.over not in times:
                return None
            found.append(Finding(times[goal.algorithm] / times[goal.over], size))
    return max(found, default=None)


def cell(finding: Finding | None, most: float) -> str:
    """Return in words what was found."""
    if finding is None:
        return "not measured"
    unit, name = next(each for each in ((MIB, "MiB"), (KIB, "KiB"), (1, "B")) if finding.size >= each[0])
    met = "met" if finding.ratio <= most else "NOT met"
    return f"{finding.ratio:.3f} at {finding.size / unit:g} {name}: {met}"


def table(results: Path = RESULTS) -> list[list[str]]:
    """Return the table, with its head."""
    lines = [["case", "measured in", "goal", *LIBRARIES.values()]]
    for goal in GOALS:
        most = " and ".join(dict.fromkeys(f"{goal.limit(library):.3g}" for library in LIBRARIES))
        for setting in goal.settings:
            cells = [cell(find(goal, setting, library, results), goal.limit(library)) for library in LIBRARIES]
            lines.append([goal.case, setting, f"{goal.algorithm} / {goal.over} <= {most}", *cells])
    return lines


def main() -> None:
    """Print the table, in Markdown."""
    lines = table()
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        print("| " + " | ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


if __name__ == "__main__":
    main()
