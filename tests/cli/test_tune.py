"""``mpiagg tune``: from measured times to rows, the command, and the table that it writes in use."""

import json
import re

import pytest
from click.testing import CliRunner
from support import on_device

from mpiagg.cli import main
from mpiagg.launch import start as launch
from mpiagg.plans.staging import LEAST_COST
from mpiagg.schedules import Collective, Layout, algorithms
from mpiagg.tables import Choice, Memory, Origin, Row, Spread, Table
from mpiagg.tables.files import read_table, text_of


@pytest.fixture
def invoke(monkeypatch):
    """Return a function that runs the command in this process, and returns its exit status and output."""
    for variable in (*launch.launchers.VARIABLES, "MPIAGG_TUNING", "MPIAGG_ALGORITHM"):
        monkeypatch.delenv(variable, raising=False)

    def invoke(*arguments, **environment):
        done = CliRunner(env={"COLUMNS": "200", **environment}).invoke(main, ["tune", *arguments])
        return done.exit_code, " ".join(done.output.split())

    return invoke


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give -o FILE to measure and save, or --quick, or --show to print what would be chosen"),
        (["--quick", "-o", "t.json"], "-o FILE and --quick exclude each other"),
        (["--quick", "--time", "300"], "--time and --quick exclude each other"),
        (["-o", "/absent/t.json"], "folder '/absent' does not exist"),
        (["--show", "-o", "t.json"], "--show measures nothing that could be saved"),
        (["-o", "t.json", "--nodes", "2"], "--table, --nodes and --library are for --show"),
        (["-o", "t.json", "-m", "bees"], "Invalid value for '-m' / '--message-size': 'bees' is not a size"),
        (["-o", "t.json", "-d", "gpu"], "'gpu' is no device"),
        (["--show", "-d", "cuda"], "--show measures nothing, on no device"),
        (["-o", "t.json", "--time", "0"], "--time"),
        (["--show", "--collective", "bees"], "'bees' is not one of"),
        (["--show", "-n", "100000"], "100000 is not in the range"),
        (["--show", "--nodes", "bees"], "'bees' is no layout of nodes"),
        (["--show", "--nodes", "300x300"], "at most 65,536 ranks, not 90,000"),
        (["--show", "-n", "3", "--nodes", "2x2"], "is a layout of 4 ranks, not of 3"),
        (["--show", "--table", "absent.json"], "tuning table 'absent.json': it cannot be read"),
    ],
)
def test_bad_arguments_are_told(invoke, arguments, words):
    status, output = invoke(*arguments)
    assert status in (1, 2)
    assert words in output


def test_a_bad_environment_is_told(invoke):
    assert invoke("--show", MPIAGG_ALGORITHM="rung") == (
        1,
        f"Error: MPIAGG_ALGORITHM: unknown algorithm 'rung'; known: {', '.join(algorithms())}",
    )


def test_the_default_is_shown_with_prices(invoke):
    status, output = invoke("--show", "-n", "4", "--nodes", "4", "--collective", "allreduce", "-m", "1K:64K")
    assert status == 0
    assert "allreduce, 4 ranks, nodes: 4 x 1" in output
    assert "1,024 any recursive_doubling row" in output
    assert "of the default table the model says recursive_doubling 2" in output
    assert "65,536 any circulant row" in output


def test_memory_is_told_where_it_matters(invoke):
    _, output = invoke("--show", "--collective", "reduce", "-m", "1K:1K")
    assert "reduce, 4 ranks, nodes: 1 x 4" in output
    assert "1,024 shared shared row" in output
    assert "1,024 messages bine row" in output


def test_every_collective_is_shown_even_for_one_rank(invoke):
    status, output = invoke("--show", "-n", "1", "-m", "64:64")
    assert status == 0
    assert all(f"{collective.value}, 1 ranks" in output for collective in Collective)
    assert "there is nobody else" in output


def test_names_of_algorithms_are_whole_in_80_columns(invoke):
    _, output = invoke("--show", "--collective", "allreduce", "-m", "64:64", COLUMNS="80")
    assert re.search(r"recursive_doubling \d+\.\d us", output)


def test_the_choice_is_shown_for_a_library(invoke):
    """A row of the default table is for Open MPI alone."""
    shown = {}
    for library in ("MPICH", "Open MPI"):
        _, output = invoke("--show", "--collective", "alltoall", "-m", "64K:64K", "--library", library)
        assert f"nodes: 1 x 4, {library}" in output
        shown[library] = "shared, or MPI's own native" in output
    assert shown == {"MPICH": False, "Open MPI": True}


