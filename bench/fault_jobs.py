"""Runs a job with a fault in it, watches how it ends, and judges that."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.fault_cases import ODD, RIGHT, WRONG, Case
from mpiagg.launch import start as launch

TOP: Final = Path(__file__).parents[1]
if str(TOP / "tests") not in sys.path:
    sys.path.append(str(TOP / "tests"))

from jobs import MARK, all_gone, end_processes, processes  # noqa: E402 - of the tests, which hold jobs to limits, too

START: Final = 60.0
"""Seconds that a job may take before anything goes wrong in it."""

LINGER: Final = 3.0
"""Seconds that the last processes may need to end after the launcher."""

FRESH: Final = 2.0
"""Seconds after its deadline at which a rank ends the job that waits in a call of the MPI library's."""

PACE: Final = 0.02
LITTLE: Final = "64m"


class Limits(NamedTuple):
    """How long ranks wait, and how much later a job may end, in seconds.

    Attributes
    ----------
    warn, timeout : float
        What the ranks get as MPIAGG_WARN and MPIAGG_TIMEOUT.
    slack : float
        What the machine may need beside that.
    """

    warn: float
    timeout: float
    slack: float

    def of(self, case: Case) -> float:
        """Return after how many seconds a case must be over."""
        waits = {
            "at once": 0.0,
            "warning": 2 * self.warn,
            "return": 3.5 * self.warn,
            "deadline": self.timeout + FRESH,
        }
        return waits[case.expected.by] + self.slack

    @property
    def last(self) -> float:
        """When a job is ended that does not end."""
        return self.timeout + FRESH + 2 * self.slack


class Said(NamedTuple):
    """What a rank has said.

    Attributes
    ----------
    rank : int or None
        None if it never knew.
    kind, text : str
        The error that it had, if it had one that its program could see.
    printed : str
        To where errors are printed.
    results : tuple of str
        Whether its results were right.
    seconds : float or None
        How long after the fault it had its error, or was done; None, if it came to neither.
    done : bool
        Whether it came to the end of its program.
    """

    rank: int | None
    kind: str = ""
    text: str = ""
    printed: str = ""
    results: tuple[str, ...] = ()
    seconds: float | None = None
    done: bool = False


class Outcome(NamedTuple):
    """What became of a job.

    Attributes
    ----------
    status : int or None
        Its exit status; None if it had to be ended.
    seconds : float
        How long after the fault it ended.
    said : tuple of Said
        By each process, in the order of the ranks.
    launcher : str
        What the launcher has printed.
    left : int
        How many processes outlived it.
    shm : tuple of str
        What it left in its own /dev/shm.
    brought_about : bool
        Whether the job came to where the fault is.
    """

    status: int | None
    seconds: float
    said: tuple[Said, ...]
    launcher: str = ""
    left: int = 0
    shm: tuple[str, ...] = ()
    brought_about: bool = True


# -- judging


def complaints(case: Case, ranks: int, outcome: Outcome, limits: Limits) -> list[str]:
    """Return in words what is wrong with an outcome; nothing, if it is as expected."""
    found = [] if outcome.brought_about else ["the fault did not come about"]
    if outcome.status is None:
        found.append(f"it had to be ended after {outcome.seconds:.1f} s")
    elif outcome.seconds > limits.of(case):
        found.append(f"it took {outcome.seconds:.1f} s, and had {limits.of(case):.1f}")
    if outcome.left:
        found.append(f"{outcome.left} processes were left")
    found += [f"rank {said.rank} had a wrong result" for said in outcome.said if WRONG in said.results]
    if len(outcome.said) != ranks:
        found.append(f"{len(outcome.said)} of {ranks} processes have started")
    if case.expected.how == "go on":
        return found + list(_not_gone_on(case, outcome))
    if outcome.status == 0:
        found.append("its exit status is 0")
    return found + list(_not_said(case, outcome))


