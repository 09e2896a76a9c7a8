"""The user's tables, one for each cluster."""

import pytest

from mpiagg.schedules import Layout
from mpiagg.tables import Origin, Table
from mpiagg.tables.cache import cached, folder, read_cached, write_cached
from mpiagg.tables.files import text_of

NODE = Layout.of([2])


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def table(layout=NODE):
    return Table("t", (), Origin(layout, "MPICH 5", {}))


def test_there_is_a_file_for_each_cluster(cache):
    clusters = [
        (NODE, "MPICH 5", ["a"]),
        (Layout.of([1, 1]), "MPICH 5", ["a"]),
        (NODE, "MPICH 6", ["a"]),
        (NODE, "MPICH 5", ["b"]),
        (NODE, "MPICH 5", ["a", "b"]),
    ]
    assert len({cached(*cluster) for cluster in clusters}) == len(clusters)
    assert cached(*clusters[-1]) == cached(NODE, "MPICH 5", ["b", "a"])
    assert cached(*clusters[0]).parent == folder() == cache / "mpiagg" / "tuning"


def test_without_a_cache_of_its_own_it_is_in_the_home(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder() == tmp_path / ".cache" / "mpiagg" / "tuning"


def test_what_is_written_is_read():
    path = cached(NODE, "MPICH 5", [])
    assert read_cached(path, NODE) == b""
    for _ in range(2):
        write_cached(path, table())
        assert read_cached(path, NODE).decode() == text_of(table())
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is not JSON"),
        (b"{", "it is not JSON"),
        (b"[]", "it must be an object"),
        (text_of(table(Layout.of([1, 1]))).encode(), "it is not of layout"),
        (text_of(Table("t", ())).encode(), "it is not of layout"),
        (b"\x80\x04", "it is not JSON"),
    ],
)
def test_what_is_no_table_of_the_layout_is_told_and_left(content, words):
    path = cached(NODE, "MPICH 5", [])
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match=f"cannot be used: tuning table .*{words}"):
        assert read_cached(path, NODE) == b""


def test_what_cannot_be_written_is_told(cache):
    (cache / "mpiagg").write_text("no folder")
    with pytest.warns(RuntimeWarning, match="is not kept for the next job"):
        write_cached(cached(NODE, "MPICH 5", []), table())
