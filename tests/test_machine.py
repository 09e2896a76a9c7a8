"""The levels of a machine and its adapters, as files say them."""

import pytest

from mpiagg.common import machine as module
from mpiagg.common.machine import PROCESSORS, has_fabric, levels


@pytest.fixture
def machine(tmp_path):
    """Return a function that writes what Linux tells of a machine: the socket and the cache of each processor."""

    def write(*processors):
        for number, (socket, shared) in enumerate(processors):
            folder = tmp_path / f"cpu{number}"
            (folder / "topology").mkdir(parents=True)
            (folder / "topology" / "physical_package_id").write_text(f"{socket}\n")
            for level, by in ((1, str(number)), (3, shared), (2, str(number))):
                cache = folder / "cache" / f"index{level}"
                cache.mkdir(parents=True)
                (cache / "level").write_text(f"{level}\n")
                (cache / "shared_cpu_list").write_text(f"{by}\n")
        (tmp_path / "cpufreq").mkdir()
        return tmp_path

    return write


EPYC = [(cache // 2, f"{2 * cache}-{2 * cache + 1},{8 + 2 * cache}") for cache in range(4) for _ in range(3)]
"""Two sockets, each with two caches."""


@pytest.mark.parametrize(
    ("ranks", "factors"), [(4, [2, 2]), (8, [2, 2, 2]), (24, [6, 2, 2]), (2, []), (6, []), (1, [])]
)
def test_ranks_are_factored_by_caches_and_sockets(machine, ranks, factors):
    assert levels(ranks, machine(*EPYC)) == factors


@pytest.mark.parametrize(
    ("processors", "factors"),
    [
        ([(0, "0-1"), (0, "0-1")], [12]),
        ([(0, "0"), (1, "1")], [6, 2]),
        ([(0, "0"), (0, "1"), (0, "2")], [4, 3]),
        ([(0, "0"), (0, "1"), (1, "2")], []),  # one socket has more caches
        ([(0, "0-1"), (1, "0-1")], []),  # a cache of two sockets
        ([(-1, "0"), (-1, "1")], []),
        ([("", "0")], []),
        ([(0, "")], []),
        ([(0, "0-")], []),
        ([(0, "0, 1")], []),
        ([(0, "9" * 10_000)], []),
        ([], []),
    ],
)
def test_what_is_uneven_or_no_number_has_no_levels(machine, processors, factors):
    assert levels(12, machine(*processors)) == factors


def test_processors_that_are_off_do_not_count(machine):
    there = machine(*EPYC)
    (there / "cpu12").mkdir()
    assert levels(8, there) == [2, 2, 2]


def test_files_that_cannot_be_read_tell_nothing(machine, tmp_path):
    assert levels(8, tmp_path / "absent") == []
    there = machine(*EPYC)
    (there / "cpu3" / "topology" / "physical_package_id").write_bytes(b"\xff\xfe")
    assert levels(8, there) == []
    (there / "cpu3" / "topology" / "physical_package_id").unlink()
    assert levels(8, there) == []


def test_this_machine_has_levels_or_none():
    assert all(factor > 1 for factor in levels(64, PROCESSORS))


@pytest.mark.parametrize("adapter", [None, "infiniband/mlx5_0", "cxi/cxi0"])
def test_adapters_that_are_used_without_tcp(tmp_path, monkeypatch, adapter):
    monkeypatch.setattr(module, "FABRICS", [f"{tmp_path}/infiniband", f"{tmp_path}/cxi"])
    (tmp_path / "infiniband").mkdir()  # there may be none in it
    if adapter:
        (tmp_path / adapter).mkdir(parents=True)
    assert has_fabric() == bool(adapter)
