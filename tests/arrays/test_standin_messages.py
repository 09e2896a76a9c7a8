"""The stand-in's messages, and the memory that it shares with other processes."""

import gc
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import standin
from standin import LOG, InFlight, NotReady, Race, peek
from standin_messages import Watched

TESTS = Path(standin.__file__).parent
PATH = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"


def run(script):
    """Run a script in a process of its own: in this one MPI must not start."""
    command = [sys.executable, "-W", "error", "-c", PATH + textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS.parent, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- messages


class Request:
    """A persistent request that is done at the second test."""

    def __init__(self):
        self.calls = []

    def Start(self):
        self.calls.append("start")

    def Test(self):
        self.calls.append("test")
        return self.calls.count("test") > 1

    def Free(self):
        self.calls.append("free")


def test_messages_are_logged_with_their_memory(device, vector):
    for memory, word in ((vector(), "device"), (device.pinned(32), "pinned"), (np.empty(4), "host")):
        LOG.clear()
        for what in ("send", "receive"):
            request = Request()
            watched = Watched(request, memory, what, 3)
            watched.Start()
            assert [watched.Test(), watched.Test(), watched.Test()] == [False, True, True]
            watched.Free()
            assert request.calls == ["start", "test", "test", "test", "free"]
        entries = [(entry.what, entry.name, entry.nbytes, entry.memory) for entry in LOG]
        assert entries == [(what, 3, 32, word) for what in ("send", "sent", "receive", "arrived")]


def writes(x):
    x.fill(2)


def reads(x):
    return x + 1


@pytest.mark.parametrize("what", ["send", "receive"])
@pytest.mark.parametrize("touch", [writes, reads])
def test_a_message_is_not_started_before_its_memory_is_ready(device, vector, what, touch):
    x, request, stream = vector(), Request(), device.stream()
    watched = Watched(request, x[1:], what, 0)
    with stream:
        x[:1].fill(3)
        touch(x[2:])
    if (what, touch) != ("send", reads):
        with pytest.raises(NotReady, match=f"{what} of 24 bytes with peer 0 .* is pending"):
            watched.Start()
        assert not request.calls
    while not stream.done():
        pass
    watched.Start()


@pytest.mark.parametrize("what", ["send", "receive"])
@pytest.mark.parametrize("touch", [writes, reads])
def test_what_is_under_way_is_left_alone(vector, what, touch):
    x = vector()
    watched = Watched(Request(), x[1:], what, 0)
    watched.Start()
    for _ in range(2):
        touch(x[:1])
        if (what, touch) == ("send", reads):
            touch(x)
        else:
            with pytest.raises(InFlight, match=f"memory of a message under way: {what} of 24 bytes"):
                touch(x)
        done = watched.Test()
    assert done
    touch(x)


def test_what_is_under_way_is_not_copied_either(device, vector):
    x, sent, received = vector(), device.pinned(32), device.pinned(32)
    for memory, what in ((sent, "send"), (received, "receive")):
        Watched(Request(), memory, what, 0).Start()
    device.copy(x, sent)
    for call in (lambda: device.copy(sent, x), lambda: device.copy(x, received), lambda: device.from_host(received)):
        with pytest.raises(InFlight):
            call()


def test_messages_do_not_share_memory_unless_all_are_sent(vector):
    x = vector()
    Watched(Request(), x, "send", 0).Start()
    Watched(Request(), x, "send", 1).Start()
    with pytest.raises(InFlight):
        Watched(Request(), x[:1], "receive", 0).Start()


def test_messages_of_a_channel():
    script = """
        import numpy as np
        import standin
        print("mpi4py.MPI" in sys.modules)
        with standin.installed() as device, standin.watch(device_messages=True):
            from mpiagg.transport import channel_of
            channel = channel_of(None)
            x, y = device.from_host(np.arange(4.0)), device.from_host(np.zeros(4))
            requests = [*channel.receive_init(y, 0, 7), *channel.send_init(x, 0, 7)]
            try:
                requests[1].Start()
            except standin.NotReady:
                device.synchronise()
            [request.Start() for request in requests]
            while not all([request.Test() for request in requests]):
                pass
            [request.Free() for request in requests]
            print(standin.peek(y).tolist(), sorted(entry.what for entry in standin.LOG[-4:]))
        before = type(channel).send_init
        with standin.installed() as device, standin.watch(device_messages=False):
            for prepare in (channel.send_init, channel.receive_init):
                try:
                    prepare(device.empty(4, float), 0, 7)
                except standin.TouchedByHost:
                    print("refused")
                [request.Free() for request in prepare(device.pinned(4), 0, 7)]
        assert type(channel).send_init is before
    """
    told = ["False", "[0.0, 1.0, 2.0, 3.0] ['arrived', 'receive', 'send', 'sent']", "refused", "refused"]
    assert run(script).splitlines() == told


# -- memory that processes share

OPENING = """
    import standin
    with standin.installed() as device:
        memory = device.open(bytes.fromhex("{}"), {})
        memory[1:3] = 7
        memory[3] = memory[0] + 1
        device.synchronise()
        device.close(memory)
"""


def test_another_process_maps_memory(device):
    memory = device.allocate(8)
    memory.fill(3)
    device.synchronise()
    handle = device.export(memory)
    assert isinstance(handle, bytes)
    assert len(handle) == 64
    run(OPENING.format(handle.hex(), 8))
    assert peek(memory).tolist() == [3, 7, 7, 4, 3, 3, 3, 3]
    run(OPENING.format(handle.hex(), 8))
    with pytest.raises(AssertionError, match="not of memory of that length"):
        run(OPENING.format(handle.hex(), 9))


def test_what_is_no_handle(device):
    memory = device.allocate(8)
    for other in (memory[:4], device.empty(8, np.uint8)):
        with pytest.raises(ValueError, match="not what allocate"):
            device.export(other)
    with pytest.raises(ValueError, match="not what open"):
        device.close(memory)
    with pytest.raises(ValueError, match="its own handle"):
        device.open(device.export(memory), 8)
    assert device.allocate(0).shape == (0,)


def test_memory_is_gone_when_nobody_has_it(device):
    before = sorted(Path("/proc/self/fd").iterdir())
    memory = device.allocate(8)
    assert sorted(Path("/proc/self/fd").iterdir()) != before
    del memory
    gc.collect()
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_closed_memory_is_not_used(device):
    script = """
        import standin, subprocess
        with standin.installed() as device:
            memory = device.allocate(8)
            print(device.export(memory).hex(), flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-c", PATH + textwrap.dedent(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        memory = device.open(bytes.fromhex(other.stdout.readline()), 8)
        other.communicate()
    memory.fill(1)  # it stays while somebody has it
    with pytest.raises(Race, match="closed while fill"):
        device.close(memory)
    device.synchronise()
    views = memory[2:], device.borrow(device.address(memory) + 1, 3, np.uint8)
    device.close(memory)
    for x in views:
        for call in (partial(x.fill, 2), partial(np.add, x, 1), partial(device.to_host, x), partial(device.copy, x, x)):
            with pytest.raises(AssertionError, match="closed"):
                call()
    with pytest.raises(ValueError, match="was closed"):
        device.close(memory)
