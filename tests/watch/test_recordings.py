"""Recordings: they are read as they were written, and whatever is wrong with one is told and named."""

import copy
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpiagg.watch import Aside, OperationLog, Recorder, Subject, done, dumps, failed, recordings
from mpiagg.watch.recordings import MOST_TEXT, RecordedOperation, RecordedRound, Recording, read, read_all, recording_of

ROUNDS = [["packing", 110, 110, 110, 120], ["round 1", 120, 130, 150, 160]]
OPERATION = {
    "channel": "00deadbeef001234",
    "order": 1,
    "what": "allreduce by ring",
    "collective": "allreduce",
    "nbytes": 4096,
    "start": 100,
    "end": 200,
    "state": "done",
    "thread": "MainThread",
    "rounds": ROUNDS,
}
STUCK = {**OPERATION, "order": 2, "start": 200, "end": None, "state": "running", "rounds": [["round 1", 210, 220]]}
CONTENT = {
    "format": "mpiagg recording",
    "version": 1,
    "rank": 1,
    "size": 4,
    "host": "node0",
    "pid": 77,
    "boot": "b0",
    "clock_ns": 1000,
    "wall_ns": 5000,
    "reason": "asked",
    "dropped": 3,
    "operations": [OPERATION, STUCK],
}


def test_a_recording_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "rank-1.json"
    path.write_text(json.dumps(CONTENT))
    rounds = RecordedRound("packing", 110, 110, 110, 120), RecordedRound("round 1", 120, 130, 150, 160)
    first = RecordedOperation(
        *("00deadbeef001234", 1, "allreduce by ring", "allreduce", 4096, 100, 200, "done", "MainThread", rounds)
    )
    stuck = RecordedOperation(
        *("00deadbeef001234", 2, "allreduce by ring", "allreduce", 4096, 200, None, "running", "MainThread"),
        (RecordedRound("round 1", 210, 220),),
    )
    found = read(path)
    assert found == Recording(1, 4, "node0", 77, "b0", 1000, 5000, "asked", 3, (first, stuck))
    assert (found.end_of(first), found.end_of(stuck), found.span) == (200, 1000, (100, 1000))
    assert [each.times for each in (*rounds, *stuck.rounds)] == [(110, 110, 110, 120), (120, 130, 150, 160), (210, 220)]


def test_what_a_process_writes_down_can_be_read():
    recorder = Recorder("rounds")
    log = OperationLog("00deadbeef001234", 0, 2)
    for end in (done, failed, lambda _: None):
        end(recorder.begin(Subject(log, "allreduce by ring", "allreduce", 8), True))
    recorder.begin(Subject(Aside(log), "a meeting of some"), True)
    written = json.loads(json.dumps(dumps.recording(recorder, 0, 2, "raised ValueError: two\nlines")))
    found = recording_of(written)
    assert [each.state for each in found.operations] == ["done", "failed", "running", "running"]
    assert [each.order for each in found.operations] == [1, 2, 3, 1]
    assert [each.channel for each in found.operations] == [log.name] * 3 + [None]
    assert found.reason == "raised ValueError: two\N{REPLACEMENT CHARACTER}lines"


def test_what_an_earlier_process_has_written_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIAGG_RECORD_DIR", str(tmp_path))
    earlier = tmp_path / "rank-1.json"
    earlier.write_text(json.dumps(CONTENT))
    for reason in ("first", "second"):  # of one process the last one counts
        assert dumps.write(Recorder(), 1, 4, reason) == earlier
    assert read(earlier).reason == "second"
    (kept,) = set(tmp_path.iterdir()) - {earlier}
    assert read(kept).reason == "asked"
    assert [each.reason for each in read_all([tmp_path])] == ["second"]
    assert earlier.stat().st_mode & 0o777 == 0o600
    assert dumps.write(Recorder(), 1, 4, "at the end", beside=True) == earlier
    assert sorted(read(path).reason for path in tmp_path.iterdir()) == ["asked", "at the end", "second"]


def changed(**fields):
    """Return a file's content whose second operation differs; ... takes a field away."""
    operation = {name: value for name, value in {**OPERATION, **fields}.items() if value is not ...}
    return {**CONTENT, "operations": [OPERATION, operation]}


