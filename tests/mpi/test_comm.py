"""The communicator: every collective, operator and datatype against the MPI library's own; its class; its end."""

import time
from contextlib import nullcontext

import numpy as np
import pytest
from mpi4py import MPI
from support import call

import mpiagg
from mpiagg.transport import channel_of, kept

pytestmark = pytest.mark.mpi

NATIVE = MPI.COMM_WORLD
SIZE, RANK = NATIVE.size, NATIVE.rank

LOGICAL = (MPI.LAND, MPI.LOR, MPI.LXOR)
BITWISE = (MPI.BAND, MPI.BOR, MPI.BXOR)
NUMERIC = (MPI.SUM, MPI.PROD, MPI.MIN, MPI.MAX)
DEFINED = (
    *[(code, (*NUMERIC, *LOGICAL, *BITWISE)) for code in "bhilqBHILQ"],
    *[(code, NUMERIC) for code in "fdg"],
    *[(code, (MPI.SUM, MPI.PROD)) for code in "FDG"],
    ("?", LOGICAL),
)
"""Which operators MPI defines for the types of C, in NumPy's letters; B is BYTE, which libraries take for numbers."""

PAIRS = {
    "f": MPI.FLOAT_INT,
    "d": MPI.DOUBLE_INT,
    "l": MPI.LONG_INT,
    "i": MPI.INT_INT,
    "h": MPI.SHORT_INT,
    "g": MPI.LONG_DOUBLE_INT,
}

FORMS = ("blocking", "nonblocking", "persistent")


@pytest.fixture
def comm():
    comm = mpiagg.Comm(NATIVE, reproducible=True)
    yield comm
    comm.Free()


def error_class(*arguments):
    """Return the class of the MPI error that a call ends with."""
    try:
        call(*arguments)
    except MPI.Exception as error:
        return error.Get_error_class()
    return MPI.SUCCESS


def values(code, length):
    """Return values of this rank whose sums and products are exact."""
    drawn = np.random.default_rng([RANK, length, ord(code)]).integers(0, 3, length)
    return drawn.astype(code)


@pytest.mark.parametrize("form", FORMS)
def test_every_operator_on_every_type_as_the_library_does_it(comm, carried, form):
    for code, ops in DEFINED:
        x = values(code, 7)
        for op in ops:
            expected, got = np.zeros_like(x), np.zeros_like(x)
            NATIVE.Allreduce(x, expected, op)
            call(comm, form, "Allreduce", x, got, op)
            assert np.array_equal(got, expected), (code, op)
        assert len(carried) == len(ops)
        carried.clear()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", [MPI.MAXLOC, MPI.MINLOC], ids=["maxloc", "minloc"])
def test_pairs_take_the_extreme_value_and_the_lowest_index(comm, carried, form, op):
    for code, datatype in PAIRS.items():
        x = np.zeros(9, np.dtype([("value", code), ("index", "i")], align=True))
        x["value"], x["index"] = values(code, 9), (RANK + np.arange(9)) % SIZE
        expected, got = np.zeros_like(x), np.zeros_like(x)
        NATIVE.Allreduce([x, datatype], [expected, datatype], op)
        call(comm, form, "Allreduce", [x, datatype], [got, datatype], op)
        assert np.array_equal(got, expected), datatype.name
    assert len(carried) == len(PAIRS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["Allreduce", "Reduce", "Reduce_scatter_block", "Scan"])
def test_pairs_beside_registered_memory(comm, form, name):
    mpiagg.empty(1, comm=comm)
    length = 40_000
    for code, datatype in PAIRS.items():
        x = np.zeros(length * SIZE, np.dtype([("value", code), ("index", "i")], align=True))
        x["value"], x["index"] = (np.arange(x.size) * (RANK + 7)) % 50, RANK
        part = length if name == "Reduce_scatter_block" else x.size
        expected, got = np.zeros_like(x), np.zeros_like(x)
        getattr(NATIVE, name)([x, datatype], [expected[:part], datatype], MPI.MINLOC)
        call(comm, form, name, [x, datatype], [got[:part], datatype], MPI.MINLOC)
        assert np.array_equal(got, expected), datatype.name


def collectives(length, root):
    """Return every collective's name, lengths of input and output, where an input in place lies, and arguments."""
    counts = [(length + rank) % 4 for rank in range(SIZE)]
    yield "Allreduce", length, length, length, (MPI.SUM,)
    yield "Reduce", length, length, length, (MPI.SUM, root)
    yield "Allgather", length, SIZE * length, SIZE * length, ()
    yield "Reduce_scatter_block", SIZE * length, length, SIZE * length, (MPI.SUM,)
    yield "Reduce_scatter", sum(counts), counts[RANK], sum(counts), (counts, MPI.SUM)


