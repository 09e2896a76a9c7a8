"""A crash, or a failure, at any step of saving leaves the old checkpoint or the new one."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def crashes(folder, *arguments):
    done = subprocess.run(
        [sys.executable, TESTS / "crashes.py", folder, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_there_is_whole_at_every_step(tmp_path):
    found = crashes(tmp_path)
    assert found["faults"] == []
    assert found["steps"] > 60


def test_files_that_are_not_synced_are_found(tmp_path):
    assert any("damaged" in fault for fault in crashes(tmp_path, "no-sync")["faults"])


def test_a_manifest_that_goes_too_early_is_found(tmp_path):
    assert any("there is no checkpoint" in fault for fault in crashes(tmp_path, "early")["faults"])
