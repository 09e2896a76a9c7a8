"""Collectives of arrays on a device, through the stand-in: right, the host's bits, and everything in order."""


import ml_dtypes
import numpy as np
import pytest
import standin

import mpiagg
from mpiagg import operations, tuning
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi

DTYPES = [np.dtype(char) for char in "?hqHdefFD"] + [np.dtype(ml_dtypes.bfloat16)]
COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter")


@pytest.fixture(params=["aware", "staged"])
def device(request, comm):
    """A device whose memory messages reach, or do not."""
    channel_of(comm).aware = request.param == "aware"
    with standin.installed() as device, standin.watch(device_messages=channel_of(comm).aware):
        yield device
        channel_of(comm).free()


@pytest.fixture
def short_ones_too(monkeypatch):
    """Let messages of short vectors be messages of a device's, too."""
    for module in (operations, tuning):
        monkeypatch.setattr(module, "BY_WAY_OF_HOST", -1)


def irregular(length, rank, dtype=float):
    """Values whose sum depends on the order."""
    return (np.random.default_rng(rank).standard_normal(length) * 3).astype(dtype)


def called(name, x, comm, **keywords):
    result = getattr(mpiagg, name)(x, comm=comm, **keywords)
    return standin.peek(result) if isinstance(result, standin.DeviceArray) else result


def assert_same(one, other, bits):
    assert (one is None) == (other is None)
    if one is not None:
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert bits(one) == bits(other)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_bits_of_the_host(comm, rank, size, device, short_ones_too, bits, collective):
    for algorithm in mpiagg.algorithms(collective):
        for length in (0, 1, size, 37, 1001):
            x = irregular(length, rank)
            wanted = called(collective, x, comm, algorithm=algorithm)
            assert_same(called(collective, device.from_host(x), comm, algorithm=algorithm), wanted, bits)


def test_every_op_and_dtype(comm, rank, device, short_ones_too, bits):
    for dtype in DTYPES:
        for op in ("sum", "avg", "min", "max", "prod"):
            x = irregular(65, rank, dtype)
            try:
                wanted = called("allreduce", x, comm, op=op, algorithm="ring")
            except TypeError:
                with pytest.raises(TypeError, match="is not for"):
                    called("allreduce", device.from_host(x), comm, op=op, algorithm="ring")
                continue
            assert_same(called("allreduce", device.from_host(x), comm, op=op, algorithm="ring"), wanted, bits)
