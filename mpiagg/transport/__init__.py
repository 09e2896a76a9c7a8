"""How chunks cross between ranks."""

from mpiagg.transport.barriers import WRITTEN, NodeBarrier, SignedBarrier, Some
from mpiagg.transport.channels import channel_of, communicator_among, free_channel_of, meet, require_mpi
from mpiagg.transport.comparison import cache_of
from mpiagg.transport.kept import FreedAfterUse, Keepable, free_if_over
from mpiagg.transport.meetings import TooLateError, keep_for_good, keep_number
from mpiagg.transport.memory import LINE, NOWHERE, READ, Block, Position, Positions, SharedMemory, Window
from mpiagg.transport.messages import SHARED_TAG, Channel
from mpiagg.transport.nodes import Node
from mpiagg.transport.process import CHECK, ending, process
from mpiagg.transport.reading import OtherMemory
from mpiagg.transport.tags import SIGNATURE_BITS, signature
from mpiagg.transport.waiting import (
    CORE,
    DEFAULT_TIMEOUT,
    check_timeout,
    limited,
    wait_patiently,
)

__all__ = [
    "CHECK",
    "CORE",
    "DEFAULT_TIMEOUT",
    "LINE",
    "NOWHERE",
    "READ",
    "SHARED_TAG",
    "SIGNATURE_BITS",
    "WRITTEN",
    "Block",
    "Channel",
    "FreedAfterUse",
    "Keepable",
    "NodeBarrier",
    "Node",
    "OtherMemory",
    "Position",
    "Positions",
    "SharedMemory",
    "SignedBarrier",
    "Some",
    "TooLateError",
    "Window",
    "cache_of",
    "channel_of",
    "communicator_among",
    "free_channel_of",
    "free_if_over",
    "keep_for_good",
    "keep_number",
    "limited",
    "meet",
    "check_timeout",
    "process",
    "require_mpi",
    "signature",
    "wait_patiently",
]

ending()
