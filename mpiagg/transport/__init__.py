"""How chunks cross between ranks."""

from mpiagg.transport.messages import SHARED_TAG, Channel, channel_of
from mpiagg.transport.waiting import DEFAULT_TIMEOUT, wait_patiently

__all__ = ["DEFAULT_TIMEOUT", "SHARED_TAG", "Channel", "channel_of", "wait_patiently"]
