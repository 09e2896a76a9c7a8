"""All ranks choose by the same table, or none goes on."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from support import refused

import mpiagg
from mpiagg.schedules import Collective, Layout
from mpiagg.tables import Choice, Origin, Row, Table
from mpiagg.tables.files import text_of
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi


@pytest.fixture
def folder():
    """Return a folder of this rank's own; pytest's would be cleaned up by all ranks at once."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def table(folder, algorithm="tree", layout=None):
    """Return a file with a table of one row."""
    path = folder / f"{algorithm}.json"
    origin = None if layout is None else Origin(layout, "MPICH", {})
    path.write_text(text_of(Table("", (Row(Collective.ALLREDUCE, Choice(algorithm)),), origin)))
    return path


def works(comm, size):
    """Show that collectives work on the communicator."""
    assert mpiagg.allreduce(np.ones(3), comm=comm).tolist() == [size] * 3


@pytest.fixture
def inputs(size):
    """Return the vectors of all ranks, whose sum depends on the order."""
    return [np.random.default_rng(peer).normal(size=50) * 10.0 ** (5 * peer) for peer in range(size)]


@pytest.mark.parametrize("how", ["table", "algorithm"])
def test_ranks_and_simulation_take_what_the_environment_says(comm, rank, environment, folder, inputs, how):  # noqa: PLR0917 - fixtures
    named = mpiagg.allreduce(inputs[rank], comm=comm, algorithm="tree")
    if how == "table":
        environment(MPIAGG_TUNING=table(folder, layout=channel_of(comm).layout))
    else:
        environment(MPIAGG_ALGORITHM="tree")
    duplicate = comm.Dup()
    assert mpiagg.allreduce(inputs[rank], comm=duplicate).tobytes() == named.tobytes()
    assert mpiagg.simulate(inputs)[rank].tobytes() == named.tobytes()
    with mpiagg.allreduce_init(inputs[rank], comm=duplicate) as plan:
        assert plan().tobytes() == named.tobytes()
    duplicate.Free()


@pytest.mark.parametrize("odd", ["first", "last"])
@pytest.mark.parametrize("what", ["table", "other table", "algorithm"])
def test_ranks_that_would_choose_otherwise_are_refused(comm, size, rank, environment, folder, odd, what):  # noqa: PLR0917 - fixtures
    variables = {"other table": {"MPIAGG_TUNING": table(folder, "ring")}}.get(what, {})
    if rank == (0 if odd == "first" else size - 1) and size > 1:
        others = {"algorithm": {"MPIAGG_ALGORITHM": "tree"}}
        variables = others.get(what, {"MPIAGG_TUNING": table(folder)})
    environment(**variables)
    duplicate = comm.Dup()
    if size > 1:
        for _ in range(2):
            refused(mpiagg.MismatchError, "ranks disagree: rank", mpiagg.allreduce, np.ones(3), comm=duplicate)
    environment()
    works(duplicate, size)  # nothing was left behind
    duplicate.Free()


def test_tables_of_other_names_and_the_same_content_agree(comm, size, rank, environment, folder):
    path = table(folder)
    environment(MPIAGG_TUNING=path.rename(folder / f"{rank}.json"))
    duplicate = comm.Dup()
    works(duplicate, size)
    duplicate.Free()


@pytest.mark.parametrize("where", ["one rank", "all ranks"])
@pytest.mark.parametrize("what", ["absent", "broken", "unknown"])
def test_a_rank_with_bad_settings_holds_nobody_up(comm, size, rank, environment, folder, where, what):  # noqa: PLR0917 - fixtures and cases
    broken = folder / "broken.json"
    broken.write_text("{")
    variables = {
        "absent": {"MPIAGG_TUNING": folder / "absent.json"},
        "broken": {"MPIAGG_TUNING": broken},
        "unknown": {"MPIAGG_ALGORITHM": "rung"},
    }[what]
    mine = where == "all ranks" or rank == size - 1
    environment(**(variables if mine else {}))
    duplicate = comm.Dup()
    words = {"absent": "cannot be read", "broken": "is not JSON", "unknown": "unknown algorithm 'rung'"}[what]
    error = ValueError if mine else mpiagg.MismatchError
    refused(error, words, mpiagg.allreduce, np.ones(3), comm=duplicate)
    refused(error, words, mpiagg.AllReduce, duplicate)
    environment()
    works(duplicate, size)
    duplicate.Free()


def test_a_table_from_another_layout_is_refused_on_all_ranks(comm, size, environment, folder):
    words = rf"was measured on another layout: .*, and this job is {channel_of(comm).layout}; measure one"
    environment(MPIAGG_TUNING=table(folder, layout=Layout.of([size, 1])))
    duplicate = comm.Dup()
    refused(ValueError, words, mpiagg.allreduce, np.ones(3), comm=duplicate)
    # A part of the ranks knows how many there are.
    part = comm.Split(comm.rank % 2, 0)
    refused(ValueError, "was measured on another layout", mpiagg.allreduce, np.ones(3), comm=part)
    part.Free()
    duplicate.Free()


def test_a_part_of_the_ranks_uses_the_table_of_the_job(comm, environment, folder):
    environment(MPIAGG_TUNING=table(folder, layout=channel_of(comm).layout))
    part = comm.Split(comm.rank % 2, 0)
    works(part, part.size)
    # So do all ranks in another order, of which the nodes look otherwise.
    reverse = comm.Split(0, -comm.rank)
    works(reverse, reverse.size)
    part.Free()
    reverse.Free()
