"""Write the tables of docs/performance.md from what the scripts in bench/ have saved.

Run it after them: ``python docs/make_performance.py``.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("performance.md")
BENCH = Path(__file__).parents[1] / "bench"
PLACE = "(?<=<!-- {} -->\n).*?(?=<!-- end -->)"
FEWEST_TURNS = 5
"""Of fewer turns no median is told."""

UNITS = {2**20: "MiB", 2**10: "KiB", 1: "B"}


def page() -> str:
    """Return the text of the page, with its tables."""
    text = PAGE.read_text()
    tables = [_node, _elsewhere, _network, _goals, _overhead]
    for name, table in ((make.__name__.removeprefix("_"), make()) for make in tables):
        # Once: after an empty place the pattern would match again, up to the end of the next.
        text = re.sub(PLACE.format(name), lambda _, table=table: table + "\n", text, count=1, flags=re.DOTALL)
    return text


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


def _elsewhere() -> str:
    lines = []
    for path in sorted((BENCH / "results").glob("elsewhere-*.json")):
        rows = json.loads(path.read_text())["rows"]
        sizes = [row["size"] for row in rows]
        for how in ("together", "apart"):
            found = {
                row["size"]: {name: us[how] for name, us in row["time_us"].items() if row["turns"][how] >= FEWEST_TURNS}
                for row in rows
            }
            lines.append(_head(f"{path.stem}, {how}", sizes))
            lines.append("| turns | " + " | ".join(str(row["turns"][how]) for row in rows) + " |")
            for name in ("ring, by messages", "mailboxes, segments of 1024 KiB"):
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
    words = [next(f"{size // unit} {word}" for unit, word in UNITS.items() if size >= unit) for size in sizes]
    return "\n".join([f"| `{name}` | {' | '.join(words)} |", "|---" * (len(sizes) + 1) + "|"])


def _line(name: str, values: list[float]) -> str:
    return f"| {name} | " + " | ".join(f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in values) + " |"


def _ratios(name: str, times: dict[int, dict[str, float]], sizes: list[int], ours: str, theirs: str) -> str:
    found = [times[size] for size in sizes]
    ratios = [each[ours] / each[theirs] if {ours, theirs} <= set(each) else None for each in found]
    cells = ["" if ratio is None else f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.1g}" for ratio in ratios]
    return f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