def test_what_is_forced_is_shown(invoke):
    _, output = invoke("--show", "-m", "64:64", MPIAGG_ALGORITHM="recursive_doubling")
    assert "64 any recursive_doubling MPIAGG_ALGORITHM it is forced" in output
    assert "64 shared shared row" in output  # where it does not serve


@pytest.fixture
def table(tmp_path):
    """Return the path of a table."""
    times = {1024: {"ring": 2e-6, "tree": 1e-6, "direct": 3e-6, "tree, 2 lanes": 4e-6}}
    row = Row(Collective.ALLREDUCE, Choice("tree", 2), 4096, 4, Spread.ONE_NODE, None, times)
    (tmp_path / "t.json").write_text(text_of(Table("", (row,), Origin(Layout.of([4]), "MPICH", {}))))
    return str(tmp_path / "t.json")


@pytest.mark.parametrize("how", ["option", "environment"])
def test_a_table_is_shown_with_its_times(invoke, table, how):
    arguments = ["--show", "--collective", "allreduce", "-m", "2K:64K"]
    if how == "option":
        status, output = invoke(*arguments, "--table", table)
    else:
        status, output = invoke(*arguments, MPIAGG_TUNING=table)
    assert status == 0
    assert "2,048 any tree, 2 lanes rows[0] of" in output
    assert "measured at 1,024 B: tree, 2 lanes 4.0 us; tree 1.0 us; ring 2.0 us" in output  # its own time first
    assert re.search(r"32,768 shared shared rows\[\d+\] of the default table", output)  # what the table has no row for


def test_what_was_not_timed_is_not_explained_by_the_time_of_another(invoke, tmp_path):
    times = {1024: {"ring": 2e-6, "direct": 3e-6}}
    row = Row(Collective.ALLREDUCE, Choice("tree"), 4096, 4, Spread.ONE_NODE, None, times)
    (tmp_path / "t.json").write_text(text_of(Table("", (row,), Origin(Layout.of([4]), "MPICH", {}))))
    _, output = invoke("--show", "--collective", "allreduce", "-m", "2K:2K", "--table", str(tmp_path / "t.json"))
    assert "measured at 1,024 B: tree was not timed; ring 2.0 us; direct 3.0 us" in output


def test_a_table_is_not_shown_for_another_layout(invoke, table):
    assert (
        "was measured on another layout: 1 x 4, and this job is 1 x 8" in invoke("--show", "--table", table, "-n8")[1]
    )
    assert "another layout: 1 x 4, and this job is 2 x 2" in invoke("--show", "--table", table, "--nodes", "2x2")[1]


def test_a_library_that_no_row_is_of_is_told_of(invoke, table):
    words = "No row was measured with mpihc, only with"
    arguments = ("--show", "--collective", "scan", "-m", "2K:2K", "--table", table, "--library")
    assert words in invoke(*arguments, "mpihc")[1]
    assert words not in invoke(*arguments, "MPICH")[1]


# -- from times to rows, in a process of its own, since it loads MPI


