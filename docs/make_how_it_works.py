"""Write the pictures of docs/how-it-works.md from the schedules: ``python docs/make_how_it_works.py``.

The tables become part of the page; the messages are drawn in ``how-it-works.png``, if matplotlib is installed.
"""

from __future__ import annotations

import re
from pathlib import Path

from mpiagg.schedules import Action, Collective, picture
from mpiagg.schedules.table import schedules

PAGE = Path(__file__).with_name("how-it-works.md")
PLACE = re.compile(r"(<!-- picture (\w+) (\w+) (\d+) -->\n).*?(<!-- end -->)", re.DOTALL)
DRAWN = ("ring", "recursive_doubling", "tree", "direct")
RANKS = 4
COLOURS = {"added": "#0072b2", "kept": "#d55e00"}
"""Of Okabe and Ito's palette, which people who are colour-blind can tell apart."""


def page() -> str:
    """Return the text of the page, with its pictures."""

    def drawn(match: re.Match[str]) -> str:
        return f"{match[1]}```text\n{picture(match[3], match[2], int(match[4]))}\n```\n{match[5]}"

    return PLACE.sub(drawn, PAGE.read_text())


def draw(path: Path) -> None:
    """Draw the messages of an all-reduce by some algorithms, round by round."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(9, 6.6), layout="constrained")
    for axes, name in zip(figure.subplots(2, 2).flat, DRAWN, strict=True):
        programs = schedules(name, Collective.ALLREDUCE, RANKS)
        rounds = max(map(len, programs))
        for rank, program in enumerate(programs):
            axes.plot([rank, rank], [0, rounds], color="#999999", linewidth=1, zorder=1)
            for index, steps in enumerate(program):
                for step in steps:
                    if step.action in (Action.SEND, Action.FINISH):
                        continue
                    colour = COLOURS["added" if step.action in (Action.REDUCE, Action.HOLD) else "kept"]
                    arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.6}
                    axes.annotate("", (rank, index + 0.85), (step.peer, index + 0.15), arrowprops=arrow)
        axes.set(xticks=range(RANKS), yticks=[index + 0.5 for index in range(rounds)], ylim=(rounds, 0))
        axes.set_xticklabels([f"rank {rank}" for rank in range(RANKS)])
        axes.set_yticklabels([f"round {index}" for index in range(rounds)])
        axes.set_title(name)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    for words, colour in COLOURS.items():
        figure.axes[0].plot([], [], color=colour, label=f"received and {words}")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    PAGE.write_text(page())
    draw(PAGE.with_suffix(".png"))
    print(f"wrote {PAGE.name} and {PAGE.stem}.png")
