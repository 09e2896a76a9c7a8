"""MPI jobs whose ranks run tests, held to a time limit."""

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

from mpiagg.launch.start import command, environment

HERE = Path(__file__).parent
JOB_SECONDS = 1800
"""What a job may take; the launcher ends it then, and we do where the launcher fails to. It is there to catch hangs: on
two slow cores with other work beside it a job of four ranks has taken more than 1100."""
MARK = "MPIAGG_TEST_JOB"
"""The environment variable by which the processes of a job are known, wherever a launcher has put them."""


class Job:
    """A finished MPI job: every rank's outcomes, and what was printed."""

    def __init__(self, folder, ranks, status, printed):
        self.folder, self.ranks, self.status, self.printed = folder, ranks, status, printed
        self.outcomes = {
            rank: json.loads(path.read_text()) if (path := folder / f"{rank}.json").exists() else None
            for rank in range(ranks)
        }

    def read(self, rank, ending):
        path = self.folder / f"{rank}.{ending}"
        return path.read_text(errors="replace") if path.exists() else ""

    def odd(self, outcomes):
        """Return what a rank did that rank 0 did not, or the other way round, or that did not pass."""
        first = self.outcomes[0] or {}
        differing = {test for test, _ in outcomes.items() ^ first.items()}
        bad = {test for test, outcome in outcomes.items() if outcome != "passed"}
        return sorted(differing | bad) or ([] if outcomes else ["no tests"])

    def _ended(self, rank):
        """Return when a rank came to its end, 0 if it did not: what is read of long complaints is their beginning."""
        path = self.folder / f"{rank}.json"
        return path.stat().st_mtime if path.exists() else 0.0

    def complaints(self):
        """Return everything that is wrong with the job, in words; nothing if it went well."""
        told = [f"the job ended with status {self.status}"] if self.status else []
        told += [f"the job printed:\n{self.printed}"] if self.printed.strip() else []
        for rank in sorted(self.outcomes, key=self._ended):
            outcomes = self.outcomes[rank]
            if self.status and (outcomes is None or "failed" in outcomes.values()):
                told.append(f"-- rank {rank} reported:\n{self.read(rank, 'out')[-5000:]}")
            elif odd := self.odd(outcomes or {}):
                told.append(f"-- rank {rank} ran other tests than rank 0, or none, or skipped: {odd}")
            if errors := self.read(rank, "err").strip():
                told.append(f"-- rank {rank} complained:\n{errors[-5000:]}")
        return "\n".join(told)


def run_job(folder, ranks, tests, *, seconds=JOB_SECONDS, stuck=300, leave_out=(), only="", stop=True):
    """Run ``tests`` on a number of ranks and return the job; no process of it is left afterwards.

    A rank that is in one test for ``stuck`` seconds, whatever it does there, says where, and ends.

    ``leave_out`` are files, ``only`` is an expression of marks, and ``stop`` says whether the first failure ends it.
    """
    arguments = ["-m", "mpi4py", str(HERE / "rank.py"), str(folder), str(stuck), str(tests), "-q"]
    arguments += ["-x"] if stop else []
    arguments += [f"--ignore={path}" for path in leave_out]
    arguments += ["-m", only] if only else []
    arguments += ["-c", str(HERE.parent / "pyproject.toml"), "--timeout=240", "--timeout-method=thread"]
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        command(ranks, arguments),
        env=environment({MARK: mark, "MPIEXEC_TIMEOUT": str(seconds)}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as launcher:
        try:
            printed, _ = launcher.communicate(timeout=seconds + 20)
        except subprocess.TimeoutExpired:
            end_processes(mark)
            printed, _ = launcher.communicate()
            printed += f"\nended after {seconds + 20} s"
    if not all_gone(mark, seconds=20):
        end_processes(mark)
        printed += "\nthe launcher left ranks behind"
    return Job(folder, ranks, launcher.returncode, printed)


def processes(mark):
    """Return the ids of the processes that were started with a mark, except this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def all_gone(mark, seconds):
    """Return whether all processes with a mark end within so many seconds."""
    deadline = time.monotonic() + seconds
    while processes(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def end_processes(mark):
    for pid in processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
