"""Write mpiagg/tables/default.json, the table that ``algorithm="auto"`` goes by, from the model of the schedules.

It also writes, in docs/tuning.md, the list of what is taken on a node by measurements.
Run it after a change to the schedules, their prices, or ``mpiagg/tables/predicted.py``: ``python docs/make_tuning.py``.
"""

import re
from pathlib import Path

from mpiagg.cli.quantities import format_size
from mpiagg.tables.files import text_of
from mpiagg.tables.predicted import ON_A_NODE, derived
from mpiagg.tables.settings import DEFAULT_FILE

PAGE = Path(__file__).with_name("tuning.md")


def page() -> str:
    """Return the text of the page, with its list."""
    lines = ["| collective | the first of these whose limits hold |", "|---|---|"]
    for collective, limited in ON_A_NODE.items():
        taken = []
        for choice, nbytes, ranks, library in limited:
            limits = [f"with {library}"] if library else []
            limits += [f"up to {format_size(nbytes)}"] if nbytes else []
            limits += [f"of at most {ranks} ranks"] if ranks else []
            held = f" ({', '.join(limits)})" if limits else ""
            taken.append(f"`{choice.algorithm}`{choice.details}{held}")
        lines.append(f"| `{collective.value}` | {'; '.join(taken)} |")
    table = "\n".join(lines) + "\n"
    return re.sub("(?<=<!-- on_a_node -->\n).*?(?=<!-- end -->)", table, PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page())
    DEFAULT_FILE.write_text(text_of(derived()))
