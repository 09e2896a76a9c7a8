"""The plot of ``mpiagg simulate``: one curve for each algorithm, none behind another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

ALIKE: Final = 0.005
"""Curves that differ by no more than this share everywhere are drawn as one."""

_STYLES: Final = [
    {"color": f"C{number % 10}", "marker": "osv^Dp"[number % 6], "linestyle": ("-", "--", ":")[number // 10 % 3]}
    for number in range(30)
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
        raise click.ClickException('--plot needs matplotlib: pip install "mpiagg[plot]"') from None
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
