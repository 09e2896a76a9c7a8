"""What the tests of the ranks that need torch share."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import mpiagg.torch

# The ranks outnumber the cores.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def process_group():
    """Let torch.distributed have the ranks of this job."""
    mpiagg.torch.init_process_group(timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()
