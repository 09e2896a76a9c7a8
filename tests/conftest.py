"""Which tests run where: the ranks of an MPI job run tests/mpi and tests/mpi_torch, and nobody else does."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

HERE = Path(__file__).parent
RANKS_TESTS = {HERE / "mpi", HERE / "mpi_torch"}

# All ranks of a job must draw the same examples, and the machine may be busy.
settings.register_profile("mpiagg", derandomize=True, database=None, deadline=None)
settings.load_profile("mpiagg")


def pytest_ignore_collect(collection_path, config):
    """Keep the tests of the ranks from a plain ``pytest``; test_ranks.py and test_torch.py start jobs for them."""
    if collection_path in RANKS_TESTS and not config.getoption("--only-mpi"):
        return True
    return None


def pytest_collection_modifyitems(config, items):
    """Leave slow tests out unless some are chosen by ``-m``."""
    if config.getoption("-m"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session")
def bits():
    """Return a function from an array to its bytes that carry values: x86's long double has 10 of those in 16."""
    padded = np.finfo(np.longdouble).nmant == 63
    unit = np.dtype(np.longdouble).itemsize

    def bits(array):
        flat = np.ascontiguousarray(array).view(np.uint8)
        if padded and array.dtype.char in "gG":
            flat = flat.reshape(-1, unit)[:, :10]
        return flat.tobytes()

    return bits
