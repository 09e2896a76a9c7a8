"""What variables of the environment can say, which the library itself goes by."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpiagg
from mpiagg.cli.variables import REFUSED, VARIABLES, should_say, unknown
from mpiagg.launch.start import MPIEXEC, TERMINAL_WIDTH


@pytest.mark.parametrize(
    ("name", "text", "good"),
    [
        *(("MPIAGG_WARN", text, True) for text in ("", "0", "2.5", "1e3")),
        *(("MPIAGG_WARN", text, False) for text in ("soon", "-1", "nan")),
        *(("MPIAGG_TIMEOUT", text, True) for text in ("", "2.5", "inf")),
        *(("MPIAGG_TIMEOUT", text, False) for text in ("soon", "0", "-1", "nan")),
        *(("MPIAGG_RECORD", text, True) for text in ("", "off", "rounds", "operations")),
        *(("MPIAGG_RECORD", text, False) for text in ("on", "1")),
        *((name, text, True) for name in ("MPIAGG_CHECK", "MPIAGG_REPRODUCIBLE") for text in ("", "0", "1")),
        *((name, "yes", False) for name in ("MPIAGG_CHECK", "MPIAGG_REPRODUCIBLE")),
    ],
)
def test_what_is_told_is_what_is_refused(name, text, good):
    assert bool(should_say(name, {name: text})) is not good
    script = "from mpiagg.transport import process\nprocess()"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, name: text}, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) is good
    assert good or f"ValueError: {name}={text!r} must be " in done.stderr


def test_the_mpiexec_is_a_program():
    assert [should_say(MPIEXEC, {MPIEXEC: text}) for text in ("", "/nonexist", "/", sys.executable, "sh")] == [
        *("", "a program that can be run", "a program that can be run", "", "")
    ]


def test_flags_are_0_or_1():
    flags = [name for name in VARIABLES if name not in {*REFUSED, MPIEXEC}]
    assert len(flags) == 4
    for name in flags:
        assert [should_say(name, {name: text}) for text in ("", "0", "1", "yes")] == ["", "", "", "0 or 1"]
        assert not should_say(name, {})


def test_all_variables_of_the_package_are_known():
    package = Path(mpiagg.__file__).parent
    texts = [path.read_text() for path in package.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"\bMPIAGG_[A-Z_]+[A-Z]\b", text)}
    assert len(named) > 12
    assert unknown(dict.fromkeys(named, "1")) == []
    assert unknown({"MPIAGG_ALGORITM": "ring", "OTHER": "1"}) == ["MPIAGG_ALGORITM"]
    for name in named - {TERMINAL_WIDTH}:  # which is for ranks that mpiagg starts
        assert f"`{name}`" in (package.parent / "docs" / "guide.md").read_text()
