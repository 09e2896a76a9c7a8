"""Whatever is passed, or stands in files and in the environment, only errors that are meant for users come out.

What needs ranks is in tests/mpi/test_fuzz.py; recordings are in tests/watch/test_recordings.py.
"""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from crew import load, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from odd import ALLOWED, kept, odd

import mpiagg
from mpiagg.ddp.adapters import adapt
from mpiagg.tables.files import read_table

SHARED_FOLDER = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refused_or_done(call, *arguments, also=(), **keywords):
    """Make a call, and show that only what is allowed comes out; return whether it was carried out."""
    before = kept([*arguments, *keywords.values()])
    try:
        call(*arguments, **keywords)
    except (*ALLOWED, *also) as error:
        pickle.dumps(error)  # as test runners and pools do with it
        assert kept([*arguments, *keywords.values()]) == before
        return False
    return True


def test_a_call_that_raises_something_else_is_found():
    with pytest.raises(KeyError):
        refused_or_done({}.__getitem__, 1)


def test_a_call_that_spoils_data_is_found():
    def spoil(x):
        x[0] = 7
        raise ValueError("too late")

    with pytest.raises(AssertionError):
        refused_or_done(spoil, np.zeros(3))


VECTORS = [np.arange(6.0), np.ones(6)]


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from(["vectors", "op", "algorithm", "lanes", "wire", "nodes"]), odd, min_size=1, max_size=2
    )
)
def test_simulate(changed):
    refused_or_done(mpiagg.simulate, **{"vectors": VECTORS, **changed})


@settings(max_examples=100)
@given(st.lists(odd, max_size=3))
def test_simulate_of_anything(vectors):
    refused_or_done(mpiagg.simulate, vectors)


@given(odd)
def test_algorithms(collective):
    refused_or_done(mpiagg.algorithms, collective)


@settings(max_examples=200)
@given(odd | st.lists(odd, max_size=3))
def test_modules_of_ddp(module):
    refused_or_done(adapt, module)


# -- files


@SHARED_FOLDER
@given(st.binary(max_size=60) | st.text(max_size=30).map(lambda text: text.encode(errors="replace")))
def test_any_bytes_as_a_tuning_table(tmp_path, data):
    path = tmp_path / "table.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"table\.json"):
        read_table(path)


@pytest.mark.parametrize("name", ["", ".", "none/such", "\0", "x" * 300, "/dev/null"])
def test_any_name_as_a_tuning_table(name, environment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    del environment
    with pytest.raises(ValueError, match="tuning table"):
        read_table(Path(name))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "checkpoint"
    assert save(folder, [{"x": np.arange(4.0), "own": rank} for rank in range(2)]) == [None, None]
    return folder


@settings(max_examples=60)
@given(
    place=st.integers(0, 2),
    where=st.integers(0, 2000),
    data=st.binary(max_size=40),
    cut=st.booleans(),
    ranks=st.integers(1, 3),
)
def test_any_bytes_in_a_checkpoint(checkpoint, place, where, data, cut, ranks):  # noqa: PLR0917 - drawn by name
    path = sorted(path for path in checkpoint.rglob("*") if path.is_file())[place]
    before = path.read_bytes()
    where %= len(before) + 1
    path.write_bytes(before[:where] + data + (b"" if cut else before[where + len(data) :]))
    try:
        found = load(checkpoint, ranks)
    finally:
        path.write_bytes(before)
    errors = [each for each in found if isinstance(each, BaseException)]
    assert len(errors) in (0, ranks)
    assert all(isinstance(each, ALLOWED) for each in errors), errors


def test_a_checkpoint_that_is_no_folder(tmp_path, checkpoint):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    manifest = copy / "mpiagg-checkpoint.json"
    manifest.unlink()
    manifest.mkdir()
    for each in load(copy, 2):
        assert isinstance(each, (*ALLOWED, OSError))


# -- the environment

WORDS = (
    "",
    "0",
    "1",
    "-1",
    "nan",
    "inf",
    "1e400",
    "ring",
    "rounds",
    "2,2",
    ",",
    "1" * 5000,
    "é",
    "²",
    " ",
    "/dev/null",
)
VARIABLES = ("MPIAGG_ALGORITHM", "MPIAGG_TUNING")


@given(st.sampled_from(VARIABLES), st.sampled_from(WORDS))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_algorithms_are_chosen_by(environment, name, word):
    environment(**{name: word})
    refused_or_done(mpiagg.simulate, VECTORS)


SCRIPT = """
import os, sys
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
for word in {words!r}:
    os.environ["MPIAGG_TIMEOUT"] = word
    for name in [name for name in sys.modules if name.startswith("mpiagg")]:
        del sys.modules[name]
    from mpiagg.transport.waiting import timeout_by_environment
    try:
        timeout_by_environment()
    except ValueError as error:
        assert "MPIAGG_TIMEOUT" in str(error), error
        print("refused", word)
    else:
        print("taken", word)
"""


def test_the_timeout():
    words = ["x", "nan", "-1", "0", " ", "", "3", "1e3"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(words=words)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    taken = ["", "3", "1e3"]
    assert done.stdout.splitlines() == [f"{'taken' if word in taken else 'refused'} {word}" for word in words]
