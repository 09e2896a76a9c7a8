"""The stand-in's streams: what is right passes, and whatever is to be found is found."""

# ruff: noqa: ARG005 - all functions take the same arrays

import gc
import threading

import numpy as np
import pytest
import standin
from hypothesis import given, settings
from hypothesis import strategies as st
from standin import LOG, NotPinned, NotReady, Race, peek
from standin_streams import PINNED

# -- work is done late, and in order


def test_work_is_not_done_until_a_stream_says_so(device, vector, monkeypatch):
    x, stream = vector(), device.stream()
    monkeypatch.setattr(device, "polls", 2)
    assert stream.done()
    with stream:
        x += 1
    assert [stream.done(), stream.done()] == [False, False]
    assert (x._array == 1).all()
    assert stream.done()
    assert (x._array == 2).all()
    assert stream.done()
    assert [entry.what for entry in LOG.of("done")] == ["done"]
    with stream:
        x += 1
    assert not stream.done()


def test_the_host_can_wait(device, vector):
    x = vector()
    x += 1
    assert (x._array == 1).all()
    device.synchronise()
    assert (x._array == 2).all()


def test_a_stream_is_the_present_one_of_its_thread_alone(device, vector):
    x, stream = vector(), device.stream()
    with stream, device.stream(), stream:
        other = threading.Thread(target=x.fill, args=(1,))
        other.start()
        other.join()
    assert LOG[-1].stream == 0
    with stream, device.stream() as inner:
        vector()
    assert LOG[-2].stream == inner.number == 3


def test_streams_of_two_devices_do_not_mix(device):
    with device.stream():
        standin.device(1).empty(3, float).fill(0)
    assert LOG[-1].stream == 0


def test_who_follows_is_done_when_all_it_waits_for_is(device, vector):
    x, first, second = vector(), device.stream(), device.stream()
    with first:
        x += 1
        second.follow()
    with second:
        x *= 3
    assert not second.done()
    assert second.done()
    assert (x._array == 6).all()
    assert first.done()
    assert [entry.name for entry in LOG.of("wait") if entry.stream == 2] == [1]


# -- races


CLASHES = [
    (lambda x, y: x.fill(1), lambda x, y: x.fill(2)),  # write, write
    (lambda x, y: x.fill(1), lambda x, y: y.__iadd__(x)),  # write, read
    (lambda x, y: y.__iadd__(x), lambda x, y: x.fill(1)),  # read, write
    (lambda x, y: x[1:3].fill(1), lambda x, y: x[2:].fill(1)),
    (lambda x, y: x[::2].fill(1), lambda x, y: x[2].item()),
    (lambda x, y: x.fill(1), lambda x, y: np.sum(x)),
    (lambda x, y: x.fill(1), lambda x, y: x.device.to_host(x)),
    (lambda x, y: x.fill(1), lambda x, y: np.flatnonzero(x)),
    (lambda x, y: x + y, lambda x, y: x.__setitem__(y.astype(int), 0)),
]
PEACE = [
    (lambda x, y: x + y, lambda x, y: x * y),  # read, read
    (lambda x, y: x.fill(1), lambda x, y: y.fill(1)),
    (lambda x, y: x[:2].fill(1), lambda x, y: x[2:].fill(1)),
    (lambda x, y: x[::2].fill(1), lambda x, y: x[1::2].fill(1)),
]


@pytest.mark.parametrize("calls", CLASHES)
def test_a_race_is_found(device, vector, calls):
    first, second = calls
    x, y, stream = vector(), vector(), device.stream()
    first(x, y)
    with pytest.raises(Race, match="does not wait for"), stream:
        second(x, y)
    stream.follow()
    with stream:
        second(x, y)


@pytest.mark.parametrize("calls", PEACE)
def test_what_is_no_race_passes(device, vector, calls):
    first, second = calls
    x, y = vector(), vector()
    first(x, y)
    with device.stream():
        second(x, y)


def test_what_is_asked_for_after_a_follow_is_not_waited_for(device, vector):
    x, stream = vector(), device.stream()
    x.fill(1)
    stream.follow()
    x.fill(2)
    with pytest.raises(Race), stream:
        x.fill(3)


def test_an_order_goes_on_from_stream_to_stream(device, vector):
    x, first, second = vector(), device.stream(), device.stream()
    x.fill(1)
    first.follow()
    with first:
        second.follow()
    with second:
        x.fill(2)
    with pytest.raises(Race), first:
        x.fill(3)


def test_what_was_waited_for_once_stays_so(device, vector):
    x, first, second = vector(), device.stream(), device.stream()
    x.fill(1)
    first.follow()
    x.fill(2)
    second.follow()
    with first:
        second.follow()  # which knows less
    with second:
        x.fill(3)


def test_done_makes_an_order(device, vector):
    x, stream = vector(), device.stream()
    with stream:
        x.fill(1)
    assert not stream.done()
    with pytest.raises(Race):
        x.fill(2)
    assert stream.done()
    x.fill(2)


