"""Schedules in step, through memory that the ranks of a node share: their bits, wherever the vectors lie."""

from itertools import product

import numpy as np
import pytest
from mpi4py import MPI
from restated import same_bits, values
from support import PLACES, placed

import mpiagg
from mpiagg.errors import MismatchError
from mpiagg.plans.choices import SEGMENT
from mpiagg.tables.rows import ANNOUNCED
from mpiagg.transport import LINE

pytestmark = pytest.mark.mpi

NAMES = ["multi_radix", "multi_radix-2", "multi_radix-3x2"]
LENGTHS = [0, 1, 7, ANNOUNCED // 4, ANNOUNCED // 4 + 1, 3 * SEGMENT // 4 + 5]
if MPI.COMM_WORLD.size > 4:  # ranks that outnumber the cores take long
    LENGTHS, NAMES, PLACES = [7, 9001], NAMES[1:], PLACES[1::2]


@pytest.fixture
def vector(comm, rank):
    """Return a function that makes vectors that lie in one of the places."""
    return placed(mpiagg.empty(4 * max(10_000, *LENGTHS) + 8 * 100, np.uint8, comm=comm), rank)


def inputs(size, length, dtype="float32", turn=0):
    return [values(rank, length, dtype, turn) for rank in range(size)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_all_reductions_have_the_bits_of_the_simulation(comm, rank, size, compare, vector, name, place):  # noqa: PLR0917 - fixtures and parameters
    for length in LENGTHS:
        everyone, out = inputs(size, length), vector(place, length)
        op = "avg" if length % 2 else "sum"
        for _ in range(2):
            compare(mpiagg.allreduce(everyone[rank], op, out=out, comm=comm, algorithm=name), everyone, op, name)
            out[:] = everyone[rank]
            compare(mpiagg.allreduce(out, op, out=out, comm=comm, algorithm=name), everyone, op, name)
        with mpiagg.allreduce_init(out, op, out=out, comm=comm, algorithm=name) as plan:
            for _ in range(2):
                out[:] = everyone[rank]
                plan.start()
                compare(plan.wait(), everyone, op, name)


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_and_operators(comm, rank, size, compare, vector, name):  # noqa: PLR0917 - fixtures
    pytest.importorskip("ml_dtypes")
    for dtype, op in (*product(["float16", "bfloat16", "float64"], ["sum", "avg", "max"]), ("int8", "prod")):
        for length, place in ((5, "anywhere"), (2500, "registered")):
            everyone = inputs(size, length, dtype)
            out = vector(place, length, dtype)
            compare(mpiagg.allreduce(everyone[rank], op, out=out, comm=comm, algorithm=name), everyone, op, name)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_halves_of_an_all_reduction(comm, rank, size, vector, name, place):  # noqa: PLR0917 - fixtures and parameters
    for length in LENGTHS:
        everyone, x, out = inputs(size, length), vector(place, length), vector(place, length // size * size)
        x[:] = everyone[rank]
        chunk = np.array_split(mpiagg.simulate(everyone, algorithm=name)[rank], size)[rank]
        for _ in range(2):  # every chunk is the same sum
            assert same_bits(mpiagg.reduce_scatter(x, comm=comm, algorithm=name), chunk)
        each = length // size
        for _ in range(2):
            got = mpiagg.allgather(everyone[rank][:each], out=out.reshape(size, each), comm=comm, algorithm=name)
            assert same_bits(got, np.stack([one[:each] for one in everyone]))
        with mpiagg.allgather_init(everyone[rank][:each], comm=comm, algorithm=name) as plan:
            assert same_bits(plan(), np.stack([one[:each] for one in everyone]))


def test_registered_vectors_are_worked_on_where_they_lie(comm, rank, size, compare, vector):
    everyone = inputs(size, 10_000)
    for place in ("registered", "anywhere"):
        out = vector(place, 10_000)
        with mpiagg.allreduce_init(everyone[rank], out=out, comm=comm, algorithm="multi_radix-2") as plan:
            compare(plan(), everyone, "sum", "multi_radix-2")
            if size > 1:  # a barrier, and two mailboxes where there is no other way
                assert (plan.nbytes == LINE) is (place == "registered")


@pytest.mark.parametrize("name", ["multi_radix-2", "hierarchical", "shared", "ring"])
@pytest.mark.parametrize("place", ["anywhere", "some registered", "registered"])
def test_an_input_that_lies_partly_in_the_output(comm, rank, size, compare, vector, name, place):  # noqa: PLR0917 - fixtures and parameters
    for length in (5, ANNOUNCED // 4 + 100):
        everyone = inputs(size, length)
        both = vector(place, length + 1)
        for _ in range(2):
            both[1:] = everyone[rank]
            got = mpiagg.allreduce(both[1:], out=both[:-1], comm=comm, algorithm=name)
            compare(got, everyone, "sum", "direct" if name == "hierarchical" else name)


@pytest.mark.parametrize("place", ["anywhere", "registered"])
def test_ranks_that_want_other_factors_are_told(comm, rank, size, vector, place):
    out = vector(place, ANNOUNCED // 4 + 100)
    if size > 1:
        with pytest.raises(MismatchError):
            mpiagg.allreduce(out, out=out, comm=comm, algorithm=f"multi_radix-{2 if rank else 3}")


def test_calls_take_turns_with_calls_of_other_kinds(comm, rank, size, compare, vector):
    """Some wait for all at every barrier, and some do not."""
    for turn in range(4):
        for name, length in product(("multi_radix-2", "shared", "multi_radix"), (7, 9001)):
            everyone, out = inputs(size, length, turn=turn), vector(PLACES[turn % len(PLACES)], length)
            compare(mpiagg.allreduce(everyone[rank], out=out, comm=comm, algorithm=name), everyone, "sum", name)


def test_requests_of_a_communicator(world, rank, size, compare, environment):
    environment(MPIAGG_ALGORITHM="multi_radix-2")
    comm = mpiagg.Comm(world, reproducible=True)
    for length in (7, 9001):
        registered = mpiagg.empty(length, comm=comm)
        for x in (registered, np.empty(length, np.float32)):
            everyone, persistent = inputs(size, length), comm.Allreduce_init(MPI.IN_PLACE, x)
            for _ in range(2):
                x[:] = everyone[rank]
                comm.Iallreduce(MPI.IN_PLACE, x).Wait()
                compare(x, everyone, "sum", "multi_radix-2")
                x[:] = everyone[rank]
                persistent.Start()
                persistent.Wait()
                compare(x, everyone, "sum", "multi_radix-2")
            persistent.Free()
        del registered, x
    comm.Free()
