"""Every way in which mpi4py lets a buffer be given, and that it is ours that reads it."""

import array
import ctypes

import numpy as np
import pytest
from mpi4py import MPI

import mpiagg
from mpiagg.collectives.buffers import read

pytestmark = pytest.mark.mpi

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank


class OnlyDLPack:
    """An array that speaks DLPack and nothing else."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, stream=None):
        return self.x.__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


class LongDoubles(OnlyDLPack):
    """Long doubles that speak DLPack, which NumPy's own do not."""

    def __dlpack__(self, stream=None):
        capsule = self.x.view("c16").__dlpack__(stream=stream)
        pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
            ("PyCapsule_GetPointer", ctypes.pythonapi)
        )
        ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p) + 12).value = 2
        return capsule


def fortran(x):
    return np.asfortranarray(x.reshape(2, 2))


WAYS = {
    "array": lambda x: x,
    "array of Fortran's order": fortran,
    "memoryview in Fortran's order": lambda x: memoryview(fortran(x)),
    "scalar shape": lambda x: x.reshape(2, 1, 2),
    "type": lambda x: [x, MPI.INT],
    "tuple": lambda x: (x, MPI.INT),
    "type string": lambda x: [x, "i4"],
    "type letter": lambda x: [x, "i"],
    "count": lambda x: [x, 4],
    "NumPy's count": lambda x: [x, np.int64(4)],
    "count, no type": lambda x: [x, 4, None],
    "count, type": lambda x: [x, 4, MPI.INT],
    "no count": lambda x: [x, None, MPI.INT],
    "count and displacement": lambda x: [np.r_[x, x], (4, 4), MPI.INT],
    "count and displacement, no type": lambda x: [np.r_[x, x], [4, 4]],
    "count, displacement, type": lambda x: [np.r_[x, x], 4, 4, "i"],
    "no count, displacement": lambda x: [np.r_[x, x], None, 4, "i"],
    "bytes": lambda x: [x.tobytes(), MPI.INT],
    "bytearray": lambda x: [bytearray(x), MPI.INT],
    "array.array": lambda x: array.array("i", x.tolist()),
    "memoryview": memoryview,
    "mpi4py's buffer": lambda x: [MPI.buffer.frombuffer(x), MPI.INT],
    "DLPack": OnlyDLPack,
    "DLPack, type": lambda x: [OnlyDLPack(x), MPI.INT],
    "not aligned": lambda x: [np.frombuffer(bytes(1) + x.tobytes(), "u1")[1:], MPI.INT],
}


@pytest.fixture
def comm():
    comm = mpiagg.Comm(MPI.COMM_WORLD, reproducible=True)
    yield comm
    comm.Free()


@pytest.mark.parametrize("way", WAYS)
def test_inputs(comm, carried, way):
    x, total, everything = np.arange(4, dtype="i") + RANK, np.empty(4, "i"), np.empty((SIZE, 4), "i")
    given = WAYS[way](x)
    order = np.asfortranarray(x.reshape(2, 2)).ravel("K") if "Fortran" in way else x
    kind = MPI.INT32_T if way == "type string" else MPI.INT
    comm.Allreduce(given, [total, kind])
    assert np.array_equal(total, SIZE * (order - RANK) + sum(range(SIZE)))
    comm.Allgather(given, everything)
    assert np.array_equal(everything, [order - RANK + other for other in range(SIZE)])
    assert carried == ["allreduce", "allgather"]


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("bytes", "not aligned")])
def test_outputs(comm, carried, way):
    x, out = np.arange(4, dtype="i") + RANK, np.zeros(4, "i")
    given = WAYS[way](out)
    comm.Allreduce([x, MPI.INT32_T if way == "type string" else MPI.INT], given)
    comm.Bcast(given, root=SIZE - 1)
    message = read(given, writable=False)
    assert np.array_equal(message.memory.view("i"), SIZE * np.arange(4) + sum(range(SIZE)))
    # What was given with a displacement or as a copy is looked at in its own memory; the rest is the array itself.
    if np.shares_memory(message.memory, out):
        assert np.array_equal(out, SIZE * np.arange(4) + sum(range(SIZE)))
    assert carried == ["allreduce", "broadcast"]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_like_one_before_takes_its_own_arrays(comm, way):
    made = []
    for turn in range(3):
        x, sums = np.arange(4, dtype="i") + turn, np.empty(4, "i")
        given = WAYS[way](x)
        comm.Allreduce(given, [sums, MPI.INT32_T if way == "type string" else MPI.INT])
        order = np.asfortranarray(x.reshape(2, 2)).ravel("K") if "Fortran" in way else x
        assert sums.tolist() == (SIZE * order).tolist()
        made += [given, sums]  # so that no other has their place


