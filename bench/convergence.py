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
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mpiagg.cli.aggregators import AGGREGATORS

RANKS = 4
RESULTS = Path(__file__).parent / "results" / f"convergence-n{RANKS}.json"


def train(aggregator: str, folder: Path) -> dict[str, Any]:
    """Run the demo with an aggregator and return what it has saved."""
    saved = folder / f"{aggregator}.json"
    command = [sys.executable, "-m", "mpiagg", "demo", "-n", str(RANKS), "--aggregator", aggregator]
    subprocess.run([*command, "--json", str(saved), "--plot", str(folder / "loss.png")], check=True)  # noqa: S603
    told: dict[str, Any] = json.loads(saved.read_text())
    return told


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the loss of each aggregator over the bytes that a rank has sent."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    for place, result in enumerate(results):
        style = ("-", "--", ":", "-.")[place // 10]
        axes.plot(result["bytes_by_epoch"], result["losses"], style, label=result["settings"]["aggregator"])
    axes.set(
        xscale="log", yscale="log", xlabel="bytes that a rank has sent, on average", ylabel="mean loss of an epoch"
    )
    axes.set_title(f"Handwritten digits on {RANKS} ranks, {results[0]['settings']['epochs']} epochs")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)


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
