"""Write the tables of docs/aggregations.md from what bench/convergence.py and bench/learning.py have saved.

Run it after these: ``python docs/make_aggregations.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

from mpiagg.cli.aggregators import AGGREGATORS

PAGE = Path(__file__).with_name("aggregations.md")
SAVED = Path(__file__).parents[1] / "bench" / "results" / "convergence-n4.json"
PLACE = re.compile(r"(?<=<!-- begin: written by docs/make_aggregations.py -->\n).*(?=<!-- end -->)", re.DOTALL)
LEARNED = SAVED.with_name("learning-mpich.json")
HARDER = re.compile(r"(?<=<!-- begin: harder tasks -->\n).*(?=<!-- end: harder tasks -->)", re.DOTALL)


def page() -> str:
    """Return the text of the page, with the tables."""
    found = PLACE.sub(_table(json.loads(SAVED.read_text())), PAGE.read_text())
    return HARDER.sub("\n".join(_learned(json.loads(LEARNED.read_text())["records"])), found)


def _learned(records: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table for each task and number of ranks: what the curves have come to, and times."""
    lines = []
    curves = [each for each in records if not each["link"] and not each["seed"]]
    for task, ranks in sorted({(each["task"], each["ranks"]) for each in curves}):
        last = {(each["way"], each["split"]): each for each in curves if (each["task"], each["ranks"]) == (task, ranks)}
        times = {
            (each["link"], each["way"]): f"{1e3 * each['step_s']:.0f}"
            for each in records
            if each["link"] and (each["task"], each["ranks"]) == (task, ranks)
        }
        links = [link for link in LINKS if any(of == link for of, _ in times)]
        columns = [*LEARNED_COLUMNS, *(f"ms a step, {LINKS[link]}" for link in links)]
        lines += [f"`{task}`, {ranks} ranks:", "", f"| way | {' | '.join(columns)} |"]
        lines.append("|---" + "|---:" * len(columns) + "|")
        for way in dict.fromkeys(way for way, _ in last):
            cells = [*_ends(last, way), *(times.get((link, way), "") for link in links)]
            lines.append(f"| `{way}` | {' | '.join(cells)} |")
        lines.append("")
    return lines


LEARNED_COLUMNS = (
    *("loss, iid", "accuracy", "loss, other data each", "accuracy"),
    *("fewer bytes", "fewer at the peak"),
)
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}


def _ends(last: dict[tuple[str, str], dict[str, Any]], way: str) -> list[str]:
    cells = []
    for split in ("iid", "skewed"):
        record, alone = last.get((way, split)), last.get(("none", split))
        if record is None:
            cells += ["", ""]
            continue
        end = record["curve"][-1]
        worse = alone is not None and way != "none" and (end["loss"] or 1e9) > alone["curve"][-1]["loss"]
        loss = "diverged" if end["loss"] is None else f"{end['loss']:.3f}"
        cells += [f"**{loss}: worse than none**" if worse else loss, f"{end['accuracy']:.3f}"]
    whole, own = last.get(("torch-ddp", "iid")), last.get((way, "iid")) or last[way, "skewed"]
    sent = own["curve"][-1]["bytes"]
    if whole is None:  # as long as not all ways are there
        return [*cells, "", ""]
    return [
        *cells,
        f"{whole['curve'][-1]['bytes'] / sent:.1f}" if sent else "",
        f"{whole['peak_bytes'] / own['peak_bytes']:.1f}" if own["peak_bytes"] else "",
    ]


WORDS = """\
`mpiagg demo` with each aggregator: a perceptron on handwritten digits (1348 to train with, 449 to test), float64,
{ranks} ranks, batches of {batch_size}, {epochs} epochs, momentum 0.9 (of the aggregation where that has it), {mpi}.
The rate is 0.2, or a lower one where that fails. One run, saved in `bench/results/convergence-n4.json`;
`python bench/convergence.py` repeats it. Accuracy is that
of the worst rank; fewer bytes are those of `allreduce` over those of the row. The time is what a step spends in
aggregating and waiting, on average over the ranks, which share {cores} cores here and no network: it says what the
arithmetic costs, on 4810 weights.
"""
COLUMNS = ("accuracy", "last loss", "bytes a rank", "fewer bytes", "ms a step", "steps", "rate")


def _table(results: list[dict[str, Any]]) -> str:
    first = results[0]
    lines = [
        WORDS.format(**first["settings"], ranks=first["ranks"], **first["machine"]),
        f"| `--aggregator` | what is aggregated | {' | '.join(COLUMNS)} |",
        "|---|---|" + "---:|" * len(COLUMNS),
        *(_row(result, max(first["bytes_sent"])) for result in results),
    ]
    return "\n".join(lines) + "\n"


def _row(result: dict[str, Any], whole: int) -> str:
    settings, sent = result["settings"], max(result["bytes_sent"])
    cells = [
        f"`{settings['aggregator']}`",
        AGGREGATORS[settings["aggregator"]].what,
        f"{result['test_accuracy']:.3f}",
        f"{result['losses'][-1]:.2g}",
        f"{sent:,}",
        f"{whole / sent:.1f}",
        f"{1e3 * mean(result['communicating']) / result['steps']:.2f}",
        f"{result['steps']}",
        f"{settings['learning_rate']}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
