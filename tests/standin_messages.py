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
    check_faults,
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
        Whether the MPI library is to be one that reaches the memory of devices. It does, for that is the host's; else to
        prepare a message of such memory is an error.
    """
    from mpiagg.transport.messages import Channel, _pieces

    names = ("send_init", "receive_init")
    originals = [getattr(Channel, name) for name in names]

    def watched(original, what):
        def prepare(channel, chunk, peer, tag):
            if isinstance(chunk, DeviceArray) and not device_messages:
                raise TouchedByHost(f"a message of {chunk!r} is prepared, which MPI does not reach")
            for piece, request in zip(_pieces(chunk), original(channel, chunk, peer, tag), strict=True):
                yield Watched(request, piece, what, peer)

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
        self._request = request
        self._what, self._peer, self._nbytes = what, peer, piece.nbytes
        on_device = isinstance(piece, DeviceArray)
        memory = piece._array if on_device else piece
        self._memory = "device" if on_device else "pinned" if is_pinned(piece) else "host"
        reads, writes = ((memory,), ()) if what == "send" else ((), (memory,))
        self._flight = Flight(f"{what} of {piece.nbytes} bytes, peer {peer}", reads, writes)

    def Start(self):
        name, reads, writes = self._flight
        with LOCK:
            check_faults()
            check_ready(name, reads, writes)
            check_flights(name, reads, writes)
            LOG.append(Entry(self._what, self._peer, self._nbytes, None, self._memory))
            FLIGHTS.append(self._flight)
            self._request.Start()

    def Test(self):
        done = self._request.Test()
        with LOCK:
            # By identity: the memory of flights cannot be compared.
            here = [number for number, flight in enumerate(FLIGHTS) if flight is self._flight]
            if done and here:
                del FLIGHTS[here[0]]
                LOG.append(
                    Entry(
                        {"send": "sent", "receive": "arrived"}[self._what], self._peer, self._nbytes, None, self._memory
                    )
                )
        return done

    def Free(self):
        self._request.Free()
