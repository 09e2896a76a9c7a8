"""Inject random faults at random moments of a training, and judge how each ends.

    python -m bench.random_faults --seed 1 --runs 200 [--ranks 4] [-o bench/results/random-faults-mpich.json]

It runs at the top of the repository. Every run must finish with the weights that the training has without the fault, to
the last bit (or, where others go on without a rank that has died, with what is right for them), or end with an error
that names the right rank. None may hang, and no process may be left. Some that have ended early, and all that were
asked to stop, are started again: they must then come to those weights, too.

Where a rank is killed by SIGKILL, MPICH's launcher kills the others as well, before anybody can name it. Such runs are
told apart, as ``unnamed``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from bench.fault_jobs import LITTLE, MARK, all_gone, can_mount, end_processes, own_shm, processes
from bench.gpu import TOP, environment
from bench.random_fault_draws import FAULTS, OWN_SHM, Draw, Job, Outcome, complaints, draws, finished, unnamed
from mpiagg.launch import start as launch
from mpiagg.launch.job import OutputFile

WARN: Final = 1.0
TIMEOUT: Final = 5.0
LIMIT: Final = 40.0
"""Seconds: after which ranks warn, after which they give up, and after which a job is ended, which is a hang. They are
multiplied by the patience that is asked for."""

LINGER: Final = 5.0
"""Seconds that the last processes may need to end after the launcher."""

PACE: Final = 0.02
MOST_PRINTED: Final = 3000
"""Characters of what a run has printed that are kept, where something is wrong with it."""


class Verdict(NamedTuple):
    """How a run has ended, by its first exit status too, and what is wrong with that."""

    how: str
    status: int | None
    complaints: list[str]
    seconds: float
    printed: str


def run(job: Job, folder: Path, patience: float) -> Outcome:
    """Run a job; no process of it is left afterwards."""
    mark = uuid.uuid4().hex
    for path in (*folder.glob("*.end"), *folder.glob("rank-*.json"), *folder.glob("signalled")):
        path.unlink()
    told = json.dumps({"aggregation": job.aggregation, "draw": None if job.draw is None else job.draw._asdict()})
    fault = "" if job.draw is None else job.draw.fault
    options = launch.SURVIVING if "survived" in fault else ()
    shm = own_shm(folder, LITTLE) if fault and FAULTS[fault].needs == OWN_SHM else []
    arguments = ["-m", "bench.random_fault_rank", str(folder), told]
    waits = {"MPIAGG_WARN": f"{patience * WARN:g}", "MPIAGG_TIMEOUT": f"{patience * TIMEOUT:g}"}
    begun = time.monotonic()
    with (folder / "printed").open("w") as printed:
        started = subprocess.Popen(  # noqa: S603 - our own Python
            [*shm, *launch.command(job.ranks, arguments, options)],
            cwd=TOP,
            env={**environment(), **waits, "MPIAGG_RECORD_DIR": str(folder), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    status = _watch(started, job.draw, folder, begun + patience * LIMIT)
    seconds = time.monotonic() - begun
    left = 0 if all_gone(mark, LINGER) else len(processes(mark))
    end_processes(mark)
    started.wait()
    ends = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.end")}
    printed = (folder / "printed").read_text(errors="replace") + _recorded(folder)
    return Outcome(status, seconds, ends, printed, left)


def _recorded(folder: Path) -> str:
    """Return why ranks have written their recordings: where the launcher was killed, nobody prints what they say."""
    records = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    lines = (f"rank {each['rank']} of {each['size']}, on {each['host']}, {each['reason']}" for each in records)
    return "".join(f"recorded: {line}\n" for line in lines)


def _watch(started: subprocess.Popen[bytes], draw: Draw | None, folder: Path, until: float) -> int | None:
    """Wait for a job, and let a rank go on that is stopped for a while; return its exit status, None if it hangs."""
    resumes: float | None = None
    while (status := started.poll()) is None:
        now = time.monotonic()
        if now > until:
            return None
        if draw is not None and draw.fault == "SIGSTOP, SIGCONT" and (folder / "signalled").exists():
            resumes = now + draw.seconds if resumes is None else resumes
            if now > resumes:
                with suppress(ProcessLookupError, ValueError):
                    os.kill(int((folder / "signalled").read_text()), signal.SIGCONT)
        time.sleep(PACE)
    return status


@cache
def without_fault(aggregation: str, ranks: int, patience: float) -> Outcome:
    """Return how a training ends in which nothing goes wrong.

    Raises
    ------
    click.ClickException
        If it does not come to its end.
    """
    job = Job(aggregation, ranks)
    with tempfile.TemporaryDirectory() as place:
        outcome = run(job, Path(place), patience)
    if outcome.status != 0 or not finished(job, outcome):
        raise click.ClickException(f"{aggregation} on {ranks} ranks does not train:\n{outcome.printed}")
    return outcome


def judge(job: Job, patience: float) -> Verdict:
    """Run a job, perhaps again, and judge it."""
    right = without_fault(job.aggregation, job.ranks, patience)
    with tempfile.TemporaryDirectory() as place:
        outcome = run(job, Path(place), patience)
        found, printed, seconds = complaints(job, outcome, right), outcome.printed, outcome.seconds
        how = "finished" if finished(job, outcome) else "ended with an error"
        early = any(end["stopped"] for end in outcome.ends.values())
        how = "stopped" if early else "ended by the launcher, unnamed" if unnamed(job, outcome) else how
        if how != "finished" and (job.again or early):
            again = job._replace(draw=None)
            second = run(again, Path(place), patience)
            found += [f"started again: {each}" for each in complaints(again, second, right)]
            printed, seconds, how = printed + second.printed, seconds + second.seconds, f"{how}, then finished"
    return Verdict(how, outcome.status, found, seconds, printed)


def row(number: int, job: Job, verdict: Verdict) -> dict[str, Any]:
    """Return what is saved of a run."""
    assert job.draw is not None
    saved = {"number": number, "aggregation": job.aggregation, "ranks": job.ranks, **job.draw._asdict()}
    saved |= {
        "how": verdict.how,
        "status": verdict.status,
        "took": round(verdict.seconds, 2),
        "complaints": verdict.complaints,
    }
    return saved | ({"printed": verdict.printed[-MOST_PRINTED:]} if verdict.complaints else {})


def all_runs(
    seed: int, numbers: Sequence[int], most_ranks: int, patience: float, without: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Make runs by their numbers, tell of each, and yield what is saved of it."""
    jobs = list(islice(draws(seed, most_ranks, without=without, patience=patience), max(numbers, default=-1) + 1))
    for number in numbers:
        job = jobs[number]
        verdict = judge(job, patience)
        told = "; ".join(verdict.complaints) or "ok"
        click.echo(f"{number}: {job.aggregation}, {job.ranks} ranks, {_described(job.draw)}: {verdict.how}: {told}")
        yield row(number, job, verdict)


