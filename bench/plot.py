"""Draw saved measurements.

    python bench/plot.py [FILE.json ...]

Every file that ``mpiagg bench --json`` saved (by default all in ``bench/results``) becomes a PNG beside it: the bus
bandwidth of algorithms by size, and their time over that of the MPI library's own collective. Eight lines at most: what
``"auto"`` takes, the peers, the limit, and the fastest of the others. Of mlbench's sizes, the mean time takes the place
of the bandwidth. An algorithm looks the same in all pictures; colours are those of Okabe and Ito.
"""

from __future__ import annotations

import argparse
import io
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from PIL import Image

from mpiagg.cli.quantities import format_size

RESULTS = Path(__file__).parent / "results"
PATTERNS = ("*-any-*.json", "*-registered-*.json", "*-quick-*.json", "*-tuned-*.json")
LIMITS = ("copy", "link")
COLOURS = 128
"""Of a picture: as many as it needs, and no more bytes than that."""

MOST = 8
"""How many lines a picture has."""

FIRST = ("native", "auto", *LIMITS, "gloo")
"""What every picture shows that has it."""

STYLES: dict[str, dict[str, Any]] = {
    "native": {"color": "#000000", "linewidth": 2.5},
    "auto": {"color": "#d55e00", "linewidth": 2.5},
    "copy": {"color": "#000000", "linestyle": ":", "linewidth": 1.5},
    "link": {"color": "#000000", "linestyle": ":", "linewidth": 1.5},
    "gloo": {"color": "#999999", "linewidth": 2.5, "linestyle": "--"},
    "ring": {"color": "#0072b2", "marker": "o"},
    "tree": {"color": "#56b4e9", "marker": "^"},
    "parameter_server": {"color": "#999999", "marker": "v"},
    "recursive_doubling": {"color": "#e69f00", "marker": "s"},
    "halving_doubling": {"color": "#009e73", "marker": "D"},
    "circulant": {"color": "#cc79a7", "marker": "p"},
    "pat": {"color": "#56b4e9", "marker": "8"},
    "swing": {"color": "#f0e442", "marker": "H"},
    "bine": {"color": "#0072b2", "marker": "d", "linestyle": "--"},
    "knomial": {"color": "#cc79a7", "marker": "<", "linestyle": "--"},
    "recursive_multiplying": {"color": "#e69f00", "marker": ">", "linestyle": "--"},
    "multi_radix": {"color": "#009e73", "marker": "8", "linestyle": "--"},
    "double_tree": {"color": "#56b4e9", "marker": "X", "linestyle": "--"},
    "circulant_blocks": {"color": "#f0e442", "marker": "P", "linestyle": "--"},
    "direct": {"color": "#d55e00", "marker": "x", "linestyle": "--"},
    "one_shot": {"color": "#cc79a7", "marker": "*", "linestyle": "-."},
    "shared": {"color": "#009e73", "marker": "P", "linestyle": "-."},
    "hierarchical": {"color": "#0072b2", "marker": "h", "linestyle": "-."},
    "auto-fp16": {"color": "#d55e00", "linestyle": ":", "marker": "<"},
    "auto-bf16": {"color": "#d55e00", "linestyle": "--", "marker": "<"},
    "auto-u8": {"color": "#d55e00", "linestyle": "-.", "marker": ">"},
}
RATIOS = [first * 10.0**power for power in range(-4, 5) for first in (1, 1.5, 2, 3, 5, 7)]
"""Where the scale of ratios has numbers."""


class View(NamedTuple):
    """What the left side shows, and which time the right side compares."""

    left: str
    label: str
    time: str


VIEWS = {
    "powers": View("busbw", "bus bandwidth (GB/s)", "time_us"),
    "mlbench": View("mean_us", "mean time (us)", "mean_us"),
}


def style(name: str) -> dict[str, Any]:
    """Return how an algorithm is drawn; one that is not known here in grey."""
    return {"linewidth": 1.2, "markersize": 4, **STYLES.get(name, {"color": "#c7c7c7", "marker": "."})}


def by_algorithm(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each algorithm."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["algorithm"], []).append(row)
    return found


def drawn(lines: dict[str, list[dict[str, Any]]], time: str) -> list[str]:
    """Return the names of the lines of a picture: the first ones, and the fastest others, by the mean ratio."""

    def slowness(name: str) -> float:
        ratios = [math.log(row[time] / native[row["size"]]) for row in lines[name] if row["size"] in native]
        return sum(ratios) / len(ratios)

    native = {row["size"]: row[time] for row in lines["native"]}
    order = sorted(lines, key=lambda name: (name not in FIRST, slowness(name)))
    return [name for name in lines if name in order[:MOST]]


def title(saved: dict[str, Any]) -> str:
    """Return what was measured, and where."""
    machine, flags = saved["machine"], saved["flags"]
    link = f", links of {flags['link_rate'] / 1e9:g} Gbit/s" if flags["link_rate"] else ""
    return (
        f"{flags['collective']} of {flags['dtype']}, {saved['ranks']} ranks ({saved['layout']}){link}, "
        f"{flags['buffer']} memory, {machine['mpi']}, {machine['cpu']}, {machine['cores']} cores"
    )


def figure_of(saved: dict[str, Any]) -> Figure:
    """Return the picture of a file."""
    view = VIEWS[saved["flags"]["protocol"]]
    lines = by_algorithm(saved["rows"])
    native = {row["size"]: row[view.time] for row in lines["native"]}
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = drawn(lines, view.time)
    for name in names:
        rows = lines[name]
        sizes = [row["size"] for row in rows]
        label = f"{name} (the limit)" if name in LIMITS else name
        left.plot(sizes, [row[view.left] for row in rows], label=label, **style(name))
        right.plot(sizes, [row[view.time] / native[row["size"]] for row in rows], **style(name))
    left.set(xscale="log", yscale="log", ylabel=view.label)
    right.set(xscale="log", yscale="log", ylabel="time over native (below 1 is faster)")
    # Peers may be a hundred times slower; the picture is for telling the others apart.
    shown = [
        row[view.time] / native[row["size"]]
        for row in saved["rows"]
        if row["algorithm"] in names and row["algorithm"] not in (*saved["flags"]["beside"], *LIMITS)
    ]
    right.set_ylim(min(shown) / 1.5, max(shown) * 1.3)
    sizes = sorted(native)
    for axes in (left, right):
        axes.set_xticks([2**power for power in range(0, 40, 4) if sizes[0] <= 2**power <= sizes[-1]], minor=False)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: format_size(nbytes)))
        axes.xaxis.minorticks_off()
        axes.grid(alpha=0.3)
    least, most = right.get_ylim()
    right.set_yticks([ratio for ratio in RATIOS if least <= ratio <= most])
    right.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    right.yaxis.minorticks_off()
    figure.legend(loc="outside right upper", fontsize="small")
    figure.suptitle(title(saved), fontsize="medium")
    return figure


def save_small(figure: Figure, path: Path) -> None:
    """Save a picture in no more bytes than it needs."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    Image.open(drawn).convert("RGB").quantize(COLOURS, Image.Quantize.FASTOCTREE).save(path, optimize=True)


def draw(path: Path) -> Path:
    """Draw one file and return the picture's path."""
    picture = path.with_suffix(".png")
    save_small(figure_of(json.loads(path.read_text())), picture)
    return picture


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE.json", type=Path, nargs="*")
    for file in parser.parse_args().files or sorted(path for each in PATTERNS for path in RESULTS.glob(each)):
        print(draw(file))
