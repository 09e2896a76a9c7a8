"""What each rank does, who is late, and how a job ends in which one has failed; it knows nothing of MPI."""

from mpiagg.watch.ending import LAST_WORDS, Ending
from mpiagg.watch.recorder import (
    END,
    KEEPS,
    STAMPS,
    Aside,
    Data,
    Entry,
    OneThread,
    Recorder,
    Subject,
    Trail,
    clock,
    done,
    failed,
)
from mpiagg.watch.report import ranks_in_words, who_says_what
from mpiagg.watch.side_channel import CARD_BYTES, Card
from mpiagg.watch.watchdog import Watchdog, say

__all__ = [
    "Aside",
    "CARD_BYTES",
    "END",
    "KEEPS",
    "LAST_WORDS",
    "STAMPS",
    "Card",
    "Data",
    "Ending",
    "Entry",
    "OneThread",
    "Recorder",
    "Subject",
    "Trail",
    "Watchdog",
    "clock",
    "done",
    "failed",
    "ranks_in_words",
    "say",
    "who_says_what",
]
