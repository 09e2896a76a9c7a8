"""How commands read what clusters are made of: numbers, times, rates, layouts, networks, and what comes late."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import click
from click.core import ParameterSource

from mpiagg.schedules import Layout
from mpiagg.schedules.cluster import Noise
from mpiagg.schedules.networks import Groups, Torus

MOST_RANKS: Final = 2**16

TIMES: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_RATES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_NUMBER: Final = r"(\d+(?:\.\d*)?|\.\d+)"


def parse_time(text: str) -> float:
    """Return the seconds that are written like 2us, 0.3us, 1ms or 1s.

    Raises
    ------
    ValueError
        If it is not written so.
    """
    match = re.fullmatch(rf"{_NUMBER}\s*([mun]?s)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time; write 300ns, 2us, 1ms or 1s")
    return float(match[1]) * TIMES[match[2]]


def parse_rate(text: str) -> float:
    """Return the bytes a second that are written like 25GB/s, 100MB/s, 1Gbit/s or 1gbit; a GB has 10**9 bytes.

    Raises
    ------
    ValueError
        If it is not written so, or zero.
    """
    match = re.fullmatch(rf"{_NUMBER}\s*([kmgtKMGT]?)(?:B/s|([bB]it)(?:/s)?)", text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a rate; write 25GB/s, 100MB/s or 1gbit")
    return float(match[1]) * _RATES[match[2].lower()] / (8 if match[3] else 1)


def parse_nodes(text: str, ranks: int | None = None) -> Layout:
    """Return the layout that is written as a number of nodes, as ``4 x 2``, or as ``8,8,4`` or ``8 + 8 + 4``.

    Raises
    ------
    ValueError
        If it is not written so, or not of so many ranks.
    """
    if re.fullmatch(r"\s*\d+\s*([,+]\s*\d+\s*)+", text):
        sizes = [int(part) for part in re.split("[,+]", text)]
    elif match := re.fullmatch(r"\s*(\d+)\s*(?:x\s*(\d+)\s*)?", text):
        nodes = int(match[1])
        if match[2] is None and ranks is None:
            raise ValueError(f"how many ranks are on the {nodes} nodes? Give -n too, or write {nodes}x8 or 8,8,4")
        total = ranks if match[2] is None else nodes * int(match[2])
        if max(nodes, total or 0) > MOST_RANKS:
            raise ValueError(f"at most {MOST_RANKS:,} ranks, not {max(nodes, total or 0):,}")
        sizes = [total * (node + 1) // nodes - total * node // nodes for node in range(nodes)] if total else []
    else:
        raise ValueError(f"{text!r} is no layout of nodes; write 128, 4x2 or 8,8,4")
    if not sizes or min(sizes) == 0:
        raise ValueError(f"{text!r} leaves nodes without ranks")
    if sum(sizes) > MOST_RANKS:
        raise ValueError(f"at most {MOST_RANKS:,} ranks, not {sum(sizes):,}")
    if ranks not in (None, sum(sizes)):
        raise ValueError(f"{text!r} is a layout of {sum(sizes)} ranks, not of {ranks}")
    return Layout.by_name([node for node, size in enumerate(sizes) for _ in range(size)])


def read_layout(ranks: int | None, nodes: str | None) -> Layout:
    """Return the layout that -n and --nodes say.

    Raises
    ------
    click.UsageError
        If they say none.
    """
    if nodes is None:
        if ranks is None:
            raise click.UsageError("how many ranks? Give -n, or --nodes with the ranks of each")
        return Layout.by_name(range(ranks))
    try:
        return parse_nodes(nodes, ranks)
    except ValueError as error:
        raise click.UsageError(f"--nodes: {error}") from None


def format_time(seconds: float) -> str:
    """Return seconds as people read them."""
    unit = next((unit for unit, length in TIMES.items() if seconds >= length), "ns")
    return f"{seconds / TIMES[unit]:,.4g} {unit}" if seconds < 10_000 else f"{seconds:,.0f} s"


def format_size(nbytes: float) -> str:
    """Return bytes as people read them."""
    power = min(4, int(math.log2(nbytes) // 10)) if nbytes >= 1 else 0
    return f"{nbytes / 2 ** (10 * power):,.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


class Written(click.ParamType):  # type: ignore[type-arg]  # generic in new releases of click only
    """Something that a function reads from text, and refuses with ValueError."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what is written; what is not written so is a usage error."""
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def refuse_given(names: Iterable[str], words: str) -> None:
    """Raise click.UsageError if one of these parameters was given on the command line: it would do nothing there."""
    context = click.get_current_context()
    for each in context.command.params:
        if each.name in names and context.get_parameter_source(each.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{each.opts[0]} {words}")


class Finite(click.FloatRange):
    """A finite number in a range; click's own range takes NaN for one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; what is none, or none in the range, is a usage error."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


POSITIVE: Final = Finite(min=0, min_open=True)


def parse_slow(text: str) -> tuple[int, float]:
    """Return a node, and the bytes a second of its link, that are written like 3:1GB/s.

    Raises
    ------
    ValueError
        If they are not written so.
    """
    match = re.fullmatch(r"(\d+):(.+)", text)
    if match is None:
        raise ValueError(f"{text!r} is no slow node; write 3:1GB/s")
    return int(match[1]), parse_rate(match[2])


def parse_network(text: str) -> tuple[Groups, ...] | Torus:
    """Return the network that is written like fat-tree:32:2,512:4 or dragonfly:64:2 or torus:16x8x8.

    Groups are written as their nodes and, behind a colon, by how much their nodes' links exceed their links to others.

    Raises
    ------
    ValueError
        If it is not written so.
    """
    kind, _, rest = text.partition(":")
    if any(int(number) > MOST_RANKS for number in re.findall(r"\d{5,}", rest)):
        raise ValueError(f"{text!r} has a number above {MOST_RANKS:,}")
    if kind == "torus" and re.fullmatch(r"\d+(x\d+){0,7}", rest):
        return Torus(tuple(map(int, rest.split("x"))))
    levels = [re.fullmatch(r"(\d+)(?::(\d+(?:\.\d*)?))?", level) for level in rest.split(",")]
    if kind not in {"fat-tree", "dragonfly"} or not all(levels) or (kind == "dragonfly" and len(levels) > 1):
        raise ValueError(f"{text!r} is no network; write fat-tree:32:2,512:4 or dragonfly:64:2 or torus:16x8x8")
    return tuple(Groups(int(level[1]), float(level[2] or 1), paired=kind == "dragonfly") for level in levels if level)


def parse_stragglers(text: str) -> Noise:
    """Return ranks that start late, written like 2:5ms.

    Raises
    ------
    ValueError
        If they are not written so.
    """
    number, _, time = text.partition(":")
    if not number.isdecimal() or not time:
        raise ValueError(f"{text!r} is no number of ranks and their delay; write 2:5ms")
    return Noise(stragglers=int(number), delay=parse_time(time))
