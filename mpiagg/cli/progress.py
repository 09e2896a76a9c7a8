"""A bar that shows how far a command has come, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mpiagg.launch import job


@contextmanager
def progress(what: str, total: int, unit: str, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Show a bar of ``total`` steps, on a terminal; give what advances it."""
    console = job.console()
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    # Without a thread of its own: the bar moves when a step ends.
    with Progress(*columns, console=console, auto_refresh=False, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=total)

        def advance() -> None:
            bar.update(task, advance=1, refresh=True)

        yield advance
