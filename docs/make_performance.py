"""Write the tables of docs/performance.md from what the scripts in bench/ have saved.

Run it after them: ``python docs/make_performance.py``.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from mpiagg.cli.quantities import format_size
from mpiagg.schedules import Collective

PAGE = Path(__file__).with_name("performance.md")
BENCH = Path(__file__).parents[1] / "bench"
PLACE = "(?<=<!-- {} -->\n).*?(?=<!-- end -->)"
FEWEST_TURNS = 5
"""Of fewer turns no median is told."""

LONG = 2**18
"""Bytes from which links are the limit."""


def page() -> str:
    """Return the text of the page, with its tables."""
    text = PAGE.read_text()
    calls = [_calls, _in_other_words, _as_requests, _many, _between_nodes, _in_company, _call_goals, _changing, _auto]
    tables = [*calls, _ddp, _node, _cache_sharing, _network, _others, _exact, _goals, _overhead]
    for name, table in ((make.__name__.removeprefix("_"), make()) for make in tables):
        # Once: after an empty place the pattern would match again, up to the end of the next.
        text = re.sub(PLACE.format(name), lambda _, table=table: table + "\n", text, count=1, flags=re.DOTALL)
    return text


WAYS = ("comm", "function", "plan")
"""A method, an array function and a plan."""

CALLS = {name: f"calls-n2-{name}" for name in ("mpich", "openmpi")}


def _saved(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((BENCH / "results" / f"{name}.json").read_text())["rows"]
    return rows


def _beside(ours: float, theirs: float) -> str:
    """Return two times that no line break separates."""
    return "\u00a0/\u00a0".join(f"{us:.3g}" if us < 1000 else f"{us:,.0f}" for us in (ours, theirs))


def _calls() -> str:
    names = [f"calls-{ranks}-{library}" for ranks in ("n2", "n4", "more-n2") for library in CALLS]
    return _methods(names, ("plain", "registered"))


def _in_other_words() -> str:
    kinds = ("plain", "typed", "columns", "apart", "own-op")
    return _methods([f"calls-described-n2-{library}" for library in CALLS], kinds)


def _as_requests() -> str:
    return _methods([f"calls-requests-n2-{library}" for library in CALLS], ("nonblocking", "persistent"))


def _many() -> str:
    return _methods([f"calls-many-n2-{library}" for library in CALLS], ("many", "lengths"))


def _between_nodes() -> str:
    return _methods([f"calls-{nodes}-{library}" for nodes in ("2x2", "4x1") for library in CALLS], ("plain",))


def _in_company() -> str:
    return _methods([f"calls-beside-n4-{library}" for library in CALLS], ("plain",))


def _changing() -> str:
    names = [f"calls-changing-n{ranks}-{library}" for ranks in (2, 4) for library in CALLS]
    return _methods(names, ("plain",), lambda us: ", ".join(f"{us[how] / us['mpi']:.2f}" for how in WAYS))


def _beside_mpi4py(us: dict[str, float]) -> str:
    return _beside(us["comm"], us["mpi"])


def _methods(
    names: Sequence[str], kinds: Sequence[str], cell: Callable[[dict[str, float]], str] = _beside_mpi4py
) -> str:
    """Return what methods take beside mpi4py's own, with arrays of these kinds."""
    lines = []
    for name in names:
        rows = _saved(name)
        sizes = sorted({row["bytes"] for row in rows} - {0})
        lines += [_head(f"{name}", sizes)]
        for verb in dict.fromkeys(row["verb"] for row in rows):
            for kind in kinds:
                found = {row["bytes"]: row["us"] for row in rows if (row["verb"], row["arrays"]) == (verb, kind)}
                if 0 in found and kind == "plain":
                    lines.append(f"| {verb} | {cell(found[0])} |" + " |" * (len(sizes) - 1))
                elif found and 0 not in found:
                    cells = (cell(found[size]) for size in sizes)
                    lines.append(f"| {verb}, {kind} | {' | '.join(cells)} |")
        lines[-1] += "\n"
    return "\n".join(lines)


