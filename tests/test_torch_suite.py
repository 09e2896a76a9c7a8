"""Run PyTorch's own tests of torch.distributed with our backend, beside Gloo."""

import os
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
from jobs import run_job

NAMES_GLOO = {"test_get_backend", "test_monitored_barrier_gloo", "test_monitored_barrier_gloo_subgroup"}
"""The tests that compare the backend's name, or call what torch refuses for every backend but Gloo."""

SUITE = Path(__file__).parent / "torch_suite"


def outcomes(folder, backend):
    """Return what became of each test on all ranks."""
    folder.mkdir()
    with mock.patch.dict(os.environ, {"SUITE_BACKEND": backend}):
        job = run_job(folder, 4, SUITE, stop=False)
    ranks = list(job.outcomes.values())
    assert all(ranks), job.complaints()
    return {test: {each.get(test) for each in ranks} for test in ranks[0]}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("expecttest") is None, reason="torch's tests need expecttest")
def test_ours_passes_what_gloo_passes(tmp_path):
    theirs, ours = (outcomes(tmp_path / backend, backend) for backend in ("gloo", "mpiagg"))
    passed = {
        test
        for test, found in theirs.items()
        if "passed" in found and "failed" not in found and test.rpartition("::")[2] not in NAMES_GLOO
    }
    assert len(passed) > 80
    wanting = {test: found for test, found in ours.items() if test in passed and found != theirs[test]}
    assert not wanting