def test_memory_is_not_given_away_while_another_stream_uses_it(device, vector):
    x, stream = vector(), device.stream()
    y = x + 1
    stream.follow()
    with stream:
        x += y
    del y
    gc.collect()
    device.empty(5, float)  # would not find room there
    with stream:
        device.empty(4, float)  # is given what was allocated in that stream
    for call in (lambda: device.empty(4, float), lambda: np.zeros_like(np.sum(x[:0]))):
        with pytest.raises(Race, match="freed while add in stream 1 was pending"):
            call()
    while not stream.done():
        pass
    device.empty(4, float)


def test_memory_is_given_away_to_who_waits_for_those_that_use_it(device):
    stream = device.stream()
    y = device.empty(4, float)
    with stream:
        y.fill(1)
        device.default.follow()
    del y
    gc.collect()
    device.empty(4, float)


@st.composite
def _steps(draw):
    """Draw steps of streams: a kernel on ranges of a vector, a follow, or a done."""
    stream = st.integers(0, 2)
    cut = st.builds(slice, st.integers(0, 9), st.just(12), st.integers(1, 3))
    kernel = st.tuples(st.just("kernel"), stream, cut, cut)
    others = (st.tuples(st.just("follow"), stream, stream), st.tuples(st.just("done"), stream))
    return draw(st.booleans()), draw(st.lists(st.one_of(kernel, kernel, kernel, *others), min_size=5, max_size=20))


@settings(max_examples=200)
@given(_steps())
def test_races_are_found_wherever_there_are_any_and_nowhere_else(drawn):
    careful, steps = drawn
    with standin.installed() as device:
        x, wanted = device.from_host(np.arange(12)), np.arange(12)
        device.synchronise()
        streams = [device.default, device.stream(), device.stream()]
        known = [set(), set(), set()]  # for each stream, the work that it comes after or that is its own
        pending = {}  # for each piece of work, the indices that it reads and writes
        for number, (what, mine, *rest) in enumerate(steps):
            if what == "done":
                while not streams[mine].done():
                    pass
                pending = {work: touched for work, touched in pending.items() if work not in known[mine]}
            elif what == "follow" or careful:
                for other in rest if what == "follow" else range(3):
                    with streams[other]:
                        streams[mine].follow()
                    known[mine] |= known[other]
            if what == "kernel":
                source, target = (np.arange(12)[cut] for cut in rest)
                target = target[: len(source)]
                source = source[: len(target)]
                others = [touched for work, touched in pending.items() if work not in known[mine]]
                clash = any(set(target) & (read | written) or set(source) & written for read, written in others)
                assert not (clash and careful)
                cuts = [slice(c.start, c.start + len(source) * c.step, c.step) for c in rest]
                try:
                    with streams[mine]:
                        np.add(x[cuts[0]], number, out=x[cuts[1]])
                    assert not clash
                except Race:
                    assert clash
                    continue
                wanted[target] = wanted[source] + number
                known[mine].add(number)
                pending[number] = set(source), set(target)
        for stream in streams:
            while not stream.done():
                pass
        assert (x._array == wanted).all()


# -- copies


def test_copies_are_asked_for(device, vector):
    x, y, host = vector(), vector(), device.pinned(64)
    LOG.clear()
    host[:] = 0
    device.copy(host[32:], x.view(np.uint8))
    assert (host[32:] == 0xA5).all()  # not yet
    assert not host[:32].any()
    device.synchronise()
    assert (host[32:].view(float) == 1).all()
    host[:32].view(float)[:] = 5
    device.copy(y, host[:32].view(float))
    device.copy(x, y)
    assert [entry[:3] for entry in LOG.of("in", "out", "on")] == [(what, "copy", 32) for what in ("out", "in", "on")]
    assert (peek(x) == 5).all()


def test_what_cannot_be_copied(device, vector):
    x, host = vector(), device.pinned(32)
    for call in (lambda: device.copy(np.empty(32, np.uint8), x), lambda: device.copy(x, np.empty(4))):
        with pytest.raises(NotPinned):
            call()
    with pytest.raises(TypeError, match="from the host to the host"):
        device.copy(host, host)
    for target, source in ((host[:16], x), (x, vector(5)), (x[::2], host[:16]), (host[::2], x[:2])):
        with pytest.raises(ValueError, match="contiguous"):
            device.copy(target, source)
    with pytest.raises(ValueError, match="is not on"):
        standin.device(1).copy(host, x)


def test_memory_is_pinned_no_longer_than_it_lives(device):
    before = dict(PINNED)
    view = device.pinned(32)[8:]
    assert standin.is_pinned(view)
    assert standin.is_pinned(view[:0])
    assert not standin.is_pinned(np.empty(24, np.uint8))
    (start,) = PINNED.keys() - before.keys()
    PINNED[start] = 16
    assert not standin.is_pinned(view)
    del view
    gc.collect()
    assert before == PINNED


def test_copies_race_for_the_hosts_memory_too(device, vector):
    x, y, host, stream = vector(), vector(), device.pinned(32), device.stream()
    device.copy(host, x)
    with stream:
        with pytest.raises(Race):
            device.copy(y, host)
        with pytest.raises(Race):
            device.copy(host, y)
    with pytest.raises(NotReady):
        device.from_host(host)
