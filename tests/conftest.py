"""Which tests run where: the ranks of an MPI job run tests/mpi, and nobody else does."""

import pytest
from hypothesis import settings

# All ranks of a job must draw the same examples, and the machine may be busy.
settings.register_profile("mpiagg", derandomize=True, database=None, deadline=None)
settings.load_profile("mpiagg")


def pytest_ignore_collect(collection_path, config):
    """Keep the tests of the ranks from a plain ``pytest``; test_ranks.py starts the jobs that run them."""
    if collection_path.name == "mpi" and not config.getoption("--only-mpi"):
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
def cluster_sizes():
    """Numbers of ranks that every property is tested for in one process."""
    return (1, 2, 3, 4, 5, 6, 7, 8, 13, 16)