@pytest.mark.parametrize("form", FORMS)
def test_every_collective_from_buffer_to_buffer(comm, carried, form):
    made = 0
    for code in "idF":
        for length in (0, 1, 5):
            for name, sent, received, _, arguments in collectives(length, length % SIZE):
                x, expected, got = values(code, sent), np.full(received, 99, code), np.full(received, 99, code)
                getattr(NATIVE, name)(x, expected, *arguments)
                call(comm, form, name, x, got, *arguments)
                assert np.array_equal(x, values(code, sent)), name
                assert np.array_equal(got, expected), (name, code, length)
                made += 1
    assert len(carried) == made


@pytest.mark.parametrize("form", FORMS)
def test_every_collective_in_place(comm, carried, form):
    made = 0
    for code in "id":
        for length in (1, 5):
            root = length % SIZE
            for name, _, received, both, arguments in collectives(length, root):
                expected, got = values(code, both), values(code, both)
                for each, buffer in ((NATIVE, expected), (comm, got)):
                    outside = name == "Reduce" and root != RANK
                    how = form if each is comm else "blocking"
                    call(each, how, name, buffer if outside else MPI.IN_PLACE, None if outside else buffer, *arguments)
                # What a reduce-scatter leaves behind its result is undefined.
                assert np.array_equal(got[:received], expected[:received]), (name, code, length)
                made += 1
    assert len(carried) == made


@pytest.mark.parametrize("form", FORMS)
def test_every_root(comm, carried, form):
    for root in range(SIZE):
        x, out = np.arange(4) + RANK, np.full(4, -1)
        call(comm, form, "Reduce", x, out if root == RANK else None, MPI.SUM, root)
        call(comm, form, "Bcast", x, root)
        assert np.array_equal(out, SIZE * np.arange(4) + sum(range(SIZE)) if root == RANK else np.full(4, -1))
        assert np.array_equal(x, np.arange(4) + root)
    assert carried == ["reduce", "broadcast"] * SIZE


@pytest.mark.parametrize("length", [20_000, 100_003])
def test_long_vectors_stay_where_they_are(comm, carried, length):
    x, total = np.arange(length) + float(RANK), SIZE * np.arange(length) + float(sum(range(SIZE)))
    out = np.empty(length)
    for _ in range(2):
        comm.Allreduce(x, out)
        assert np.array_equal(out, total)
        comm.Reduce(x, out, root=SIZE - 1)
        both = x.copy()
        comm.Allreduce(MPI.IN_PLACE, both)
        assert np.array_equal(both, total)
        comm.Bcast(both if RANK else total)
        assert np.array_equal(both, total)
        everything = np.empty((SIZE, length))
        comm.Allgather(x, everything)
        assert all(np.array_equal(row, np.arange(length) + other) for other, row in enumerate(everything))
    assert len(carried) == 10


@pytest.mark.parametrize("form", FORMS)
def test_a_barrier_holds_until_all_have_come(comm, form):
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    for late in range(SIZE):
        request = None if late == RANK else comm.irecv(source=late)
        if late == RANK:
            for other in range(SIZE):
                if other != RANK:
                    comm.send("here", other)
        call(comm, form, "Barrier")
        if request is not None:
            assert request.wait() == "here"


@pytest.mark.parametrize("form", FORMS)
def test_numbers_overflow_without_a_warning(comm, carried, form):
    for largest, op in [(np.finfo("d").max, MPI.SUM), (np.finfo("f").max, MPI.PROD)]:
        x, out = np.full(5, largest), np.zeros(5, type(largest))
        call(comm, form, "Allreduce", x, out, op)
        assert np.isinf(out).all() == (SIZE > 1)
    assert carried == ["allreduce"] * 2


def test_counts_of_a_reduce_scatter_are_asked_for(comm, carried):
    x = np.arange(sum(range(1, SIZE + 1)))
    out = np.empty(RANK + 1, x.dtype)
    comm.Reduce_scatter(x, out)
    start = sum(range(1, RANK + 1))
    assert np.array_equal(out, SIZE * x[start : start + RANK + 1])
    assert carried == ["allgather", "reduce_scatter"]