WRONG = [
    ([], "it must be an object with format, version"),
    ({"traceEvents": []}, "format must be 'mpiagg recording', not None"),
    ({**CONTENT, "format": "mpiagg tuning"}, "format must be 'mpiagg recording', not 'mpiagg tuning'"),
    *(({**CONTENT, "version": version}, "version must be 1, not ") for version in (2, True, 1.0, None, "1", [1])),
    ({**CONTENT, "more": 1}, "unknown field `more`"),
    ({**CONTENT, "more\x1b[31m": 1}, "unknown field `more\N{REPLACEMENT CHARACTER}[31m`"),
    ({**CONTENT, "m" * 10**4: 1}, "unknown field `mmm"),
    ({name: value for name, value in CONTENT.items() if name != "boot"}, "missing required field `boot`"),
    ({**CONTENT, "rank": 4}, "rank must be below the size, 4, and is 4"),
    ({**CONTENT, "rank": -1}, "Expected `int` >= 0 - at `$.rank`"),
    *(({**CONTENT, "rank": rank}, "Expected `int`, got") for rank in (True, 1.0, None, "1")),
    *(({**CONTENT, "size": size}, "- at `$.size`") for size in (0, 2**25, False)),
    ({**CONTENT, "host": 7}, "Expected `str`, got `int` - at `$.host`"),
    ({**CONTENT, "reason": "x" * (MOST_TEXT + 1)}, "Expected `str` of length <= 65536 - at `$.reason`"),
    *(({**CONTENT, name: -1}, f">= 0 - at `$.{name}`") for name in ("pid", "clock_ns", "wall_ns", "dropped")),
    ({**CONTENT, "clock_ns": 2**63}, "- at `$.clock_ns`"),
    ({**CONTENT, "operations": {}}, "Expected `array`, got `object` - at `$.operations`"),
    ({**CONTENT, "operations": [OPERATION] * (2**16 + 1)}, "Expected `array` of length <= 65536 - at `$.operations`"),
    ({**CONTENT, "operations": [OPERATION, 5]}, "Expected `object`, got `int` - at `$.operations[1]`"),
    (changed(state=...), "missing required field `state` - at `$.operations[1]`"),
    (changed(more=1), "unknown field `more` - at `$.operations[1]`"),
    *(
        (changed(channel=name), "- at `$.operations[1].channel`")
        for name in (1, "xyz", "0" * 17, "A" * 16, "0" * 16 + "\n")
    ),
    *((changed(order=order), "- at `$.operations[1].order`") for order in (0, True, "2")),
    (changed(what=None), "Expected `str`, got `null` - at `$.operations[1].what`"),
    *((changed(collective=word), "- at `$.operations[1].collective`") for word in ("alltoallw", 1, [])),
    (changed(nbytes=1.5), "- at `$.operations[1].nbytes`"),
    *((changed(state=state), "- at `$.operations[1].state`") for state in ("over", [], None)),
    (changed(end=None), "end must be null if, and only if, the state is running - at `$.operations[1]`"),
    (changed(state="running"), "end must be null if, and only if, the state is running - at `$.operations[1]`"),
    (changed(end=99), "rounds must follow one another between start and end - at `$.operations[1]`"),
    (changed(end=99, rounds=[]), "rounds must follow one another between start and end - at `$.operations[1]`"),
    (changed(rounds=None), "Expected `array`, got `null` - at `$.operations[1].rounds`"),
    *((changed(rounds=[each]), "- at `$.operations[1].rounds[0]") for each in (5, [], ["round 1"], [""] * 6)),
    (changed(rounds=[["round 1", 110, 110, 110, 110, 110]]), "of at most length 5, got 6"),
    (changed(rounds=[["round 1", 110, None, 110, 110]]), "got `null` - at `$.operations[1].rounds[0][2]`"),
    (changed(rounds=[[1, 110, 110, 110, 110]]), "Expected `str`, got `int` - at `$.operations[1].rounds[0][0]`"),
    (changed(rounds=[["round 1", 110, 110, True, 110]]), "got `bool` - at `$.operations[1].rounds[0][3]`"),
    (changed(rounds=[["round 1", 110, 120, 115, 130]]), "rounds must follow one another"),
    (changed(rounds=[["round 1", 90, 120, 120, 130]]), "rounds must follow one another"),
    (changed(rounds=[["round 1", 110, 120, 120, 230]]), "rounds must follow one another"),
    (changed(rounds=ROUNDS[::-1]), "rounds must follow one another"),
    (changed(rounds=[["round 1", 110, 120]]), "rounds must have four times"),
    (changed(rounds=[["a", 110], ["b", 120]], end=None, state="running"), "rounds must have four times"),
]


