"""Collective algorithms as data: no MPI, no arrays, no clock.

The modules named after an algorithm define it; ``table`` names them all. ``check`` checks them on the walk through all
ranks that ``walk`` takes. ``model`` prices them; its ``ranks``, ``posts``, ``waves`` and ``clocks`` take that walk for
all ranks at once. ``picture`` draws them.
"""

from mpiagg.schedules.check import Count, check, count, forwards, prove
from mpiagg.schedules.layout import Layout
from mpiagg.schedules.model import Cluster, price
from mpiagg.schedules.picture import picture
from mpiagg.schedules.steps import (
    MOST_LANES,
    Action,
    Collective,
    Round,
    Step,
    finish,
    hold,
    keep_from,
    receive,
    reduce_from,
    send,
    take,
)
from mpiagg.schedules.table import TABLE, Algorithm, algorithm, algorithms, comparable, schedules
from mpiagg.schedules.walk import Message, RoundDone, walk

__all__ = [
    "MOST_LANES",
    "TABLE",
    "Action",
    "Algorithm",
    "Cluster",
    "Collective",
    "Count",
    "Layout",
    "Message",
    "Round",
    "RoundDone",
    "Step",
    "algorithm",
    "algorithms",
    "check",
    "comparable",
    "count",
    "finish",
    "forwards",
    "hold",
    "keep_from",
    "picture",
    "price",
    "prove",
    "receive",
    "reduce_from",
    "schedules",
    "send",
    "take",
    "walk",
]
