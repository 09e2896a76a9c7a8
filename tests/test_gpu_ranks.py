"""Start MPI jobs whose ranks share one GPU and run the tests in tests/gpu."""

import pytest
from gpu_jobs import GPU, run_gpu_job, trouble


@pytest.fixture(scope="module")
def gpu():
    """Skip where there is no GPU."""
    if reason := trouble(GPU):
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_ranks_pass(tmp_path, ranks):
    if complaints := run_gpu_job(tmp_path, ranks).complaints():
        pytest.fail(complaints, pytrace=False)
