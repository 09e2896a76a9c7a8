"""Bad arguments: the same clear error on every rank, data untouched, and everything still works afterwards."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpiagg

pytestmark = pytest.mark.mpi

ALL = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter")
REDUCING = ("allreduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast")
SAME_SHAPE = ("allreduce", "reduce", "broadcast")
KNOWN = "known: sum, avg, min, max, prod, or an MPI.Op"


def read_only(*shape):
    array = np.zeros(shape)
    array.flags.writeable = False
    return array


CASES = [
    (REDUCING, {"op": "mean"}, ValueError, f"unknown op 'mean'; {KNOWN}"),
    (REDUCING, {"op": None}, ValueError, f"unknown op None; {KNOWN}"),
    (REDUCING, {"op": np.add}, ValueError, f"; {KNOWN}"),
    (
        ALL,
        {"algorithm": "rung"},
        ValueError,
        "unknown algorithm 'rung'; known: auto, native, ring, tree, parameter_server, ",
    ),
    (ALL, {"algorithm": None}, ValueError, "unknown algorithm None; known: auto, native, ring, "),
    (("reduce", "broadcast"), {"algorithm": "circulant"}, ValueError, "'circulant' does not serve "),
    (
        ("allgather", "reduce_scatter"),
        {"algorithm": "tree"},
        ValueError,
        "; these do: ring, circulant, pat, ",
    ),
    (("broadcast",), {"algorithm": "recursive_doubling"}, ValueError, "these do: ring, tree, parameter_server"),
    (ALL, {"lanes": 0}, ValueError, "lanes must be an integer from 1 to 64, not 0"),
    (ALL, {"lanes": 65}, ValueError, "lanes must be an integer from 1 to 64, not 65"),
    (ALL, {"lanes": -1, "algorithm": "ring"}, ValueError, "lanes must be an integer from 1 to 64, not -1"),
    (ALL, {"lanes": 1.5}, ValueError, "lanes must be an integer from 1 to 64, not 1.5"),
    (ALL, {"lanes": True}, ValueError, "not True"),
    (ROOTED, {"root": True}, ValueError, "not True"),
    (REDUCING, {"op": MPI.MAXLOC}, ValueError, "this MPI.Op is not for arrays of numbers; known: sum, "),
    (ROOTED, {"root": -1}, ValueError, "root must be a rank from 0 to "),
    (ROOTED, {"root": 1000}, ValueError, "not 1000"),
    (ROOTED, {"root": 0.0}, ValueError, "root must be a rank from 0 to "),
    (ROOTED, {"root": None}, ValueError, "not None"),
    (REDUCING, {"x": np.arange(6), "op": "avg"}, TypeError, "op 'avg' is not for integers (int64)"),
    (REDUCING, {"x": np.ones(6, bool), "op": "sum"}, TypeError, "take op='max' for any, op='min' for all"),
    (REDUCING, {"x": np.ones(6, complex), "op": "max"}, TypeError, "op 'max' is not for dtype complex128"),
    (REDUCING, {"x": np.ones(6), "op": MPI.BAND}, TypeError, "op 'band' is not for dtype float64"),
    (REDUCING, {"x": np.ones(6, ml_dtypes.bfloat16), "op": MPI.BOR}, TypeError, "op 'bor' is not for dtype bfloat16"),
    (ALL, {"x": np.array([object()] * 6)}, TypeError, "arrays of dtype object cannot be aggregated; numbers can"),
    (ALL, {"x": None}, TypeError, "arrays of dtype object cannot be aggregated"),
    (ALL, {"x": ["a"] * 6}, TypeError, "arrays of dtype <U1 cannot be aggregated"),
    (ALL, {"x": np.zeros(6, "M8[s]")}, TypeError, "arrays of dtype datetime64[s] cannot be aggregated"),
    (ALL, {"x": np.zeros(6, "i4,f4")}, TypeError, "cannot be aggregated; numbers can"),
    (ALL, {"x": np.zeros(6, ">f8")}, TypeError, "dtype >f8 is not in native byte order"),
    (ALL, {"x": np.ma.zeros(6)}, TypeError, "a masked array would lose its mask; pass x.filled(value), or x.data"),
    (SAME_SHAPE, {"out": np.ma.zeros(6)}, TypeError, "out must be a NumPy array, not MaskedArray"),
    (SAME_SHAPE, {"out": read_only(6)}, ValueError, "out is read-only"),
    (SAME_SHAPE, {"out": np.zeros(5)}, ValueError, "out has shape (5,), the result has (6,)"),
    (SAME_SHAPE, {"out": np.zeros((6, 1))}, ValueError, "out has shape (6, 1), the result has (6,)"),
    (("allgather",), {"out": np.zeros(6)}, ValueError, "out has shape (6,), the result has ("),
    (("reduce_scatter",), {"out": np.zeros(700)}, ValueError, "out has shape (700,), the result has ("),
    (
        SAME_SHAPE,
        {"out": np.zeros(6, "f4")},
        TypeError,
        "out has dtype float32, the result has float64",
    ),
    (SAME_SHAPE, {"out": [0.0] * 6}, TypeError, "out must be a NumPy array, not list"),
    (("reduce_scatter",), {"x": np.array(3.0)}, ValueError, "an array without dimensions has none"),
]


@pytest.mark.parametrize(("collectives", "changed", "kind", "words"), CASES)
def test_bad_arguments(comm, size, collectives, changed, kind, words):  # noqa: PLR0917 - fixtures and parameters
    arguments = {"x": np.arange(6.0), **changed}
    before = {name: np.array(value) for name, value in arguments.items() if isinstance(value, np.ndarray)}
    for name in (*collectives, *(f"{collective}_init" for collective in collectives)):
        function = getattr(mpiagg, name)
        with pytest.raises(kind) as caught:
            function(comm=comm, **arguments)
        assert words in str(caught.value)
    for name, value in before.items():
        assert np.array_equal(arguments[name], value)
    assert mpiagg.allreduce(np.ones(2), comm=comm).tolist() == [size] * 2


@pytest.mark.parametrize("check", [1, "yes", np.ones(2)], ids=str)
def test_check_is_a_flag(comm, rank, size, check):
    ring = comm.Create_dist_graph_adjacent([(rank - 1) % size], [(rank + 1) % size])
    for function, arguments, among in (
        (mpiagg.broadcast, (np.ones(3),), comm),
        (mpiagg.alltoallv, (np.ones(size), [1] * size), comm),
        (mpiagg.neighbor_allgather, (np.ones(3),), ring),
    ):
        with pytest.raises(ValueError, match=r"^check must be "):
            function(*arguments, comm=among, check=check)
    ring.Free()


def test_reduce_takes_an_out_on_the_root_alone(comm, rank, size):
    root = size - 1
    result = mpiagg.reduce(np.arange(6.0), root=root, comm=comm, out=np.zeros(6) if rank == root else None)
    assert np.array_equal(result, np.arange(6.0) * size) if rank == root else result is None


def test_reduce_writes_to_no_other_out_than_the_roots(comm, rank):
    out = np.full(6, -1.0)
    mpiagg.reduce(np.arange(6.0), comm=comm, out=out)
    assert (out == -1).all() == (rank != 0)


@pytest.mark.parametrize("comm", ["world", 0, MPI.COMM_NULL, MPI.GROUP_EMPTY], ids=["word", "number", "null", "group"])
def test_what_is_no_communicator(size, comm):
    with pytest.raises(TypeError, match=r"^comm must be an mpi4py.MPI.Intracomm, not "):
        mpiagg.allreduce(np.ones(3), comm=comm)
    assert mpiagg.allreduce(np.ones(1)).tolist() == [size]


def test_a_communicator_that_is_freed(world, size):
    comm = world.Dup()
    assert mpiagg.allreduce(np.ones(1), comm=comm).tolist() == [size]
    comm.Free()
    with pytest.raises(ValueError, match="freed"):
        mpiagg.allreduce(np.ones(3), comm=comm)
