"""What ``bench/gpu.py`` has measured: held against the goals, and as tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

KIB, MIB = 2**10, 2**20
LONG = 64 * MIB
"""From so many bytes on the goals hold."""

ROUNDINGS = 4
"""Weights are equal within rounding if those of the device are no further from the host's than so many times what
these are from weights in float64: both round, and add in another order."""

TRAINED = ("by way of the host", "by mapped memory or messages")
"""How the gradients of a training go, in turn."""

Record = Mapping[str, Any]
Table = list[list[str]]


class Goal(NamedTuple):
    """A goal, and what came out.

    Attributes
    ----------
    name, wanted, found : str
        In words.
    met : bool or None
        None if it was not measured, or not all of it and what was is as wanted.
    partly : bool
        Whether something was measured then.
    """

    name: str
    wanted: str
    found: str
    met: bool | None
    partly: bool = False

    @property
    def verdict(self) -> str:
        """Return whether it is met, in words."""
        if self.met is None:
            return "met in part" if self.partly else "not measured"
        return "met" if self.met else "MISSED"


def goals(record: Record) -> list[Goal]:
    """Return all goals, held against what was measured."""
    return [
        _ratio(record, "CUDA IPC beside staged, 64 MiB and more", ("staged", "ipc"), 10),
        _ratio(record, "CUDA IPC beside the memory's limit, 64 MiB and more", ("limit", "ipc"), 0.5),
        _ratio(record, "staged beside copy, MPI_Allreduce, copy, 64 MiB and more", ("by hand", "staged"), 1.5),
        _training(record),
        _tests(record),
    ]


def _ratio(record: Record, name: str, ways: tuple[str, str], least: float) -> Goal:
    """Return the goal that at every number of ranks and every size one way takes so many times as long as another.

    It is missed if it is where it was measured, or if a result is wrong.
    """
    wanted, found = f"at least {least:g} times as fast", []
    missing, wrong = [], []
    for ranks in record["ranks"]:
        part = part_of(record, "allreduce", ranks)
        rows = {row["size"]: row for row in part.get("rows", ())}
        for size in [size for size in part.get("sizes", ()) if size >= LONG] or [LONG]:
            row, where = rows.get(size, {"times": {}, "wrong": {}}), f"at {words(size)} on {ranks} ranks"
            if any(row["wrong"].get(way) for way in ways):
                wrong.append(where)
            elif any(way not in row["times"] for way in ways):
                missing.append(where)
            else:
                times = [row["times"][way]["us"] for way in ways]
                found.append((times[0] / times[1], where))
    worst, where = min(found, default=(least, ""), key=lambda each: each[0])
    told = [f"{worst:.2f} {where}"] if found else []
    told += [f"wrong {', '.join(wrong)}"] if wrong else []
    told += [f"not measured {', '.join(missing)}"] if missing else []
    met = False if wrong or worst < least else None if missing else True
    return Goal(name, wanted, "; ".join(told), met, partly=bool(found and missing))


def _training(record: Record) -> Goal:
    name, wanted = "DDP on the device as on the host", f"within {ROUNDINGS} times what float32 rounds"
    found: list[tuple[bool, str]] = []
    missing: list[str] = []
    for ranks in record["ranks"]:
        rows = part_of(record, "training", ranks).get("rows", ())
        for row in rows:
            equal = row["difference"] <= ROUNDINGS * row["rounding"] and row["between_ranks"] == 0
            told = f"{row['difference']:.1e} {row['way']} on {ranks} ranks; float32 rounds {row['rounding']:.1e}"
            found.append((equal, told))
        done = [row["way"] for row in rows]
        missing += [f"{way} on {ranks} ranks" for way in TRAINED if way not in done]
    told = [min(found)[1]] if found else []
    told += [f"not measured {', '.join(missing)}"] if missing else []
    met = False if not all(equal for equal, _ in found) else None if missing else True
    return Goal(name, wanted, "; ".join(told), met, partly=bool(found and missing))


def _tests(record: Record) -> Goal:
    name, wanted = "tests/gpu", "all pass, on 1 to 4 ranks"
    parts = [part_of(record, "tests", ranks) for ranks in (1, 2, 3, 4)]
    other = [part for part in parts if part["how"] != "done"]
    failed = [part for part in other if part["how"].startswith("FAILED") or "passed" in part]
    passed = sum(part.get("passed", part.get("passed_until_then", 0)) for part in parts)
    told = [f"{passed} passed", *(f"{part['how']} on {part['ranks']} ranks" for part in other)]
    met = False if failed else None if other else True
    return Goal(name, wanted, "; ".join(told), met, partly=passed > 0)


def summary(record: Record) -> Iterator[str]:
    """Yield what was measured and what was not, with why, a line each."""
    done = [title(part) for part in record["parts"] if part["how"] == "done"]
    yield f"measured: {'; '.join(done) or 'nothing'}"
    for part in record["parts"]:
        if part["how"] != "done":
            yield f"not measured, or not all of it: {title(part)}: {part['how']}"
    for name, why in record.get("unchosen", {}).items():
        yield f"not measured: {name}: {why}"


def part_of(record: Record, name: str, ranks: int) -> Record:
    """Return what is known of a part."""
    missing: Record = {"part": name, "ranks": ranks, "how": "not run"}
    return next((one for one in record["parts"] if (one["part"], one["ranks"]) == (name, ranks)), missing)


def crossing(rows: Sequence[Record], slow: str, fast: str) -> int | None:
    """Return the size from which on one way is faster than another, also at all larger ones; None if none is."""
    found = None
    for row in sorted(rows, key=lambda row: row["size"], reverse=True):
        if row["times"][fast]["us"] >= row["times"][slow]["us"]:
            break
        found = int(row["size"])
    return found


# -- as a page


def page(record: Record) -> str:
    """Return everything as a page."""
    return "\n".join(_lines(record)) + "\n"


def _lines(record: Record) -> Iterator[str]:
    machine = next((part["machine"] for part in record["parts"] if "machine" in part), {})
    device = machine.get("device", {})
    yield f"# Measured on {device.get('model', device.get('name', 'nothing'))}"
    yield ""
    yield (
        f"{machine.get('cpu')}, {machine.get('cores')} cores; {machine.get('mpi')}, mpi4py {machine.get('mpi4py')}, "
        f"CuPy {device.get('cupy')}, driver {device.get('driver')}; all ranks on one machine. Microseconds are medians "
        f"over blocks of calls of the slowest rank's mean; all columns of a table took turns."
    )
    aware = record.get("info", {}).get("cuda_aware")
    if "info_failed" in record:
        yield f"mpiagg info: FAILED: {record['info_failed']}"
    if aware is not None:
        yield f"CUDA-aware messages: {'yes' if aware['able'] else 'no'}: {aware['reason']}."
    yield from _table(
        [["goal", "wanted", "found", ""], *([g.name, g.wanted, g.found, g.verdict] for g in goals(record))]
    )
    yield from (f"- {line}" for line in summary(record))
    for part in record["parts"]:
        yield ""
        yield f"## {title(part)}"
        yield ""
        yield f"{part['how']}, {part['took']:.0f} s" if "took" in part else part["how"]
        for name, reason in part.get("left_out", {}).items():
            yield f"Without {name}: {reason}."
        yield from _table(_rows(part))
        yield from _notes(part)
        if part["how"] != "done" and part.get("printed"):
            yield from ("```text", *part["printed"].splitlines()[-30:], "```")


def _rows(part: Record) -> Table:
    """Return the rows of a part as a table."""
    rows = part.get("rows") or []
    timed = sorted((row for row in rows if "times" in row), key=lambda row: int(row["size"]))
    ways = list(dict.fromkeys(way for row in timed for way in row["times"]))
    if not timed:
        return []
    return [
        ["", *(f"{way}, us" for way in ways), *_more_titles(part)],
        *(
            [
                _case(row),
                *(_microseconds(row, way) for way in ways),
                *_more(part, row),
            ]
            for row in timed
        ),
    ]


def _case(row: Record) -> str:
    what = [str(row[key]) for key in ("dtype", "wire") if key in row]
    what += [f"{row['vectors']} vectors"] if "vectors" in row else []
    return ", ".join([*what, words(row["size"])])


def _microseconds(row: Record, way: str) -> str:
    if way not in row["times"]:
        return "-"
    wrong = row.get("wrong", 0)
    bad = wrong.get(way, 0) if isinstance(wrong, dict) else wrong
    return f"{row['times'][way]['us']:.1f}" + (" WRONG" if bad else "")


_RATIOS = {
    "allreduce": (("staged", "ipc"), ("staged", "slots"), ("limit", "ipc"), ("by hand", "staged")),
    "messages": (("staged", "aware"),),
    "library": (("staged", "mpi"),),
    "folds": (("limit", "fold"),),
    "codecs": (("limit", "encode"), ("limit", "decode")),
}
"""For each part, which times are divided by which."""


def _more_titles(part: Record) -> list[str]:
    rates = ["GB/s read and written", "GB/s out", "GB/s in"] if part["part"] == "memory" else []
    return [*(f"{over} / {under}" for over, under in _RATIOS.get(part["part"], ())), *rates]


def _more(part: Record, row: Record) -> list[str]:
    times = {way: one["us"] for way, one in row["times"].items()}
    ratios = [
        f"{times[over] / times[under]:.2f}" if {over, under} <= times.keys() else "-"
        for over, under in _RATIOS.get(part["part"], ())
    ]
    if part["part"] != "memory":
        return ratios
    gigabytes = row["size"] * part["ranks"] / 1e3
    factors = {"on the device": 2, "to the host": 1, "from the host": 1}
    return [f"{factor * gigabytes / times[way]:.1f}" for way, factor in factors.items()]


def _notes(part: Record) -> Iterator[str]:
    rows = part.get("rows") or []
    if part["part"] == "threshold" and rows:
        for fast in ("messages", "ipc"):
            if all(fast in row["times"] for row in rows):
                size = crossing(rows, "by way of the host", fast)
                yield f"{fast}: faster than by way of the host {f'from {words(size)} on' if size else 'at no size'}."
    if part["part"] == "threshold" and "at_present" in part:
        yield f"At present: {words(part['at_present'])}."
    if part["part"] == "training":
        for row in rows:
            yield (
                f"{row['epochs']} epochs, {row['way']}: the weights differ by {row['difference']:.2e} at most, those "
                f"in float32 and float64 on the host by {row['rounding']:.2e}; {row['accuracy']:.3f} of the held-out "
                f"digits are told."
            )
            yield ", ".join(f"a step {where}: {us:.0f} us" for where, us in row["step_us"].items()) + "."
    if "passed" in part:
        yield f"{part['passed']} tests passed."
    if "passed_until_then" in part:
        yield f"{part['passed_until_then']} tests had passed until then."


def _table(lines: Table) -> Iterator[str]:
    if not lines:
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    yield ""
    for number, line in enumerate(lines):
        yield "| " + " | ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    yield ""


def title(part: Record) -> str:
    """Return a part's name and how many ranks it has."""
    return f"{part['part']}, {part['ranks']} {'rank' if part['ranks'] == 1 else 'ranks'}"


def words(nbytes: int) -> str:
    """Return a size as it is said."""
    for unit, name in ((2**30, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"
