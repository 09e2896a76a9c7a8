"""Measure arrays on one NVIDIA GPU that ranks share: all that is to be known of them, in under eight minutes.

    python -m bench.gpu FOLDER [--ranks 2,4] [--quick]

It runs at the top of the repository, with this Python and the mpiexec of the MPI library that mpi4py loads. It saves
FOLDER/gpu.json, which has everything, and FOLDER/gpu.md, the same as tables, with the goals; both are written anew
after each part. A part is a job of its own with its own time limit: one that crashes or hangs is told of, with what it
had measured until then, and the others go on.

What it takes: CuPy, about 40 GiB of the GPU's memory (``--largest 256M`` takes a quarter), and for the tests pytest,
of which it tells if it is missing; torch, scikit-learn and ml_dtypes where they are installed. It ends with what was
measured and what was not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench import gpu_report
from bench.counts import parse_ranks
from bench.gpu_rank import PARTS
from mpiagg.benchmarks.flags import parse_size
from mpiagg.launch import start as launch

TOP = Path(__file__).parents[1]

DEADLINE = 455.0
"""Seconds for everything, the beginning too."""

GRACE = 10.0
"""How much later than they should a job's ranks are ended, if they do not end by themselves."""

LEAST = 5.0
"""With less time left than that, a part is not begun."""

PRINTED = 5000
"""Characters of what a part has printed that are kept."""

INFO_SECONDS = 60

WARM_SECONDS = 120
WARM = """
for name in ("torch", "cupy", "sklearn"):
    try:
        __import__(name)
    except Exception:
        pass
"""
"""Brings into memory what is read from a disk at first, which no part should pay for."""

LATE = 30.0
"""How much later than they should the jobs of tests may end, if they do not end by themselves."""

TESTS, ALONE = "tests", "tests alone"
"""Of tests/gpu, those that ranks run, and those that one process runs, with no MPI."""


class Part(NamedTuple):
    """A part of the measurements: a job of its own.

    Attributes
    ----------
    name : str
    ranks : int
    seconds : float
        What it may take.
    """

    name: str
    ranks: int
    seconds: float


class Outcome(NamedTuple):
    """What became of a part.

    Attributes
    ----------
    how : str
        ``"done"``, or what went wrong.
    printed : str
        By its ranks.
    saved : dict
        What they have measured.
    """

    how: str
    printed: str = ""
    saved: dict[str, Any] = {}  # noqa: RUF012 - a default that nobody changes


def parts(ranks: Sequence[int], *, able: bool, tests: bool) -> Iterator[Part]:
    """Yield what is measured, what matters most first; ``able`` if messages reach the device's memory."""
    for count in ranks:
        yield Part("allreduce", count, 110 if count < 4 else 150)
    for count in ranks:
        yield Part("training", count, 40)
    for name, count in (("folds", 1), ("memory", 1), ("memory", max(ranks)), ("codecs", 1)):
        yield Part(name, count, 30)
    for count in ranks:
        yield Part("threshold", count, 30)
    for count in ranks:
        yield Part("pieces", count, 40)
    for count in (1, 2, 3, 4) if tests else ():
        yield Part(TESTS, count, 150 if count < 3 else 60)
    for name in ("messages", "library") if able else ():
        for count in ranks:
            yield Part(name, count, 40)
    if tests:
        yield Part(ALONE, 1, 150)


class Run:
    """All parts, one after the other, and what is saved of them.

    Parameters
    ----------
    folder : Path
        Where it is saved.
    ranks : sequence of int
        How many ranks share the GPU, in turn.
    options : sequence of str
        For the ranks.
    seconds : float
        For everything.
    """

    def __init__(
        self, folder: Path, ranks: Sequence[int], options: Sequence[str] = (), seconds: float = DEADLINE
    ) -> None:
        self.folder, self.options = folder, options
        self._until = time.monotonic() + seconds
        self.record: dict[str, Any] = {"ranks": list(ranks), "options": list(options), "parts": []}

    def measure(self, part: Part) -> None:
        """Run a part as long as there is time, and save what came of it."""
        start = time.monotonic()
        limit = min(part.seconds, self._until - start - (LATE if part.name == TESTS else 0))
        try:
            if limit < LEAST:
                outcome = Outcome("not run: no time was left")
            else:
                outcome = self._tests(part, limit) if part.name in (TESTS, ALONE) else self._job(part, limit)
        except Exception as error:  # noqa: BLE001 - whatever it is, other parts can be measured
            outcome = Outcome(f"FAILED: {description(error)}")
        took = time.monotonic() - start
        known = {"part": part.name, "ranks": part.ranks, "how": outcome.how, "took": took}
        self.record["parts"].append({**known, "printed": outcome.printed[-PRINTED:], **outcome.saved})
        click.echo(f"{gpu_report.title(known)}: {outcome.how}, {took:.0f} s")
        self.save()

    def _job(self, part: Part, limit: float) -> Outcome:
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "part.json"
            arguments = ["-m", "bench.gpu_rank", part.name, str(path), *self.options, "--seconds", f"{limit:.1f}"]
            outcome = job(part.ranks, arguments, limit)
            return outcome._replace(saved=json.loads(path.read_text()) if path.exists() else {})

    def _tests(self, part: Part, limit: float) -> Outcome:
        if find_spec("pytest") is None:
            return Outcome("not run: pytest is missing")
        if part.name == ALONE:
            arguments = ["-m", "pytest", "-q", "--timeout=60", "-rfE", "--tb=short"]
            arguments += ["-n", "8", "-p", "no:benchmark"] if find_spec("xdist") else []
            return job(1, [*arguments, str(TOP / "tests" / "gpu" / "test_device.py")], limit)
        if str(TOP / "tests") not in sys.path:
            sys.path.insert(0, str(TOP / "tests"))
        os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
        from gpu_jobs import run_gpu_job  # noqa: PLC0415 - of the tests

        with tempfile.TemporaryDirectory() as place:
            start = time.monotonic()
            done = run_gpu_job(Path(place), part.ranks, seconds=int(limit))
            took, told = time.monotonic() - start, done.complaints()
            until_then = done.read(0, "tests").count(" passed\n")
        if done.outcomes[0] is not None:
            passed = list(done.outcomes[0].values()).count("passed")
            return Outcome("FAILED" if told else "done", told, {"passed": passed})
        how = f"ENDED after {took:.0f} s" if took >= int(limit) else "FAILED"
        return Outcome(how, told, {"passed_until_then": until_then})

    def save(self, **facts: object) -> None:
        """Save everything so far."""
        self.record.update(facts)
        self.record["goals"] = [goal._asdict() for goal in gpu_report.goals(self.record)]
        (self.folder / "gpu.json").write_text(json.dumps(self.record, indent=1) + "\n")
        (self.folder / "gpu.md").write_text(gpu_report.page(self.record))


