"""Kernels that are compiled once and kept: a compiler that counts stands for NVRTC, and a loader for the driver."""

import os

import pytest

from mpiagg.cuda import cubins

KEY = ("source", "-option", "90", "14.2.0")


class Machine:
    """Compiles keys into binaries, and loads none but those of its own."""

    def __init__(self):
        self.compiled = 0

    def use(self, key=KEY):
        def compiled():
            self.compiled += 1
            return b"binary of " + repr(key).encode()

        return cubins.loaded(key, compiled, self.load)

    def load(self, binary):
        if not binary.startswith(b"binary of "):
            raise ValueError("invalid image")
        return binary


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mpiagg" / "kernels"


@pytest.fixture
def machine(folder):  # noqa: ARG001 - what it keeps lies there
    return Machine()


def test_another_process_does_not_compile_again(machine, folder):
    first = machine.use()
    assert Machine().use() == first == b"binary of " + repr(KEY).encode()
    again = Machine()
    again.use()
    assert (machine.compiled, again.compiled) == (1, 0)
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]


@pytest.mark.parametrize("place", range(len(KEY)))
def test_whatever_the_binary_depends_on_makes_another(machine, place):
    machine.use()
    other = (*KEY[:place], KEY[place] + "x", *KEY[place + 1 :])
    assert machine.use(other) == b"binary of " + repr(other).encode()
    assert machine.compiled == 2


def test_parts_of_a_key_are_not_run_together(machine):
    machine.use(("ab", "c"))
    machine.use(("a", "bc"))
    assert machine.compiled == 2


def _cut(data):
    return data[:-1]


def _flipped(data):
    return data[:40] + bytes([data[40] ^ 1]) + data[41:]


@pytest.mark.parametrize("damage", [_cut, _flipped, lambda _: b"", lambda data: data + b"more", lambda _: b"x" * 100])
def test_a_damaged_file_is_compiled_anew_and_mended(machine, folder, damage):
    expected = machine.use()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert machine.use() == expected
    assert machine.compiled == 2
    assert path.read_bytes() == whole


def test_the_file_of_another_kernel_is_refused(machine, folder):
    machine.use(("other",))
    (other,) = folder.iterdir()
    machine.use()
    (mine,) = set(folder.iterdir()) - {other}
    mine.write_bytes(other.read_bytes())
    assert machine.use() == b"binary of " + repr(KEY).encode()
    assert machine.compiled == 3


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_refused(machine, folder, mode):
    machine.use()
    (path,) = folder.iterdir()
    path.chmod(mode)
    machine.use()
    assert machine.compiled == 2
    assert not path.stat().st_mode & 0o022


@pytest.mark.usefixtures("folder")
def test_a_binary_that_does_not_load_is_compiled_anew():
    assert cubins.loaded(KEY, lambda: b"foreign", len) == 7  # this loader takes anything
    machine = Machine()
    machine.use()
    machine.use()
    assert machine.compiled == 1


def test_an_error_of_the_compiler_or_the_loader_is_the_callers(folder):
    def fails():
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        cubins.loaded(KEY, fails, len)
    with pytest.raises(ValueError, match="invalid image"):
        cubins.loaded(KEY, lambda: b"none", Machine().load)
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_no_error(machine, folder):
    folder.parent.write_text("a file, not a folder")
    machine.use()
    machine.use()
    assert machine.compiled == 2


def test_no_home_is_no_error(machine, monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", nowhere)
    machine.use()
    assert machine.compiled == 1


def test_those_go_that_were_not_used_for_the_longest_time(machine, folder, monkeypatch):
    monkeypatch.setattr(cubins, "MOST_FILES", 3)
    for number in range(3):
        machine.use((str(number),))
        newest = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (number, number))  # long ago, one after the other
        if number == 0:
            first = newest
    machine.use(("0",))  # is used again, and so "1" is the oldest
    machine.use(("3",))
    assert len(list(folder.iterdir())) == 3
    assert first.exists()
    compiled = machine.compiled
    for key in ("0", "2", "3"):
        machine.use((key,))
    assert machine.compiled == compiled
    machine.use(("1",))
    assert machine.compiled == compiled + 1
