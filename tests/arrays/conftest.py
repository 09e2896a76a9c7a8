"""What the tests of the stand-in share."""

import numpy as np
import pytest
import standin


@pytest.fixture
def device():
    with standin.installed() as device:
        yield device


@pytest.fixture
def vector(device):
    """Return a function that makes a vector of ones, which is ready."""

    def vector(length=4):
        x = device.from_host(np.ones(length))
        device.synchronise()
        return x

    return vector
