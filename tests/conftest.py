"""Which tests run where: only the ranks of MPI jobs run those in mpi, mpi_torch, mpi_jax and most of those in gpu."""

import os
import tempfile
import tracemalloc
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from mpiagg.tables import settings as chosen_by
from mpiagg.tables.settings import FORCED, TUNING

HERE = Path(__file__).parent
RANKS_TESTS = {
    HERE / "mpi",
    HERE / "mpi_torch",
    HERE / "mpi_jax",
    HERE / "torch_suite",
    *(
        HERE / "gpu" / f"test_{name}.py"
        for name in ("collectives", "training", "torch_groups", "torch_horovod", "torch_modules")
    ),
}

# Jobs of more ranks than cores run beside one another here: where the MPI libraries wait, they shall sleep. By a yield
# they would give the core to whoever computes for milliseconds.
os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
os.environ.setdefault("OMPI_MCA_threads_pthreads_yield_strategy", "nanosleep")

# The tests in gpu need no plugin: the machine with a GPU may have no more than pytest and what mpiagg needs.
if find_spec("hypothesis") is not None:
    from hypothesis import settings

    # All ranks of a job must draw the same examples, and the machine may be busy.
    settings.register_profile("mpiagg", derandomize=True, database=None, deadline=None)
    settings.load_profile("mpiagg")


def pytest_addoption(parser):
    """Take the options of plugins that are not installed: without pytest-timeout a test has no limit of its own."""
    if find_spec("pytest_mpi") is None:
        parser.addoption("--only-mpi", action="store_true", help="run the tests of the ranks")
    if find_spec("pytest_timeout") is None:
        parser.addoption("--timeout", help="not kept: pytest-timeout is not installed")
        parser.addoption("--timeout-method", help="not kept either")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Know the marks of plugins that are not installed, and give a rank a temporary folder of its own.

    Ranks that clean up one that they share come into one another's way.
    """
    if config.getoption("--only-mpi") and not config.option.basetemp:
        folder = tempfile.TemporaryDirectory(prefix="mpiagg-tests-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        config.option.basetemp = folder.name
    if find_spec("pytest_mpi") is None:
        config.addinivalue_line("markers", "mpi: is for ranks")


def pytest_ignore_collect(collection_path, config):
    """Keep the tests of the ranks from a plain ``pytest``; test_ranks.py and its siblings start jobs for them."""
    if collection_path in RANKS_TESTS and not config.getoption("--only-mpi"):
        return True
    return None


def pytest_collection_modifyitems(config, items):
    """Leave slow and thorough tests out unless some are chosen by ``-m``."""
    if config.getoption("-m"):
        return
    left_out = [item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("thorough")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets what this process chooses algorithms by, as it is found when a process starts."""

    def environment(**variables):
        for variable in (TUNING, FORCED):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, str(value))
        chosen_by.cache_clear()

    yield environment
    monkeypatch.undo()
    chosen_by.cache_clear()


@pytest.fixture
def repeated_peak():
    """Return a function that makes a call twice and returns how many bytes Python had more during the second."""

    def repeated_peak(call):
        call()
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return repeated_peak


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