ROWS = """
import math, sys
from mpiagg.benchmarks.tuner import OPEN, Candidate, candidates, chosen, preferred, rows_of, variants
from mpiagg.schedules import Collective, Layout
from mpiagg.tables import Choice, Memory, Spread
ring, tree, shared, lanes = Choice("ring"), Choice("tree"), Choice("shared"), Choice("ring", 2)

def same(found, expected):
    if found != expected:
        raise AssertionError(f"{found} is not {expected}")

# What is usual stays unless another is 3 % faster; then the choice before, and then the simplest.
same(preferred({ring: 1.02, tree: 1.0}, [ring]), ring)
same(preferred({ring: 1.04, tree: 1.0}, [ring]), tree)
same(preferred({ring: 1.04, tree: 1.0, shared: 1.01}, [ring, shared]), shared)
same(preferred({lanes: 1.0, tree: 1.02, ring: 1.01}, []), ring)
same(preferred({ring: 1.0}, [Choice("direct")]), ring)  # what is usual was not measured

# What is best in registered memory is taken there, and for other arrays what is best by messages, if that is faster.
def of_both(registered, unregistered, **messages):
    both = {Candidate(shared): unregistered, Candidate(shared, True): registered}
    return both | {Candidate(Choice(name)): taken for name, taken in messages.items()}
mixed = shared._replace(unregistered="ring")
same(chosen(of_both(1.0, 2.0, ring=3.0), [tree], apart=True), shared)
same(chosen(of_both(1.0, 4.0, ring=3.0), [tree], apart=False), shared)
same(chosen(of_both(1.0, 4.0, ring=3.0, tree=5.0), [tree], apart=True), mixed)
same(chosen(of_both(1.0, 3.05, ring=3.0), [mixed], apart=True), mixed)
same(chosen(of_both(1.0, 3.05, ring=3.0), [shared], apart=True), shared)  # what is usual stays here, too
same(chosen(of_both(1.0, 3.0, ring=2.95), [mixed], apart=True), mixed)
same(chosen(of_both(1.0, 2.0) | {Candidate(lanes): 1.5}, [], apart=True), shared)  # other lanes cannot be said
same(chosen(of_both(4.0, 4.0, ring=3.0), [shared], apart=True), ring)
same(chosen({Candidate(shared): 1.0, Candidate(ring): 1.01}, [mixed], apart=True), ring)  # never in place

# One node: two kinds of memory; neighbours that agree are one row; limits lie in the middle.
node = Layout.of([2])
def times(**seconds):
    return {Candidate(Choice(name)): taken for name, taken in seconds.items()}
measured = {
    64: times(shared=1.0, tree=2.0, ring=3.0),
    256: times(shared=1.0, tree=2.0, ring=3.0),
    1024: times(shared=3.0, tree=2.0, ring=1.0),
}
rows = rows_of(Collective.ALLREDUCE, node, measured)
same([(r.choice.algorithm, r.nbytes, r.memory) for r in rows], [
    ("shared", 512, Memory.TOGETHER), ("ring", 1024, Memory.TOGETHER),
    ("tree", 512, Memory.NONE), ("ring", 1024, Memory.NONE),
])
same({(r.ranks, r.spread) for r in rows}, {(2, Spread.ONE_NODE)})
same(rows[0].times, {64: {"shared": 1.0, "tree": 2.0, "ring": 3.0}, 256: {"shared": 1.0, "tree": 2.0, "ring": 3.0}})
same(list(rows[2].times[64]), ["tree", "ring"])

# The last row is for all that is longer, if what was measured is long; with a rank a node memory makes no difference.
apart = rows_of(Collective.ALLREDUCE, Layout.of([1, 1]), {OPEN: times(ring=1.0, tree=2.0)})
same([(r.choice.algorithm, r.nbytes, r.memory) for r in apart], [("ring", None, None)])

# What is measured: not what is another by another name, nor long vectors by what sends several times as much.
same("shared" in candidates(Collective.ALLREDUCE, node, 64), True)
same({"shared", "hierarchical"} & set(candidates(Collective.ALLREDUCE, Layout.of([1, 1]), 64)), set())
same("hierarchical" in candidates(Collective.ALLREDUCE, Layout.of([2, 2]), 2**24), True)
long = candidates(Collective.ALLREDUCE, Layout.of([1] * 8), 2**24)
same("ring" in long and "circulant" in long and "tree" not in long and "one_shot" not in long, True)
same(list(variants(ring, 64, node)), [ring])
same([one.lanes for one in variants(ring, 2**24, node)], [1, 2, 4, 16, 64])
same([one.lanes for one in variants(ring, 2**18, node)], [1, 2, 4])  # whose messages would be too short
same([one.lanes for one in variants(shared, 2**24, node)], [1] * 4)

# What goes through memory on a node is no message there; its factors are those of the machine, if that has levels.
radix = Choice("multi_radix")
same([one.lanes for one in variants(radix, 2**24, node)], [1] * 4)
same([one.lanes for one in variants(radix, 2**24, Layout.of([1, 1]))], [1, 2, 4, 16, 64])
same(chosen(of_both(1.0, 4.0, ring=3.0, multi_radix=2.0), [tree], apart=True), mixed)
(kept,) = (row for row in rows_of(Collective.ALLREDUCE, node, {64: times(multi_radix=1.0, ring=2.0)})
           if row.memory is Memory.NONE)
same(kept.choice, ring)
same(rows_of(Collective.ALLREDUCE, Layout.of([1, 1]), {64: times(multi_radix=1.0, ring=2.0)})[0].choice, radix)
several = {"multi_radix-2x4"}
same(several & set(candidates(Collective.ALLREDUCE, Layout.of([8]), 64, [2, 4])), several)
same(several & set(candidates(Collective.REDUCE, Layout.of([8]), 64, [2, 4])), set())
same(set(candidates(Collective.ALLREDUCE, Layout.of([8]), 64, [8])), set(candidates(Collective.ALLREDUCE, node, 64)))
sys.stdout.write("all right")
"""


