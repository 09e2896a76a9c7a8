"""The user's tables, one for each cluster."""

import re

import pytest

from mpiagg.schedules import Collective, Layout
from mpiagg.tables import Choice, Origin, Row, Table
from mpiagg.tables.cache import cached, folder, read_cached, write_cached
from mpiagg.tables.files import read_table, text_of

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
    assert read_cached(path, NODE) == (b"", "")
    for _ in range(2):
        write_cached(path, table())
        assert read_cached(path, NODE) == (text_of(table()).encode(), "")
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_what_others_have_learned_of_other_collectives_stays():
    path = cached(NODE, "MPICH 5", [])
    reduce, broadcast = (Row(each, Choice("tree")) for each in (Collective.REDUCE, Collective.BROADCAST))
    newer = Row(Collective.REDUCE, Choice("ring"))
    for rows in ((reduce, broadcast), (newer,)):
        write_cached(path, Table("t", rows, Origin(NODE, "MPICH 5", {})))
    assert read_table(path).rows == (newer, broadcast)


def test_what_others_have_measured_of_a_device_stays():
    path = cached(NODE, "MPICH 5", [])
    for cost, kept in ((2**20, 2**20), (None, 2**20), (2**21, 2**21)):
        write_cached(path, Table("t", (), Origin(NODE, "MPICH 5", {}), piece_cost=cost))
        assert read_table(path).piece_cost == kept


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is not JSON"),
        (b"{", "it is not JSON"),
        (b"[]", "it must be an object"),
        (text_of(table(Layout.of([1, 1]))).encode(), "is not of layout"),
        (text_of(Table("t", ())).encode(), "is not of layout"),
        (b"\x80\x04", "it is not JSON"),
    ],
)
def test_what_is_no_table_of_the_layout_is_told_and_left(content, words):
    path = cached(NODE, "MPICH 5", [])
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    data, fault = read_cached(path, NODE)
    assert data == b""
    assert re.match(f"tuning table .*{words}", fault)


def test_what_cannot_be_written_is_told(cache):
    (cache / "mpiagg").write_text("no folder")
    with pytest.warns(RuntimeWarning, match="is not kept"):
        write_cached(cached(NODE, "MPICH 5", []), table())


def test_a_folder_that_cannot_be_looked_at_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 300)))
    path = cached(NODE, "MPICH 5", [])
    data, fault = read_cached(path, NODE)
    assert data == b""
    assert "too long" in fault
    with pytest.warns(RuntimeWarning, match="is not kept"):
        write_cached(path, table())


def test_nothing_is_left_of_what_could_not_be_put_in_its_place():
    path = cached(NODE, "MPICH 5", [])
    path.mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="is not kept"):
        write_cached(path, table())
    assert list(path.parent.iterdir()) == [path]