@pytest.mark.parametrize(("content", "words"), WRONG)
def test_what_is_wrong_is_told_with_the_file_and_the_field(tmp_path, content, words):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as caught:
        read(path)
    assert str(caught.value).startswith(f"recording {str(path)!r}: ")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is not JSON, or cut short"),
        (json.dumps(CONTENT).encode()[:-20], "it is not JSON, or cut short"),
        (b"\xff\x00\xff", "it is not JSON"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b"9" * 10_000, "recording "),
    ],
)
def test_what_is_no_json_is_told(tmp_path, data, words):
    path = tmp_path / "rank-0.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=words):
        read(path)


def test_a_file_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "rank-1.json"
    path.write_text(json.dumps(CONTENT))
    length = path.stat().st_size
    monkeypatch.setattr(recordings, "MOST_FILE_BYTES", length)
    assert read(path).rank == 1
    monkeypatch.setattr(recordings, "MOST_FILE_BYTES", length - 1)
    with pytest.raises(ValueError, match="it has more than"):
        read(path)


def test_only_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("pipe", "it is no file"), ("", "it is no file"), ("nothing", "it cannot be read: ")):
        with pytest.raises(ValueError, match=words):
            read(tmp_path / name)


def test_nothing_reaches_the_terminal_that_it_would_obey():
    found = recording_of({**CONTENT, "host": "a\x1b[31mb\ud800", "reason": "é\u202e\n"})
    assert found.host == "a\N{REPLACEMENT CHARACTER}[31mb\N{REPLACEMENT CHARACTER}"
    assert found.reason == "é\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from([2**62, 2**80]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)


def places(value, path=()):
    """Yield the paths to everything in a JSON value."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


@given(st.sampled_from(list(places(CONTENT))[1:]), JUNK)
def test_whatever_stands_in_a_file_only_value_errors_come_out(path, junk):
    content = copy.deepcopy(CONTENT)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = junk
    try:
        found = recording_of(content)
    except ValueError:
        return
    assert isinstance(found, Recording)
    assert found.span[0] <= found.span[1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**4), st.binary(max_size=8))
def test_whatever_happens_to_a_file_only_value_errors_come_out(tmp_path, where, junk):
    path = tmp_path / "rank-1.json"
    data = json.dumps(CONTENT).encode()
    where %= len(data)
    for damaged in (data[:where], data[:where] + junk + data[where + len(junk) :]):
        path.write_bytes(damaged)
        try:
            read(path)
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017 - it may also be fine


def write(folder, **fields):
    folder.mkdir(exist_ok=True)
    path = folder / f"rank-{fields['rank']}.json"
    path.write_text(json.dumps({**CONTENT, **fields}))
    return path


def test_recordings_of_a_job_come_from_files_and_folders(tmp_path):
    write(tmp_path / "a", rank=2)
    write(tmp_path / "a", rank=1)
    (tmp_path / "a" / "trace.json").write_text("{}")
    other = write(tmp_path / "b", rank=0)
    assert [each.rank for each in read_all([tmp_path / "a", other])] == [0, 1, 2]


def test_recordings_that_are_not_of_one_job_are_refused(tmp_path):
    write(tmp_path / "a", rank=2)
    with pytest.raises(ValueError, match="there are no recordings"):
        read_all([])
    with pytest.raises(ValueError, match=r"holds no recordings; they are named rank-R.json"):
        read_all([tmp_path])
    with pytest.raises(ValueError, match=r"rank 2 is there twice: .*a/rank-2.json.* and .*b/rank-2.json"):
        read_all([tmp_path / "a", write(tmp_path / "b", rank=2)])
    with pytest.raises(ValueError, match=r"is of 4 ranks and .*rank-1.json' of 5: name the files of one job"):
        read_all([tmp_path / "a", write(tmp_path / "c", rank=1, size=5)])
