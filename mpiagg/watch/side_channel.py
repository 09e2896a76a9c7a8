"""The side channel: every rank listens, and tells who asks what it does.

It is there for when messages of MPI do not come any more: a thread of each process listens on a TCP port. It costs
nothing while nobody asks. Ranks learn each other's addresses, and a secret of each, when their communicator is set up
(:class:`Peer`). The secret itself is never sent on the side channel: each side gives the other a fresh number, and
proves with every message that it knows the secret, by a code made of both numbers, the secret and what is said (HMAC,
RFC 2104). What is said is JSON, of limited length, and is checked before use.

Who connects is unauthenticated at first: nothing is kept but the connection, and nothing read but the first proof.
They get no thread, and little time; where there are many, the one that has waited longest is dropped.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from mpiagg.common import documents, machine

SECRET: Final = 16
MOST_ADDRESSES: Final = 6
_PEER: Final = struct.Struct(f"!{SECRET}sIHB{4 * MOST_ADDRESSES}s64s")
PEER_BYTES: Final = _PEER.size
"""Bytes of a peer's packed address."""

LONGEST: Final = 2**20
"""Bytes of a question or an answer at most."""

PATIENCE: Final = 2.0
"""Seconds after which who does not answer counts as silent."""

MOST_UNAUTHENTICATED: Final = 256
"""How many may be connected at the same time without a proof."""

MOMENT: Final = 1.0
"""Seconds that an unauthenticated peer has."""

PACE: Final = 0.01
"""Seconds between two tries to let somebody in who cannot be let in."""

_NONCE: Final = 16
_PROOF: Final = 32
_HEAD: Final = struct.Struct("!I32s")

Fields = Mapping[str, Any]


class GoneError(OSError):
    """Nobody listens there any more.

    Attributes
    ----------
    certain : bool
        Whether the process does not exist any more; elsewhere a firewall could be between.
    """

    certain = False


class Peer(NamedTuple):
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
        """Return the address as ``PEER_BYTES`` bytes."""
        packed = b"".join(map(socket.inet_aton, self.addresses))
        return _PEER.pack(self.secret, self.pid, self.port, len(self.addresses), packed, self.host.encode()[:64])

    @classmethod
    def unpack(cls, data: bytes) -> Peer:
        """Return the address that was packed so."""
        secret, pid, port, count, packed, host = _PEER.unpack(data)
        addresses = [socket.inet_ntoa(packed[4 * i : 4 * i + 4]) for i in range(min(count, MOST_ADDRESSES))]
        return cls(secret, pid, port, tuple(addresses), host.rstrip(b"\0").decode(errors="replace"))

    def ask(self, question: Fields, patience: float = PATIENCE) -> Fields:
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
                    mine = secrets.token_bytes(_NONCE)
                    both = mine + _exactly(connection, _NONCE, until)
                    connection.sendall(mine + _code(self.secret, b"proof", both))
                    _send(connection, question, self.secret, b"question" + both)
                    return _receive(connection, self.secret, b"answer" + both, until)
            except (OSError, ValueError) as error:
                faults.append(error)
        if faults and all(isinstance(fault, ConnectionRefusedError) for fault in faults):
            gone = GoneError(f"nobody listens on port {self.port} of {self.host}")
            gone.certain = here and not _exists(self.pid)
            raise gone
        raise OSError(f"{self.host} does not answer: {faults[-1] if faults else 'it does not listen'}")


class _Unauthenticated:
    """Who has connected, and has not proved anything yet."""

    __slots__ = ("nonce", "since", "told")

    def __init__(self) -> None:
        self.nonce, self.since, self.told = secrets.token_bytes(_NONCE), time.monotonic(), b""


