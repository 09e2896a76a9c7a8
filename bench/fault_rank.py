"""What a rank does in a job of bench/faults.py: it works, brings a fault about, and notes what it sees.

    python bench/fault_rank.py FAULT WAY FOLDER

All that it prints goes to ``FOLDER/<process>.err``, and what it sees, with the time, to ``FOLDER/<process>.said``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.fault_cases import (
    AFTER_THE_FIRST,
    ALIKE,
    BEFORE_THE_FIRST,
    FREEING,
    IN_CALLS,
    MAKING,
    MISMATCHES,
    ODD,
    RIGHT,
)
from bench.fault_monitor import PACE, SHORT, Asked, Rank

WARN: Final = float(os.environ["MPIAGG_WARN"])
LATE: Final = 2.5 * WARN
"""Seconds that a late rank is late."""

FOREVER: Final = 1000.0
LONG: Final = 200_003
LEFT: Final = 3 * 2**20
"""Bytes that are left of a file system that is full; less than a window of this package has."""


def good(rank: Rank, fault: str = "") -> Asked:
    """Return what all ranks should call, in this case's way."""
    asked = Asked("broadcast") if fault == "root" else Asked()
    if rank.way == "native":
        return asked._replace(algorithm="native")
    if rank.way in {"long", "nonblocking"}:
        return asked._replace(length=LONG, algorithm="tree" if fault in {"root", "collective"} else "ring")
    return asked


def mismatch(rank: Rank, fault: str) -> None:
    """Call something else on one rank."""
    asked = good(rank, fault)
    other = {
        "shape": asked._replace(length=asked.length + 1),
        "dtype": asked._replace(dtype="int32"),  # of as many bytes
        "op": asked._replace(op="max"),
        "root": asked._replace(root=ODD),
        "algorithm": asked._replace(algorithm="recursive_doubling"),
        "collective": asked._replace(collective="broadcast"),
        "order": asked._replace(length=2 * asked.length),
    }[fault]
    if rank.way == ALIKE:
        asked, other = other, other._replace(another=True)
    rank.note("fault")
    with rank.observed():
        if fault == "order":
            rank.perform(*((other, asked) if rank.odd else (asked, other)))
        else:
            rank.perform(other if rank.odd else asked)
        rank.go_on()


def missing(rank: Rank, fault: str) -> None:
    """Have one rank never come."""
    del fault
    rank.note("fault")
    if rank.odd:
        time.sleep(FOREVER)
    with rank.observed():
        come(rank)


def unauthenticated(rank: Rank, fault: str) -> None:
    """Have one rank never come, while unauthenticated peers hold the ports where it could be asked why."""
    from bench.fault_means import crowd, own_port  # noqa: PLC0415 - which start MPI

    ports = rank.world.allgather(own_port())
    if rank.rank == 0:
        crowd(rank.way, ports)
    rank.world.Barrier()
    missing(rank, fault)


def late(rank: Rank, fault: str) -> None:
    """Have one rank come when the others have been warned."""
    del fault
    rank.note("fault")
    if rank.odd:
        time.sleep(LATE)
    with rank.observed():
        come(rank)
        rank.go_on()


def come(rank: Rank) -> None:
    """Do what the odd rank does not, or not yet."""
    if rank.way == MAKING:
        rank.mpiagg.Comm(rank.world).Free()
    elif rank.way == FREEING:
        rank.comm.Free()
    elif rank.way == BEFORE_THE_FIRST:
        rank.get_acquainted()
    else:
        rank.perform(good(rank))


def given_up(rank: Rank, fault: str) -> None:
    """Have all but one rank wait in vain, and come to the end of their program before that one does."""
    del fault
    rank.note("fault")
    if rank.odd:
        time.sleep(WARN)
    else:
        try:
            rank.call(Asked(), check=True, timeout=WARN / 2)
        except rank.mpiagg.StallError as error:
            print(f"StallError: {error}", flush=True)
    rank.note("result", result=RIGHT)
    rank.note("done")


def other_purpose(rank: Rank, fault: str) -> None:
    """Have one rank come together with the others for something else."""
    del fault
    rank.note("fault")
    first, _, others = rank.way.partition(", ")
    with rank.observed():
        if rank.odd:
            getattr(rank.comm, first)()
        elif others == "a plan":
            rank.mpiagg.allreduce_init(rank.array(Asked()), comm=rank.comm)
        else:
            rank.call(Asked(), comm=rank.comm, check=True)
        rank.go_on()


