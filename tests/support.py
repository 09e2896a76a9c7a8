"""What tests of several folders share."""

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpiagg.transport import process
from mpiagg.watch import OperationLog, Subject, failed
from mpiagg.watch.recorder import LENGTH


def refused(error, words, call, *arguments, **keywords):
    """Show that the call raises this on all ranks."""
    with pytest.raises(error, match=words):
        call(*arguments, **keywords)
    MPI.COMM_WORLD.Barrier()


def call(comm, form, name, *arguments):
    """Make a call of a communicator's: blocking, nonblocking or persistent."""
    if form == "blocking":
        getattr(comm, name)(*arguments)
    elif form == "nonblocking":
        getattr(comm, "I" + name.lower())(*arguments).Wait()
    else:
        request = getattr(comm, name + "_init")(*arguments)
        request.Start()
        request.Wait()
        request.Free()


def on_device(script):
    """Return a script whose ranks know the stand-in."""
    tests = str(Path(__file__).parent)
    return f"import sys\nsys.path.insert(0, {tests!r})\nimport standin\nstandin.install()\n{script}"


def fill_recorder():
    """Fill the ring of operations, so that from now on each that comes takes the place of another."""
    for _ in range(LENGTH):
        failed(process().recorder.begin(Subject(OperationLog("", 0, 1), ""), False))


def resnet18():
    """Return the shapes of a ResNet-18 for pictures of 32 by 32 pixels in 10 classes."""
    shapes = [(64, 3, 3, 3), (64,), (64,)]
    width = 64
    for new, stride in [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)]:
        shapes += [(new, width, 3, 3), (new,), (new,), (new, new, 3, 3), (new,), (new,)]
        if stride == 2:
            shapes += [(new, width, 1, 1), (new,), (new,)]
        width = new
    return [*shapes, (10, 512), (10,)]


def kept_plans(channel):
    """Return the plans of the calls that a channel keeps."""
    return [call.plan for call in channel.calls.values() if call.plan is not None]


PLACES = ["anywhere", "registered", "at offsets", "some registered"]
"""Where the vectors of a collective lie."""


def placed(registered, rank):
    """Return a function that makes vectors that lie in one of the places, of registered memory in bytes or not."""

    def vector(place, length, dtype="float32"):
        itemsize = np.dtype(dtype).itemsize
        start = {"registered": 0, "at offsets": 7 * rank * itemsize, "some registered": 64 if rank % 2 else None}
        first = start.get(place)
        if first is None:
            return np.empty(length, dtype)
        return registered[first : first + length * itemsize].view(dtype)

    return vector