class Listener:
    """Listens in a thread of its own, and answers.

    Parameters
    ----------
    answer : callable
        Returns the answer to a question.
    look : callable
        Called every so often.
    every : float
        Seconds between two looks.
    host : str
        The address to listen at; all of this host's by default.

    Attributes
    ----------
    socket : socket.socket
        Where it listens.
    peer : Peer
        The same, for others.
    """

    def __init__(
        self, answer: Callable[[Fields], Fields], look: Callable[[], object], every: float, host: str = ""
    ) -> None:
        self._answer, self._look, self._every = answer, look, every
        self.socket = socket.create_server((host, 0), backlog=128)
        self.socket.setblocking(False)
        self._unauthenticated: dict[socket.socket, _Unauthenticated] = {}  # in the order in which they came
        self._polled = selectors.PollSelector()
        self._polled.register(self.socket, selectors.EVENT_READ)
        self._closed = False
        port, addresses = self.socket.getsockname()[1], () if host else _reached_at()
        self.peer = Peer(secrets.token_bytes(SECRET), os.getpid(), port, addresses, socket.gethostname())
        self._thread = threading.Thread(target=self._serve, name="mpiagg watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._closed = True
        self._thread.join()
        self.socket.close()

    def _serve(self) -> None:
        """Let others in, hear what they say, and look, until this is closed."""
        next_look = time.monotonic() + self._every
        while not self._closed:
            oldest = next(iter(self._unauthenticated.values()), None)
            until = next_look if oldest is None else min(next_look, oldest.since + MOMENT)
            for key, _ in self._polled.select(max(0.0, until - time.monotonic())):
                if key.fileobj is self.socket:
                    self._let_in()
                elif key.fileobj in self._unauthenticated:  # it may have been dropped since
                    self._hear(key.fileobj)
            now = time.monotonic()
            for unknown in [each for each, known in self._unauthenticated.items() if now - known.since >= MOMENT]:
                self._drop(unknown)
            if now >= next_look:
                next_look = now + self._every
                self._look()
        for unknown in list(self._unauthenticated):
            self._drop(unknown)

    def _let_in(self) -> None:
        try:
            connection, _ = self.socket.accept()
        except OSError:  # it has hung up already; or this process has no file left, which takes a moment to change
            time.sleep(PACE)
            return
        connection.setblocking(False)
        if len(self._unauthenticated) >= MOST_UNAUTHENTICATED:
            self._drop(next(iter(self._unauthenticated)))
        unknown = self._unauthenticated[connection] = _Unauthenticated()
        self._polled.register(connection, selectors.EVENT_READ)
        with suppress(OSError):  # it has hung up
            connection.send(unknown.nonce)

    def _forget(self, connection: socket.socket) -> _Unauthenticated:
        self._polled.unregister(connection)
        return self._unauthenticated.pop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _hear(self, connection: socket.socket) -> None:
        """Read what there is of an unauthenticated peer's proof; who has given it is answered in a thread."""
        unknown = self._unauthenticated[connection]
        try:
            more = connection.recv(_NONCE + _PROOF - len(unknown.told))
        except OSError:
            more = b""
        unknown.told += more
        if more and len(unknown.told) < _NONCE + _PROOF:
            return
        both, proof = unknown.told[:_NONCE] + unknown.nonce, unknown.told[_NONCE:]
        if not hmac.compare_digest(proof, _code(self.peer.secret, b"proof", both)):
            self._drop(connection)
            return
        self._forget(connection)
        thread = threading.Thread(target=self._reply, args=(connection, both), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # at the end of the program no thread can be started any more
            self._reply(connection, both)

    def _reply(self, connection: socket.socket, both: bytes) -> None:
        """Answer one question; keep quiet about those who have hung up, or say what is none.

        At the end of the program, too, where no thread can be started to ask other ranks: then they ask for themselves.
        """
        with connection, suppress(Exception):  # whatever it finds half done: a question must not end the job
            question = _receive(connection, self.peer.secret, b"question" + both, time.monotonic() + PATIENCE)
            answer = self._answer(question)
            connection.settimeout(PATIENCE)
            _send(connection, answer, self.peer.secret, b"answer" + both)


def _code(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(parts), "sha256")


def _send(connection: socket.socket, told: Fields, secret: bytes, context: bytes) -> None:
    data = json.dumps(told).encode()
    connection.sendall(_HEAD.pack(len(data), _code(secret, context, data)) + data)


def _receive(connection: socket.socket, secret: bytes, context: bytes, until: float) -> Fields:
    length, code = _HEAD.unpack(_exactly(connection, _HEAD.size, until))
    if length > LONGEST:
        raise ValueError(f"a message of {length} bytes")
    data = _exactly(connection, length, until)
    if not hmac.compare_digest(code, _code(secret, context, data)):
        raise ValueError("a message of an unauthenticated peer")
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


def _reached_at() -> tuple[str, ...]:
    """Return the addresses of this host other than loopback's."""
    found = machine.addresses().values()
    return tuple(address for address in found if not address.startswith("127."))[:MOST_ADDRESSES]
