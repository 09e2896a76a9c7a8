"""PyTorch's own tests of torch.distributed, which its wheel brings, on the ranks of this job.

The environment variable SUITE_BACKEND says which backend runs them. The tests are told that it is Gloo: what they ask
of that one, and skip for others, is what is to be shown.
"""

import os
import shutil
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore")]

WORLD = MPI.COMM_WORLD
BACKEND = os.environ.get("SUITE_BACKEND", "mpiagg")
FOLDER = Path(WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None))
TOLD = {
    "BACKEND": "gloo",
    "WORLD_SIZE": str(WORLD.size),
    "RANK": str(WORLD.rank),
    "TEMP_DIR": str(FOLDER),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29555",
    "GLOO_SOCKET_IFNAME": "lo",
}
os.environ.update(TOLD)
for name in ("barrier", "init_dir", "test_dir"):
    (FOLDER / name).mkdir(exist_ok=True)
torch.set_num_threads(1)

if BACKEND == "mpiagg":
    import mpiagg.torch

    assert mpiagg.torch.BACKEND == BACKEND

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of what it imports itself
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test

CODES = {skip.exit_code for skip in TEST_SKIPS.values()}


@pytest.fixture(scope="module", autouse=True)
def folder():
    """Leave nothing behind."""
    yield
    WORLD.Barrier()
    if WORLD.rank == 0:
        shutil.rmtree(FOLDER)


class TestDistributed(TestCase, distributed_test.DistributedTest._DistTestBase):
    """The tests, each with a process group of its own."""

    rank, world_size, file_name = WORLD.rank, str(WORLD.size), ""

    def _barrier(self, *_, **__):
        WORLD.Barrier()

    @property
    def init_method(self):
        return f"file://{self.file_name}"

    def run(self, result=None):
        """Run a test; that it leaves the process by a code of torch's means that it is skipped."""
        method = getattr(self, self._testMethodName)

        def test():
            try:
                method()
            except SystemExit as left:
                if left.code not in CODES:
                    raise AssertionError(f"the test has left the process with {left.code}") from None
                self.skipTest(f"torch's code {left.code}")

        setattr(self, self._testMethodName, test)
        return super().run(result)

    def setUp(self):
        super().setUp()
        os.environ.update(TOLD)
        self.file_name = str(FOLDER / f"store-{self._testMethodName}")
        seconds = distributed_test.CUSTOM_PG_TIMEOUT.get(self._testMethodName, 60)
        timeout = timedelta(seconds=seconds)
        dist.init_process_group(
            BACKEND, init_method=self.init_method, rank=WORLD.rank, world_size=WORLD.size, timeout=timeout
        )

    def tearDown(self):
        WORLD.Barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
        super().tearDown()
