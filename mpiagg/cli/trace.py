"""``mpiagg trace``: recordings of all ranks as one timeline, for Perfetto and Chrome."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
from rich import box
from rich.table import Table

from mpiagg.cli.quantities import format_time
from mpiagg.launch import job
from mpiagg.watch import describe_ranks, flight_recorder, who_says_what
from mpiagg.watch.recordings import RecordedOperation, RecordedRound, Recording, read_all
from mpiagg.watch.timeline import COMPUTING, PACKING, WAITING, Timeline, computing, parts, spent

Event = dict[str, Any]

_EXAMPLE: Final = """\b
mpiagg trace mpiagg-recordings -o trace.json
"""
_MARKS: Final = {"running": " (still running)", "failed": " (failed)", "done": ""}
_MOST_NAMED: Final = 64
_APART: Final = 10**9
"""Nanoseconds by which recordings of one moment may be apart."""


@click.command(epilog=_EXAMPLE)
@click.argument("sources", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "-o", "--output", type=job.OutputFile(), default=Path("trace.json"), show_default=True, help="The timeline."
)
@click.option(
    "--torch",
    "flight",
    metavar="DIRECTORY",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write the recordings as torch's flight recorder does, for torchfrtrace.",
)
def trace(sources: tuple[Path, ...], output: Path, flight: Path | None) -> None:
    """Put recordings of all ranks on one timeline, and tell which rank kept the others waiting.

    SOURCES are files that ranks have written, and folders of them. Open the timeline at https://ui.perfetto.dev or
    chrome://tracing.
    """
    try:
        timeline = Timeline(read_all(sources))
        lines = ",\n".join(json.dumps(event) for event in events(timeline))
        job.write(output, f'{{"traceEvents": [\n{lines}\n]}}\n')
        if flight is not None:
            flight_recorder.write(timeline.recordings, flight)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    for line in summary(timeline):
        click.echo(line)
    job.show(_table(timeline))
    click.echo(f"Saved the timeline to {output}; open it at https://ui.perfetto.dev")
    if flight is not None:
        click.echo(f"Saved the flight records to {flight}; analyse them by: torchfrtrace {flight}")


# -- the timeline


class Slice(NamedTuple):
    """A span of time, in ns of a rank's clock; those inside lie within it, one after another."""

    name: str
    category: str
    start: int
    end: int
    inside: tuple[Slice, ...] = ()
    args: Mapping[str, object] | None = None


def events(timeline: Timeline) -> list[Event]:
    """Return a timeline in the Trace Event Format, by time.

    Spans are pairs of a beginning and an end. The ends of complete events would be added up by those who read them, and
    by a rounded nanosecond overlap what follows; Perfetto drops what overlaps.
    """
    about: list[Event] = []
    timed: list[Event] = []
    for recording in timeline.recordings:
        pid = recording.rank + 1  # 0 is the idle task's
        about.append(_about("process_name", pid, pid, name=f"rank {recording.rank} ({recording.host})"))
        about.append(_about("process_sort_index", pid, pid, sort_index=recording.rank))
        for number, (name, slices) in enumerate(_tracks(timeline, recording)):
            tid = pid + number * recording.size
            about.append(_about("thread_name", pid, tid, name=name))
            about.append(_about("thread_sort_index", pid, tid, sort_index=number))
            for each in slices:
                timed += _events(timeline, recording, each, tid)
        ts = timeline.us(recording, recording.span[1])
        name = f"recorded: {_first_line(recording.reason)}"
        timed.append({"name": name, "ph": "i", "s": "p", "ts": ts, "pid": pid, "tid": pid})
    # The sort is stable: on each track, what begins or ends at one time stays in order.
    return about + sorted(timed, key=lambda event: float(event["ts"]))


def _about(what: str, pid: int, tid: int, **args: object) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _events(timeline: Timeline, recording: Recording, span: Slice, tid: int) -> Iterator[Event]:
    where = {"pid": recording.rank + 1, "tid": tid}
    args = {} if span.args is None else {"args": span.args}
    start = timeline.us(recording, span.start)
    yield {"name": span.name, "cat": span.category, "ph": "B", "ts": start, **where, **args}
    for each in span.inside:
        yield from _events(timeline, recording, each, tid)
    yield {"ph": "E", "ts": timeline.us(recording, span.end), **where}


def _tracks(timeline: Timeline, recording: Recording) -> Iterator[tuple[str, list[Slice]]]:
    """Yield the tracks of a rank: for each thread one, and more where its operations overlap."""
    threads: dict[str, list[Slice]] = defaultdict(list)
    for operation in recording.operations:
        threads[operation.thread].append(_operation(timeline, recording, operation))
    for thread, slices in threads.items():
        slices.sort(key=lambda each: (each.start, -each.end))
        tracks: list[list[Slice]] = []
        for each in slices:
            track = next((track for track in tracks if track[-1].end <= each.start), None)
            if track is None:
                tracks.append(track := [])
            track.append(each)
        gaps = computing([(each.start, each.end) for each in slices], recording.clock_ns)
        tracks[0] += (Slice(COMPUTING, COMPUTING, *gap) for gap in gaps)
        tracks[0].sort(key=lambda each: (each.start, each.end))
        for number, track in enumerate(tracks):
            yield f"{thread} ({number + 1})" if number else thread, track