def test_what_is_not_ours_goes_to_the_library(comm, carried):
    def keep_larger(left, right, datatype):
        del datatype
        mine, theirs = np.frombuffer(left, "i8"), np.frombuffer(right, "i8")
        np.maximum(mine, theirs, out=theirs)

    op = MPI.Op.Create(keep_larger, commute=True)
    x, out = np.array([RANK, -RANK]), np.empty(2, int)
    comm.Allreduce(x, out, op)
    assert out.tolist() == [SIZE - 1, 0]
    request = comm.Iallreduce(x, out, op)
    request.Wait()
    op.Free()

    pair = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.INT32_T, MPI.INT64_T]).Commit()
    pairs = np.array([(RANK, -RANK)], np.dtype("i4,i8", align=True))
    comm.Bcast([pairs, 1, pair], root=SIZE - 1)
    assert pairs.tolist() == [(SIZE - 1, 1 - SIZE)]
    pair.Free()
    assert comm.allreduce(RANK) == sum(range(SIZE))
    assert comm.scan(1) == RANK + 1
    assert not carried


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Allreduce", (np.zeros(2), np.zeros(3))),
        ("Allreduce", (np.zeros(2), np.zeros(2, "f4"))),
        ("Allreduce", (np.zeros(2), b"12345678")),
        ("Allreduce", (np.zeros(2), None)),
        ("Allreduce", (np.zeros(4)[::2], np.zeros(2))),
        ("Allreduce", (np.zeros(2, object), np.zeros(2, object))),
        ("Allreduce", ([np.zeros(2), 1, 2, 3, MPI.DOUBLE], np.zeros(2))),
        ("Allreduce", ([np.zeros(2), -1, MPI.DOUBLE], np.zeros(2))),
        ("Allreduce", ([bytes(7), MPI.INT], [bytearray(7), MPI.INT])),
        ("Allreduce", ([np.zeros(2), "no type"], np.zeros(2))),
        ("Allreduce", ([np.zeros(2), MPI.DATATYPE_NULL], np.zeros(2))),
        ("Allreduce", (np.zeros(2), np.zeros(2), "sum")),
        ("Allreduce", (np.zeros(2), np.zeros(2), MPI.OP_NULL)),
        ("Reduce", (np.zeros(2), np.zeros(2), MPI.SUM, SIZE)),
        ("Reduce", (np.zeros(2), np.zeros(2), MPI.SUM, -10)),
        ("Reduce", (np.zeros(2), np.zeros(2), MPI.SUM, "0")),
        ("Bcast", (np.zeros(2), SIZE)),
        ("Bcast", (12, 0)),
        ("Allgather", (np.zeros(2), [bytearray(7), MPI.INT])),
        ("Allgather", (np.zeros(2), bytes(16 * SIZE))),
        ("Reduce_scatter_block", (np.zeros(2 * SIZE), np.zeros(3))),
        ("Reduce_scatter", (np.zeros(2 * SIZE), np.zeros(2), [2] * (SIZE + 1))),
        ("Reduce_scatter", (np.zeros(2 * SIZE), np.zeros(2), [1] * SIZE)),
        ("Reduce_scatter", (np.zeros(2 * SIZE), np.zeros(3), [2] * SIZE)),
    ],
)
def test_mpi4py_refuses_in_its_own_words(comm, carried, name, arguments):
    refused = []
    for each in (NATIVE, comm):
        with pytest.raises(Exception) as caught:
            getattr(each, name)(*arguments)
        # The library's own words name the communicator.
        mpis = isinstance(caught.value, MPI.Exception)
        refused.append((type(caught.value), caught.value.Get_error_class() if mpis else str(caught.value)))
    assert refused[0] == refused[1]
    assert not carried


def read_only(array):
    array.flags.writeable = False
    return array


