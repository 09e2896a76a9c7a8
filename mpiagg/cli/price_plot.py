"""The plot of ``mpiagg simulate``: a curve for each of the fastest algorithms, none behind another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Of lines in one picture: Okabe and Ito's, which people who are colour-blind can tell apart."""

MARKS: Final = "osD^vPX"

ALIKE: Final = 0.005
"""Curves that differ by no more than this share everywhere are drawn as one."""

MOST: Final = 8
"""How many algorithms a plot shows: more cannot be told apart."""

_STYLES: Final = [
    {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKS[number % len(MARKS)],
        "linestyle": ("-", "--")[number // 7],
    }
    for number in range(MOST)
]


def figure() -> Any:
    """Return an empty figure.

    Raises
    ------
    click.ClickException
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra that need not be installed
    except ImportError:
        raise click.ClickException("--plot needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=(13, 5.5), layout="constrained")


def alike(curves: Mapping[str, Sequence[float]]) -> list[tuple[str, ...]]:
    """Return the names of curves that cannot be told from one another, together."""
    groups: list[tuple[str, ...]] = []
    for name, values in curves.items():
        same = next((group for group in groups if _close(curves[group[0]], values)), None)
        if same is None:
            groups.append((name,))
        else:
            groups[groups.index(same)] = (*same, name)
    return groups


def fastest(plots: Sequence[Mapping[str, Sequence[float]]], asked: Sequence[str]) -> list[str]:
    """Return the names of at most 8 curves: those that are ``asked`` for, and others by their mean logarithm."""
    names = list(plots[0])
    means = {name: sum(math.log(max(seconds, 1e-30)) for plot in plots for seconds in plot[name]) for name in names}
    order = sorted(names, key=lambda name: (name not in asked or len(asked) > MOST, means[name]))
    return [name for name in names if name in order[:MOST]]


def draw(axes: Any, what: str, ticks: Mapping[int, str], curves: Mapping[str, Sequence[float]], title: str) -> None:
    """Draw curves of seconds over what ``ticks`` says, those that cannot be told from one another as one.

    Each algorithm keeps its style in all plots of a figure. Curves that run together are drawn thick below thin, and
    have their markers at different places.
    """
    groups = alike(curves)
    names = list(curves)
    for order, group in enumerate(groups):
        style = _STYLES[names.index(group[0]) % len(_STYLES)]
        every = (order % 3, 3) if len(ticks) > 6 else (order % 2, 2) if len(ticks) > 3 else 1
        width = 1 + 3 * (1 - order / len(groups))
        label = ", ".join(group)
        axes.plot(list(ticks), curves[group[0]], label=label, linewidth=width, markersize=5, markevery=every, **style)
    axes.set(xscale="log", yscale="log", xlabel=what, ylabel="predicted time (s)", title=title)
    shown = list(ticks)[:: 1 + len(ticks) // 8]
    axes.set_xticks(shown, [ticks[tick] for tick in shown], rotation=30)
    axes.set_xticks([], minor=True)
    axes.grid(visible=True, alpha=0.3)


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) <= ALIKE * max(a, b) for a, b in zip(one, other, strict=True))
