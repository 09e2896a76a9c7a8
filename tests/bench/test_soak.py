"""``bench/soak.py``: that it works; in the slow lane, all of it; and that a leak would be found."""

import json
import random
import sys
from pathlib import Path

import mpi4py
import numpy as np
import pytest

mpi4py.rc.initialize = False
sys.path.append(str(Path(__file__).parents[2]))

from bench import soak, soak_actions  # noqa: E402 - MPI must not start

RANKS = 2


def samples(leak=0.0, what="rss", count=31, noise=0.0, seconds=60.0):
    """Return the samples of a rank that holds more of something each minute."""
    draw = random.Random(1)
    held = dict.fromkeys(soak.SLACK, 1000.0)
    return {
        "samples": [
            {"seconds": minute * seconds, **held, what: 1e8 + leak * minute + noise * draw.uniform(-1, 1)}
            for minute in range(count)
        ]
    }


@pytest.mark.parametrize("what", soak.SLACK)
def test_leaks_are_found(what):
    slack = soak.SLACK[what]
    for leak, noise, flat in (
        (0, 0, True),
        (0, slack / 4, True),
        (slack / 50, slack / 4, True),
        (slack / 10, 0, False),
    ):
        found = {each.what: each.flat for each in soak.rises([samples(leak, what, noise=noise)])}
        assert found == {**dict.fromkeys(soak.SLACK, True), what: flat}


def test_a_leak_of_one_rank_is_found():
    found = soak.rises([samples(), samples(2**20), samples()])
    assert {each.rank for each in found if not each.flat} == {1}


def test_what_grows_at_first_alone_is_no_leak():
    told = samples()
    for number, each in enumerate(told["samples"]):
        each["rss"] += min(number, 6) * 100 * soak.MIB
    assert all(each.flat for each in soak.rises([told]))


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="make no line"):
        soak.rises([samples(count=4)])


def soaked(folder, seconds, ranks, seed):
    status, printed = soak.soak(seconds, seconds / 30, ranks, seed, folder)
    assert (status, printed.strip()) == (0, "")
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(each["ended"] for each in told)
    assert len({json.dumps(each["done"]) for each in told}) == 1
    return told


def test_it_works(tmp_path):
    told = soaked(tmp_path, 4, RANKS, 3)
    assert sum(told[0]["done"].values()) >= 20
    assert {each.what for each in soak.rises(told)} == set(soak.SLACK)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_half_an_hour_leaves_nothing_behind(tmp_path):
    assert [each for each in soak.rises(soaked(tmp_path, 1800, 4, 1)) if not each.flat] == []


def test_wrong_results_are_found():
    right = np.arange(3.0)
    soak_actions.same(right.copy(), right)
    for wrong in (np.array([0, 1, 2.5]), right[:2], right.astype("f4"), None, right.tolist()):
        with pytest.raises(AssertionError):
            soak_actions.same(wrong, right)
    with pytest.raises(AssertionError):
        soak_actions.held(right, None)
    with pytest.raises(AssertionError):
        soak_actions.near([right], [right + 1e-3])