def in_lists(rank: Rank, fault: str) -> None:
    """Give DDP, or an aggregation, other arrays on one rank."""
    shapes: Sequence[Any] = ((4, 3), (5,))
    if rank.odd:
        shapes = ((4, 3), (6,)) if fault == "shape" else ((5,), (4, 3))
    rank.note("fault")
    with rank.observed():
        arrays = [np.ones(shape, np.float32) for shape in shapes]
        if rank.way == "DDP":
            rank.mpiagg.DDP(arrays).free()
        else:
            rank.mpiagg.AllReduce().aggregate(arrays)
        rank.go_on()


def exception(rank: Rank, fault: str) -> None:
    """Raise an exception on one rank that nobody catches."""
    del fault
    rank.note("fault")
    if rank.odd:
        raise_somewhere(rank)
    with rank.observed():
        if rank.way == f"before {BEFORE_THE_FIRST}":
            rank.get_acquainted()
        if rank.way == "in a call, by NumPy":
            overflow(rank)
        if rank.way == "in a call, in an operator of the user's":
            rank.comm.Allreduce(rank.mpi.IN_PLACE, rank.array(Asked()), rank.mpi.Op.Create(add))
        rank.go_on()


def overflow(rank: Rank) -> None:
    """Add what is too large for its dtype; by an algorithm with messages, in which every rank adds."""
    rank.mpiagg.allreduce(np.full(SHORT, 3e38, np.float32), algorithm="direct")


def add(a: Any, b: Any, datatype: Any) -> None:
    """Add, in an operator of MPI's."""
    del datatype
    b_array = np.frombuffer(b, np.float32)
    b_array += np.frombuffer(a, np.float32)


def raise_somewhere(rank: Rank) -> None:
    """Raise where this case wants it."""

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    if rank.way == "while a nonblocking call is under way":
        rank.comm.Iallreduce(rank.mpi.IN_PLACE, rank.array(Asked()))
    elif rank.way == "after a call":
        rank.check(rank.call(Asked()), Asked())
    elif rank.way == "in a call, by NumPy":
        with np.errstate(all="raise"):
            overflow(rank)
    elif rank.way == "in a call, in an operator of the user's":
        rank.comm.Allreduce(rank.mpi.IN_PLACE, rank.array(Asked()), rank.mpi.Op.Create(fail))
    elif rank.way == "in a thread":
        threading.Thread(target=fail).start()
        time.sleep(FOREVER)
    fail()


def out_of_memory(rank: Rank, fault: str) -> None:
    """Ask for more memory than there is, on one rank."""
    del fault
    rank.note("fault")
    if rank.odd:
        np.ones(2**50)
    with rank.observed():
        rank.go_on()


def leave(rank: Rank, fault: str) -> None:
    """Have the program of one rank end before its time."""
    rank.note("fault")
    if rank.odd:
        sys.exit(3 if "3" in fault else 0)
    with rank.observed():
        rank.go_on()


def signalled(rank: Rank, fault: str) -> None:
    """Be where a signal comes; who starts the ranks sends it."""
    waiting = rank.way in {"waiting", "in MPI_Allreduce"}
    if rank.odd:
        rank.note("here")
    if rank.odd is not waiting:
        # One waits for the other: who computes is to be there while the signal comes, and a little longer.
        until = time.monotonic() + (WARN if fault == "SIGSTOP" else FOREVER)
        while time.monotonic() < until:
            time.sleep(PACE)
    with rank.observed():
        rank.perform(Asked(algorithm="native" if rank.way == "in MPI_Allreduce" else "auto"))
        rank.go_on()


def launcher_killed(rank: Rank, fault: str) -> None:
    """Have the launcher killed, so that nobody tells the ranks of its end."""
    from mpiagg.launch.launchers import started_by  # noqa: PLC0415 - as mpiagg, when MPI may start

    del fault
    rank.note("fault")
    if rank.odd:
        os.kill(started_by(), signal.SIGKILL)
        if rank.way != IN_CALLS:
            time.sleep(FOREVER)
    asked = Asked(algorithm="native" if rank.way == "in MPI_Allreduce" else "auto")
    with rank.observed():
        while True:
            rank.call(asked)


def second_thread(rank: Rank, fault: str) -> None:
    """Have a second thread call while another waits for the ranks that are late, and once more when they have come."""
    del fault
    rank.note("fault")
    asked = good(rank)
    with rank.observed():
        if rank.odd:
            first = threading.Thread(target=rank.perform, args=(asked,))
            first.start()
            time.sleep(WARN / 4)
            try:
                rank.perform(asked)
            except rank.mpiagg.PlanError as error:
                print(f"PlanError: {error}", flush=True)
            first.join()
        else:
            time.sleep(WARN / 2)
            rank.perform(asked)
        rank.perform(asked)
        rank.go_on()


