"""Checkpoints that are damaged, cut, or of something else are refused, on all ranks."""

import errno
import json
import re
import shutil

import numpy as np
import pytest
from crew import load, save
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiagg import MismatchError
from mpiagg.checkpoints import PerRank, folders, together
from mpiagg.checkpoints.folders import MANIFEST
from mpiagg.checkpoints.trees import digest_of

RANKS = 2


def states(ranks=RANKS):
    return [
        {"step": 3, "shared": np.arange(4, dtype=np.float32), "own": [np.full(2, rank, np.int16), f"rank {rank}"]}
        for rank in range(ranks)
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, and its files."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    assert save(folder, states()) == [None] * RANKS
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert sorted(map(str, files)) == ["generation-1/0.bin", "generation-1/1.bin", MANIFEST]
    return folder, files


def good(found):
    """Whether this is what was saved, of as many ranks as have loaded it."""
    if len(found) == RANKS:
        return repr(found) == repr(states())
    own = [state["own"] for state in states()]
    return all(
        isinstance(state, dict)
        and state["step"] == 3
        and repr(state["shared"]) == repr(states()[0]["shared"])
        and repr(list(state["own"][0])) == repr([each[0] for each in own])
        and list(state["own"][1]) == [each[1] for each in own]
        for state in found
    )


def refused(found):
    """Whether all ranks have raised, and only what they may."""
    return all(isinstance(each, ValueError | MismatchError) for each in found)


def test_it_comes_back(saved):
    assert good(load(saved[0], RANKS))
    for ranks in (1, 3, 5):
        found = load(saved[0], ranks)
        assert good(found)
        assert all(isinstance(each, PerRank) for state in found for each in state["own"])


def test_what_is_the_same_is_stored_once(tmp_path):
    big = np.zeros(10**5)
    save(tmp_path, [{"a": big, "b": np.ones(3), "c": big.copy()} for _ in range(3)])
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("generation-*/*"))]
    assert sizes[0] > 2 * big.nbytes
    assert max(sizes[1:]) < 2000


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_flipped_bit_is_found(saved, ranks):
    folder, files = saved
    for name, content in files.items():
        for place in range(0, len(content), 2):
            damaged = bytearray(content)
            damaged[place] ^= 1 << (place // 2 % 8)
            (folder / name).write_bytes(damaged)
            found = load(folder, ranks)
            assert refused(found) or good(found), (name, place)
            # Of a file's own bytes nothing goes unnoticed.
            assert refused(found) or name.name == MANIFEST, (name, place)
        (folder / name).write_bytes(content)
    assert good(load(folder, ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_cut_is_found(saved, ranks):
    folder, files = saved
    for name, content in files.items():
        for length in [*range(0, len(content) - 1, 7), len(content) - 2]:
            (folder / name).write_bytes(content[:length])
            assert refused(load(folder, ranks)), (name, length)
        if name.name != MANIFEST:
            (folder / name).write_bytes(content + b"\0")
            assert refused(load(folder, ranks)), name
            (folder / name).unlink()
            found = load(folder, ranks)
            assert refused(found)
            assert any("missing" in str(each) for each in found)
        (folder / name).write_bytes(content)
    assert good(load(folder, ranks))


json_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})


@settings(max_examples=100)
@given(st.data())
def test_only_value_errors_come_of_manifests(saved, data):
    folder, files = saved
    manifest = json.loads(files[folder.joinpath(MANIFEST).relative_to(folder)])
    where = data.draw(st.sampled_from([*manifest, "file", "length", "drop"]))
    if where == "file":
        manifest["files"][data.draw(st.integers(0, 1))] = data.draw(json_values)
    elif where == "length":
        manifest["files"][data.draw(st.integers(0, 1))][data.draw(st.integers(0, 2))] = data.draw(json_values)
    elif where == "drop":
        del manifest[data.draw(st.sampled_from([*manifest]))]
    else:
        manifest[where] = data.draw(json_values)
    if {"generation", "files", "digest"} <= set(manifest) and data.draw(st.booleans()):
        manifest["digest"] = folders._digest(manifest["generation"], manifest["files"])
    (folder / MANIFEST).write_text(json.dumps(manifest))
    found = load(folder, RANKS)
    (folder / MANIFEST).write_bytes(files[folder.joinpath(MANIFEST).relative_to(folder)])
    assert refused(found) or good(found)


def test_a_manifest_that_names_less_is_refused(saved):
    folder, files = saved
    manifest = json.loads(files[_manifest(files)])
    manifest["files"].pop()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    found = load(folder, RANKS)
    (folder / MANIFEST).write_bytes(files[_manifest(files)])
    assert refused(found)
    assert "not what was written" in str(found[0])


def test_a_text_that_was_forged_is_read_with_checks(saved):
    folder, files = saved
    (name, content), manifest = next(iter(sorted(files.items()))), json.loads(files[_manifest(files)])
    nbytes, length, _ = manifest["files"][0]
    for old, new in [(b'"float32", [4]', b'"float64", [4]'), (b"[4]", b"[9999999999]"), (b'"float32"', b'"object"')]:
        text = content[-length:].replace(old, new)
        manifest["files"][0] = [nbytes - length + len(text), len(text), digest_of(text)]
        manifest["digest"] = folders._digest(manifest["generation"], manifest["files"])
        (folder / name).write_bytes(content[:-length] + text)
        (folder / MANIFEST).write_text(json.dumps(manifest))
        assert refused(load(folder, RANKS)), new
    (folder / name).write_bytes(content)
    (folder / MANIFEST).write_bytes(files[_manifest(files)])
    assert good(load(folder, RANKS))


def test_arrays_that_no_machine_can_hold_are_refused(saved, tmp_path):
    folder, (_, files) = tmp_path / "checkpoint", saved
    shutil.copytree(saved[0], folder)
    manifest, elements = json.loads(files[_manifest(files)]), 2**39
    for rank, (_, length, _) in enumerate(manifest["files"]):
        path = folder / "generation-1" / f"{rank}.bin"
        text = path.read_bytes()[-length:]
        if not rank:
            text = re.sub(
                rb'"float32", \[4\], false, 0, 0, "\w+"', b'"float32", [%d], false, 0, 100, "0"' % elements, text
            )
            end = 4 * elements + 100
            with path.open("r+b") as file:
                file.seek(end)  # 2 TiB that are not there
                file.write(text)
        manifest["files"][rank] = [path.stat().st_size, len(text), digest_of(text)]
    manifest["digest"] = folders._digest(manifest["generation"], manifest["files"])
    (folder / MANIFEST).write_text(json.dumps(manifest))
    found = load(folder, RANKS)
    assert isinstance(found[0], ValueError)
    assert re.search(r"arrays have 2199\d+ bytes, and this machine has \d+ of memory", str(found[0]))
    assert refused(found)


def _manifest(files):
    return next(name for name in files if name.name == MANIFEST)


def test_without_a_checkpoint_all_ranks_say_so(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        assert all(isinstance(each, FileNotFoundError) for each in load(folder, RANKS))
    assert isinstance(save(tmp_path / "file", states())[0], OSError)


def test_something_else_is_refused(tmp_path, monkeypatch):
    manifest = {"format": "x", "version": 1, "byteorder": "little", "generation": 1, "files": []}
    for text in ("", "{}", json.dumps(manifest), "[" * 10**5):
        (tmp_path / MANIFEST).write_text(text)
        assert all("damaged, or of something else" in str(each) for each in load(tmp_path, RANKS))
    monkeypatch.setattr(folders, "MOST_MANIFEST_BYTES", 10)
    assert "more than 10 bytes" in str(load(tmp_path, RANKS)[0])
    # It can be written over.
    monkeypatch.undo()
    assert save(tmp_path, states()) == [None] * RANKS
    assert good(load(tmp_path, RANKS))


def test_nothing_is_written_of_what_cannot_be_saved(tmp_path):
    folder = tmp_path / "new"
    one, other = save(folder, [{"a": 1}, {"a": object()}])
    assert isinstance(one, MismatchError)
    assert isinstance(other, TypeError)
    assert all(isinstance(each, MismatchError) for each in save(folder, [{"a": 1}, {"b": 1}]))
    assert all(isinstance(each, TypeError) for each in save(folder, [[1], [1]]))
    for path in (3, None, b"x"):
        assert all(isinstance(each, TypeError) for each in save(path, states()))
        assert all(isinstance(each, TypeError) for each in load(path, 2))
    for path in ("", "a\0b"):
        assert all(isinstance(each, ValueError) for each in save(path, states()))
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_ours_is_removed(tmp_path):
    for name in ("generation-5", "generation-05", "generation-x", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("")
    (tmp_path / "generation-5" / "0.bin").write_text("")
    assert save(tmp_path, states()) == save(tmp_path, states()) == [None] * RANKS
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["generation-05", "generation-5", "generation-7", "generation-x", MANIFEST, "other"]
    assert [path.name for path in (tmp_path / "generation-5").iterdir()] == ["mine.txt"]


def test_a_rank_that_sees_another_disk_is_named(tmp_path, monkeypatch):
    real = together.generation_of
    assert save(tmp_path, states()) == [None] * RANKS
    write = together.write_file

    def elsewhere(generation, rank, *more):
        return write(generation if rank == 0 else tmp_path / "elsewhere", rank, *more)

    monkeypatch.setattr(together, "write_file", elsewhere)
    one, other = save(tmp_path, [{"a": 1}] * 2)
    assert isinstance(one, MismatchError)
    assert "one file system" in str(other)
    (tmp_path / "elsewhere").mkdir()
    one, other = save(tmp_path, [{"a": 1}] * 2)
    assert "of rank 1 is not to be seen from rank 0; all ranks must see one file system" in str(one)
    assert isinstance(other, MismatchError)
    monkeypatch.undo()
    assert real is together.generation_of
    assert good(load(tmp_path, RANKS))


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    assert save(tmp_path, states()) == [None] * RANKS

    def full(generation, rank, *more):
        record = write(generation, rank, *more)
        if rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return record

    write = together.write_file
    monkeypatch.setattr(together, "write_file", full)
    one, other = save(tmp_path, [{"a": 1}] * 2)
    assert isinstance(one, MismatchError)
    assert isinstance(other, OSError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generation-1", MANIFEST]
    assert good(load(tmp_path, RANKS))


def test_what_is_asked_for_too_late_is_a_clear_error(tmp_path):
    save(tmp_path, states())
    (state,) = load(tmp_path, 1)
    shutil.rmtree(tmp_path)
    with pytest.raises(ValueError, match="has the checkpoint been replaced"):
        state["own"][0][1]


def test_folders_that_are_made_are_brought_to_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(folders, "_sync", synced.append)
    folders.begin(tmp_path / "a" / "b")
    assert set(synced) == {tmp_path, tmp_path / "a"}


def test_a_state_that_could_not_be_read_again_is_not_written(tmp_path, monkeypatch):
    assert save(tmp_path / "saved", states()) == [None] * RANKS
    monkeypatch.setattr(folders, "MOST_TEXT_BYTES", 1000)
    assert refused(save(tmp_path / "saved", [{**state, "more": "x" * 2000} for state in states()]))
    assert good(load(tmp_path / "saved", RANKS))