def _call_goals() -> str:
    """Return how many cells meet each goal, and the one that is farthest from it."""
    long = 256 * 2**10
    goals: list[tuple[str, Callable[[dict[str, Any]], tuple[float, float] | None]]] = [
        ("a method of Comm: at most 1.05 of mpi4py's own + 1 us", lambda row: (row["us"]["comm"], _allowed(row, 1))),
        (
            "an array function with `out=`: 0.5 us more than that",
            lambda row: (row["us"]["function"], _allowed(row, 1.5)) if "function" in row["us"] else None,
        ),
        (
            "a method over a prepared plan: at most + 1.5 us",
            lambda row: (row["us"]["comm"], row["us"]["plan"] + 1.5) if "plan" in row["us"] else None,
        ),
        (
            "registered, from 256 KiB: all-reduce in place, reduce, reduce-scatter at most 0.5 of mpi4py's own",
            lambda row: _registered(row, long, ("Allreduce", "Reduce", "Reduce_scatter_block"), 0.5),
        ),
        (
            "registered, from 256 KiB: broadcast, all-gather at most 0.7",
            lambda row: _registered(row, long, ("Bcast", "Allgather"), 0.7),
        ),
        (
            "registered, from 64 KiB: all-to-all, all-gather of blocks, gather, scatter at most 0.6",
            lambda row: _registered(row, long // 4, ("Alltoall", "Allgatherv", "Gather", "Scatter"), 0.6),
        ),
    ]
    lines = ["| two ranks | " + " | ".join(f"{name}: met, worst" for name in CALLS) + " |", "|---|---|---|"]
    for goal, judge in goals:
        cells = []
        for name in CALLS.values():
            rows = _saved(name) + _saved(name.replace("calls-", "calls-more-"))
            judged = [(row, *found) for row in rows if (found := judge(row)) is not None]
            met = sum(taken <= allowed for _, taken, allowed in judged)
            row, taken, allowed = max(judged, key=lambda one: one[1] / one[2])
            where = f"{row['verb']}, {row['arrays']}, {row['bytes']} B: {taken:.3g} us, {allowed:.3g} allowed"
            cells.append(f"{met} of {len(judged)}; {where}")
        lines.append(f"| {goal} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _auto() -> str:
    """Return how far "auto" is from the best of all algorithms and the MPI library's own."""
    lines = []
    for name in [f"{how}-n2-{library}" for how in ("auto", "learned") for library in CALLS]:
        rows = [row for row in _saved(name) if row["bytes"]]  # a barrier has no algorithms
        sizes = sorted({row["bytes"] for row in rows})
        lines += [_head(name, sizes)]
        within = 0
        for verb, kind in dict.fromkeys((row["verb"], row["arrays"]) for row in rows):
            cells = []
            for row in (row for row in rows if (row["verb"], row["arrays"]) == (verb, kind)):
                us = dict(row["us"])
                auto = us.pop("auto")
                best = min(us, key=us.__getitem__)
                within += auto <= 1.1 * us[best]
                cells.append(f"{_beside(auto, us[best])} {best}")
            lines.append(f"| {verb}, {kind} | {' | '.join(cells)} |")
        lines[-1] += f"\n\n{within} of {len(rows)} are within 1.1 of the best.\n"
    return "\n".join(lines)


def _allowed(row: dict[str, Any], more: float) -> float:
    return float(1.05 * row["us"]["mpi"] + more)


def _registered(row: dict[str, Any], least: int, verbs: tuple[str, ...], most: float) -> tuple[float, float] | None:
    if row["arrays"] != "registered" or row["bytes"] < least or row["verb"] not in verbs:
        return None
    return row["us"]["comm"], most * row["us"]["mpi"]


def _ddp() -> str:
    lines = []
    for library in CALLS:
        rows = _saved(f"ddp-cost-n2-{library}")
        arrays = [row for row in rows if "arrays" in row]
        lines += [f"| `ddp-cost-n2-{library}`, us | " + " | ".join(arrays[0]["us"]) + " |"]
        lines += ["|---" * (len(arrays[0]["us"]) + 1) + "|"]
        for row in arrays:
            lines.append(f"| {row['arrays']} arrays of {row['elements']:,} | {_numbers(row['us'].values())} |")
        modules = [row for row in rows if "module" in row]
        if modules:
            lines += ["\n| what a step is longer by, us | " + " | ".join(modules[0]["added_us"]) + " |"]
            lines += ["|---" * (len(modules[0]["added_us"]) + 1) + "|"]
            lines += [f"| a perceptron of {row['module']} | {_numbers(row['added_us'].values())} |" for row in modules]
        lines[-1] += "\n"
    return "\n".join(lines)


def _numbers(values: Iterable[float]) -> str:
    return " | ".join(f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in values)


def _node() -> str:
    files = [f"allreduce-{ranks}-registered-{library}" for ranks in ("n2", "n4") for library in ("mpich", "openmpi")]
    both = [(name, name.replace("registered", "any")) for name in files]
    lines = []
    for registered, anywhere in both:
        one, other = _times(registered), _times(anywhere)
        sizes = [size for size in one if size in other]
        lines += [_head(registered, sizes), _line("MPI_Allreduce, us", [one[size]["native"] for size in sizes])]
        lines.append(_ratios("registered / MPI_Allreduce", one, sizes, "auto", "native"))
        lines.append(_ratios("any array / MPI_Allreduce", other, sizes, "auto", "native"))
        lines.append(_ratios("registered / plain copy", one, sizes, "auto", "copy"))
        lines.append(_ratios("registered / Gloo", one, sizes, "auto", "gloo") + "\n")
    return "\n".join(lines)


def _cache_sharing() -> str:
    lines = []
    for path in sorted((BENCH / "results").glob("cache_sharing-*.json")):
        rows = json.loads(path.read_text())["rows"]
        sizes = [row["size"] for row in rows]
        for how in ("together", "apart"):
            found = {
                row["size"]: {name: us[how] for name, us in row["time_us"].items() if row["turns"][how] >= FEWEST_TURNS}
                for row in rows
            }
            lines.append(_head(f"{path.stem}, {how}", sizes))
            lines.append("| turns | " + " | ".join(str(row["turns"][how]) for row in rows) + " |")
            for name in ("ring, by messages", "read from the others' memory", "mailboxes"):
                words = name.partition(",")[0]
                lines.append(_ratios(f"{words} / MPI_Allreduce", found, sizes, name, "MPI_Allreduce"))
            lines[-1] += "\n"
    return "\n".join(lines)


def _network() -> str:
    lines = []
    for path in sorted((BENCH / "results").glob("allreduce-[0-9]x*-*.json")):
        times = _times(path.stem)
        sizes = list(times)
        lines += [_head(path.stem, sizes), _line("MPI_Allreduce, us", [times[size]["native"] for size in sizes])]
        for name, over in (("auto", "native"), ("auto", "gloo"), ("auto", "link"), ("hierarchical", "ring")):
            lines.append(_ratios(f"{name} / {over.replace('native', 'MPI_Allreduce')}", times, sizes, name, over))
        for wire in ("auto-bf16", "auto-u8"):
            lines.append(_ratios(f"{wire} / auto", times, sizes, wire, "auto"))
        lines[-1] += "\n"
    return "\n".join(lines)


def _others() -> str:
    """Return the tables of the other collectives on a network, a table for each layout and library."""
    lines = []
    for layout, library in product(("2x2", "4x2", "4x1"), CALLS):
        verbs = [c.value for c in Collective if c is not Collective.ALLREDUCE]
        found = {verb: _times(f"{verb}-{layout}-any-{library}") for verb in verbs}
        sizes = sorted({size for times in found.values() for size in times})
        lines.append(_head(f"<collective>-{layout}-any-{library}", sizes))
        for verb, times in found.items():
            lines.append(f"| {verb} | " + " | ".join(_standing(s, times.get(s)) for s in sizes) + " |")
        every = [(size, cell) for times in found.values() for size, cell in times.items()]
        near = [cell["auto"] <= 1.05 * cell["native"] for _, cell in every]
        full = [0.95 * cell["auto"] <= cell["link"] for size, cell in every if size >= LONG]
        met = f"{sum(near)} of {len(near)}; at 0.95 of the links: {sum(full)} of {len(full)}"
        lines[-1] += f"\n\nWithin 1.05 of the library's time: {met}.\n"
    return "\n".join(lines)


def _standing(size: int, times: dict[str, float] | None) -> str:
    """Return how ``auto`` stands to the MPI library's own, to the links, and to an algorithm that is far faster."""
    if times is None:
        return ""
    us, best = min((us, name) for name, us in times.items() if name not in PEERS)
    word = f"{times['auto'] / times['native']:.2f}"
    if size >= LONG:
        word += f" ({times['auto'] / times['link']:.2f})"
    return word if times["auto"] <= 1.1 * us else f"{word}; {best} {us / times['native']:.2f}"


def _exact() -> str:
    lines = []
    for path in sorted((BENCH / "results").glob("exact-*.json")):
        times = _times(path.stem)
        sizes = list(times)
        lines += [_head(path.stem, sizes), _line("auto, us", [times[size]["auto"] for size in sizes])]
        lines.append(_ratios("exact / auto", times, sizes, "auto-exact", "auto"))
        lines.append(_ratios("exact / MPI_Allreduce", times, sizes, "auto-exact", "native") + "\n")
    return "\n".join(lines)


PEERS = {"native", "auto", "gloo", "link"}


def _goals() -> str:
    head, *rows = runpy.run_path(str(BENCH / "goals.py"))["table"]()
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows))


def _overhead() -> str:
    saved = json.loads((BENCH / "results" / "overhead-mpich.json").read_text())
    lines = [f"| {saved['machine']['mpi']} | ns |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {ns:.0f} |" for name, ns in saved["ns"].items())])


def _times(name: str) -> dict[int, dict[str, float]]:
    saved: dict[str, Any] = json.loads((BENCH / "results" / f"{name}.json").read_text())
    times: dict[int, dict[str, float]] = {}
    for row in saved["rows"]:
        times.setdefault(row["size"], {})[row["algorithm"]] = row["time_us"]
    return times


def _head(name: str, sizes: list[int]) -> str:
    return "\n".join([f"| `{name}` | {' | '.join(map(format_size, sizes))} |", "|---" * (len(sizes) + 1) + "|"])


def _line(name: str, values: list[float]) -> str:
    return f"| {name} | " + " | ".join(f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in values) + " |"


def _ratios(name: str, times: dict[int, dict[str, float]], sizes: list[int], ours: str, theirs: str) -> str:
    found = [times[size] for size in sizes]
    ratios = [each[ours] / each[theirs] if {ours, theirs} <= set(each) else None for each in found]
    cells = ["" if ratio is None else f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.1g}" for ratio in ratios]
    return f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
