"""NCCL of the stand-in: kernels that call mpi4py's collectives, on private memory, when their turn has come.

Like NCCL it does what it is asked for in the order in which it is asked, whatever the streams; it has few dtypes, and
refuses ranks that share a device.
"""

import os
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI
from standin_streams import LOCK, PENDING, POISON, present

from mpiagg.arrays.devices import Nccl

DTYPES = [np.dtype(name) for name in ("i1", "u1", "i4", "u4", "i8", "u8", "f4", "f8")]
OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


class StandInNccl(Nccl):
    """The collectives of a stand-in, among all ranks of the job.

    ``state`` is "new", "connected", "closed" or "aborted".
    """

    def __init__(self, device):
        self.device, self.state = device, "new"
        self._comm = self._group = self._last = None

    def unique_id(self):
        return os.urandom(128)

    def connect(self, unique_id, rank, size):
        self._comm = MPI.COMM_WORLD.Dup()
        ids, devices = zip(*self._comm.allgather((unique_id, self.device.identity)), strict=True)
        assert (rank, size, len(unique_id)) == (self._comm.rank, self._comm.size, 128)
        assert len(set(ids)) == 1
        assert len(set(devices)) == size, "ranks share a device"
        self.state = "connected"

    def all_reduce(self, vector, op):
        x = self._private(vector)
        self._add("all_reduce", lambda: self._comm.Allreduce(MPI.IN_PLACE, x, OPS[op]), [x], [x])

    def reduce(self, vector, op, root):
        x, at_root = self._private(vector), self._comm.rank == root
        sent, received = (MPI.IN_PLACE, x) if at_root else (x, None)
        self._add("reduce", lambda: self._comm.Reduce(sent, received, OPS[op], root), [x], [x] if at_root else [])

    def broadcast(self, vector, root):
        x, at_root = self._private(vector), self._comm.rank == root
        self._add("broadcast", lambda: self._comm.Bcast(x, root), *(([x], []) if at_root else ([], [x])))

    def all_gather(self, vector, own):
        x, part = self._private(vector), self._own(vector, own)
        self._add("all_gather", lambda: self._comm.Allgather(MPI.IN_PLACE, x), [part], [x])

    def reduce_scatter(self, vector, own, op):
        x, part = self._private(vector), self._own(vector, own)

        def call():
            values = x.copy()
            x.view(np.uint8).fill(POISON)
            self._comm.Reduce_scatter_block(values, part, OPS[op])

        self._add("reduce_scatter", call, [x], [x])

    @contextmanager
    def group(self):
        assert self._group is None
        self._group = []
        try:
            yield
        finally:
            parts, self._group = self._group, None
        self._ask(parts)

    def close(self, *, abort):
        assert self.state in ("new", "connected")
        if self._comm is not None and not abort:
            assert not any(work.name.startswith("nccl") for work in PENDING)
            self._comm.Free()
        self.state = "aborted" if abort else "closed"

    # -- work

    def _private(self, x):
        assert self.state == "connected"
        assert x.dtype in DTYPES, f"there is no {x.dtype}"
        assert x.size, "an empty vector"
        assert x.ndim == 1
        assert x.flags.c_contiguous
        return self.device._here(x)

    def _own(self, vector, own):
        """Return the private memory of this rank's part, which must be there where NCCL works in place."""
        start = self._comm.rank * own.nbytes
        assert vector.nbytes == self._comm.size * own.nbytes
        assert self.device.address(own) == self.device.address(vector) + start
        return self._private(own)

    def _add(self, name, call, reads, writes):
        if self._group is None:
            self._ask([(name, call, reads, writes)])
        else:
            self._group.append((name, call, reads, writes))

    def _ask(self, parts):
        """Ask for one kernel that does several collectives, in the present stream, after the last one."""
        names, calls, reads, writes = zip(*parts, strict=True)
        stream = present(self.device)
        with LOCK:
            if self._last not in (None, stream):
                with self._last:
                    stream.follow()
            self._last = stream

            def kernel():
                for call in calls:
                    call()

            reads, writes = ([x for some in each for x in some] for each in (reads, writes))
            stream.ask("kernel", f"nccl {' '.join(names)}", kernel, reads=reads, writes=writes)
