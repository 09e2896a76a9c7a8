"""Memory of other processes: what is read, what cannot be, and ranks that may not."""

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpiagg.arrays import address
from mpiagg.launch import start as launch
from mpiagg.transport.reading import OtherMemory, can_be_read, readers

PAGE = mmap.PAGESIZE

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
ALLOWED = can_be_read(np.zeros(1)) and not (YAMA.exists() and int(YAMA.read_text()))

pytestmark = pytest.mark.skipif(not ALLOWED, reason="the system does not let processes read one another's memory")


def memory_of(array, process=None):
    return OtherMemory(os.getpid() if process is None else process, address(array), array.size, array.dtype)


def test_parts_are_read():
    x = np.arange(1000, dtype=np.float32)
    out = np.zeros(1000, np.float32)
    memory_of(x).reading(out)()
    assert out.tolist() == x.tolist()
    part = memory_of(x)[10:700][5:20]
    part.reading(out[:15])()
    assert out[:15].tolist() == x[15:30].tolist()
    assert part.view(np.dtype(np.int16)).size == 30
    nothing = memory_of(x)[3:3]
    nothing.reading(out[:0])()
    with pytest.raises(AssertionError, match="room"):
        part.reading(out[:14])
    with pytest.raises(AssertionError, match="lies together"):
        memory_of(x)[::2]


def test_another_process_is_read():
    program = (
        "import ctypes, sys\n"
        "x = ctypes.create_string_buffer(b'what a child has')\n"
        "print(ctypes.addressof(x), flush=True)\n"
        "sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    out = np.zeros(16, np.uint8)
    reading = OtherMemory(child.pid, int(child.stdout.readline()), 16, out.dtype).reading(out)
    reading()
    child.communicate("")
    assert out.tobytes() == b"what a child has"
    with pytest.raises(ProcessLookupError, match=f"cannot read memory of process {child.pid}"):
        reading()


def test_what_can_be_read_in_part_alone_is_an_error():
    pages = mmap.mmap(-1, 2 * PAGE)
    x = np.frombuffer(pages, np.uint8)
    assert can_be_read(x)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address(x) + PAGE), ctypes.c_size_t(PAGE), 0) == 0
    try:
        assert not can_be_read(x)
        assert can_be_read(x[:PAGE])
        with pytest.raises(OSError, match="cannot read memory") as found:
            memory_of(x).reading(np.empty_like(x))()
        assert found.value.errno == errno.EFAULT
    finally:
        libc.mprotect(ctypes.c_void_p(address(x) + PAGE), ctypes.c_size_t(PAGE), mmap.PROT_READ | mmap.PROT_WRITE)


def test_an_array_without_elements_can_be_read():
    assert can_be_read(np.empty(0))


@pytest.mark.parametrize("change", ["nothing", "secret", "process", "another rank may not"])
def test_who_is_read_must_be_who_is_meant(change):
    """Two ranks, of which this process plays both."""
    told = []

    def tell(words, purpose):
        del purpose
        told.append(words)
        if len(told) == 2:
            return [words, (change != "another rank may not",)]
        process, start, *secret = words
        other = os.getppid() if change == "process" else process
        return [words, (other, start, *[each + (change == "secret") for each in secret])]

    found = readers(tell)
    assert found == ((os.getpid(),) * 2 if change == "nothing" else None)
    assert [len(words) for words in told] == [4, 1]


FORBID = """
import ctypes
import os
import sys

import numpy as np
from mpi4py import MPI

import mpiagg
from mpiagg.transport import channel_of

comm = MPI.COMM_WORLD
if comm.rank in map(int, sys.argv[1:]):
    # As the filters of containers: this rank's calls of process_vm_readv, and all its threads', are refused.
    class Filter(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint)]

    class Filters(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("first", ctypes.POINTER(Filter))]

    number = {"x86_64": 310, "aarch64": 270}[os.uname().machine]
    refused, allowed = 0x00050000 | 1, 0x7FFF0000
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, refused), (0x06, 0, 0, allowed)]
    filters = Filters(len(steps), (Filter * len(steps))(*(Filter(*step) for step in steps)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(filters)) == 0, os.strerror(ctypes.get_errno())

n = 600_000
x = np.arange(n, dtype=np.float64) + comm.rank
want = comm.size * np.arange(n, dtype=np.float64) + comm.size * (comm.size - 1) / 2
for _ in range(2):
    if sys.argv[1:]:
        comm = mpiagg.Comm(MPI.COMM_WORLD) if not isinstance(comm, mpiagg.Comm) else comm
    assert (mpiagg.allreduce(x, comm=comm) == want).all()
    total = mpiagg.reduce(x, root=1, comm=comm)
    assert total is None or (total == want).all()
reads = MPI.COMM_WORLD.gather(channel_of(comm).memory.read())
if comm.rank == 0:
    print(reads)
"""


@pytest.mark.parametrize("forbidden", [(), (1,), (0, 1, 2)])
def test_ranks_read_each_others_memory_if_all_of_them_may(tmp_path, forbidden):
    # The MPI libraries' own messages go another way: MPICH's fail where they cannot read.
    environment = launch.environment({"MPIR_CVAR_CH4_CMA_ENABLE": "0", "OMPI_MCA_smsc": "^cma"})
    script = tmp_path / "forbid.py"
    script.write_text(FORBID)
    command = launch.command(3, [str(script), *map(str, forbidden)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str([not forbidden] * 3)]
