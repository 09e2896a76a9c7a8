"""Running commands as a user does, with a hard time limit."""

import subprocess
import sys
from typing import NamedTuple

import pytest

from mpiagg.launch import start as launch

SECONDS = 300


class Done(NamedTuple):
    """What became of a command."""

    status: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a function that runs a command, and raises if that does not end in time."""
    for variable in (*launch.launchers.VARIABLES, launch.TERMINAL_WIDTH):
        monkeypatch.delenv(variable, raising=False)

    def run(arguments, **environment):
        with subprocess.Popen(
            arguments,
            env=launch.environment(environment),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                # Launchers that are asked to end take their ranks with them.
                process.terminate()
                raise
        return Done(process.returncode, out, err)

    return run


@pytest.fixture
def mpiagg(run):
    """Return a function that runs the command line."""
    return lambda *arguments, **environment: run([sys.executable, "-m", "mpiagg", *arguments], **environment)


@pytest.fixture
def run_ranks(run, tmp_path):
    """Return a function that runs a script on a number of ranks."""

    def run_ranks(ranks, script, *arguments):
        path = tmp_path / "script.py"
        path.write_text(script)
        return run(launch.command(ranks, [str(path), *arguments]))

    return run_ranks