LAYOUTS = {
    "as it was": np.zeros,
    "read-only": lambda n, code: read_only(np.zeros(n, code)),
    "every second": lambda n, code: np.zeros(2 * n, code)[::2],
    "by columns": lambda n, code: np.zeros((n // 2, 2), code, order="F"),
    "a view": lambda n, code: np.zeros(n + 1, code)[1:],
    "of a class of its own": lambda n, code: np.zeros(n, code).view(np.recarray),
}


ON_SOME_RANKS = (("Bcast", "read-only"), ("Reduce", "read-only"), ("Reduce", "every second"))
"""What is an error on some ranks alone, for which others would wait."""


def outcome(comm, name, make, n, code):
    """Return what a method does with arrays of some layout: the error's type, or all that it has written."""
    whole, part = make(SIZE * n, code), make(n, code)
    if whole.flags.writeable:
        whole[...] = np.arange(whole.size).reshape(whole.shape) + RANK
        part[...] = np.arange(part.size).reshape(part.shape) + 10 * RANK
    arguments = {
        "Bcast": (whole, SIZE - 1),
        "Allgather": (part, whole),
        "Reduce": (part.copy(), part, MPI.SUM, 0),
        "Reduce_scatter_block": (whole, part, MPI.SUM),
    }[name]
    try:
        getattr(comm, name)(*arguments)
    except Exception as error:  # noqa: BLE001 - whichever the other raises, too
        return type(error)
    return whole.tolist(), part.tolist()


@pytest.mark.few_ranks
@pytest.mark.parametrize("code", "ld")
@pytest.mark.parametrize("n", [4, 3000])
@pytest.mark.parametrize("name", ["Bcast", "Allgather", "Reduce", "Reduce_scatter_block"])
def test_what_is_kept_for_some_arrays_is_not_taken_for_others(name, n, code):
    for first in ("as it was", "by columns", "a view"):
        comm = mpiagg.Comm(NATIVE)
        for layout in (first, *LAYOUTS, first):
            if (name, layout) in ON_SOME_RANKS and SIZE > 1:
                continue
            expected = outcome(NATIVE, name, LAYOUTS[layout], n, code)
            assert outcome(comm, name, LAYOUTS[layout], n, code) == expected, (first, layout)
        comm.Free()


def error_of(comm, name, *arguments):
    """Return the error that a method raises, in words; nothing, if it raises none."""
    try:
        getattr(comm, name)(*arguments)
    except Exception as error:  # noqa: BLE001 - whichever the other raises, too
        return repr(error)
    return ""


@pytest.mark.parametrize("n", [4, 3000, 30_000])
@pytest.mark.parametrize("root", [0, np.int64(0), False, 0.0, "0"])
def test_a_root_is_an_integer_also_where_one_was_kept(n, root):
    comm = mpiagg.Comm(NATIVE)
    x = np.zeros(n)
    for _ in range(2):
        comm.Bcast(x, 0)
        comm.Reduce(x.copy(), x, MPI.SUM, 0)
    for name, arguments in (("Bcast", (x,)), ("Reduce", (x.copy(), x, MPI.SUM))):
        told = [error_of(each, name, *arguments, root) for each in (NATIVE, comm)]
        assert told[0] == told[1]
        assert ("TypeError" in told[0]) == isinstance(root, str)
    comm.Free()


def test_what_leads_to_a_kept_call_may_go_before_it(monkeypatch):
    comm = mpiagg.Comm(NATIVE)
    monkeypatch.setattr(kept, "MOST", 3)
    for turn in range(5):
        for n in (30_000, 30_001, 30_002):
            x = np.full(n, float(RANK + turn))
            out = np.empty(n)
            comm.Reduce(x, out, MPI.SUM, 0)
            assert RANK or (out == sum(range(SIZE)) + SIZE * turn).all()
    assert len(channel_of(comm).calls) <= 3
    comm.Free()


@pytest.mark.parametrize("form", ["blocking", "nonblocking"])
def test_operators_that_mpi_does_not_define_are_left_to_the_library(comm, carried, form):
    for code, op in [("d", MPI.BAND), ("F", MPI.MAX), ("d", MPI.MAXLOC), ("c", MPI.MAX)]:
        x, out = np.zeros(2, code), np.zeros(2, code)
        outcomes = [error_class(each, form, "Allreduce", x, out, op) for each in (NATIVE, comm)]
        assert outcomes[0] == outcomes[1]
    assert not carried


def test_communicators_made_from_ours_are_ours(comm, carried):
    group = comm.group.Incl([0])
    made = [
        comm.Dup(),
        comm.Clone(),
        comm.Dup_with_info(MPI.INFO_NULL),
        comm.Split(RANK % 2, -RANK),
        comm.Split_type(MPI.COMM_TYPE_SHARED),
        comm.Create(group),
        mpiagg.Comm(comm),
    ]
    if RANK == 0:
        made.append(comm.Create_group(group))
    group.Free()
    for twin, request in (comm.Idup(), comm.Idup_with_info(MPI.INFO_NULL)):
        request.Wait()
        made.append(twin)
        assert mpiagg.allreduce(1, comm=twin) == comm.size  # whose first call may be another's than its own
    assert MPI.Comm.Compare(made[0], comm) == MPI.CONGRUENT
    for each in made:
        assert type(each) is mpiagg.Comm
        if each != MPI.COMM_NULL:
            carried.clear()
            total = np.array(1)
            each.Allreduce(MPI.IN_PLACE, total)
            assert total == each.size
            assert carried == ["allreduce"]
            each.Free()
        assert each == MPI.COMM_NULL
    assert comm.Split(MPI.UNDEFINED) == MPI.COMM_NULL


def test_null_communicators():
    assert mpiagg.Comm() == MPI.COMM_NULL
    assert mpiagg.Comm(MPI.COMM_NULL) == MPI.COMM_NULL
    for null in (mpiagg.Comm(), MPI.Intracomm()):
        for name, arguments in [("Allreduce", (np.zeros(1), np.zeros(1))), ("Bcast", (np.zeros(1),)), ("Barrier", ())]:
            with pytest.raises(MPI.Exception) as caught:
                getattr(null, name)(*arguments)
            assert caught.value.Get_error_class() == MPI.ERR_COMM
    with pytest.raises(TypeError):
        mpiagg.Comm("a string")


def test_the_original_is_left_alone(comm):
    assert comm != NATIVE
    assert NATIVE.Compare(comm) == MPI.CONGRUENT
    comm.Set_name("ours")
    assert NATIVE.Get_name() != "ours"


def test_use_after_free():
    comm = mpiagg.Comm(NATIVE)
    comm.Allreduce(MPI.IN_PLACE, np.zeros(3))
    comm.Free()
    assert comm == MPI.COMM_NULL
    with pytest.raises(MPI.Exception):
        comm.Allreduce(MPI.IN_PLACE, np.zeros(3))
    with pytest.raises(MPI.Exception):
        comm.Free()
    comm.free()


def test_messages_of_the_user_do_not_meet_ours(comm, carried):
    got = np.zeros(1, int)
    wild = comm.Irecv(got, MPI.ANY_SOURCE, MPI.ANY_TAG)
    x = np.full(30, RANK)
    for _ in range(3):
        out = np.empty_like(x)
        comm.Allreduce(x, out)
        assert (out == sum(range(SIZE))).all()
        comm.Iallreduce(x, out).Wait()
        assert not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    assert not wild.Test()
    comm.Barrier()
    comm.Send(np.array([RANK]), (RANK + 1) % SIZE, tag=5)
    status = MPI.Status()
    wild.Wait(status)
    assert (got[0], status.source, status.tag) == ((RANK - 1) % SIZE, (RANK - 1) % SIZE, 5)
    assert len(carried) == 6


@pytest.mark.few_ranks
def test_two_hundred_communicators_made_and_freed():
    for turn in range(200):
        comm = mpiagg.Comm(NATIVE)
        if turn % 20 == 0:
            total = np.array([1.0])
            comm.Allreduce(MPI.IN_PLACE, total)
            comm.Iallreduce(MPI.IN_PLACE, total).Wait()
            assert total == SIZE**2
        comm.Free()


def test_a_plan_that_one_rank_has_left_running_holds_nobody_up(world, rank):
    comm = mpiagg.Comm(world)
    plan = mpiagg.allreduce_init(np.ones(9000, np.float32), comm=comm, algorithm="ring")
    if rank == 0:
        plan.start()
    comm.Free()
    assert comm == MPI.COMM_NULL
    world.Barrier()


@pytest.mark.parametrize("make", [MPI.Intracomm.Dup, mpiagg.Comm], ids=["MPI's", "ours"])
def test_a_communicator_on_which_ranks_have_disagreed_can_be_freed(world, rank, size, make):
    comm = make(world)
    with pytest.raises(mpiagg.MismatchError) if size > 1 else nullcontext():
        mpiagg.allreduce(np.ones(3), "max" if rank == 0 else "sum", comm=comm)
    if rank == 0:
        time.sleep(0.1)  # so that the others have begun to sleep, too, which is where faults are looked at
    comm.Free()
    assert comm == MPI.COMM_NULL
    world.Barrier()


@pytest.mark.parametrize("algorithm", ["native", "tree"])
def test_a_later_communicator_receives_nothing_of_an_earlier_one(world, rank, algorithm):
    for value in (1.0, 2.0):
        comm, x = mpiagg.Comm(world), np.full(3, value + 10 * rank)
        if rank == 0 or value > 1:  # the first time the other ranks do not come
            mpiagg.broadcast(x, out=x, comm=comm, algorithm=algorithm)
        comm.Free()
    assert (x == value).all()


def test_a_later_communicator_receives_nothing_of_calls_that_differed(world, rank):
    for value in (1.0, 2.0):
        comm, x = mpiagg.Comm(world), np.full(3, value + 10 * rank)
        # The first time each takes itself for the root, and so waits for nobody.
        mpiagg.broadcast(x, root=rank if value == 1 else 0, out=x, comm=comm, algorithm="tree")
        comm.Free()
    assert (x == value).all()
