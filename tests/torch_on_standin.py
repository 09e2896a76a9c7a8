"""Modules of torch on the stand-in: tensors of the CPU that DDP takes for a device's, and streams that are made up.

What torch does with them is done at once, in no stream; what mpiagg asks of the device is done as late as may be.
"""

import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import standin
import torch

from mpiagg.ddp import torch_ddp, torch_modules, torch_streams
from mpiagg.sharded import torch_copies, torch_sharded, torch_states

assert torch_ddp  # whose modules are to know the functions that are replaced here as they are


class Torch:
    """What is counted, and which stream of torch's is the present one.

    Attributes
    ----------
    stream : int
        The pointer of torch's present stream; 0 is the default.
    counts : Counter
        How often torch was asked to copy (``"copies"``), and how many tensors that were (``"copied"``).
    copied : list of (int, list of int)
        For each of these, torch's stream and where the tensors go.
    """

    def __init__(self, device):
        self.device, self.stream, self.counts = device, 0, Counter()
        self.streams = {0: nullcontext()}
        self.copied = []

    def made(self, pointer):
        """Return the stand-in's stream for one of torch's."""
        if pointer not in self.streams:
            self.streams[pointer] = self.device.stream()
        return self.streams[pointer]

    def over(self, tensor):
        """Return an array of the device's over a tensor's memory."""
        array = tensor.numpy()
        memory = np.frombuffer(array.data, np.uint8) if array.flags.c_contiguous and array.size else None
        assert memory is not None, "the stand-in takes contiguous tensors"
        return self.device._block(memory).array(0, array.shape, array.dtype)


@contextmanager
def installed(monkeypatch):
    """Install the stand-in, let DDP take all tensors for its own, and return what is counted."""
    with standin.installed() as device:
        made = Torch(device)
        kind = SimpleNamespace(from_external=lambda stream: made.made(stream.__cuda_stream__()[1]))
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Stream=kind)))
        monkeypatch.setattr(torch_streams, "find_device", lambda _: device)
        for module in (torch_modules, torch_streams):
            monkeypatch.setattr(module, "is_on_host", lambda _: False)
        monkeypatch.setattr(torch_modules, "_over", made.over)
        for module in (torch_modules, torch_copies, torch_sharded, torch_states):
            monkeypatch.setattr(module, "tensor_of", tensor_of)
        monkeypatch.setattr(torch_streams, "_present_stream", lambda _: made.stream)
        monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, _: pointer)
        monkeypatch.setattr(torch.cuda, "stream", lambda pointer: _present(made, pointer))
        copy = torch._foreach_copy_

        def counted(into, gradients):
            made.counts["copies"] += 1
            made.counts["copied"] += len(gradients)
            made.copied.append((made.stream, [each.data_ptr() for each in into]))
            copy(into, gradients)

        monkeypatch.setattr(torch, "_foreach_copy_", counted)
        torch_streams._source_at.cache_clear()
        yield made
        torch_streams._source_at.cache_clear()


def tensor_of(array):
    """Return an array of the stand-in's, or of the host, as a tensor over the same memory."""
    return torch.from_numpy(array if isinstance(array, np.ndarray) else array._array)


@contextmanager
def _present(made, pointer):
    before, made.stream = made.stream, pointer
    try:
        yield
    finally:
        made.stream = before


@contextmanager
def calls_counted():
    """Return a Counter of the functions of Python that this thread calls, by their files and names."""
    found = Counter()

    def count(frame, event, _):
        if event == "call":
            found[frame.f_code.co_filename, frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(before)
