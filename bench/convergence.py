"""Train with every aggregator of ``mpiagg demo``, and save what came of it: accuracy, loss, bytes.

    python bench/convergence.py          runs all on 4 ranks, and saves results/convergence-n4.json and .png
    python bench/convergence.py NAME...  runs these alone, and puts them among those that are saved
    python bench/convergence.py --draw   only draws the saved results

The table in docs/aggregations.md is made from the saved file by docs/make_aggregations.py.
"""

import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mpiagg.cli.aggregators import AGGREGATORS
from mpiagg.cli.price_plot import COLOURS, MARKS

RANKS = 4
EXACT = "allreduce"
RESULTS = Path(__file__).parent / "results" / f"convergence-n{RANKS}.json"


def train(aggregator: str, folder: Path) -> dict[str, Any]:
    """Run the demo with an aggregator and return what it has saved."""
    saved = folder / f"{aggregator}.json"
    command = [sys.executable, "-m", "mpiagg", "demo", "-n", str(RANKS), "--aggregator", aggregator]
    subprocess.run([*command, "--json", str(saved), "--plot", str(folder / "loss.png")], check=True)  # noqa: S603 - a command of our own
    told: dict[str, Any] = json.loads(saved.read_text())
    return told


MOST = len(COLOURS)
"""Lines in a panel, beside the one that all panels have."""


def panels(names: list[str]) -> list[list[str]]:
    """Return the aggregators of each panel, in their order: no more than can be told apart, and as many in each."""
    others = [name for name in names if name != EXACT]
    count = -(-len(others) // MOST)
    cuts = [len(others) * panel // count for panel in range(count + 1)]
    return [others[first:last] for first, last in pairwise(cuts)]


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the loss of each aggregator over the bytes that a rank has sent, beside that of the exact mean."""
    found = {result["settings"]["aggregator"]: result for result in results}
    shown = panels(list(found))
    figure = Figure(figsize=(9, 4 * -(-len(shown) // 2)), layout="constrained")
    grid = figure.subplots(-(-len(shown) // 2), 2, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, names in zip(grid.flat, shown, strict=False):
        for name, colour, mark in zip([EXACT, *names], ("#999999", *COLOURS), "." + MARKS, strict=False):
            style = {"color": colour, "marker": mark, "markersize": 3.5, "linewidth": 3 if name == EXACT else 1.3}
            axes.plot(found[name]["bytes_by_epoch"], found[name]["losses"], label=name, **style)
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.supxlabel("bytes that a rank has sent, on average")
    figure.supylabel("mean loss of an epoch")
    figure.suptitle(f"Handwritten digits on {RANKS} ranks, {results[0]['settings']['epochs']} epochs; a mark an epoch")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run all or some, or only draw."""
    arguments = sys.argv[1:]
    if arguments != ["--draw"]:
        saved = {each["settings"]["aggregator"]: each for each in json.loads(RESULTS.read_text())} if arguments else {}
        with tempfile.TemporaryDirectory() as folder:
            saved |= {aggregator: train(aggregator, Path(folder)) for aggregator in arguments or AGGREGATORS}
        results = [saved[aggregator] for aggregator in AGGREGATORS if aggregator in saved]
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    draw(json.loads(RESULTS.read_text()), RESULTS.with_suffix(".png"))
    print(f"saved {RESULTS} and its picture")


if __name__ == "__main__":
    main()
