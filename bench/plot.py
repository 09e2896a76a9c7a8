"""Draw saved measurements.

    python bench/plot.py [FILE.json ...]

Every file that ``mpiagg bench --json`` saved (by default all in ``bench/results``) becomes a PNG beside it:
the bus bandwidth of each algorithm by size, and its time over that of the MPI library's own collective.
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"


def by_algorithm(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each algorithm."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["algorithm"], []).append(row)
    return found


def draw(path: Path) -> Path:
    """Draw one file and return the picture's path."""
    saved = json.loads(path.read_text())
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    bandwidth, ratio = figure.subplots(1, 2)
    for name, rows in by_algorithm(saved["rows"]).items():
        sizes = [row["size"] for row in rows]
        style: dict[str, Any] = {"color": "black", "linewidth": 2.5} if name == "native" else {"marker": "."}
        bandwidth.plot(sizes, [row["busbw"] for row in rows], label=name, **style)
        ratio.plot(sizes, [row["ratio"] for row in rows], label=name, **style)
    bandwidth.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth (GB/s)")
    ratio.set(xscale="log", yscale="log", xlabel="bytes", ylabel="time over native (below 1 is faster)")
    figure.legend(*ratio.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    machine = saved["machine"]
    figure.suptitle(
        f"{saved['flags']['collective']}, {saved['ranks']} ranks, {machine['mpi']}, "
        f"{machine['cpu']}, {machine['cores']} cores"
    )
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=120)
    return picture


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(map(str, RESULTS.glob("allreduce-*.json"))):
        print(draw(Path(name)))
