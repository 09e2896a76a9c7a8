"""The ring of operations, and what is written of it."""

import json

import pytest

from mpiagg.watch import OperationLog, Recorder, Subject, done, failed
from mpiagg.watch.dumps import DIRECTORY, recording, write
from mpiagg.watch.recorder import LENGTH, ORDER, STAMPS, START, SUBJECT
from mpiagg.watch.recordings import read


@pytest.fixture
def log():
    return OperationLog("0123456789abcdef", 1, 3)


def test_operations_are_numbered_as_they_come(log):
    recorder = Recorder()
    other = OperationLog("f" * 16, 0, 2)
    for each in (log, log, other, log):
        done(recorder.begin(Subject(each, "a sum"), True))
    assert [entry[ORDER] for entry in recorder.entries] == [1, 2, 1, 3]
    assert (log.count, other.count, recorder.dropped, recorder.running) == (3, 1, 0, [])


def test_the_ring_keeps_the_last(log):
    recorder = Recorder()
    subject = Subject(log, "a sum")
    for _ in range(LENGTH + 10):
        recorder.begin(subject, True)
    assert [entry[ORDER] for entry in recorder.entries] == list(range(11, LENGTH + 11))
    assert recorder.dropped == 10
    assert len(recorder.running) == LENGTH


def test_off_keeps_nothing(log):
    recorder = Recorder("off")
    done(recorder.begin(Subject(log, "a sum"), True))
    assert recorder.entries == []
    with pytest.raises(ValueError, match="one of operations, rounds, off, not 'on'"):
        Recorder("on")


def test_what_is_written_can_be_read(log, tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "recordings"))
    recorder = Recorder("rounds")
    first = Subject(log, "allreduce of 3 float32", "allreduce", 12)
    first.rounds = ("packing", "round 0")
    entry = recorder.begin(first, True)
    entry[STAMPS] = [entry[START] + step for step in range(8)]
    done(entry)
    failed(recorder.begin(Subject(log, "x" * 10_000), False))
    recorder.begin(Subject(log, "a sum"), True)
    path = write(recorder, 1, 3, "because")
    assert path == tmp_path / "recordings" / "rank-1.json"
    assert list(path.parent.iterdir()) == [path]
    found = read(path)
    assert (found.rank, found.size, found.reason) == (1, 3, "because")
    assert [each.state for each in found.operations] == ["done", "failed", "running"]
    assert [each.name for each in found.operations[0].rounds] == ["packing", "round 0"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "file"))
    assert write(Recorder(), 0, 1, "because") is None
    json.dumps(recording(Recorder(), 0, 1, "because"))


def test_a_fault_is_raised_anew_each_time(log):
    log.check()
    log.fault = ValueError("no")
    with pytest.raises(ValueError, match="no") as first:
        log.check()
    with pytest.raises(ValueError, match="no") as second:
        log.check()
    assert first.value is not second.value


def test_entries_know_their_subject():
    recorder, subject = Recorder(), Subject(OperationLog("a" * 16, 0, 1), "a sum")
    assert recorder.begin(subject, True)[SUBJECT] is subject
