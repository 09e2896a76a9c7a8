"""Sharded training of arrays on a device, through the stand-in: what it does to arrays on the host."""

import numpy as np
import pytest
import standin

import mpiagg
from mpiagg import optimizers
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi

SHAPES = [(130, 90), (3,), (20, 30), (), (50,)]
MAKE = {
    "sgd": lambda: optimizers.SGD(0.1, 0.9),
    "adamw": lambda: optimizers.AdamW(1e-2),
    "lamb": lambda: optimizers.LAMB(1e-2),
    "muon": lambda: optimizers.Muon(1e-2),
}


@pytest.fixture(params=["aware", "staged"])
def device(request, comm):
    """A device whose memory messages reach, or do not."""
    channel_of(comm).aware = request.param == "aware"
    with standin.installed() as device, standin.watch(device_messages=channel_of(comm).aware):
        yield device
        channel_of(comm).free()


def tensors(*seed):
    random = np.random.default_rng(seed)
    return [np.asarray(random.standard_normal(shape).astype("f4")) for shape in SHAPES]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_arrays_on_a_device_are_trained_as_those_of_the_host(comm, rank, device, stage, name):
    def sharded(weights):
        return mpiagg.Sharded(weights, MAKE[name](), stage=stage, comm=comm, bucket_bytes=10_000, algorithm="direct")

    with sharded(tensors(0)) as on_host, sharded([device.from_host(x) for x in tensors(0)]) as on_device:
        for step in range(3):
            given = tensors(1, step, rank)
            on_host.step(given)
            on_device.step([device.from_host(x) for x in given])
        state = on_device.state_dict()
        on_device.load_state_dict(state)
        for x, wanted in zip(on_device.weights().values(), on_host.weights().values(), strict=True):
            np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-6)
