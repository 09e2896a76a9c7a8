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

Record = Mapping[str, Any]
Table = list[list[str]]


class Goal(NamedTuple):
    """A goal, and what came out.

    Attributes
    ----------
    name, wanted, found : str
        In words.
    met : bool or None
        None if it was not measured, or not all of it.
    """

    name: str
    wanted: str
    found: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """Return whether it is met, in words."""
        return {True: "met", False: "MISSED", None: "not measured"}[self.met]


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
    """Return the goal that at every number of ranks and every size one way takes so many times as long as another."""
    wanted, found = f"at least {least:g} times as fast", []
    for ranks in record["ranks"]:
        part = part_of(record, "allreduce", ranks)
        rows = {row["size"]: row for row in part.get("rows", ())}
        for size in [size for size in part.get("sizes", ()) if size >= LONG] or [LONG]:
            row = rows.get(size, {"times": {}, "wrong": {}})
            if any(way not in row["times"] or row["wrong"].get(way) for way in ways):
                return Goal(name, wanted, f"nothing right at {words(size)} on {ranks} ranks", None)
            times = [row["times"][way]["us"] for way in ways]
            found.append((times[0] / times[1], f"at {words(size)} on {ranks} ranks"))
    worst, where = min(found, key=lambda each: each[0])
    return Goal(name, wanted, f"{worst:.2f} {where}", worst >= least)


def _training(record: Record) -> Goal:
    name, wanted = "DDP on the device as on the host", f"within {ROUNDINGS} times what float32 rounds"
    found = []
    for ranks in record["ranks"]:
        rows = part_of(record, "training", ranks).get("rows")
        if not rows:
            return Goal(name, wanted, f"nothing on {ranks} ranks", None)
        (row,) = rows
        equal = row["difference"] <= ROUNDINGS * row["rounding"] and row["between_ranks"] == 0
        found.append((equal, f"{row['difference']:.1e} on {ranks} ranks; float32 rounds {row['rounding']:.1e}"))
    return Goal(name, wanted, min(found)[1], all(equal for equal, _ in found))


def _tests(record: Record) -> Goal:
    name, wanted = "tests/gpu", "all pass, on 1 to 4 ranks"
    parts = [part_of(record, "tests", ranks) for ranks in (1, 2, 3, 4)]
    if any("passed" not in part for part in parts):
        return Goal(name, wanted, next(part["how"] for part in parts if "passed" not in part), None)
    failed = [part for part in parts if part["how"] != "done"]
    told = "; ".join(f"{part['how']} on {part['ranks']} ranks" for part in failed)
    return Goal(name, wanted, told or f"{sum(part['passed'] for part in parts)} passed", not failed)


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
    if aware is not None:
        yield f"CUDA-aware messages: {'yes' if aware['able'] else 'no'}: {aware['reason']}."
    yield from _table(
        [["goal", "wanted", "found", ""], *([g.name, g.wanted, g.found, g.verdict] for g in goals(record))]
    )
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
    timed = [row for row in rows if "times" in row]
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
    "allreduce": (("staged", "ipc"), ("limit", "ipc"), ("by hand", "staged")),
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
    if part["part"] in ("threshold", "pieces") and "at_present" in part:
        yield f"At present: {words(part['at_present'])}."
    if part["part"] == "training":
        for row in rows:
            yield (
                f"{row['epochs']} epochs: the weights differ by {row['difference']:.2e} at most, those in float32 and "
                f"float64 on the host by {row['rounding']:.2e}; {row['accuracy']:.3f} of the held-out digits are told."
            )
            yield ", ".join(f"a step {where}: {us:.0f} us" for where, us in row["step_us"].items()) + "."
    if "passed" in part:
        yield f"{part['passed']} tests passed."


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
