"""Bring about every fault that a job can have, and see what each rank says, and when the job has ended or gone on.

    python -m bench.faults [--ranks 2,4,5] [--only NAME] [-o FILE.json]

It runs at the top of the repository, with this Python and the mpiexec of the MPI library that mpi4py loads. Each case
is a job of its own with small deadlines. ``not ok`` is what hangs, has a wrong result, leaves processes behind, or does
not say what it should; then the exit status is 1. docs/make_faults.py makes docs/faults.md of what is saved.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import click

from bench import fault_cases, fault_jobs
from bench.counts import parse_ranks
from bench.fault_cases import Case
from bench.fault_jobs import Limits, Outcome, Said
from mpiagg.launch import start as launch

RESULTS: Final = Path(__file__).parent / "results"
LIMITS: Final = Limits(warn=1, timeout=6, slack=6)
MOST_SAID: Final = 500
"""Characters that are kept of what a rank says."""


def skipped(case: Case, other_mpiexec: str) -> str:
    """Return why a case cannot be run here, if it cannot."""
    if case.launch == "other" and not other_mpiexec:
        return "no mpiexec of another library is given"
    if case.little_shm and not fault_jobs.can_mount():
        return "no /dev/shm of its own can be mounted"
    return ""


def record(case: Case, ranks: int, limits: Limits, outcome: Outcome) -> dict[str, Any]:
    """Return what is saved of an outcome."""
    return {
        "fault": case.fault,
        "way": case.way,
        "ranks": ranks,
        "expected": case.expected.description(),
        "complaints": fault_jobs.complaints(case, ranks, outcome, limits),
        "status": outcome.status,
        "seconds": round(outcome.seconds, 2),
        "limit": limits.of(case),
        "left": outcome.left,
        "shm": list(outcome.shm),
        "said": [_said(each) for each in outcome.said],
        "launcher": _launcher_says(outcome.launcher),
    }


def _launcher_says(printed: str) -> str:
    """Return by what the launcher says that a process was killed, in the words of MPICH's or Open MPI's; or nothing."""
    found = re.search(r"(process rank \d+ .*?|EXIT STRING: .*?)\(.*?\)", printed, re.DOTALL)
    return " ".join(found[0].split()) if found else ""


def _said(said: Said) -> dict[str, Any]:
    first, *others = said.text.splitlines() or [""]
    return {
        "rank": said.rank,
        "kind": said.kind,
        "first": first[:MOST_SAID],
        "culprit": _of_odd(others),
        "printed": [line[:MOST_SAID] for line in _last_words(said.printed.splitlines())],
        "results": sorted(set(said.results)),
        "seconds": None if said.seconds is None else round(said.seconds, 2),
        "done": said.done,
    }


def _of_odd(lines: Sequence[str]) -> str:
    """Return what a table says of the odd rank; nothing, if there is none."""
    return next((line.strip()[:MOST_SAID] for line in lines if line.startswith(f"  rank {fault_cases.ODD}:")), "")


def _last_words(lines: Sequence[str]) -> list[str]:
    """Return what is kept of what a rank has printed: why it has ended, or else what it was warned of."""
    ended = [line for line in lines if re.match(r"mpiagg: rank \d+ of \d+, on ", line)]
    warned = [line for line in lines if " has waited " in line][:1]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Warning): ", line)]
    return ended[:1] or [*warned, *filter(None, [_of_odd(lines)])] or raised[-1:] or list(lines[-1:])


def one(case: Case, ranks: int, limits: Limits, other_mpiexec: str) -> dict[str, Any]:
    """Run a case and tell of it."""
    saved = record(case, ranks, limits, fault_jobs.run(case, ranks, limits, other_mpiexec))
    verdict = "ok" if not saved["complaints"] else f"NOT OK: {'; '.join(saved['complaints'])}"
    click.echo(f"{case.name}, {ranks} ranks: {saved['seconds']:.1f} s, {verdict}")
    return saved


def chosen(only: Sequence[str]) -> list[Case]:
    """Return the cases whose names begin as one of these, or all.

    Raises
    ------
    click.BadParameter
        If there are none.
    """
    found = [case for case in fault_cases.cases() if not only or case.name.startswith(tuple(only))]
    if not found:
        names = sorted({case.fault for case in fault_cases.cases()})
        raise click.BadParameter(f"no case begins so; there are: {', '.join(names)}")
    return found


@click.command()
@click.option("--ranks", default="2,4,5", show_default=True, help="How many ranks, in turn.")
@click.option("--only", multiple=True, help="Only cases whose names begin so: FAULT or 'FAULT: WAY'; repeatable.")
@click.option("--patience", default=1.0, show_default=True, help="How many times longer everything may take.")
@click.option("--at-once", default=1, show_default=True, help="How many jobs run at the same time.")
@click.option("--other-mpiexec", default="", help="The mpiexec of another MPI library, as the wrong launcher.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Where it is saved, as JSON.")
def main(  # noqa: PLR0917 - click passes them by name
    ranks: str, only: tuple[str, ...], patience: float, at_once: int, other_mpiexec: str, output: Path | None
) -> None:
    """Bring about every fault, and save what each rank says, and when the job has ended or gone on."""
    numbers, cases = parse_ranks(ranks), chosen(only)
    limits = Limits(*(patience * seconds for seconds in LIMITS))
    library = launch.mpi_vendor()
    launch.mpiexec()  # tells what is missing
    for case in cases:
        if why := skipped(case, other_mpiexec):
            click.echo(f"{case.name}: left out: {why}")
    jobs = [(case, number) for case in cases if not skipped(case, other_mpiexec) for number in numbers]
    with ThreadPoolExecutor(at_once) as pool:
        run = partial(one, limits=limits, other_mpiexec=other_mpiexec)
        rows = list(pool.map(lambda job: run(*job), jobs))
    bad = [row for row in rows if row["complaints"]]
    if output is not None:
        machine = {
            "mpi": f"{library} {_version(library)}",
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "system": platform.system(),
        }
        saved = {"machine": machine, "limits": limits._asdict(), "at_once": at_once, "rows": rows}
        output.write_text(json.dumps(saved, indent=1) + "\n")
        click.echo(f"saved {output}")
    click.echo(f"{len(rows) - len(bad)} of {len(rows)} are ok")
    sys.exit(1 if bad else 0)


def _version(library: str) -> str:
    try:
        return version(library.replace(" ", "").lower())
    except ImportError:
        return ""


if __name__ == "__main__":
    main()
