"""How work for a GPU follows torch's streams; CuPy and the streams are made up."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def made(monkeypatch):
    """Return the streams that were made of torch's, each the pointer that it says."""
    from mpiagg.ddp import torch_streams

    made = []

    def from_external(stream):
        version, pointer = stream.__cuda_stream__()
        assert version == 0
        made.append(pointer)
        return nullcontext()

    cuda = SimpleNamespace(Stream=SimpleNamespace(from_external=from_external))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch_streams, "find_device", lambda _: SimpleNamespace(present=nullcontext))
    torch_streams._source_at.cache_clear()
    yield made
    torch_streams._source_at.cache_clear()


def test_a_stream_is_wrapped_once_and_not_once_a_gradient(made, monkeypatch):
    from mpiagg.ddp import torch_streams
    from mpiagg.ddp.torch_streams import stream_of

    pointer = [0]
    monkeypatch.setattr(torch_streams, "_present_stream", lambda _: pointer[0])
    on = [SimpleNamespace(device=SimpleNamespace(type="cuda", index=index)) for index in range(2)]
    for _ in range(160):
        with stream_of(on[0]):
            pass
    assert made == [0]
    pointer[0] = 4096
    for tensor in (on[0], on[1], on[0], on[1]):
        with stream_of(tensor):
            pass
    assert made == [0, 4096, 4096]
    with stream_of(SimpleNamespace(device=SimpleNamespace(type="cpu"))):
        assert made == [0, 4096, 4096]