def _not_gone_on(case: Case, outcome: Outcome) -> Iterator[str]:
    if outcome.status:
        yield f"its exit status is {outcome.status}"
    for said in outcome.said:
        if not said.done or RIGHT not in said.results:
            yield f"rank {said.rank} has not gone on{f': {said.kind}: {said.text[:200]}' if said.kind else ''}"
    if not any(re.search(case.expected.words, said.printed) for said in outcome.said):
        yield "nobody was warned of it in the words that were expected"


def _not_said(case: Case, outcome: Outcome) -> Iterator[str]:
    expected = case.expected
    errors = expected.how == "error"
    speakers = [said for said in outcome.said if _speaks(case, said)]
    good = [
        re.search(expected.words, said.text if errors else said.printed, re.DOTALL) is not None
        and (not errors or said.kind in expected.kinds)
        for said in speakers
    ]
    if expected.speakers == "some":
        if not any(good):
            yield "no rank says why in the words that were expected"
        return
    for said, fine in zip(speakers, good, strict=True):
        if not fine:
            told = f"says {said.kind}: {said.text[:200]!r}" if said.kind else "does not say it"
            yield f"rank {said.rank} {'has noticed nothing' if said.done else told}"
    if not speakers:
        yield "nobody is there who should say something"
    if errors and "MismatchError" in expected.kinds == ("MismatchError",) and len({s.text for s in speakers}) > 1:
        yield "ranks have different errors"


def _speaks(case: Case, said: Said) -> bool:
    who = case.expected.speakers
    return who in {"all", "some"} or (said.rank == ODD) == (who == "odd")


# -- running


def run(case: Case, ranks: int, limits: Limits, other_mpiexec: str = "") -> Outcome:
    """Run a job with a fault; no process of it is left afterwards."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o755)
        with (folder / "launcher").open("w") as printed:
            started = [
                subprocess.Popen(  # noqa: S603 - our own Python
                    command,
                    cwd=TOP,
                    env={**_environment(case, ranks, limits, folder), MARK: mark, **more},
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for command, more in _commands(case, ranks, folder, other_mpiexec)
            ]
        status, ended = _watch(case, started, folder, limits)
        left = 0 if all_gone(mark, LINGER) else len(processes(mark))
        end_processes(mark)
        for each in started:
            each.wait()
        return _outcome(folder, status, ended, left)


def _commands(
    case: Case, ranks: int, folder: Path, other_mpiexec: str
) -> Iterator[tuple[Sequence[str], dict[str, str]]]:
    arguments = ["-m", "bench.fault_rank", case.fault, case.way, str(folder)]
    if case.launch == "alone":
        for rank in range(ranks):
            slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(ranks)}
            yield [sys.executable, *arguments], {**slurm, "SLURM_PROCID": str(rank)}
        return
    command = launch.command(ranks, arguments)
    if case.launch == "other":
        command[0] = other_mpiexec
    yield [*own_shm(folder, LITTLE if case.little_shm else "50%"), *command], {}


def own_shm(folder: Path, size: str) -> list[str]:
    """Return what runs a command with a /dev/shm of its own, and tells what is left there; nothing, where none can."""
    if not can_mount():
        return []
    script = (
        f"mount -t tmpfs -o size={size} tmpfs /dev/shm || exit 99; "
        f'"$@"; status=$?; ls -A /dev/shm > "{folder}/shm"; exit $status'
    )
    return [*_UNSHARE, "sh", "-c", script, "sh"]


_UNSHARE: Final = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


@cache
def can_mount() -> bool:
    """Whether a job can be given a /dev/shm of its own."""
    if not shutil.which("unshare"):
        return False
    script = "mount -t tmpfs tmpfs /dev/shm"
    return subprocess.run([*_UNSHARE, "sh", "-c", script], capture_output=True, check=False).returncode == 0  # noqa: S603 - a command of our own


def _environment(case: Case, ranks: int, limits: Limits, folder: Path) -> dict[str, str]:
    silent = case.expected.speakers in {"others", "odd"}
    paths = [str(TOP), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **{name: value for name, value in launch.environment().items() if not name.startswith("MPIAGG_")},
        "PYTHONPATH": os.pathsep.join(paths),
        "MPIAGG_WARN": f"{limits.warn:g}",
        "MPIAGG_TIMEOUT": f"{limits.timeout:g}",
        "MPIAGG_RECORD_DIR": str(folder / "recordings"),
        "FAULTS_SPEAKERS": str(ranks - 1 if silent else ranks),
        "FAULTS_PATIENCE": f"{limits.timeout + FRESH:g}",
    }


def _watch(
    case: Case, started: Sequence[subprocess.Popen[bytes]], folder: Path, limits: Limits
) -> tuple[int | None, float]:
    """Send the signals when their time has come; return the job's exit status, None if it does not end, and when."""
    signals = list(case.signals)
    begun, fault = time.monotonic(), None
    here: tuple[float, int] | None = None
    while any(each.poll() is None for each in started):
        now = time.monotonic()
        events = list(_events(folder)) if fault is None or (signals and here is None) else []
        for pid, event in events:
            if event["event"] == "here":
                here = event["time"], pid
            if event["event"] == "fault":
                fault = min(fault or now, event["time"])
        if here is not None and signals and now > here[0] + signals[0][0] * limits.warn:
            with suppress(ProcessLookupError):
                os.kill(here[1], signals.pop(0)[1])
            if fault is None:
                fault = time.monotonic()
                (folder / "signalled").write_text(f"{fault}")
        if now > (begun + START + limits.slack if fault is None else fault + limits.last):
            return None, now
        time.sleep(PACE)
    return max((abs(each.returncode) for each in started), default=0), time.monotonic()


