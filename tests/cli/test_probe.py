"""The probe of device memory: what two ranks find, and what is made of ranks that do not come so far."""

import json
import sys

import pytest

from mpiagg.cli import probe
from mpiagg.launch import start as launch

SAID = probe._MARK


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """No launcher has started this process."""
    for variable in launch.launchers.VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def said(**words):
    return f"{SAID}{json.dumps(words)}\n"


BEGUN = said(size=8) + said(size=2**16)


@pytest.mark.parametrize(
    ("status", "printed", "able", "reason"),
    [
        (0, BEGUN + said(size=2**23) + said(done=True) * 2, True, "messages of 8 B, 64 KiB, 8 MiB came through"),
        # Ranks that say nothing, or do not end well, have not shown anything.
        (0, BEGUN, False, "the probe ended with status 0, in a message of 64 KiB"),
        (1, BEGUN + said(done=True), False, "the probe ended with status 1, in a message of 64 KiB"),
        (0, "", None, "the probe ended with status 0, before its first message"),
        (3, f"{SAID}no json\n", None, "the probe ended with status 3, before its first message"),
        (0, BEGUN + said(wrong=7) * 2, False, "7 bytes of a message of 64 KiB came out wrong"),
        (0, said(unable="no GPU"), None, "no GPU"),
        (1, BEGUN + said(failed="Oh: no"), False, "the probe failed (Oh: no), in a message of 64 KiB"),
        (None, BEGUN, False, "the probe did not end within 5 s, in a message of 64 KiB"),
        (1, BEGUN + "Timeout (0:00:05)!\n", False, "the probe did not end within 5 s, in a message of 64 KiB"),
        # Of Hydra and of Open MPI.
        (11, BEGUN + "STRING: Segmentation fault (signal 11)", False, "ended with signal 11, in a message of 64 KiB"),
        (139, "process rank 1 with PID 7 exited on\nsignal 11 (Segm", None, "with signal 11, before its first message"),
    ],
)
def test_verdicts(status, printed, able, reason):
    found = probe.verdict(status, printed, seconds=5)
    assert found.able is able
    assert reason in found.reason


CHILD = """
import ctypes, faulthandler, time
import numpy as np
from mpiagg.cli import probe
from mpiagg.errors import DeviceError

def crash(array):
    ctypes.string_at(0)

def hang(array):
    faulthandler.dump_traceback_later(0.1, exit=True)  # the time is over, whenever the ranks came here
    time.sleep(1000)

def corrupt(array):
    array[3] ^= 1
    return array

def fail(array):
    raise OSError("it rained")

def make():
    {}

probe.take_part(make, {})
"""


@pytest.mark.parametrize(
    ("body", "seconds", "able", "reason"),
    [
        (
            "return probe.ProbedMemory(np.array, crash)",
            60,
            False,
            "the probe ended with signal 11, in a message of 8 B",
        ),
        ("return probe.ProbedMemory(np.array, hang)", 60, False, "did not end within 60 s, in a message of 8 B"),
        ("time.sleep(1000)", 1, None, "the probe did not end within 1 s, before its first message"),
        ("return probe.ProbedMemory(np.array, corrupt)", 60, False, "2 bytes of a message of 8 B came out wrong"),
        ("return probe.ProbedMemory(np.array, fail)", 60, False, "the probe failed (OSError: it rained)"),
        ("crash(None)", 60, None, "the probe ended with signal 11, before its first message"),
        ("raise DeviceError('there is no GPU')", 60, None, "there is no GPU"),
    ],
)
def test_ranks_that_fail_are_an_answer(body, seconds, able, reason):
    found = probe.ask(["-c", CHILD.format(body, seconds)], seconds)
    assert found.able is able, found
    assert reason in found.reason


@pytest.mark.parametrize("deaf", [False, True])
def test_a_job_that_does_not_end_itself_is_ended(monkeypatch, deaf):
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if deaf else ""
    script = f"import signal, time; {ignore}print(flush=True); time.sleep(1000)"
    monkeypatch.setattr(launch, "command", lambda ranks, arguments: [sys.executable, *arguments])  # noqa: ARG005 - the arguments of what it stands for
    monkeypatch.setattr(probe, "GRACE", 1.0)
    assert probe.ask(["-c", script], 0.5) == (
        None,
        "the probe did not end within 0.5 s, before its first message",
        "cuda",
    )


def test_without_mpiexec_nothing_is_tried(monkeypatch, tmp_path):
    monkeypatch.delenv("MPIAGG_MPIEXEC", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(launch, "mpi_vendor", lambda: "MPICH")
    launch.mpiexec_of.cache_clear()
    found = probe.probe("cuda")
    launch.mpiexec_of.cache_clear()
    assert found.able is None
    assert "found no mpiexec of MPICH" in found.reason


def test_the_patterns_differ_everywhere():
    for nbytes in probe.SIZES:
        ours, theirs = probe._pattern(0, nbytes), probe._pattern(1, nbytes)
        assert ours.all()
        assert theirs.all()
        assert (ours != theirs).all()
