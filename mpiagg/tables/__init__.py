"""Tables of choices: which algorithm for which collective, vector, number of ranks, layout and memory.

``rows`` says what a table is, ``files`` reads and writes one as JSON, ``predicted`` derives the default from the model
of the schedules, and ``settings`` is what this process has been told to use.
"""

from mpiagg.tables.rows import ANNOUNCED, NATIVE, SEGMENT, Case, Choice, Memory, Origin, Row, Spread, Table
from mpiagg.tables.settings import DIGEST_BYTES, Settings, settings

__all__ = [
    "ANNOUNCED",
    "DIGEST_BYTES",
    "NATIVE",
    "SEGMENT",
    "Case",
    "Choice",
    "Memory",
    "Origin",
    "Row",
    "Settings",
    "Spread",
    "Table",
    "settings",
]