def _events(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for path in folder.glob("*.said"):
        for line in path.read_text().splitlines():
            with suppress(ValueError):  # it is being written
                yield int(path.stem), json.loads(line)


def _outcome(folder: Path, status: int | None, ended: float, left: int) -> Outcome:
    events = list(_events(folder))
    sent = folder / "signalled"
    faults = [float(sent.read_text())] if sent.exists() else []
    faults += [event["time"] for _, event in events if event["event"] == "fault"]
    fault = min(faults, default=ended)
    pids = sorted(int(path.stem) for path in folder.glob("*.said"))
    said = [
        _said([event for other, event in events if other == pid], folder / f"{pid}.err", fault, folder) for pid in pids
    ]
    said.sort(key=lambda each: (each.rank is None, each.rank))
    shm = folder / "shm"
    return Outcome(
        status,
        ended - fault,
        tuple(said),
        _without_places((folder / "launcher").read_text(errors="replace"), folder),
        left,
        tuple(name for name in shm.read_text().split() if name != "full") if shm.exists() else (),
        brought_about=bool(faults),
    )


def _said(events: Sequence[dict[str, Any]], printed: Path, fault: float, folder: Path) -> Said:
    found: dict[str, dict[str, Any]] = {event["event"]: event for event in events}
    error = found.get("error", {})
    end = error or found.get("done")
    return Said(
        found["rank"]["rank"] if "rank" in found else None,
        error.get("kind", ""),
        _without_places(error.get("text", ""), folder),
        _without_places(printed.read_text(errors="replace") if printed.exists() else "", folder),
        tuple(event["result"] for event in events if event["event"] == "result"),
        end["time"] - fault if end else None,
        "done" in found,
    )


def _without_places(text: str, folder: Path) -> str:
    """Return a text without the names of this machine and of its folders."""
    for name, instead in (
        (str(folder), "FOLDER"),
        (str(TOP), "."),
        (sys.prefix, "VENV"),
        (socket.gethostname(), "node"),
    ):
        text = text.replace(name, instead)
    return text
