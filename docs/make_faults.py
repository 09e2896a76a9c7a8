"""Write the table of docs/faults.md from what ``python -m bench.faults`` has saved.

Run it afterwards: ``python docs/make_faults.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("faults.md")
RESULTS = Path(__file__).parents[1] / "bench" / "results"
PLACE = "(?<=<!-- {} -->\n).*?(?=<!-- end -->)"
LIBRARIES = {"mpich": "MPICH", "openmpi": "Open MPI"}
SHOWN = 4
"""What the ranks of a job of so many say is shown, if it was run."""

LONGEST = 200
"""Characters of what a rank says that are shown."""

Row = dict[str, Any]


def page() -> str:
    """Return the text of the page, with its tables."""
    text = PAGE.read_text()
    saved = {name: json.loads(path.read_text()) for name in LIBRARIES if (path := _path(name)).exists()}
    for name, made in (("runs", _runs(saved)), ("faults", "\n".join(_lines(saved)))):
        text = re.sub(PLACE.format(name), lambda _, made=made: made + "\n", text, count=1, flags=re.DOTALL)
    return text


def _path(library: str) -> Path:
    return RESULTS / f"faults-{library}.json"


def _runs(saved: dict[str, Any]) -> str:
    lines = []
    for each in saved.values():
        rows, limits, machine = each["rows"], each["limits"], each["machine"]
        good = sum(not row["complaints"] for row in rows)
        wrong = sum("wrong" in said["results"] for row in rows for said in row["said"])
        hung, left = sum(row["status"] is None for row in rows), sum(row["left"] for row in rows)
        files = sum(bool(row["shm"]) for row in rows)
        lines.append(
            f"- {machine['mpi']}, {machine['cores']} cores, `MPIAGG_WARN={limits['warn']:g}`, "
            f"`MPIAGG_TIMEOUT={limits['timeout']:g}`: {good} of {len(rows)} jobs did what is expected; {hung} hung, "
            f"{wrong} ranks had wrong results, {left} processes were left, {files} jobs left a file in `/dev/shm`."
        )
    return "\n".join(lines)


def _lines(saved: dict[str, Any]) -> Iterator[str]:
    names = [LIBRARIES[name] for name in saved]
    yield f"| fault | where it comes | expected | what is said | {' | '.join(f'{name}, s' for name in names)} |"
    yield "|---" * (4 + len(names)) + "|"
    cases: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for library, each in saved.items():
        for row in each["rows"]:
            cases.setdefault((row["fault"], row["way"]), {}).setdefault(library, []).append(row)
    before = ""
    faults = list(dict.fromkeys(fault for fault, _ in cases))
    for fault, way in sorted(cases, key=lambda case: faults.index(case[0])):
        rows = cases[fault, way]
        first = next(iter(rows.values()))
        shown = next((row for row in first if row["ranks"] == SHOWN), first[-1])
        cells = [_times(rows.get(library, [])) for library in saved]
        said = "<br>".join(_cell(text) for text in _said(shown))
        yield f"| {fault if fault != before else ''} | {way} | {shown['expected']} | {said} | {' | '.join(cells)} |"
        before = fault


def _times(rows: list[Row]) -> str:
    """Return after how many seconds the jobs have ended, or gone on, and which of them did not do what is expected."""
    return "<br>".join(
        f"{row['ranks']}: {_seconds(row):.1f}{' **not ok**' if row['complaints'] else ''}" for row in rows
    )


def _seconds(row: Row) -> float:
    done = [said["seconds"] for said in row["said"] if said["done"] and said["seconds"] is not None]
    return float(max(done) if row["status"] == 0 and done else row["seconds"])


def _said(row: Row) -> Iterator[str]:
    """Yield what the ranks say: those of them together who say the same."""
    together: dict[str, list[str]] = {}
    for said in row["said"]:
        for text in _words(said):
            together.setdefault(text, []).append(str(said["rank"]))
    for text, ranks in together.items():
        who = f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}"
        if len(ranks) == row["ranks"]:
            who = "all"
        elif "None" in ranks:
            who = f"{len(ranks)} that never knew their rank"
        yield f"{who}: `{_short(text)}`"
    if not together and row["launcher"]:
        yield f"the launcher: `{row['launcher']}`"


def _words(said: dict[str, Any]) -> Iterator[str]:
    """Yield what a rank says: the error that it has, or else its last words."""
    if said["kind"]:
        yield f"{said['kind']}: {said['first']}"
        if said["culprit"]:
            yield f"... {said['culprit']}"
    for line in said["printed"] if not said["kind"] else ():
        yield re.sub(r"^mpiagg: rank \d+ (of \d+, on \S+, )?", "", line)


def _short(text: str) -> str:
    """Return a text without where recordings are, and who has called whom."""
    text = re.sub(r"; its last operations are in \S+|; called at .*| < .*", "", text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
