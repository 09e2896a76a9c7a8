"""What the tests on a GPU share; where there is none, they are skipped with the reason."""

import kernel_checks as checks
import pytest


@pytest.fixture(scope="session")
def device():
    """Return the GPU in use at present."""
    return checks.gpu()


BARRIER = r"""
extern "C" __global__ void barrier(const volatile int *open) {
    const long long start = clock64();
    while (!*open && clock64() - start < 40000000000ll) {}  // some 20 seconds: a test that fails must end
}
"""


class NodeBarrier:
    """Holds up a stream until it is opened; to be made before anything is held up, for that loads the kernel."""

    def __init__(self, device):
        import cupy

        self.kernel = cupy.RawKernel(BARRIER, "barrier")
        self.flag = device.pinned(4).view("i4")
        self.flag[0] = 1
        self.close()  # once, open
        device.synchronise()
        self.flag[0] = 0

    def close(self):
        """Ask the present stream to wait here."""
        self.kernel((1,), (1,), (self.flag.ctypes.data,))

    def open(self):
        self.flag[0] = 1


@pytest.fixture
def barrier(device):
    barrier = NodeBarrier(device)
    yield barrier
    barrier.open()
    device.synchronise()