def test_rows_come_of_times(run_ranks):
    done = run_ranks(1, ROWS)
    assert (done.out, done.err) == ("all right", "")


# -- the ranks


USE = """
import sys
import numpy as np
from mpi4py import MPI
import mpiagg
from mpiagg.schedules import Collective
from mpiagg.transport import channel_of
from mpiagg.tables import Case, settings
found = settings().found(Case(Collective.ALLREDUCE, 64, channel_of(None).layout))
x = mpiagg.allreduce(np.ones(16, np.float32))
if MPI.COMM_WORLD.rank == 0:
    sys.stdout.write(f"{found.table.name} {x[0]}")
"""


@pytest.mark.parametrize(("ranks", "nodes"), [(2, ""), (3, "2,1")])
def test_a_table_is_measured_and_used(mpiagg, run_ranks, monkeypatch, tmp_path, ranks, nodes):  # noqa: PLR0917 - fixtures
    monkeypatch.setenv("MPIAGG_NODES", nodes)
    path = tmp_path / "t.json"
    # What was chosen before makes no difference, not even where it is broken.
    arguments = ["tune", "-n", str(ranks), "-m", "64:1K", "--time", "0.5", "-o", str(path)]
    done = mpiagg(*arguments, MPIAGG_TUNING="absent.json", MPIAGG_ALGORITHM="rung")
    assert (done.status, done.err) == (0, "")
    assert f"use them with MPIAGG_TUNING={path}" in done.out
    table = read_table(path)
    layout = Layout.of([2, 1]) if nodes else Layout.of([ranks])
    assert table.origin.layout == layout
    assert table.origin.mpi.startswith(launch.mpi_vendor())
    assert {row.collective for row in table.rows} >= {Collective.ALLREDUCE}
    for row in table.rows:
        assert row.spread is Spread.of(layout)
        assert row.memory in set(Memory)
        for times in row.times.values():
            assert str(row.choice._replace(unregistered=None)) in times
    monkeypatch.setenv("MPIAGG_TUNING", str(path))
    done = run_ranks(ranks, USE)
    assert (done.out, done.err) == (f"{path} {ranks}.0", "")
    monkeypatch.delenv("MPIAGG_NODES")
    done = run_ranks(4, USE)
    assert done.status != 0
    assert f"was measured on another layout: {layout}" in done.err


DEVICE = """
from mpiagg.cli import main
main(["tune", "-d", "standin", "--collective", "broadcast", "-m", "64:64", "--time", "0.5", *sys.argv[1:]])
"""

PIECES = """
import numpy as np
import mpiagg
from mpiagg.transport import channel_of
cost = channel_of(None).piece_cost
device = standin.device(0)
x = device.from_host(np.zeros(2**22, np.uint8))
with standin.watch(device_messages=False), mpiagg.broadcast_init(x, out=x, algorithm="tree") as plan:
    standin.LOG.clear()
    plan()
    found = standin.LOG.counts()["out"]
if channel_of(None).rank == 0:
    sys.stdout.write(f"{cost} {found}")
"""


def test_what_a_piece_of_a_staged_message_costs_is_measured_and_used(run_ranks, monkeypatch, tmp_path):
    path = tmp_path / "t.json"
    done = run_ranks(2, on_device(DEVICE), "-o", str(path))
    assert done.status == 0, done.err
    found = read_table(path).piece_cost
    assert LEAST_COST <= found <= 2**24
    assert f"a piece costs as much as {found:,} B" in done.out
    monkeypatch.setenv("MPIAGG_TUNING", str(path))
    for cost, pieces in ((None, 2), (2**22, 2), (2**18, 4)):
        path.write_text(text_of(Table("", (), piece_cost=cost)))
        done = run_ranks(2, on_device(PIECES))
        assert (done.out, done.err) == (f"{cost} {pieces}", "")


