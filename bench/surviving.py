"""Training that goes on when ranks die: how much of the time is spent in steps that count.

    python -m bench.surviving --minutes 60 --ranks 4 [-o bench/results/surviving-openmpi.json]
    python -m bench.surviving --respawn --every 60 60 --minutes 30 [-o bench/results/respawning-openmpi.json]

It runs at the top of the repository, under Open MPI. Every 30 to 60 s a rank that trains under ``mpiagg.Loop`` is
killed; the others go on. When the last one is killed, or a job ends in another way, a new job begins with the
checkpoint. Weights are compared bit by bit among the ranks. What counts is the time in steps whose result was kept:
not what was lost with a commit or a checkpoint and done again, nor how long it takes to notice a death, to make
another communicator, or to start a job.

With ``--respawn`` ranks are started in the places of the dead, and join. As many ranks train without a kill before,
afterwards, and three times in between, each time for a fortieth of the time: the job is stopped meanwhile, as machines
are not always as fast. Afterwards each other number of ranks trains that there has been. What is told then is the
throughput over that of an uninterrupted run of the ranks that were there: how long the steps that count would have
taken undisturbed, over how long all has taken; and the loss by steps, of both.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple

import click

from bench.fault_jobs import MARK, end_processes, processes
from bench.gpu import environment
from mpiagg.cli.quantities import POSITIVE
from mpiagg.launch import start as launch
from mpiagg.launch.job import OutputFile

TOP = Path(__file__).parents[1]
LEAST, MOST = 30.0, 60.0
"""Seconds between two kills, where nothing else is asked for."""

END = 60.0
"""Seconds that a job may take to end, when it is told to."""

FAR = 0.2
"""How far from the minimum, on average, weights are at most at the end: noise alone brings them to 0.05, none to 1."""

PAUSE = 0.05
"""Seconds between two looks at a job."""

PARTS = 4
"""In how many parts the time of a job is cut, between which ranks train without kills."""

ASIDE = 1 / 40
"""How long they do so each time, as a part of the job's time."""


class Step(NamedTuple):
    """A step that was taken: when it was over, its number, by how many ranks of which job, how far from the minimum."""

    at: float
    step: int
    ranks: int
    far: float
    job: int = 0


def steps_of(folder: Path) -> list[Step]:
    """Return all steps that were taken, in the order in which they were."""
    # What has no end of line was being written when its writer was killed.
    logs = {path: path.read_text().split("\n")[:-1] for path in folder.glob("*.steps")}
    return sorted(
        Step(**json.loads(line), job=int(path.stem.split("-")[0])) for path, lines in logs.items() for line in lines
    )


def summary(steps: list[Step], kills: Iterable[float], began: float, ended: float) -> dict[str, Any]:
    """Return what a soak comes to.

    Raises
    ------
    ValueError
        If a step was left out.
    """
    kept: dict[int, float] = {}
    for before, step in zip([None, *steps], steps, strict=False):
        follows = before is not None and step.step == before.step + 1
        if not follows and step.step > (0 if before is None else before.step):
            raise ValueError(f"step {step.step} came after {'none' if before is None else before.step}")
        # The first step after a death or a start is counted without what came before it, of which it is no part.
        like = before is not None and (before.ranks, before.job) == (step.ranks, step.job)
        kept[step.step] = step.at - before.at if before is not None and follows and like else 0.0
    # What is under way when a rank is killed may still be over.
    gaps = [next((step.at for step in steps if step.at > kill + 2 * PAUSE), ended) - kill for kill in kills]
    return {
        "seconds": ended - began,
        "steps": len(kept),
        "steps_done_again": len(steps) - len(kept),
        "training": sum(kept.values()) / (ended - began),
        "seconds_to_next_step": {"median": median(gaps), "most": max(gaps)} if gaps else None,
        "far": steps[-1].far if steps else None,
    }


def without(stops: Iterable[tuple[float, float]], at: float) -> float:
    """Return a time of a clock that stands still from the beginning of each stop to its end."""
    return at - sum(min(at, ended) - began for began, ended in stops if at > began)


def throughput(steps: list[Step], undisturbed: Mapping[int, float], began: float, ended: float) -> float:
    """Return how long the steps that count would have taken undisturbed, over how long all has taken.

    Parameters
    ----------
    steps : list of Step
    undisturbed : mapping of int to float
        Seconds of a step with so many ranks.
    began, ended : float
    """
    kept = {step.step: step.ranks for step in steps}  # the last one counts
    return sum(undisturbed[ranks] for ranks in kept.values()) / (ended - began)


