"""The side channel: every rank listens, and tells who asks what it does.

It is there for when messages of MPI do not come any more: a thread of each process listens on a TCP port. It costs
nothing while nobody asks. Ranks learn each other's addresses, and a secret of each, when their communicator is set up
(:class:`Card`). The secret itself is never sent on the side channel: who is connected gets a fresh number, and question
and answer carry a code made of it, the secret and what is said (HMAC, RFC 2104). What is said is JSON, of limited
length, and is checked before use.
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
from pathlib import Path
from typing import Any, Final, NamedTuple

from mpiagg.common import documents

SECRET: Final = 16
MOST_ADDRESSES: Final = 6
_CARD: Final = struct.Struct(f"!{SECRET}sIHB{4 * MOST_ADDRESSES}s64s")
CARD_BYTES: Final = _CARD.size
"""Bytes of a card."""

LONGEST: Final = 2**20
"""Bytes of a question or an answer at most."""

PATIENCE: Final = 2.0
"""Seconds after which who does not answer counts as silent."""

MOST_GUESTS: Final = 64
"""How many are answered at the same time; others are turned away, lest strangers use up threads and files."""

_SIOCGIFADDR: Final = 0x8915
_NONCE: Final = 16
_HEAD: Final = struct.Struct("!I32s")

Told = Mapping[str, Any]


class GoneError(OSError):
    """Nobody listens there any more.

    Attributes
    ----------
    certain : bool
        Whether the process does not exist any more; elsewhere a firewall could be between.
    """

    certain = False


class Card(NamedTuple):
    """Where a rank listens.

    Attributes
    ----------
    secret : bytes
        What who asks it must know.
    pid : int
    port : int
        0 where it does not listen.
    addresses : tuple of str
        IPv4 addresses of its host.
    host : str
        The name of its host.
    """

    secret: bytes
    pid: int
    port: int
    addresses: tuple[str, ...]
    host: str

    def pack(self) -> bytes:
        """Return the card as ``CARD_BYTES`` bytes."""
        packed = b"".join(map(socket.inet_aton, self.addresses))
        return _CARD.pack(self.secret, self.pid, self.port, len(self.addresses), packed, self.host.encode()[:64])

    @classmethod
    def unpack(cls, data: bytes) -> Card:
        """Return the card that was packed so."""
        secret, pid, port, count, packed, host = _CARD.unpack(data)
        addresses = [socket.inet_ntoa(packed[4 * i : 4 * i + 4]) for i in range(min(count, MOST_ADDRESSES))]
        return cls(secret, pid, port, tuple(addresses), host.rstrip(b"\0").decode(errors="replace"))

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
        for number, address in enumerate(candidates if self.port else ()):
            share = _left(until) / (len(candidates) - number)
            try:
                with socket.create_connection((address, self.port), share) as connection:
                    nonce = _exactly(connection, _NONCE, until)
                    _send(connection, question, self.secret, b"question" + nonce)
                    return _receive(connection, self.secret, b"answer" + nonce, until)
            except (OSError, ValueError) as error:
                faults.append(error)
        if faults and all(isinstance(fault, ConnectionRefusedError) for fault in faults):
            gone = GoneError(f"nobody listens on port {self.port} of {self.host}")
            gone.certain = here and not _exists(self.pid)
            raise gone
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
    request_queue_size = 128

    def __init__(self, answer: Callable[[Told], Told], look: Callable[[], object], every: float) -> None:
        super().__init__(("", 0), _Handler)
        self.answer, self._look = answer, look
        self._guests = threading.Semaphore(MOST_GUESTS)
        port, host = self.server_address[1], socket.gethostname()
        self.card = Card(secrets.token_bytes(SECRET), os.getpid(), port, _addresses(), host)
        threading.Thread(target=self.serve_forever, args=(every,), name="mpiagg watch", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; or here, at the end of the program, when no thread can be started any more."""
        if not self._guests.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            self.process_request_thread(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and let the next one in."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._guests.release()

    def service_actions(self) -> None:
        """Look after this process's own operations."""
        self._look()

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep quiet about strangers, and about those who have hung up."""


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        listener, connection, nonce = self.server, self.request, secrets.token_bytes(_NONCE)
        assert isinstance(listener, Listener)
        until = time.monotonic() + PATIENCE
        connection.settimeout(PATIENCE)
        connection.sendall(nonce)
        question = _receive(connection, listener.card.secret, b"question" + nonce, until)
        answer = listener.answer(question)
        connection.settimeout(PATIENCE)
        _send(connection, answer, listener.card.secret, b"answer" + nonce)


def _send(connection: socket.socket, told: Told, secret: bytes, context: bytes) -> None:
    data = json.dumps(told).encode()
    connection.sendall(_HEAD.pack(len(data), hmac.digest(secret, context + data, "sha256")) + data)


def _receive(connection: socket.socket, secret: bytes, context: bytes, until: float) -> Told:
    length, code = _HEAD.unpack(_exactly(connection, _HEAD.size, until))
    if length > LONGEST:
        raise ValueError(f"a message of {length} bytes")
    data = _exactly(connection, length, until)
    if not hmac.compare_digest(code, hmac.digest(secret, context + data, "sha256")):
        raise ValueError("a message of a stranger's")
    return documents.made(documents.parsed(data), dict[str, Any])


def _exactly(connection: socket.socket, length: int, until: float) -> bytes:
    data = bytearray()
    while len(data) < length:
        connection.settimeout(_left(until))
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return bytes(data)


def _left(until: float) -> float:
    """Return the seconds that are left, and a moment more: 0 would mean something else."""
    return max(until - time.monotonic(), 1e-3)


def _exists(pid: int) -> bool:
    """Whether a process of this host is alive; one that has ended, and whose parent has not asked how, is not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        _, _, state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
    except OSError:
        return True
    return not state.startswith("Z")


def _addresses() -> tuple[str, ...]:
    """Return the IPv4 addresses of this host's interfaces, other than loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                reply = ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(reply[20:24]))
    return tuple(address for address in found if not address.startswith("127."))[:MOST_ADDRESSES]
