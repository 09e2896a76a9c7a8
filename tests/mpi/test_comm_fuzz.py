"""Any call of a communicator, drawn by chance, beside mpi4py's own; each rank describes its data in its own way."""

from functools import cache
from itertools import accumulate

import numpy as np
import pytest
from mpi4py import MPI
from support import call

import mpiagg

pytestmark = pytest.mark.mpi

DRAWS = 100
DTYPES = ("f4", "f8", "i2", "i4", "i8", "u1", "c8")
LENGTHS = (0, 1, 2, 7, 63, 1000, 5000, 20_000, 70_000)
REDUCING = ("Allreduce", "Reduce", "Reduce_scatter_block", "Reduce_scatter", "Scan", "Exscan")
ROOTED = ("Bcast", "Reduce", "Gather", "Gatherv", "Scatter", "Scatterv")
EACH_SENT = ("Scatter", "Alltoall", "Reduce_scatter_block")
EACH_RECEIVED = ("Gather", "Allgather", "Alltoall")
COUNTED_SENT = ("Scatterv", "Alltoallv")
COUNTED_RECEIVED = ("Gatherv", "Allgatherv", "Alltoallv")
VERBS = sorted({*REDUCING, *ROOTED, *EACH_SENT, *EACH_RECEIVED, *COUNTED_SENT, *COUNTED_RECEIVED})


@cache
def column(code):
    """Return the datatype of a number in a row of two, by NumPy's letter."""
    number = MPI._typedict[code]
    return number.Create_resized(0, 2 * number.extent).Commit()


class Case:
    """One call: what all ranks draw alike, and what this one does by itself."""

    def __init__(self, seed, comm, rooms):
        self.rank, self.size = comm.rank, comm.size
        self.rooms = rooms
        alike, self.own = np.random.default_rng(seed), np.random.default_rng([*seed, comm.rank])
        self.verb, self.form = alike.choice(VERBS), alike.choice(["blocking", "nonblocking", "persistent"])
        self.dtype = np.dtype(alike.choice(DTYPES))
        self.op = alike.choice(["SUM", "PROD"] if self.dtype.kind == "c" else ["SUM", "PROD", "MAX", "MIN"])
        self.length, self.root = int(alike.choice(LENGTHS)), int(alike.integers(self.size))
        self.lengths = alike.integers(self.length + 1, size=(self.size, self.size)) // self.size
        self.registered, self.all_in_place = alike.random(2) < 0.5
        self.drawn = self.own.bit_generator.state

    def __str__(self):
        return f"{self.verb}, {self.form}, of {self.length} {self.dtype}, {self.op}, root {self.root}"

    def blocks(self):
        """Return the lengths of the blocks that this rank sends, and of those that it receives."""
        row = self.lengths[0].tolist()
        own, many = [row[self.rank]], [self.length] * self.size
        if self.verb == "Alltoallv":
            return self.lengths[self.rank].tolist(), self.lengths[:, self.rank].tolist()
        if self.verb in {"Gatherv", "Allgatherv"}:
            return own, row
        if self.verb == "Scatterv":
            return row, own
        if self.verb == "Reduce_scatter":
            return [sum(row)], own
        return many if self.verb in EACH_SENT else many[:1], many if self.verb in EACH_RECEIVED else many[:1]

    def buffer(self, place, lengths, *, counted, each):
        """Return a buffer specification of some numbers, in one of many ways, and the array that it is about."""
        kinds = ["array", "counted", *([] if self.verb in REDUCING else ["column"])]
        if self.verb in REDUCING and self.dtype == np.uint8:
            kinds = ["array"]  # which mpi4py takes for MPI.BYTE, and it wants one datatype of both buffers
        kind, apart = self.own.choice(kinds), int(self.own.integers(2)) if counted else 0
        step = 2 if kind == "column" else 1
        starts = [0, *accumulate(length + apart for length in lengths)]
        nbytes = starts[-1] * step * self.dtype.itemsize
        whole = (
            self.rooms[place][:nbytes] if self.registered and self.own.random() < 0.5 else np.empty(nbytes, np.uint8)
        )
        array = whole.view(self.dtype)
        array[:] = self.own.integers(0 if self.dtype.kind == "u" else -4, 5, size=array.size)
        datatype = column(self.dtype.char) if kind == "column" else MPI._typedict[self.dtype.char]
        if counted:
            return [array, (lengths, starts[:-1]), datatype], array
        if kind == "array":
            return array, array
        return [array, sum(lengths) // (self.size if each else 1), datatype], array

    def carry_out(self, comm):
        """Make the call, and return what is in the buffers then."""
        self.own.bit_generator.state = self.drawn
        verb, root = self.verb, self.rank == self.root
        sent, received = self.blocks()
        x, sends = self.buffer(0, sent, counted=verb in COUNTED_SENT, each=verb in EACH_SENT)
        if verb == "Bcast":
            given = [x, self.root]
            receives = sends
        else:
            out, receives = self.buffer(1, received, counted=verb in COUNTED_RECEIVED, each=verb in EACH_RECEIVED)
            in_place = bool(self.own.random() < 0.3)
            if verb in {"Allreduce", "Scan", "Exscan", "Allgather", "Allgatherv", "Alltoall"} and self.all_in_place:
                x = MPI.IN_PLACE
            elif verb in {"Reduce", "Gather", "Gatherv"}:
                x, out = (MPI.IN_PLACE if root and in_place else x), (out if root else None)
            elif verb in {"Scatter", "Scatterv"}:
                x, out = (x if root else None), (MPI.IN_PLACE if root and in_place else out)
            given = [x, out]
            given += [self.lengths[0].tolist()] if verb == "Reduce_scatter" else []
            given += [getattr(MPI, self.op)] if verb in REDUCING else []
            given += [self.root] if verb in ROOTED else []
        call(comm, self.form, verb, *given)
        return sends.copy(), None if verb == "Exscan" and not self.rank else receives.copy()


@pytest.fixture(scope="module")
def rooms():
    """Registered memory for the buffers of a call."""
    nbytes = 2 * 8 * MPI.COMM_WORLD.size * (max(LENGTHS) + 1)
    return [mpiagg.empty(nbytes, np.uint8) for _ in range(2)]


@pytest.mark.parametrize("seed", range(2))
def test_any_call_does_what_mpi4pys_does(world, rooms, seed):
    comm = mpiagg.Comm(world)
    for draw in range(DRAWS):
        case = Case([seed, draw], world, rooms)
        theirs, ours = case.carry_out(world), case.carry_out(comm)
        for one, other in zip(theirs, ours, strict=True):
            if one is not None and case.dtype.kind in "fc":
                np.testing.assert_allclose(other, one, 1e-5, err_msg=str(case))
            elif one is not None:
                np.testing.assert_array_equal(other, one, err_msg=str(case))
    comm.Free()