def seconds_a_step(steps: list[Step]) -> float:
    """Return the mean time of a step of a run without kills, of which the first fifth is left out."""
    steady = steps[len(steps) // 5 :]
    return (steady[-1].at - steady[0].at) / (len(steady) - 1)


def losses(steps: list[Step]) -> dict[str, Any]:
    """Return a loss curve of at most fifty points, and the mean and the deviation of its second half."""
    kept = {step.step: step.far for step in steps}
    curve = sorted(kept.items())
    late = [far for _, far in curve[len(curve) // 2 :]]
    return {"mean": fmean(late), "deviation": pstdev(late), "curve": curve[:: max(1, len(curve) // 50)]}


def _raised(log: Path) -> bool:
    return "Traceback" in log.read_text(errors="replace")


class Job:
    """A job of ranks that train.

    Parameters
    ----------
    folder : Path
    number : int
        Which job it is, of those that follow one another.
    ranks : int
    respawn : bool
        Whether ranks are started in the places of the dead.
    """

    def __init__(self, folder: Path, number: int, ranks: int, *, respawn: bool = False) -> None:
        self._folder, self.number = folder, number
        arguments = ["-m", "mpi4py", "-m", "bench.surviving_rank", str(folder), str(number)]
        arguments += ["respawn"] if respawn else []
        self._mark = uuid.uuid4().hex
        known = launch.environment({**environment(), "MPIAGG_RECORD_DIR": str(folder), MARK: self._mark})
        with (folder / f"{number}.log").open("wb") as log:
            self._started = subprocess.Popen(  # noqa: S603 - our own Python
                launch.command(ranks, arguments, launch.SURVIVING), env=known, cwd=TOP, stdout=log, stderr=log
            )

    def alive(self) -> list[int]:
        """Return the processes that can be killed."""
        started = [int(path.read_text() or 0) for path in self._folder.glob(f"{self.number}-*.pid")]
        return sorted({*started} & {*processes(self._mark)})

    @property
    def trains(self) -> bool:
        """Whether it has taken a step."""
        return bool(list(self._folder.glob(f"{self.number}-*.steps")))

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._started.poll() is not None

    @property
    def printed(self) -> str:
        """What it has printed."""
        return (self._folder / f"{self.number}.log").read_text(errors="replace")

    def stop(self) -> int | None:
        """Tell the ranks to stop; return the exit status of the launcher, or None if it had to be killed."""
        deadline, told = time.monotonic() + END, set[int]()
        while not self.ended:
            for pid in set(self.alive()) - told:  # they may still be starting
                os.kill(pid, signal.SIGTERM)
                told.add(pid)
            if time.monotonic() > deadline:
                self.kill()
                return None
            time.sleep(PAUSE)
        return self._started.returncode

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Give it no time meanwhile."""
        held = processes(self._mark)
        try:
            for pid in held:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in held:
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """End what is left of it."""
        end_processes(self._mark)
        self._started.wait()


def soak(
    folder: Path, seconds: float, ranks: int, seed: int, between: tuple[float, float], *, respawn: bool = False
) -> dict[str, Any]:
    """Train, and kill ranks; return what became of it."""
    draw, stops = random.Random(seed), list[tuple[float, float]]()
    alone = {ranks: [unkilled(folder / "before", ranks, seconds * ASIDE)]} if respawn else {}
    began, kills, problems = time.time(), list[float](), list[str]()
    job, jobs = Job(folder, 0, ranks, respawn=respawn), 1
    next_kill, left = began + draw.uniform(*between), ranks
    while (taken := without(stops, time.time()) - began) < seconds:
        time.sleep(PAUSE)
        if respawn and taken > seconds * (len(stops) + 1) / PARTS and len(job.alive()) == ranks:
            stop = time.time()
            with job.stopped():
                alone[ranks].append(unkilled(folder / f"between-{len(stops)}", ranks, seconds * ASIDE))
            stops.append((stop, time.time()))
            next_kill += stops[-1][1] - stop
        elif job.ended:
            if left:
                problems.append(f"job {job.number} ended by itself:\n{job.printed[-2000:]}")
            job, jobs, left = Job(folder, jobs, ranks, respawn=respawn), jobs + 1, ranks
        elif time.time() >= next_kill and job.trains and len(alive := job.alive()) >= (2 if respawn else left):
            with suppress(ProcessLookupError):
                os.kill(draw.choice(alive), signal.SIGKILL)
            kills.append(time.time())
            next_kill, left = kills[-1] + draw.uniform(*between), left if respawn else left - 1
    if job.stop() is None:
        problems.append(f"the last job did not end:\n{job.printed[-2000:]}")
    ended, steps = without(stops, time.time()), [each._replace(at=without(stops, each.at)) for each in steps_of(folder)]
    kills = [without(stops, kill) for kill in kills]
    found = summary(steps, kills, began, ended)
    problems += faults_of(found, folder)
    if respawn and steps:
        for count in sorted({step.ranks for step in steps}):
            alone.setdefault(count, []).append(unkilled(folder / f"after-{count}", count, seconds * ASIDE))
        found |= beside(steps, alone, began, ended)
    return {"ranks": ranks, "seed": seed, "jobs": jobs, "kills": len(kills), **found, "problems": problems}


def faults_of(found: Mapping[str, Any], folder: Path) -> list[str]:
    """Return what is wrong with what a soak comes to, and with what its jobs have printed."""
    problems = [f"a job raised:\n{path.read_text()[-2000:]}" for path in folder.glob("*.log") if _raised(path)]
    if found["far"] is None or found["far"] > FAR:
        problems.append(f"the weights are {found['far']} from the minimum")
    gaps = found["seconds_to_next_step"]
    if gaps is not None and gaps["most"] > END:
        problems.append(f"training went on {gaps['most']:.0f} s after a kill")
    return problems


def unkilled(folder: Path, ranks: int, seconds: float) -> list[Step]:
    """Train without kills for a while, and return the steps."""
    folder.mkdir(parents=True)
    job, deadline = Job(folder, 0, ranks), time.monotonic() + END
    while not job.ended and not job.trains and time.monotonic() < deadline:
        time.sleep(PAUSE)
    time.sleep(seconds)
    job.stop()
    return steps_of(folder)


def beside(steps: list[Step], alone: Mapping[int, list[list[Step]]], began: float, ended: float) -> dict[str, Any]:
    """Return how steps compare with those that so many ranks took without kills, in one or more runs."""
    undisturbed = {ranks: fmean(map(seconds_a_step, runs)) for ranks, runs in alone.items()}
    counted = {step.step: step.ranks for step in steps}
    return {
        "throughput": throughput(steps, undisturbed, began, ended),
        "undisturbed_step_s": undisturbed,
        "undisturbed_runs_s": {ranks: list(map(seconds_a_step, runs)) for ranks, runs in alone.items()},
        "steps_by_ranks": {ranks: list(counted.values()).count(ranks) for ranks in undisturbed},
        "loss": losses(steps),
        "undisturbed_loss": losses(alone[max(alone)][-1]),
    }


@click.command()
@click.option("--minutes", type=POSITIVE, default=60, show_default=True)
@click.option("--ranks", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True)
@click.option("--every", type=(float, float), default=(LEAST, MOST), help="Seconds between two kills: least, most.")
@click.option("--respawn", is_flag=True, help="Start ranks in the places of the dead.")
@click.option("-o", "--output", type=OutputFile(), help="Save what it comes to, as JSON.")
def main(
    *, minutes: float, ranks: int, seed: int, every: tuple[float, float], respawn: bool, output: Path | None
) -> None:
    """Train for long while ranks are killed, and show how much of the time was spent training."""
    if launch.mpi_vendor() != "Open MPI":
        raise click.ClickException("ranks that die are survived under Open MPI alone")
    with tempfile.TemporaryDirectory() as place:
        found = soak(Path(place), 60 * minutes, ranks, seed, every, respawn=respawn)
    click.echo(json.dumps({name: value for name, value in found.items() if "loss" not in name}, indent=1))
    for name in ("loss", "undisturbed_loss"):
        if name in found:
            click.echo(f"{name}: {found[name]['mean']:.5f}, deviation {found[name]['deviation']:.5f}")
    if output is not None:
        saved = {"mpi": launch.mpi_vendor(), "processors": os.cpu_count(), "kills_every": every, **found}
        output.write_text(json.dumps(saved, indent=1) + "\n")
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