def _operation(timeline: Timeline, recording: Recording, operation: RecordedOperation) -> Slice:
    end = recording.end_of(operation)
    args: dict[str, object] = {
        "order": operation.order,
        "bytes": operation.nbytes,
        "state": operation.state,
        "channel": timeline.names[operation.channel],
        "what": operation.what,
    }
    late = timeline.last.get((operation.channel, operation.order))
    if late is not None:
        args["last to enter"] = f"rank {late.rank}, {_time(late.ns)} after the others"
    rounds = tuple(_round(each, end) for each in operation.rounds)
    return Slice(f"{operation.what}{_MARKS[operation.state]}", "operation", operation.start, end, rounds, args)


def _round(a_round: RecordedRound, end: int) -> Slice:
    inside = [Slice(name, name, start, stop) for name, start, stop in parts(a_round, end)]
    whole = Slice(a_round.name, "round", inside[0].start, inside[-1].end)
    # What is empty, and what is the same as the whole, would only be in the way.
    return whole._replace(inside=tuple(each for each in inside if each.end > each.start and each.name != PACKING))


# -- the summary


def summary(timeline: Timeline) -> Iterator[str]:
    """Yield what is to be said of all ranks together, a line each."""
    recordings = timeline.recordings
    size, there = recordings[0].size, {each.rank for each in recordings}
    yield f"{len(there)} of {size} ranks, {_time(timeline.length * 1000)}"
    if len(there) < size:
        missing = [rank for rank in range(size) if rank not in there]
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        yield f"missing: {describe_ranks(missing[:_MOST_NAMED])}{more}"
    if len(groups := timeline.groups()) > 1:
        apart = "; ".join(map(describe_ranks, groups))
        yield f"perhaps of several runs, with no communicator in common as far as is recorded: {apart}"
    reasons: dict[str, list[int]] = defaultdict(list)
    clocks: dict[str, list[Recording]] = defaultdict(list)
    for each in recordings:
        reasons[_first_line(each.reason)].append(each.rank)
        clocks[each.boot].append(each)
    yield f"recorded: {who_says_what(reasons)}"
    for ranks in clocks.values() if len(clocks) > 1 else ():
        offset = timeline.offsets[ranks[0].rank]
        within = "by the time of day" if offset.within is None else f"within {_time(offset.within)}"
        who = describe_ranks([each.rank for each in ranks])
        yield f"clock of {ranks[0].host} ({who}): {offset.ns / 1e9:+.6f} s, {within}"
    if earlier := timeline.earlier(_APART):
        who, apart = describe_ranks(list(earlier)), _time(max(earlier.values()))
        yield f"written up to {apart} before the others: {who}; what runs there may have ended since"
    for operation, on, missing in timeline.stuck():
        name = f"{timeline.names[operation.channel]}, operation {operation.order}: {operation.what}"
        state = "still running" if operation.state == "running" else operation.state
        yield f"{state}: {name}, on {describe_ranks(on)}" + (
            f"; not entered by {describe_ranks(missing)}" if missing else ""
        )


def _table(timeline: Timeline) -> Table:
    """Return what each rank spent its time on, and how often the others waited for it."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    columns = (
        "rank",
        "ops",
        "dropped",
        COMPUTING,
        PACKING,
        WAITING,
        "last to\nenter",
        "by\nin all",
        "by\nat most",
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    late: dict[int, list[int]] = defaultdict(list)
    for rank, ns in timeline.last.values():
        late[rank].append(ns)
    for each in timeline.recordings:
        start, end = each.span
        shares = spent(each)
        with_rounds = any(operation.rounds for operation in each.operations)
        told = [f"{shares[name] / max(1, end - start):.1%}" for name in (COMPUTING, PACKING, WAITING)]
        times = late[each.rank]
        table.add_row(
            *(str(each.rank), f"{len(each.operations):,}", f"{each.dropped:,}"),
            *(told if with_rounds else [told[0], "", ""]),
            *(f"{len(times)} of {len(timeline.last)}", _time(sum(times)), _time(max(times, default=0))),
        )
    return table


def _time(ns: float) -> str:
    return format_time(ns / 1e9)


def _first_line(reason: str) -> str:
    """Return what an error says before its table; ends of lines, which cannot be shown, are read as one character."""
    return next(filter(None, reason.split("\N{REPLACEMENT CHARACTER}")), "")
