"""Write the table of measurements in docs/aggregations.md from what bench/convergence.py has saved.

Run it after that: ``python docs/make_aggregations.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mpiagg.cli.aggregators import AGGREGATORS

PAGE = Path(__file__).with_name("aggregations.md")
SAVED = Path(__file__).parents[1] / "bench" / "results" / "convergence-n4.json"
PLACE = re.compile(r"(?<=<!-- begin: written by docs/make_aggregations.py -->\n).*(?=<!-- end -->)", re.DOTALL)


def page() -> str:
    """Return the text of the page, with the table."""
    return PLACE.sub(_table(json.loads(SAVED.read_text())), PAGE.read_text())


def _table(results: list[dict[str, Any]]) -> str:
    first, machine = results[0], results[0]["machine"]
    settings = first["settings"]
    whole = max(first["bytes_sent"])
    lines = [
        (
            "`mpiagg demo` with each aggregator: a perceptron on handwritten digits (1348 to train with, "
            f"449 to test), float64, {first['ranks']} ranks, batches of {settings['batch_size']}, {settings['epochs']} "
            f"epochs, momentum 0.9, {machine['mpi']}. The rate is 0.2, or a lower one where that fails."
        ),
        "One run, saved in `bench/results/convergence-n4.json`; `python bench/convergence.py` repeats it.",
        "Accuracy is that of the worst rank; fewer bytes are those of `allreduce` over those of the row.",
        "",
        "| `--aggregator` | what is aggregated | accuracy | last loss | bytes a rank | fewer bytes | steps | rate |",
        "|---|---|" + "---:|" * 6,
    ]
    for result in results:
        name, sent = result["settings"]["aggregator"], max(result["bytes_sent"])
        lines.append(
            f"| `{name}` | {AGGREGATORS[name].what} | {result['test_accuracy']:.3f} | {result['losses'][-1]:.2g} "
            f"| {sent:,} | {whole / sent:.1f} | {result['steps']} | {result['settings']['learning_rate']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
