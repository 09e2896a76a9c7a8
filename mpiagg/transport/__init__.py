"""How chunks cross between ranks."""

from mpiagg.transport.messages import MOST_LANES, SHARED_TAG, Channel, channel_of
from mpiagg.transport.waiting import DEFAULT_TIMEOUT, wait_patiently

__all__ = ["DEFAULT_TIMEOUT", "MOST_LANES", "SHARED_TAG", "Channel", "channel_of", "wait_patiently"]
