"""What MPI is given of a device's memory, and when."""

from contextlib import contextmanager

from standin_arrays import DeviceArray
from standin_streams import (
    FLIGHTS,
    LOCK,
    LOG,
    Entry,
    Flight,
    TouchedByHost,
    check_flights,
    check_ready,
    is_pinned,
)


@contextmanager
def watch(*, device_messages):
    """Watch all messages of channels that are prepared within.

    Parameters
    ----------
    device_messages : bool
        Whether the MPI library is to be one that reaches the memory of devices; it does, for that is the host's. If
        not, it is an error to prepare a message of such memory.
    """
    from mpiagg.transport.messages import Channel

    names = ("send_init", "receive_init")
    originals = [getattr(Channel, name) for name in names]

    def watched(original, what):
        def prepare(channel, chunk, peer, tag, *, cut=True):
            if isinstance(chunk, DeviceArray) and not device_messages:
                raise TouchedByHost(f"a message of {chunk!r} is prepared, which MPI does not reach")
            requests, pieces = original(channel, chunk, peer, tag, cut=cut), channel._pieces(chunk, peer, cut=cut)
            return (Watched(r, piece, what, peer) for piece, r in zip(pieces, requests, strict=True))

        return prepare

    for name, original in zip(names, originals, strict=True):
        setattr(Channel, name, watched(original, name.removesuffix("_init")))
    try:
        yield
    finally:
        for name, original in zip(names, originals, strict=True):
            setattr(Channel, name, original)


class Watched:
    """A persistent request, watched from its start until it has been tested to be done."""

    def __init__(self, request, piece, what, peer):
        self._request, self._sending = request, what == "send"
        memory = piece._array if isinstance(piece, DeviceArray) else piece
        self._reads, self._writes = ((memory,), ()) if self._sending else ((), (memory,))
        where = "device" if memory is not piece else "pinned" if is_pinned(piece) else "host"
        self._started = Entry(what, peer, piece.nbytes, None, where)
        self._flight = None

    def Start(self):
        name = f"{self._started.what} of {self._started.nbytes} bytes with peer {self._started.name}"
        with LOCK:
            check_ready(name, self._reads, self._writes)
            check_flights(name, self._reads, self._writes)
            LOG.append(self._started)
            self._flight = Flight(name, self._reads, self._writes)
            FLIGHTS.append(self._flight)
            self._request.Start()

    def Test(self):
        done = self._request.Test()
        with LOCK:
            if done and self._flight is not None:
                FLIGHTS.remove(self._flight)
                self._flight = None
                LOG.append(self._started._replace(what="sent" if self._sending else "arrived"))
        return done

    def Free(self):
        self._request.Free()
