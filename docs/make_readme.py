"""Draw docs/readme.png from saved measurements: ``python docs/make_readme.py``.

The time of an all-reduce against its size, beside MPI_Allreduce and Gloo, on one node and between nodes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from mpiagg.cli.quantities import format_size, format_time

PICTURE = Path(__file__).with_name("readme.png")
RESULTS = Path(__file__).parents[1] / "bench" / "results"
PANELS = (
    ("One node, 2 ranks", {"n2-any-mpich": ("auto", "native", "gloo"), "n2-registered-mpich": ("registered",)}),
    ("4 nodes, links of 1 Gbit/s", {"4x1-any-mpich": ("auto", "native", "gloo")}),
)
STYLES: dict[str, dict[str, Any]] = {  # Okabe and Ito's colours; marks and lines differ, too
    "gloo": {"label": "torch Gloo", "color": "#999999", "marker": "s", "linestyle": ":"},
    "native": {"label": "MPI_Allreduce (MPICH)", "color": "black", "marker": "o", "linestyle": "--"},
    "auto": {"label": "mpiagg", "color": "#d55e00", "marker": "^"},
    "registered": {"label": "mpiagg, memory of mpiagg.empty", "color": "#0072b2", "marker": "D"},
}


def times(run: str, line: str) -> tuple[list[int], list[float]]:
    """Return the lengths in bytes of a saved run, and the times in us of one of its lines."""
    rows = json.loads((RESULTS / f"allreduce-{run}.json").read_text())["rows"]
    found = [row for row in rows if row["algorithm"] == ("auto" if line == "registered" else line)]
    return [row["size"] for row in found], [row["time_us"] for row in found]


def figure() -> Figure:
    """Return the picture."""
    drawn = Figure(figsize=(9, 3.9), layout="constrained")
    for axes, (title, runs) in zip(drawn.subplots(1, 2), PANELS, strict=True):
        for run, lines in runs.items():
            for line in lines:
                axes.plot(*times(run, line), markersize=4.5, linewidth=1.8, **STYLES[line])
        axes.set(xscale="log", yscale="log", title=title, xlabel="length of the vector")
        axes.xaxis.set_major_locator(FixedLocator([2**power for power in (6, 10, 14, 18, 22, 26)]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(size)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: format_time(us / 1e6)))
        axes.grid(alpha=0.3)
    drawn.axes[0].set_ylabel("time of an all-reduce (float32)")
    drawn.legend(*drawn.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return drawn


if __name__ == "__main__":
    figure().savefig(PICTURE, dpi=130)
    print(f"wrote {PICTURE.name}")