@pytest.mark.parametrize("dtype", ["?", "H", "f", "F", "D", "g"])
def test_every_dtype_of_dlpack(comm, carried, dtype):
    speaks = LongDoubles if dtype == "g" else OnlyDLPack
    x, out = np.arange(4).astype(dtype), np.zeros((SIZE, 4), dtype)
    # The others have NumPy's own: who is handed on by a rank alone waits for ever.
    comm.Allgather(speaks(x) if RANK == 0 else x, out)
    assert np.array_equal(out, [x] * SIZE)
    assert carried == ["allgather"]


def test_the_memory_around_an_output_is_left_alone(comm, carried):
    out = np.full(6, -1.0)
    comm.Allreduce(np.ones(3), [out, 3, 2, "d"])
    assert out.tolist() == [-1, -1, SIZE, SIZE, SIZE, -1]
    blocks = np.full(2 * SIZE + 2, -1.0)
    comm.Allgather(np.array([RANK, RANK], "d"), [blocks, 2, 1, MPI.DOUBLE])
    assert blocks.tolist() == [-1, *np.repeat(np.arange(SIZE), 2), -1]
    assert carried == ["allreduce", "allgather"]


@pytest.mark.parametrize("nothing", [[None, 0, MPI.INT], [MPI.BOTTOM, 0, "i"], np.empty(0, "i"), [np.empty(0), "i"]])
def test_nothing(comm, carried, nothing):
    comm.Allreduce(nothing, nothing)
    comm.Bcast(nothing)
    comm.Allgather(nothing, nothing)
    comm.Reduce_scatter_block(nothing, nothing)
    assert len(carried) == 4


def test_a_root_may_send_what_it_cannot_write(comm, carried):
    root = SIZE - 1
    word = b"immutable" if root == RANK else bytearray(9)
    comm.Bcast(word, root)
    assert word == b"immutable"
    comm.Bcast([word, MPI.CHAR], root)
    assert carried == ["broadcast"] * 2


def test_every_predefined_type_travels(comm, carried):
    names = ("CHAR", "WCHAR", "BYTE", "PACKED", "C_BOOL", "AINT", "COUNT", "INT16_T", "LONG_DOUBLE", "SHORT_INT")
    for name in names:
        datatype = getattr(MPI, name)
        x = bytearray([RANK + 1]) * (3 * datatype.extent)
        comm.Bcast([x, datatype], root=SIZE - 1)
        assert x == bytes([SIZE]) * (3 * datatype.extent)
        everything = bytearray(3 * SIZE * datatype.extent)
        comm.Allgather([bytes([RANK]) * (3 * datatype.extent), 3, datatype], [everything, datatype])
        assert everything == b"".join(bytes([other]) * (3 * datatype.extent) for other in range(SIZE))
    assert len(carried) == 2 * len(names)


@pytest.mark.parametrize("length", [3, 100_000])
@pytest.mark.parametrize("op", [MPI.SUM, MPI.MAX, MPI.BXOR])
def test_bytes_are_reduced_as_numbers(world, comm, op, length):
    """mpi4py takes arrays of uint8 for MPI.BYTE, which no rank needs to know of another."""
    x, out, expected = np.full(length, RANK + 1, np.uint8), *np.zeros((2, length), np.uint8)
    world.Allreduce([x, MPI.UINT8_T], [expected, MPI.UINT8_T], op)
    comm.Allreduce(*((x, out) if RANK % 2 else ([x, MPI.UINT8_T], [out, MPI.UINT8_T])), op)
    assert np.array_equal(out, expected)


def test_what_the_library_must_read_is_not_read_here():
    derived = MPI.INT.Create_contiguous(2).Commit()
    x = np.zeros(4, "i")
    assert read([x, derived], writable=True) is None
    derived.Free()
    for given in (
        [x, 5, MPI.INT],
        [x, (1, 4), MPI.INT],
        [x, MPI.DOUBLE_INT, 3],
        [x],
        x[::2],
        "text",
        [bytes(12), 1, MPI.DOUBLE_INT],
    ):
        assert read(given, writable=False) is None
    assert read(bytes(4), writable=True) is None
    assert read(bytes(4), writable=False).memory.size == 4
    assert read([x, MPI.INT], writable=True, blocks=3) is None
