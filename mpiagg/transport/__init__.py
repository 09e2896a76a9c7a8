"""How chunks cross between ranks."""

from mpiagg.transport.messages import MOST_LANES, SHARED_TAG, Channel, channel_of

__all__ = ["MOST_LANES", "SHARED_TAG", "Channel", "channel_of"]
