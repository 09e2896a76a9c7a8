"""The side channel: questions between processes, answered to those who know the word, and to nobody else."""

import json
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.watch.side_channel import CARD_BYTES, LONGEST, TOKEN, Card, GoneError, Listener


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
    server.shutdown()
    server.server_close()


def test_a_question_is_answered(listener, asked):
    assert listener.card.ask({"ask": "state", "é": 1}) == {"got": {"ask": "state", "é": 1}}
    assert asked == [{"ask": "state", "é": 1}]


def test_who_does_not_know_the_word_hears_nothing(listener, asked):
    stranger = listener.card._replace(token=bytes(TOKEN))
    with pytest.raises(OSError, match="does not answer"):
        stranger.ask({"ask": "state"})
    assert not asked


@pytest.mark.parametrize(
    "sent",
    [struct.pack("!I", LONGEST + 1), struct.pack("!I", 5) + b"[1,2]", struct.pack("!I", 3) + b"{a}", b"\0\0"],
)
def test_what_is_no_question_is_dropped(listener, asked, sent):
    with socket.create_connection(("127.0.0.1", listener.card.port), timeout=5) as connection:
        connection.sendall(listener.card.token + sent)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert not asked
    assert listener.card.ask({}) == {"got": {}}  # it still listens


def test_an_answer_is_not_trusted():
    # Somebody else may listen on a port that a process had before.
    with socket.create_server(("127.0.0.1", 0)) as other:
        card = Card(bytes(TOKEN), 1, other.getsockname()[1], (), socket.gethostname())
        for told in (struct.pack("!I", 2**31), struct.pack("!I", 2) + b"[]"):
            with pytest.raises((OSError, ValueError)):
                _ask(card, other, told)


def _ask(card, server, told):
    import threading

    def answer():
        connection, _ = server.accept()
        with connection:
            connection.sendall(told)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        card.ask({}, patience=0.5)
    finally:
        thread.join()


def test_who_is_gone_is_told_from_who_is_silent(listener):
    with socket.create_server(("127.0.0.1", 0)) as nobody_answers:
        silent = listener.card._replace(port=nobody_answers.getsockname()[1], addresses=())
        with pytest.raises(OSError, match="does not answer") as caught:
            silent.ask({}, patience=0.05)
        assert not isinstance(caught.value, GoneError)
    with pytest.raises(GoneError):
        silent.ask({}, patience=1)
    with pytest.raises(OSError, match="does not listen") as caught:
        silent._replace(port=0).ask({})
    assert not isinstance(caught.value, GoneError)


def test_it_looks_every_so_often():
    import threading

    looked = threading.Event()
    server = Listener(dict, looked.set, 0.01)
    assert looked.wait(10)
    server.shutdown()
    server.server_close()


@given(
    st.binary(min_size=TOKEN, max_size=TOKEN),
    st.integers(0, 2**32 - 1),
    st.integers(0, 65535),
    st.lists(st.ip_addresses(v=4).map(str), max_size=6).map(tuple),
    st.from_regex(r"[a-z0-9.-]{1,60}", fullmatch=True),
)
def test_cards_are_of_one_length(token, pid, port, addresses, host):
    card = Card(token, pid, port, addresses, host)
    assert len(card.pack()) == CARD_BYTES
    assert Card.unpack(card.pack()) == card


@given(st.binary(min_size=CARD_BYTES, max_size=CARD_BYTES))
def test_any_bytes_are_a_card(data):
    card = Card.unpack(data)
    assert len(card.addresses) <= 6
    json.dumps(card.host)