def nan(rank: Rank, fault: str) -> None:
    """Have a gradient of one rank be no number."""
    del fault
    rank.note("fault")
    with rank.observed(), rank.mpiagg.DDP([np.ones(4), np.ones(5)], check_finite=True) as ddp:
        ddp.sync_gradients([np.ones(4), np.full(5, np.nan if rank.odd else 1.0)])


def checkpoint(rank: Rank, fault: str) -> None:
    """Load a checkpoint that was cut short."""
    del fault
    place = rank.folder / "checkpoint"
    rank.mpiagg.save_checkpoint(place, {"w": rank.array(Asked())})
    if rank.rank == 0:
        for path in place.rglob("mpiagg-checkpoint.json" if rank.way == "the manifest" else f"{ODD}.bin"):
            os.truncate(path, path.stat().st_size // 2)
    rank.world.Barrier()
    rank.note("fault")
    with rank.observed():
        rank.mpiagg.load_checkpoint(place)
        rank.go_on()


def full_shm(rank: Rank, fault: str) -> None:
    """Fill the file system of shared memory, but for what the MPI library needs: Open MPI crashes in full ones."""
    from bench.fault_means import LITTLE, fill_shm  # noqa: PLC0415 - which start MPI

    del fault
    if rank.way == AFTER_THE_FIRST:
        rank.get_acquainted()
    if rank.rank == 0:
        fill_shm(LITTLE if rank.way == AFTER_THE_FIRST else LEFT)
    rank.world.Barrier()
    rank.note("fault")
    with rank.observed():
        if rank.way == "mpiagg.empty":
            rank.mpiagg.empty(2**26)
        elif rank.way == AFTER_THE_FIRST:
            rank.perform(Asked(length=LONG // 2))
        else:
            rank.comm = rank.mpiagg.Comm(rank.world)
            rank.perform(good(rank))
        rank.go_on()


def at_first(rank: Rank, fault: str) -> None:
    """Meet what the surroundings have in store: it shows in the first call."""
    del fault
    rank.note("fault")
    with rank.observed():
        rank.get_acquainted()
        rank.go_on()


def surroundings(fault: str, way: str, folder: Path) -> None:
    """Make the surroundings wrong, before MPI starts; the launcher has told this process who it is."""
    from mpiagg.launch.launchers import launch  # noqa: PLC0415 - it does not know MPI

    found = launch()
    odd = found is not None and found.rank == ODD
    if way == "MPIAGG_ALGORITHM":
        os.environ[way] = "tree" if odd else "ring"
    if fault == "truncated tuning table" and (odd or way == "on all ranks"):
        path = folder / "table.json"
        path.write_text('{"format": "mpiagg tuning", "version": 2, "rows": [')
        os.environ["MPIAGG_TUNING"] = str(path)


FAULTS: Final[dict[str, Callable[[Rank, str], None]]] = {
    **dict.fromkeys(MISMATCHES, mismatch),
    "missing": missing,
    "given up": given_up,
    "purpose": other_purpose,
    "late": late,
    "unauthenticated connections": unauthenticated,
    "exception": exception,
    "out of memory": out_of_memory,
    **dict.fromkeys(("sys.exit(0)", "sys.exit(3)"), leave),
    **dict.fromkeys(("SIGINT", "SIGTERM", "SIGKILL", "SIGSTOP"), signalled),
    "SIGKILL of the launcher": launcher_killed,
    "second thread": second_thread,
    "NaN": nan,
    "truncated checkpoint": checkpoint,
    "truncated tuning table": at_first,
    "full /dev/shm": full_shm,
    "wrong launcher": at_first,
}

AT_FIRST: Final = (BEFORE_THE_FIRST, f"before {BEFORE_THE_FIRST}", "MPIAGG_ALGORITHM")
"""Ways in which ranks do not know each other yet."""


def main(fault: str, way: str, folder: Path) -> None:
    """Do what this rank does."""
    with (folder / f"{os.getpid()}.err").open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts jobs in the background has it ignored
    rank = Rank(folder, way)
    surroundings(fault, way, folder)
    if fault == "wrong launcher":
        rank.note("fault")  # MPI may end this process when it starts
    rank.start()
    act = FAULTS[fault]
    if way in {"DDP", "aggregate"}:
        act = in_lists
    elif way == "MPIAGG_ALGORITHM":
        act = at_first
    if act is not at_first and act is not full_shm and way not in AT_FIRST:
        rank.get_acquainted()
    act(rank, fault)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
