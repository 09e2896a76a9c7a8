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

from mpiagg.watch.side_channel import CARD_BYTES, LONGEST, MOST_STRANGERS, SECRET, Card, GoneError, Listener


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
    assert listener.card.ask({"ask": "state", "é": 1}) == {"got": {"ask": "state", "é": 1}}
    assert asked == [{"ask": "state", "é": 1}]


def test_who_does_not_know_the_word_hears_nothing(listener, asked):
    stranger = listener.card._replace(secret=bytes(SECRET))
    with pytest.raises(OSError, match="does not answer"):
        stranger.ask({"ask": "state"})
    assert not asked


def head(length, code=bytes(32)):
    return struct.pack("!I32s", length, code)


@pytest.mark.parametrize("sent", [head(LONGEST + 1), head(2) + b"{}", head(5) + b"{}", b"\0\0", b""])
def test_what_is_no_question_is_dropped(listener, asked, sent):
    with socket.create_connection(("127.0.0.1", listener.card.port), timeout=5) as connection:
        assert len(connection.recv(100)) == 16
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert not asked
    assert listener.card.ask({}) == {"got": {}}  # it still listens


def overheard(listener):
    """Return what somebody sends who asks the listener with the right secret."""
    with socket.create_server(("127.0.0.1", 0)) as between:
        card = listener.card._replace(port=between.getsockname()[1], addresses=())

        def ask():
            with pytest.raises((OSError, ValueError)):
                card.ask({"tell": "x"})

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
    assert listener.card.secret not in told
    with socket.create_connection(("127.0.0.1", listener.card.port), timeout=5) as connection:
        connection.recv(16)
        connection.sendall(told)
        with contextlib.suppress(ConnectionError):  # it was closed with something in it that is not read
            assert connection.recv(1) == b""
    assert not asked


@pytest.mark.parametrize("told", [head(2**31), head(2) + b"{}", b"", bytes(100)])
def test_an_answer_is_not_trusted(told):
    # Somebody else may listen on a port that a process had before.
    with socket.create_server(("127.0.0.1", 0)) as other:
        card = Card(bytes(SECRET), 1, other.getsockname()[1], (), socket.gethostname())

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.sendall(bytes(16))
                connection.recv(1000)
                connection.sendall(told)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises((OSError, ValueError)):
            card.ask({}, patience=1)
        thread.join()


STRANGERS = Path(__file__).parents[2] / "bench" / "strangers.py"


@pytest.mark.parametrize("how", ["idle", "talk"])
def test_strangers_do_not_use_up_what_there_is(listener, how):
    threads = threading.active_count()
    command = [sys.executable, str(STRANGERS), str(MOST_STRANGERS + 44), how, str(listener.card.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as strangers:
        assert any(int(line) >= MOST_STRANGERS + 44 for line in strangers.stdout)
        for _ in range(20):
            assert listener.card.ask({}) == {"got": {}}
        assert len(list(Path("/proc/self/fd").iterdir())) < MOST_STRANGERS + 100
        assert threading.active_count() <= threads + 20  # those of its own guests may still be there
        strangers.kill()


def test_a_stranger_has_but_a_moment(listener):
    with socket.create_connection(("127.0.0.1", listener.card.port), timeout=30) as connection:
        connection.recv(16)
        assert connection.recv(1) == b""


def test_a_longer_question_than_the_proof_is_not_read_before_it(listener, asked):
    with socket.create_connection(("127.0.0.1", listener.card.port), timeout=30) as connection:
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
            card = listener.card._replace(port=between.getsockname()[1], addresses=())
            found = []

            def ask():
                try:
                    found.append(card.ask({"ask": "state"}, patience=5))
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
                code = hmac.digest(listener.card.secret, context + data, "sha256")
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
    assert here.card.addresses == ()
    assert here.card.ask({}) == {}
    here.close()


def test_who_is_gone_is_told_from_who_is_silent(listener):
    with socket.create_server(("127.0.0.1", 0)) as nobody_answers:
        silent = listener.card._replace(port=nobody_answers.getsockname()[1], addresses=())
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
def test_cards_are_of_one_length(secret, pid, port, addresses, host):
    card = Card(secret, pid, port, addresses, host)
    assert len(card.pack()) == CARD_BYTES
    assert Card.unpack(card.pack()) == card


@given(st.binary(min_size=CARD_BYTES, max_size=CARD_BYTES))
def test_any_bytes_are_a_card(data):
    card = Card.unpack(data)
    assert len(card.addresses) <= 6
    json.dumps(card.host)
