"""The side channel: questions between processes, answered to those who know the word, and to nobody else."""

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.watch.side_channel import LONGEST, MOST_UNAUTHENTICATED, PEER_BYTES, SECRET, GoneError, Listener, Peer


@pytest.fixture
def asked():
    return []


@pytest.fixture
def listener(asked):
    def answer(question):
        asked.append(question)
        return {"got": question}

    server = Listener(answer, lambda: None, 0.01)
    yield server
    server.close()


def test_a_question_is_answered(listener, asked):
    assert listener.peer.ask({"ask": "state", "é": 1}, patience=60) == {"got": {"ask": "state", "é": 1}}
    assert asked == [{"ask": "state", "é": 1}]


def test_an_answer_that_fails_ends_the_connection_and_nothing_else(listener, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(listener, "_answer", lambda question: [][len(question)])
    for _ in range(2):
        with pytest.raises(OSError, match=r"."):
            listener.peer.ask({"ask": "state"}, patience=60)
    assert not raised


def test_who_does_not_know_the_word_hears_nothing(listener, asked):
    unknown = listener.peer._replace(secret=bytes(SECRET))
    with pytest.raises(OSError, match="does not answer"):
        unknown.ask({"ask": "state"})
    assert not asked


def head(length, code=bytes(32)):
    return struct.pack("!I32s", length, code)


@pytest.mark.parametrize("sent", [head(LONGEST + 1), head(2) + b"{}", head(5) + b"{}", b"\0\0", b""])
def test_what_is_no_question_is_dropped(listener, asked, sent):
    with socket.create_connection(("127.0.0.1", listener.peer.port), timeout=5) as connection:
        assert len(connection.recv(100)) == 16
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert not asked
    assert listener.peer.ask({}, patience=60) == {"got": {}}  # it still listens


def overheard(listener):
    """Return what somebody sends who asks the listener with the right secret."""
    with socket.create_server(("127.0.0.1", 0)) as between:
        peer = listener.peer._replace(port=between.getsockname()[1], addresses=())

        def ask():
            with pytest.raises((OSError, ValueError)):
                peer.ask({"tell": "x"})

        asking = threading.Thread(target=ask)
        asking.start()
        connection, _ = between.accept()
        with connection:
            connection.sendall(bytes(16))
            told = connection.recv(1000)
        asking.join()
    return told


def test_what_was_overheard_is_of_no_use_later(listener, asked):
    told = overheard(listener)
    assert listener.peer.secret not in told
    with socket.create_connection(("127.0.0.1", listener.peer.port), timeout=5) as connection:
        connection.recv(16)
        connection.sendall(told)
        with contextlib.suppress(ConnectionError):  # it was closed with something in it that is not read
            assert connection.recv(1) == b""
    assert not asked


@pytest.mark.parametrize("told", [head(2**31), head(2) + b"{}", b"", bytes(100)])
def test_an_answer_is_not_trusted(told):
    # Somebody else may listen on a port that a process had before.
    with socket.create_server(("127.0.0.1", 0)) as other:
        peer = Peer(bytes(SECRET), 1, other.getsockname()[1], (), socket.gethostname())

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.sendall(bytes(16))
                connection.recv(1000)
                connection.sendall(told)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises((OSError, ValueError)):
            peer.ask({}, patience=1)
        thread.join()


UNAUTHENTICATED = Path(__file__).parents[2] / "bench" / "unauthenticated.py"


@pytest.mark.parametrize("how", ["idle", "talk"])
def test_unauthenticated_peers_do_not_use_up_what_there_is(listener, how):
    threads = threading.active_count()
    command = [sys.executable, str(UNAUTHENTICATED), str(MOST_UNAUTHENTICATED + 44), how, str(listener.peer.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as unauthenticated:
        try:
            assert any(int(line) >= MOST_UNAUTHENTICATED + 44 for line in unauthenticated.stdout)
            for _ in range(20):
                assert listener.peer.ask({}, patience=60) == {"got": {}}
            assert len(list(Path("/proc/self/fd").iterdir())) < MOST_UNAUTHENTICATED + 100
            assert threading.active_count() <= threads + 20  # those of its own connections may still be there
        finally:
            unauthenticated.kill()


def test_an_unauthenticated_peer_has_but_a_moment(listener):
    with socket.create_connection(("127.0.0.1", listener.peer.port), timeout=30) as connection:
        connection.recv(16)
        assert connection.recv(1) == b""


def test_a_longer_question_than_the_proof_is_not_read_before_it(listener, asked):
    with socket.create_connection(("127.0.0.1", listener.peer.port), timeout=30) as connection:
        connection.recv(16)
        connection.sendall(bytes(48))  # no proof
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""
    assert not asked


def test_an_answer_to_another_is_of_no_use(listener):
    """What was answered to somebody is not taken by another who gets the same number from the listener."""
    number = secrets.token_bytes(16)

    def replay(recorded):
        with socket.create_server(("127.0.0.1", 0)) as between:
            peer = listener.peer._replace(port=between.getsockname()[1], addresses=())
            found = []

            def ask():
                try:
                    found.append(peer.ask({"ask": "state"}, patience=5))
                except (OSError, ValueError):
                    found.append(None)

            asking = threading.Thread(target=ask)
            asking.start()
            connection, _ = between.accept()
            with connection:
                connection.sendall(number)
                told = connection.recv(1000)
                context = b"answer" + told[:16] + number
                data = json.dumps({"got": 1}).encode()
                code = hmac.digest(listener.peer.secret, context + data, "sha256")
                answer = recorded or struct.pack("!I32s", len(data), code) + data
                connection.sendall(answer)
            asking.join()
            return answer, found[0]

    recorded, found = replay(None)
    assert found == {"got": 1}
    assert replay(recorded)[1] is None


def test_it_listens_where_it_is_told():
    here = Listener(dict, lambda: None, 1, "127.0.0.1")
    assert here.socket.getsockname()[0] == "127.0.0.1"
    assert here.peer.addresses == ()
    assert here.peer.ask({}, patience=60) == {}
    here.close()


def test_who_is_gone_is_told_from_who_is_silent(listener):
    with socket.create_server(("127.0.0.1", 0)) as nobody_answers:
        silent = listener.peer._replace(port=nobody_answers.getsockname()[1], addresses=())
        with pytest.raises(OSError, match="does not answer") as caught:
            silent.ask({}, patience=0.05)
        assert not isinstance(caught.value, GoneError)
    with pytest.raises(GoneError) as gone:
        silent.ask({}, patience=1)
    assert not gone.value.certain  # this process is there
    with pytest.raises(GoneError) as gone:
        silent._replace(pid=2**22 + 1).ask({}, patience=1)
    assert gone.value.certain
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays in the table of processes
        with pytest.raises(GoneError) as gone:
            silent._replace(pid=ended.pid).ask({}, patience=1)
        assert gone.value.certain
    with pytest.raises(GoneError) as gone:
        silent._replace(pid=2**22 + 1, host="elsewhere", addresses=("127.0.0.1",)).ask({}, patience=1)
    assert not gone.value.certain
    with pytest.raises(OSError, match="does not listen") as caught:
        silent._replace(port=0).ask({})
    assert not isinstance(caught.value, GoneError)


def test_it_looks_every_so_often():
    looked = threading.Event()
    server = Listener(dict, looked.set, 0.01)
    assert looked.wait(10)
    server.close()


@given(
    st.binary(min_size=SECRET, max_size=SECRET),
    st.integers(0, 2**32 - 1),
    st.integers(0, 65535),
    st.lists(st.ip_addresses(v=4).map(str), max_size=6).map(tuple),
    st.from_regex(r"[a-z0-9.-]{1,60}", fullmatch=True),
)
def test_peers_are_of_one_length(secret, pid, port, addresses, host):
    peer = Peer(secret, pid, port, addresses, host)
    assert len(peer.pack()) == PEER_BYTES
    assert Peer.unpack(peer.pack()) == peer


@given(st.binary(min_size=PEER_BYTES, max_size=PEER_BYTES))
def test_any_bytes_are_a_peer(data):
    peer = Peer.unpack(data)
    assert len(peer.addresses) <= 6
    json.dumps(peer.host)
