"""In which order a GPU is asked for what a process group does, on made-up streams."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mpiagg.errors import StallError
from mpiagg.torch import streams

pytestmark = pytest.mark.mpi


class Gpu:
    """What is asked of a GPU with number 1, in its order."""

    name = "cuda:1"

    def __init__(self):
        self.asked, self.current, self.busy = [], "the program's", 0

    @contextmanager
    def _within(self, what):
        self.asked.append(f"enter {what}")
        yield
        self.asked.append(f"leave {what}")

    def present(self):
        return self._within("device")

    def inside(self):
        return self._within("CuPy's stream")

    def stream(self, ordinal, priority):
        assert (ordinal, priority) == (1, -1)
        return SimpleNamespace(wait_event=lambda event: self.asked.append(f"wait for {event}"), query=self._query)

    def current_stream(self, _):
        return SimpleNamespace(record_event=lambda: f"an event in {self.current}")

    def _query(self):
        self.busy -= 1
        return self.busy < 0


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    monkeypatch.setattr(streams, "find_device", lambda name: made if name == "cuda:1" else None)
    monkeypatch.setattr(streams, "present_source", lambda _: made)
    monkeypatch.setattr(streams, "_own", SimpleNamespace())
    cuda = SimpleNamespace(
        Stream=made.stream, current_stream=made.current_stream, stream=lambda _: made._within("torch's stream")
    )
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=cuda))
    return made


def tensor(index=1, **more):
    return SimpleNamespace(is_cuda=True, is_sparse=False, device=SimpleNamespace(index=index), **more)


ORDER = [
    "enter device",
    "wait for an event in the program's",
    "enter torch's stream",
    "enter CuPy's stream",
    "work",
    "leave CuPy's stream",
    "leave torch's stream",
    "leave device",
]


def test_work_that_never_ends_is_a_stall(gpu, monkeypatch):
    monkeypatch.setattr(streams, "wait_patiently", partial(streams.wait_patiently, timeout=0.05))
    gpu.busy = float("inf")
    with pytest.raises(StallError, match="in vain for what was asked of cuda:1"):
        streams.behind_present([tensor()])(lambda: None)


def test_work_comes_after_what_was_asked_before_and_is_waited_for(gpu):
    in_order = streams.behind_present([tensor()])
    gpu.current, gpu.busy = "another", 3
    in_order(lambda: gpu.asked.append("work"))
    assert gpu.asked == ORDER
    assert gpu.busy < 0


def test_work_that_has_failed_is_waited_for_too(gpu):
    def fail():
        raise ValueError("wrong")

    gpu.busy = 3
    with pytest.raises(ValueError, match="wrong"):
        streams.behind_present([tensor()])(fail)
    assert gpu.busy < 0


@pytest.mark.usefixtures("gpu")
def test_a_thread_has_one_stream_for_a_device():
    for _ in range(2):
        assert streams.behind_present([tensor()])(lambda: "result") == "result"
    assert list(streams._own.streams) == [1]


@pytest.mark.usefixtures("gpu")
def test_the_parts_of_a_sparse_result_are_kept_for_who_asked():
    kept = []
    part = SimpleNamespace(record_stream=kept.append)
    result = tensor(_indices=lambda: part, _values=lambda: part)
    result.is_sparse = True
    streams.behind_present([result])(lambda: None)
    assert len(kept) == 2


def test_on_the_cpu_the_task_is_all_that_is_run(gpu):
    for tensors in ([], [torch.ones(1), torch.ones(2)]):
        assert streams.behind_present(tensors)(lambda: "result") == "result"
    assert not gpu.asked
    streams.keep_for_present_stream(torch.ones(1))


def test_several_devices_are_refused():
    with pytest.raises(ValueError, match="on one device"):
        streams.behind_present([torch.ones(1), torch.ones(1, device="meta")])
