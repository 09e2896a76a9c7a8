"""The side channel: every rank listens, and tells who asks what it does.

It is there for when messages of MPI do not come any more: a thread of each process listens on a TCP port. It costs
nothing while nobody asks. Ranks learn each other's addresses, and a secret word without which nothing is answered,
when their communicator is set up (:class:`Card`). What is said is JSON, of limited length, and is checked before use.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from fcntl import ioctl
from typing import Any, Final, NamedTuple

TOKEN: Final = 16
MOST_ADDRESSES: Final = 6
_CARD: Final = struct.Struct(f"!{TOKEN}sIHB{4 * MOST_ADDRESSES}s64s")
CARD_BYTES: Final = _CARD.size
"""Bytes of a card."""

LONGEST: Final = 2**18
"""Bytes of a question or an answer at most."""

PATIENCE: Final = 2.0
"""Seconds after which who does not answer counts as silent."""

_SIOCGIFADDR: Final = 0x8915
_LENGTH: Final = struct.Struct("!I")

Told = Mapping[str, Any]


class GoneError(OSError):
    """Nobody listens there any more."""


class Card(NamedTuple):
    """Where a rank listens.

    Attributes
    ----------
    token : bytes
        What it must be told before it answers.
    pid : int
    port : int
        0 where it does not listen.
    addresses : tuple of str
        IPv4 addresses of its host.
    host : str
        The name of its host.
    """

    token: bytes
    pid: int
    port: int
    addresses: tuple[str, ...]
    host: str

    def pack(self) -> bytes:
        """Return the card as ``CARD_BYTES`` bytes."""
        packed = b"".join(map(socket.inet_aton, self.addresses))
        return _CARD.pack(self.token, self.pid, self.port, len(self.addresses), packed, self.host.encode()[:64])

    @classmethod
    def unpack(cls, data: bytes) -> Card:
        """Return the card that was packed so."""
        token, pid, port, count, packed, host = _CARD.unpack(data)
        addresses = [socket.inet_ntoa(packed[4 * i : 4 * i + 4]) for i in range(min(count, MOST_ADDRESSES))]
        return cls(token, pid, port, tuple(addresses), host.rstrip(b"\0").decode(errors="replace"))

    def ask(self, question: Told, patience: float = PATIENCE) -> Told:
        """Return what the rank answers to a question.

        Raises
        ------
        GoneError
            If nobody listens at any of its addresses.
        OSError, ValueError
            If it does not answer in time, or not in the form of an answer.
        """
        here = self.host == socket.gethostname()
        until = time.monotonic() + patience
        faults: list[Exception] = []
        candidates = ("127.0.0.1", *self.addresses) if here else self.addresses
        for address in candidates if self.port else ():
            try:
                with socket.create_connection((address, self.port), _left(until)) as connection:
                    connection.sendall(self.token)
                    _send(connection, question)
                    return _receive(connection, until)
            except (OSError, ValueError, RecursionError) as error:  # noqa: PERF203 - on to the next address
                faults.append(error)
        if faults and all(isinstance(fault, ConnectionRefusedError) for fault in faults):
            raise GoneError(f"nobody listens on port {self.port} of {self.host}")
        raise OSError(f"{self.host} does not answer: {faults[-1] if faults else 'it does not listen'}")


class Listener(socketserver.ThreadingTCPServer):
    """Listens in a thread of its own, and answers.

    Parameters
    ----------
    answer : callable
        Returns the answer to a question.
    look : callable
        Called every so often.
    every : float
        Seconds between two looks.
    """

    daemon_threads = True
    allow_reuse_address = False
    request_queue_size = 128

    def __init__(self, answer: Callable[[Told], Told], look: Callable[[], object], every: float) -> None:
        super().__init__(("", 0), _Handler)
        self.answer, self._look, self._every = answer, look, every
        self.card = Card(
            secrets.token_bytes(TOKEN), os.getpid(), self.server_address[1], _addresses(), socket.gethostname()
        )
        threading.Thread(target=self.serve_forever, args=(every,), name="mpiagg watch", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; or here, at the end of the program, when no thread can be started any more."""
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            socketserver.TCPServer.process_request(self, request, client_address)

    def service_actions(self) -> None:
        """Look after this process's own operations."""
        self._look()

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep quiet about strangers, and about those who have hung up."""


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        listener, connection = self.server, self.request
        assert isinstance(listener, Listener)
        until = time.monotonic() + PATIENCE
        if hmac.compare_digest(_exactly(connection, TOKEN, until), listener.card.token):
            _send(connection, listener.answer(_receive(connection, until)))


def _send(connection: socket.socket, told: Told) -> None:
    data = json.dumps(told).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _left(until: float) -> float:
    """Return the seconds that are left, and a moment more: 0 would mean something else."""
    return max(until - time.monotonic(), 1e-3)


def _receive(connection: socket.socket, until: float) -> Told:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, until))
    if length > LONGEST:
        raise ValueError(f"a message of {length} bytes")
    told = json.loads(_exactly(connection, length, until))
    if not isinstance(told, dict):
        raise ValueError(f"a message that is a {type(told).__name__}")  # noqa: TRY004 - what was sent is bad
    return told


def _exactly(connection: socket.socket, length: int, until: float) -> bytes:
    data = b""
    while len(data) < length:
        connection.settimeout(_left(until))
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return data


def _addresses() -> tuple[str, ...]:
    """Return the IPv4 addresses of this host's interfaces, other than loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                reply = ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(reply[20:24]))
    return tuple(address for address in found if not address.startswith("127."))[:MOST_ADDRESSES]
