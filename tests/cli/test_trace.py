"""``mpiagg trace``: the timeline keeps the rules of its format, and the summary names who was late."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiagg.cli import main
from mpiagg.cli.trace import events, summary
from mpiagg.watch.recordings import recording_of
from mpiagg.watch.timeline import Timeline, spent

CHANNELS = ("aaaaaaaaaaaaaaaa", "0000000000000000")


def operation(start, end=None, order=1, **fields):
    return {
        "channel": CHANNELS[0],
        "order": order,
        "what": "allreduce by ring",
        "collective": "allreduce",
        "nbytes": 8,
        "start": start,
        "end": end,
        "state": "running" if end is None else "done",
        "thread": "MainThread",
        "rounds": [],
        **fields,
    }


def content(rank, *operations, **fields):
    return {
        "format": "mpiagg recording",
        "version": 1,
        "rank": rank,
        "size": 2,
        "host": "node0",
        "pid": 7,
        "boot": "b",
        "clock_ns": 1_000_000,
        "wall_ns": 10**18,
        "reason": "asked",
        "dropped": 0,
        "operations": list(operations),
        **fields,
    }


def timeline(*contents):
    return Timeline([recording_of(each) for each in contents])


def faults(found):
    """Return what breaks the rules of the Trace Event Format, in words."""
    told = []
    times = [event["ts"] for event in found if event["ph"] != "M"]
    if times != sorted(times) or any(time < 0 for time in times):
        told.append("not by time")
    open_spans = defaultdict(list)
    for event in found:
        if event["ph"] not in "BEiM" or {"pid", "tid"} - set(event) or (event["ph"] != "E" and "name" not in event):
            told.append(f"malformed: {event}")
        elif event["ph"] == "B":
            open_spans[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "E":
            if not open_spans[event["pid"], event["tid"]]:
                told.append("an end without a beginning")
            else:
                open_spans[event["pid"], event["tid"]].pop()
    return told + ["a beginning without an end" for spans in open_spans.values() if spans]


def spans(found):
    """Return the spans by track, as (name, begins, ends, depth), in the order in which they begin."""
    tracks, open_spans = defaultdict(list), defaultdict(list)
    for event in found:
        track = event["pid"], event["tid"]
        if event["ph"] == "B":
            open_spans[track].append(len(tracks[track]))
            tracks[track].append([event["name"], event["ts"], None, len(open_spans[track]) - 1])
        elif event["ph"] == "E":
            tracks[track][open_spans[track].pop()][2] = event["ts"]
    return {track: [tuple(span) for span in found] for track, found in tracks.items()}


GOOD = [
    {"name": "a", "ph": "B", "ts": 0, "pid": 1, "tid": 1},
    {"name": "b", "ph": "B", "ts": 1, "pid": 1, "tid": 1},
    {"ph": "E", "ts": 2, "pid": 1, "tid": 1},
    {"ph": "E", "ts": 2, "pid": 1, "tid": 1},
]


def test_the_checker_finds_what_is_wrong():
    assert faults(GOOD) == []
    assert faults([*GOOD[:2], {**GOOD[2], "ts": 0.5}, GOOD[3]]) == ["not by time"]
    assert faults([{**event, "ts": event["ts"] - 1} for event in GOOD]) == ["not by time"]
    assert faults(GOOD[:3]) == ["a beginning without an end"]
    assert faults([*GOOD[:3], {**GOOD[3], "tid": 2}]) == ["an end without a beginning", "a beginning without an end"]
    assert faults([*GOOD, {"ph": "X", "ts": 3, "name": "c", "pid": 1, "tid": 1}])[0].startswith("malformed")
    assert faults([*GOOD, {"ph": "B", "ts": 3, "pid": 1, "tid": 1}])[0].startswith("malformed")


@st.composite
def operations(draw):
    """Return operations that may overlap, with rounds one after another."""
    found = []
    for order in range(1, draw(st.integers(0, 5)) + 1):
        start = draw(st.integers(0, 2000))
        state = draw(st.sampled_from(["done", "failed", "running"]))
        times = sorted(draw(st.lists(st.integers(start, start + 1000), max_size=12)))
        times = times[: len(times) // 4 * 4] if state == "done" else times
        cut = [times[first : first + 4] for first in range(0, len(times), 4)]
        rounds = [[draw(st.sampled_from(["packing", "round 1", "unpacking"])), *each] for each in cut]
        end = None if state == "running" else draw(st.integers(max([start, *times]), start + 1500))
        channel, thread = draw(st.sampled_from([*CHANNELS, None])), draw(st.sampled_from(["MainThread", "Thread-1"]))
        found.append(operation(start, end, order, state=state, rounds=rounds, channel=channel, thread=thread))
    return found


@settings(max_examples=40)
@given(operations(), operations(), st.integers(0, 3000), st.sampled_from("bc"))
def test_every_timeline_keeps_the_rules(first, second, clock, boot):
    line = timeline(content(0, *first, clock_ns=clock), content(1, *second, clock_ns=clock, boot=boot))
    found = events(line)
    assert faults(found) == []
    for track in spans(found).values():
        depths = [[span for span in track if span[3] == depth] for depth in range(3)]
        for level in depths:
            assert all(one[2] <= other[1] for one, other in pairwise(level))
    names = [span[0] for track in spans(found).values() for span in track if span[3] == 0 and span[0] != "computing"]
    assert len(names) == len(first) + len(second)
    assert all(value >= 0 for each in line.recordings for value in spent(each).values())
    assert list(summary(line))


def test_rounds_lie_in_operations_and_computing_between_them():
    rounds = [["packing", 1000, 1000, 1000, 2000], ["round 1", 2000, 2500, 4000, 4000]]
    busy = content(0, operation(1000, 5000, rounds=rounds), operation(7000, 8000, 2), clock_ns=9000)
    assert spans(events(timeline(busy))) == {
        (1, 1): [
            ("allreduce by ring", 0, 4, 0),
            ("packing", 0, 1, 1),
            ("round 1", 1, 3, 1),
            ("posting", 1, 1.5, 2),
            ("waiting", 1.5, 3, 2),  # and nothing to reduce
            ("computing", 4, 6, 0),
            ("allreduce by ring", 6, 7, 0),
            ("computing", 7, 8, 0),
        ]
    }


def test_what_is_still_running_ends_with_its_recording_and_waits_till_then():
    stuck = content(0, operation(1000, rounds=[["round 1", 1000, 2000]]), clock_ns=9000)
    assert spans(events(timeline(stuck)))[1, 1] == [
        ("allreduce by ring (still running)", 0, 8, 0),
        ("round 1", 0, 8, 1),
        ("posting", 0, 1, 2),
        ("waiting", 1, 8, 2),
    ]


def test_operations_that_overlap_get_tracks_of_their_own():
    both = content(1, operation(0, 2000), operation(1000, 3000, 2), operation(3000, 4000, 3), clock_ns=4000)
    tracks = spans(events(timeline(both)))
    assert [[span[1:3] for span in tracks[2, tid]] for tid in (2, 4)] == [[(0, 2), (3, 4)], [(1, 3)]]


def test_processes_are_named_and_operations_say_what_they_are():
    found = events(
        timeline(
            content(0, operation(5000, 6000), host="a"),
            content(1, operation(0, 1000, channel=CHANNELS[1]), operation(4000, 6000), reason="stall: rank 0"),
        )
    )
    about = [(event["name"], event["pid"], event["args"]) for event in found if event["ph"] == "M"]
    assert ("process_name", 1, {"name": "rank 0 (a)"}) in about
    assert ("process_sort_index", 2, {"sort_index": 1}) in about
    assert ("thread_name", 1, {"name": "MainThread"}) in about
    (args,) = [event["args"] for event in found if event["ph"] == "B" and event["pid"] == 1 and "args" in event]
    assert args == {
        "order": 1,
        "bytes": 8,
        "state": "done",
        "channel": "comm 1",
        "what": "allreduce by ring",
        "last to enter": "rank 0, 1 us after the others",
    }
    assert [event["name"] for event in found if event["ph"] == "i"] == ["recorded: asked", "recorded: stall: rank 0"]


@pytest.fixture
def run(tmp_path):
    """Return a function that writes recordings, runs the command and returns what it says, and the events it saves."""

    def run(*contents):
        for each in contents:
            (tmp_path / f"rank-{each['rank']}.json").write_text(json.dumps(each))
        done = CliRunner().invoke(main, ["trace", str(tmp_path), "-o", str(tmp_path / "trace.json")])
        assert done.exit_code == 0, done.output
        return done.output, json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    return run


def test_the_summary_names_who_was_late_and_who_is_missing(run):
    # Rank 1 enters three of four last, and computes meanwhile.
    early = [operation(1000 * order, 1000 * order + 700, order) for order in range(1, 5)]
    late = [
        operation(1000 * order + late, 1000 * order + 700, order) for order, late in enumerate([-9, 500, 600, 300], 1)
    ]
    output, found = run(content(0, *early, size=4, clock_ns=5000), content(1, *late, size=4, clock_ns=5000))
    assert faults(found) == []
    lines = output.splitlines()
    assert lines[:3] == ["2 of 4 ranks, 4.009 us", "missing: ranks 2, 3", "recorded: ranks 0, 1: asked"]
    rows = [line.split() for line in lines if line.strip()[:1] in {"0", "1"}]
    assert rows[0][:4] == ["0", "4", "0", "30.0%"]
    assert rows[0][4:] == ["1", "of", "4", "9", "ns", "9", "ns"]
    assert rows[1][4:] == ["3", "of", "4", "1.4", "us", "600", "ns"]
    assert all(len(line) <= 80 for line in lines if "trace.json" not in line)


def test_the_summary_tells_of_clocks_and_of_shares(run):
    rounds = [["packing", 1000, 1000, 1000, 1500], ["round 1", 1500, 1600, 1900, 2000]]
    output, _ = run(
        content(0, operation(1000, 2000, rounds=rounds), clock_ns=3000),
        content(1, operation(5000, 5400), boot="c", host="node1"),
    )
    assert "clock of node0 (rank 0): +0.000000 s, within 0 ns" in output
    assert "clock of node1 (rank 1): -0.000004 s, within 700 ns" in output
    rows = [line.split() for line in output.splitlines()]
    assert ["50.0%", "25.0%", "15.0%"] in [row[3:6] for row in rows]


def test_the_summary_tells_of_what_hangs(run):
    done = [operation(100, 200)]
    output, _ = run(content(0, *done, operation(300, order=2)), content(1, *done, reason="stall: 30 s"))
    assert "recorded: rank 0: asked; rank 1: stall: 30 s" in output
    assert "still running: comm 0, operation 2: allreduce by ring, on rank 0; not entered by rank 1" in output


def test_the_summary_tells_of_what_has_failed_last(run):
    caught = operation(100, 200, state="failed")
    output, _ = run(content(0, caught, operation(300, 900, 2, state="failed")), content(1, caught))
    assert "failed: comm 0, operation 2: allreduce by ring, on rank 0; not entered by rank 1" in output
    assert "failed: comm 0, operation 1: allreduce by ring, on rank 1\n" in output
    output, _ = run(content(0, caught, operation(300, 900, 2)), content(1, caught, operation(300, 900, 2)))
    assert "failed:" not in output


def test_the_summary_tells_of_recordings_of_different_moments(run):
    first, second = operation(100, 200), operation(300, 400, 2)
    output, _ = run(content(0, first, second, clock_ns=3 * 10**9), content(1, first, operation(300, order=2)))
    assert "s before the others: rank 1; what runs there may have ended since" in output
    output, _ = run(content(0, first), content(1, first))
    assert "before the others" not in output


def test_what_some_ranks_do_alone_is_of_no_communicator(run):
    both, alone = operation(100, 200), operation(300, channel=None, what="a meeting of some", collective=None)
    output, found = run(content(0, both, alone), content(1, both, {**alone, "what": "another"}))
    assert "still running: some ranks, operation 1: a meeting of some, on rank 0\n" in output
    assert "still running: some ranks, operation 1: another, on rank 1\n" in output
    assert "several runs" not in output
    assert {event["args"]["channel"] for event in found if event.get("cat") == "operation"} == {"comm 0", "some ranks"}


def test_recordings_of_two_runs_are_told_of(run):
    mine, others = operation(100, 200), operation(100, 200, channel=CHANNELS[1])
    told = "perhaps of several runs, with no communicator in common as far as is recorded: {}"
    for old, words in (([2], "ranks 0, 1; rank 2"), ([2, 3], "ranks 0, 1; ranks 2, 3")):
        kept = [content(rank, others if rank in old else mine, size=4) for rank in range(2 + len(old))]
        assert told.format(words) in run(*kept)[0]
    # One that two groups have in common connects them.
    both = content(1, mine, others, size=4)
    output, _ = run(content(0, mine, size=4), both, content(2, others, size=4), content(3, others, size=4))
    assert "several runs" not in output


def test_without_operations_there_is_a_timeline_all_the_same(run):
    output, found = run(content(0), content(1))
    assert "2 of 2 ranks, 0 ns" in output
    assert faults(found) == []


def test_markup_is_not_obeyed(run):
    output, _ = run(content(0, operation(1, 2, what="[red]x[/nothing]"), host="[bold]", reason="[/b]"), content(1))
    assert "rank 0: [/b]" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument 'SOURCES...'"),
        (["nowhere"], "'nowhere' does not exist"),
        (["."], "holds no recordings; they are named rank-R.json"),
        (["bad.json"], "recording 'bad.json': format must be 'mpiagg recording', not"),
        (["bad.json", "-o", "none/trace.json"], "folder 'none' does not exist"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    done = CliRunner().invoke(main, ["trace", *arguments])
    assert done.exit_code != 0
    assert words in done.output
    assert not (tmp_path / "trace.json").exists()
