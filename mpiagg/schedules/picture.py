"""Pictures of schedules, as text: what every rank does in every round, and the messages on their way.

They are generated from the schedules themselves, so they cannot be out of date.
"""

from __future__ import annotations

from mpiagg.schedules.layout import Layout
from mpiagg.schedules.steps import Action, Collective, Round, Step
from mpiagg.schedules.table import schedules


def picture(name: str, collective: Collective | str, ranks: Layout | int, root: int = 0) -> str:
    """Return a table with a row for each round and a column for each rank.

    ``2>1`` sends chunk 2 to rank 1, ``1<0`` receives chunk 1 from rank 0, ``1+0`` receives chunk 1 from rank 0 and
    reduces it into its own, ``1~0`` receives it to stand to the left of what is reduced next, ``1&0`` reduces it into
    its own and keeps it, ``1=`` takes what was kept of chunk 1, ``1!`` finishes chunk 1, and ``2-4`` stands for chunks
    2 to 4.
    """
    programs = schedules(name, Collective(collective), ranks, root)
    rows = [["round"] + [f"rank {rank}" for rank in range(len(programs))]]
    for index in range(max(len(program) for program in programs)):
        cells = [_cell(program[index]) if index < len(program) else "" for program in programs]
        rows.append([str(index), *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(programs) + 1)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


_SIGNS = {Action.SEND: ">", Action.RECEIVE: "<", Action.REDUCE: "+", Action.HOLD: "~", Action.KEEP: "&"}
_LOCAL = {Action.TAKE: "=", Action.FINISH: "!"}


def _cell(a_round: Round) -> str:
    return " ".join(_word(step) for step in a_round)


def _word(step: Step) -> str:
    last = step.chunk + step.count - 1
    chunks = f"{step.chunk}" if step.count == 1 else f"{step.chunk}-{last}"
    return chunks + (_LOCAL[step.action] if step.action.local else f"{_SIGNS[step.action]}{step.peer}")