def test_messages_that_reach_the_device_have_no_pieces(run_ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("MPIAGG_CUDA_AWARE", "1")
    path = tmp_path / "t.json"
    done = run_ranks(2, on_device(DEVICE), "-o", str(path))
    assert done.status == 0, done.err
    assert "# no message of the device's memory is staged" in done.out
    assert read_table(path).piece_cost is None


def test_a_device_that_is_not_there_is_told(run_ranks, tmp_path):
    done = run_ranks(2, on_device(DEVICE), "-o", str(tmp_path / "t.json"), "-d", "standin:7")
    assert done.status == 1
    assert "Error: " in done.err
    assert "Traceback" not in done.err


LEARN = """
import sys
import numpy as np
from mpi4py import MPI
import mpiagg
from mpiagg.transport import channel_of
comm, plain = mpiagg.Comm(MPI.COMM_WORLD), MPI.COMM_WORLD
rank, size = comm.rank, comm.size
total = size * (size + 1) / 2
def calls(comm, shared, length, turn):
    x = np.full(length, rank + 1.0, np.float32)
    assert (mpiagg.allreduce(x, comm=comm) == total).all()
    x = shared[:length] if turn % 2 else x  # of one kind of memory at a time, on all ranks
    x[:] = rank + 1
    comm.Allreduce(MPI.IN_PLACE, x)
    assert (x == total).all()
    halves = np.full(length, rank + 1.0, np.float16)
    comm.Allreduce(MPI.IN_PLACE, halves)
    assert (halves == total).all()
    x = np.full(length, float(rank))
    comm.Bcast(x, root=size - 1)
    assert (x == size - 1).all()
    least = mpiagg.reduce(x + rank, "min", root=0, comm=comm)
    assert (least is None) == (rank > 0) and (rank or (least == size - 1).all())
    all_of = mpiagg.allgather(np.full(length, rank), comm=comm)
    assert (all_of == np.arange(size)[:, None]).all()
    comm.Scan(np.full(length, 1), ones := np.empty(length, int))
    assert (ones == rank + 1).all()
    with mpiagg.AllReduce(comm, op="sum") as aggregation:
        aggregation.aggregate([x := np.ones(length)])
        assert (x == size).all()
shared = mpiagg.empty(40_000, np.float32, comm=comm)
for turn in range(int(sys.argv[1])):
    for length in (1, 40_000):
        calls(comm, shared, length, turn)
learner = channel_of(comm).learner
quiet = mpiagg.Comm(plain, reproducible=True)
assert channel_of(quiet).learner is None
if rank == 0 and learner is not None:
    learned = {row.collective.value for row in learner.table.rows if row.times} if learner.table else set()
    sys.stdout.write(f"{len(learner._trials)} {' '.join(sorted(learned))}")
"""


@pytest.mark.parametrize(("ranks", "nodes"), [(2, ""), (3, "2,1")])
def test_jobs_learn_from_their_own_calls(run_ranks, monkeypatch, tmp_path, ranks, nodes):
    monkeypatch.setenv("MPIAGG_NODES", nodes)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MPIAGG_TUNING", "learn")
    done = run_ranks(ranks, LEARN, "1")
    assert (done.status, done.err) == (0, "")
    tried, *learned = done.out.split()
    assert int(tried) > 0
    assert learned == []
    assert not (tmp_path / "cache").exists()
    done = run_ranks(ranks, LEARN, "100")
    assert (done.status, done.err) == (0, "")
    assert done.out == "0 allgather allreduce broadcast reduce scan"
    (path,) = (tmp_path / "cache" / "mpiagg" / "tuning").iterdir()
    table, text = read_table(path), path.read_text()
    assert table.origin.layout == (Layout.of([2, 1]) if nodes else Layout.of([ranks]))
    registered = [name for row in table.rows for times in row.times.values() for name in times if "registered" in name]
    assert bool(registered) is not bool(nodes)
    # The next job has learned that already.
    done = run_ranks(ranks, LEARN, "1")
    assert (done.status, done.err) == (0, "")
    assert done.out == "0 allgather allreduce broadcast reduce scan"
    assert path.read_text() == text
    path.write_text("{")
    done = run_ranks(ranks, LEARN, "1")
    assert done.status == 0
    assert done.err.count("what was learned before cannot be used") == 1


KEPT = """
import sys
import numpy as np
import mpiagg
from mpiagg.transport import channel_of
channel = channel_of(None)
rank, size = channel.rank, channel.size

def twice(collective, length):
    # A call that one rank has kept and another resolves anew, after others like it were learned.
    plain, strided = np.ones(length, np.int64), np.ones(2 * length, np.int64)[::2]
    for x in (plain, strided if rank == 1 else plain):
        y = getattr(mpiagg, collective)(x)
        assert y is None or (y == (rank + 1 if collective == "scan" else size)).all(), (collective, length)

for collective in ("allreduce", "reduce", "scan"):
    for length in (2500, 5000, 12_500):  # two of one power of 4, on both sides of 32 KiB, and a longer one
        getattr(mpiagg, collective)(np.ones(length, np.int64))
    for turn in range(200):
        getattr(mpiagg, collective)(np.ones(12_500, np.int64))
        if turn == 20:
            memory = mpiagg.empty(10)
    for length in (2500, 5000, 12_500):
        twice(collective, length)
try:  # an error that all have been told of changes nothing
    mpiagg.allreduce(np.ones(16_384), "nonsense" if rank == 1 else "sum", check=True)
except Exception as error:
    assert isinstance(error, ValueError if rank == 1 else mpiagg.MismatchError)
for _ in range(60):
    assert (mpiagg.allreduce(np.ones(16_384)) == size).all()
values = [np.random.default_rng(each).standard_normal(5000) for each in range(size)]
own = mpiagg.allreduce(values[rank], reproducible=True)
assert own.tobytes() == mpiagg.simulate(values)[rank].tobytes()
sys.stdout.write("k" if rank else "o")
"""


def test_ranks_that_have_kept_other_calls_learn_the_same(run_ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MPIAGG_TUNING", "learn")
    for _ in range(2):  # the second time with what the first has learned
        done = run_ranks(2, KEPT)
        assert (done.status, sorted(done.out), done.err) == (0, ["k", "o"], "")


CROWDED = """
import sys
import numpy as np
import mpiagg
from mpiagg.transport import channel_of, kept
kept.MOST_BYTES = 1  # so that each plan takes the room of all others, also of the call that it belongs to
x = mpiagg.empty(300_000, "f4")
x[...] = 1
comm = mpiagg.Comm(channel_of(None).comm)
y = np.zeros_like(x)
for _ in range(60):
    for name in ("allreduce", "reduce_scatter"):
        assert (getattr(mpiagg, name)(x) == comm.size).all()
    comm.Allreduce(x.copy(), y)
    assert (y == comm.size).all()
sys.stdout.write("k" if comm.rank else "o")
"""


def test_what_is_tried_is_not_given_back_while_it_runs(run_ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MPIAGG_TUNING", "learn")
    done = run_ranks(2, CROWDED)
    assert (done.status, sorted(done.out), done.err) == (0, ["k", "o"], "")


def test_without_being_told_to_nothing_is_learned(run_ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = run_ranks(2, LEARN, "2")
    assert (done.status, done.out, done.err) == (0, "", "")
    assert not (tmp_path / "cache").exists()


def test_a_quick_table_is_kept_for_jobs_that_learn(mpiagg, run_ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = mpiagg("tune", "--quick", "-m", "64:256", "--collective", "allreduce")
    assert (done.status, done.err) == (0, "")
    (path,) = (tmp_path / "cache" / "mpiagg" / "tuning").iterdir()
    assert f"rows in {path}\n# use them with MPIAGG_TUNING=learn" in done.out
    done = mpiagg("tune", "--show", "-m", "64", "--collective", "allreduce", MPIAGG_TUNING="learn", COLUMNS="300")
    assert f"rows[0] of {path}" in done.out
    assert "measured at 64 B" in done.out
    monkeypatch.setenv("MPIAGG_TUNING", "learn")
    done = run_ranks(2, LEARN, "1")
    assert (done.status, done.err) == (0, "")
    assert "allreduce" in done.out.split()


def test_a_quick_table_that_cannot_be_kept_is_an_error(mpiagg):
    done = mpiagg("tune", "--quick", "-m", "64", "--collective", "scan", XDG_CACHE_HOME="/dev/null/cache")
    assert done.status != 0
    assert "cannot be kept in the user's cache; set XDG_CACHE_HOME, or give -o FILE" in done.err
    assert done.out == ""  # nothing was measured


def test_ranks_that_do_not_all_learn_are_told(run_ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = """
import os
rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
if rank == "0":
    os.environ["MPIAGG_TUNING"] = "learn"
import numpy as np, mpiagg, sys
try:
    mpiagg.allreduce(np.ones(3))
except mpiagg.MismatchError as error:
    sys.stdout.write(str(error) if rank == "0" else "")
"""
    done = run_ranks(2, script)
    assert "and learns" in done.out


def test_what_there_is_no_time_for_is_left_out(mpiagg, tmp_path):
    path = tmp_path / "t.json"
    done = mpiagg("tune", "-m", "64:1M", "--time", "0.001", "--collective", "allreduce", "-o", str(path))
    assert done.status == 0, done.err
    assert "# out of time: 7 of 8 are left out" in done.out
    limits = {row["bytes"] for row in json.loads(path.read_text())["rows"]}
    assert limits == {64}
