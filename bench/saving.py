"""What the scripts that save measurements share: sweeps are run one after the other, and each is saved and drawn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from mpiagg.launch import start as launch

RESULTS = Path(__file__).parent / "results"
BENCH = [sys.executable, "-m", "mpiagg", "bench", "allreduce"]


def library() -> str:
    """Return how the MPI library that mpi4py loads is called in the names of files."""
    return launch.mpi_vendor().replace(" ", "").lower()


def peers() -> list[str]:
    """Return the options that take the peers in that are there."""
    return ["--beside", "gloo"] if find_spec("torch") else []


def save(sweeps: Mapping[str, Sequence[str]], more: Iterable[str], wanted: str = "") -> int:
    """Run the commands of sweeps and save and draw what they measure; return the worst exit status.

    Parameters
    ----------
    sweeps : mapping of str to sequence of str
        A command for each name; ``results/<name>-<library>.json`` and ``.png`` are saved.
    more : iterable of str
        Options that are added to each command.
    wanted : str
        Only sweeps whose names begin so are run.
    """
    RESULTS.mkdir(exist_ok=True)
    worst = 0
    for name, sweep in sweeps.items():
        if not name.startswith(wanted):
            continue
        path = RESULTS / f"{name}-{library()}.json"
        command = [*sweep, *peers(), "--json", str(path), *more]
        print("#", *command, flush=True)
        status = subprocess.call(command)  # noqa: S603 - our own Python
        worst = max(worst, status)
        if status == 0 and find_spec("matplotlib"):
            from plot import draw  # noqa: PLC0415 - matplotlib is an extra

            print(f"# saved {path} and {draw(path)}", flush=True)
    return worst


def main(sweeps: Mapping[str, Sequence[str]]) -> int:
    """Run the sweeps that the command line asks for: ``[--only NAME] [options of mpiagg bench]``."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-h", "--help"):
        print(sys.modules["__main__"].__doc__)
        return 0
    wanted = ""
    if arguments and arguments[0] == "--only":
        if len(arguments) < 2 or not any(name.startswith(arguments[1]) for name in sweeps):
            print(f"Error: --only takes what a name begins with: {', '.join(sweeps)}", file=sys.stderr)
            return 2
        wanted, arguments = arguments[1], arguments[2:]
    return save(sweeps, arguments, wanted)