def _made_before(output: Path | None, known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a file of runs, which must have been made in the same way."""
    saved = json.loads(output.read_text()) if output is not None and output.exists() else {**known, "rows": []}
    rows: list[dict[str, Any]] = saved.pop("rows")
    if saved != known:
        raise click.UsageError(f"{output} was made in another way: {saved}, and not {known}")
    return rows


def _described(draw: Draw | None) -> str:
    return "nothing" if draw is None else f"{draw.fault} on rank {draw.rank}, step {draw.step}, {draw.place}"


@click.command()
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True)
@click.option("--runs", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--only", type=click.IntRange(min=0), multiple=True, help="Make only the run of this number; repeatable.")
@click.option("--ranks", type=click.IntRange(min=3), default=4, show_default=True, help="At most; 3 at least.")
@click.option("--onward", is_flag=True, help="Go on where the file of -o ends.")
@click.option("--patience", default=1.0, show_default=True, help="How many times longer everything may take.")
@click.option("-o", "--output", type=OutputFile(), help="Save what was drawn and how it ended, as JSON.")
def main(  # noqa: PLR0917 - click passes them by name
    seed: int, runs: int, only: tuple[int, ...], ranks: int, onward: bool, patience: float, output: Path | None
) -> None:
    """Inject random faults, and show that every run finishes right or says who is to blame."""
    launch.mpiexec()  # tells what is missing
    vendor = launch.mpi_vendor()
    limits = {"warn": patience * WARN, "timeout": patience * TIMEOUT, "limit": patience * LIMIT}
    there = {"ULFM": vendor == "Open MPI", OWN_SHM: can_mount()}
    without = [what for what, is_there in there.items() if not is_there]
    known = {"mpi": vendor, "seed": seed, "ranks": ranks, **limits, "without": without}
    if onward and only:
        raise click.UsageError("--onward goes on with the next runs, and not with --only some")
    rows = _made_before(output, known) if onward else []
    for each in all_runs(seed, only or range(len(rows), runs), ranks, patience, without):
        rows.append(each)
        if output is not None:
            whole = output.with_suffix(".part")
            whole.write_text(json.dumps({**known, "rows": rows}, indent=1) + "\n")
            whole.replace(output)  # in one step: whoever goes on reads it
    bad = [each for each in rows if each["complaints"]]
    for what, count in sorted(Counter((each["fault"], each["how"]) for each in rows).items()):
        click.echo(f"{count:4}  {what[0]}: {what[1]}")
    click.echo(f"{len(rows) - len(bad)} of {len(rows)} runs ended well")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