def job(ranks: int, arguments: Sequence[str], limit: float) -> Outcome:
    """Run ``python arguments`` on ranks, which should end themselves after so many seconds."""
    status, printed = launch.run_within(limit + GRACE, ranks, arguments, environment(), cwd=TOP)
    if status is None:
        return Outcome(f"ENDED after {limit + GRACE:.0f} s", printed)
    if "Timeout (" in printed:  # which ranks say that end themselves
        return Outcome(f"ENDED after {limit:.0f} s", printed)
    return Outcome("done" if status == 0 else f"FAILED with status {status}", printed)


def environment() -> dict[str, str]:
    """Return the environment of the ranks: they find this checkout, wherever else one is installed."""
    paths = [str(TOP), *filter(None, [os.environ.get("PYTHONPATH")])]
    return launch.environment({"PYTHONPATH": os.pathsep.join(paths)})


def description(error: Exception) -> str:
    """Return what went wrong here, not in a part."""
    return f"{type(error).__name__}: {error}"


def warm_up() -> None:
    """Import what parts import, once; whether it can be imported is not asked here."""
    with suppress(subprocess.TimeoutExpired, OSError):
        subprocess.run(  # noqa: S603 - our own Python
            [sys.executable, "-c", WARM], cwd=TOP, capture_output=True, check=False, timeout=WARM_SECONDS
        )


def info() -> dict[str, Any]:
    """Return what ``mpiagg info`` says.

    Raises
    ------
    click.ClickException
        If it says nothing.
    """
    command = [sys.executable, "-m", "mpiagg", "info", "--json"]
    told = subprocess.run(  # noqa: S603 - our own Python
        command, cwd=TOP, env=environment(), capture_output=True, text=True, check=False, timeout=INFO_SECONDS
    )
    if told.returncode:
        raise click.ClickException(f"mpiagg info fails:\n{told.stdout}{told.stderr}")
    return json.loads(told.stdout)  # type: ignore[no-any-return]  # it is a dictionary


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--ranks", default="2,4", show_default=True, help="How many ranks share the GPU, in turn.")
@click.option("--quick", is_flag=True, help="Only try everything out, on a few short vectors.")
@click.option("--largest", default="1G", show_default=True, help="Bytes of the longest vectors.")
@click.option("--tests/--no-tests", default=True, help="Whether tests/gpu is run, too.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([*PARTS, TESTS, ALONE]),
    help="Measure only parts of that name; repeatable.",
)
@click.option("--device", default="cuda", hidden=True)
def main(
    folder: Path, ranks: str, *, quick: bool, largest: str, tests: bool, only: tuple[str, ...], device: str
) -> None:
    """Measure arrays on one NVIDIA GPU that ranks share, and save it in FOLDER: gpu.json, and gpu.md to read."""
    numbers, nbytes = parse_ranks(ranks), parse_size(largest)
    launch.mpiexec()  # tells what is missing
    run = Run(folder, numbers, ["--device", device, "--largest", str(nbytes), *["--quick"] * quick])
    if device == "cuda":
        warm_up()
    told: dict[str, Any] = {}
    try:
        told = info()
    except (click.ClickException, subprocess.SubprocessError, ValueError) as error:
        click.echo(f"info: FAILED: {description(error)}")
        run.record["info_failed"] = description(error)
    if told and device == "cuda" and not told["ranks"][0]["visible"]:
        raise click.ClickException(f"this process sees no GPU; CuPy: {told['ranks'][0]['cupy']}")
    folder.mkdir(parents=True, exist_ok=True)
    run.save(info=told)
    for part in parts(numbers, able=bool(told) and told["cuda_aware"]["able"], tests=tests):
        if not only or part.name in only:
            run.measure(part)
    chosen = {part["part"] for part in run.record["parts"]}
    unchosen = dict.fromkeys(PARTS, "messages do not reach the device's memory") | dict.fromkeys(
        (TESTS, ALONE), "--no-tests"
    )
    unchosen |= {name: "--only names others" for name in unchosen if only and name not in only}
    run.save(unchosen={name: why for name, why in unchosen.items() if name not in chosen})
    for line in gpu_report.summary(run.record):
        click.echo(line)
    for goal in gpu_report.goals(run.record):
        click.echo(f"{goal.verdict:12} {goal.name}: {goal.found} (wanted: {goal.wanted})")
    click.echo(f"saved {folder / 'gpu.json'} and {folder / 'gpu.md'}")
    sys.exit(0 if told and all(part["how"] == "done" for part in run.record["parts"]) else 1)


if __name__ == "__main__":
    main()
