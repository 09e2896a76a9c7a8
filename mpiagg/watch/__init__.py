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
    OperationLog,
    Recorder,
    Subject,
    clock,
    done,
    failed,
)
from mpiagg.watch.report import describe_ranks, who_says_what
from mpiagg.watch.side_channel import PEER_BYTES, Peer
from mpiagg.watch.watchdog import Watchdog, say

__all__ = [
    "Aside",
    "PEER_BYTES",
    "END",
    "KEEPS",
    "LAST_WORDS",
    "STAMPS",
    "Peer",
    "Data",
    "Ending",
    "Entry",
    "OneThread",
    "Recorder",
    "Subject",
    "OperationLog",
    "Watchdog",
    "clock",
    "done",
    "failed",
    "describe_ranks",
    "say",
    "who_says_what",
]
