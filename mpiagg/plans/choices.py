"""Which schedule for which case: what a caller's words mean, and what ``algorithm="auto"`` takes.

That is the algorithm in ``MPIAGG_ALGORITHM``, the first row that fits of the table in ``MPIAGG_TUNING``, or of the
default: see ``tables``.
"""

from __future__ import annotations

from typing import Final

from mpiagg.arrays import HOST, Codec, Device, Reduction, codec_of
from mpiagg.common.arguments import check_integer
from mpiagg.schedules import MOST_LANES, Collective, Layout, algorithm
from mpiagg.tables import NATIVE, SEGMENT, Case, Choice, Memory, settings

__all__ = ["BY_WAY_OF_HOST", "ENCODING_ONCE", "NATIVE", "NCCL", "SEGMENT", "Case", "Choice", "Memory", "choose", "pick"]

ENCODING_ONCE: Final = "direct"
"""The algorithm for codecs that lose something each time that they encode."""

NCCL: Final = "nccl"
"""The algorithm that is the collective of NVIDIA's library, for vectors on its devices."""

SHARED: Final = "shared"
"""The algorithm of one stage within one node, in which owners read inputs and write results, wherever they lie."""

FLOAT32: Final = 4
"""Bytes of a number that a wire encodes, but for those of float64 and longdouble, whose lanes are some more."""

PLANNED_NATIVE: Final = 8 * 2**10
"""Bytes up to which plans and requests are the MPI library's own where its blocking collective would be taken; between
nodes those of what is only moved. Its persistent and nonblocking ones may be far slower than that: Open MPI's
persistent reduce of 16 MiB took 1.9 seconds, and between nodes one of 1 KiB two to four times as long as its blocking
one. But to move 1 KiB between nodes our plans took two to six times as long."""

TO_EACH_RANK: Final = {Collective.GATHER: "direct", Collective.SCATTER: "direct", Collective.ALLTOALL: "pairwise"}
"""The algorithms in which chunks go directly to their ranks, so that only these need to know how long they are."""

BY_WAY_OF_HOST: Final = 64 * 2**10
"""Bytes up to which vectors of a device go by way of the host as a whole: two copies cost less then than waiting for
the device in every round."""


def takes_native(
    collective: Collective, reduction: Reduction, nbytes: int, layout: Layout, *, minima: bool, at_once: bool
) -> bool:
    """Whether the MPI library's own collective may be taken for ``"auto"``: it breaks no promise of ours.

    An all-reduction has the same bits on all ranks. Those of the MPI library have, where the result does not depend on
    the order in which values are combined; so floating-point numbers are left to our own algorithms.

    Parameters
    ----------
    collective : Collective
    reduction : Reduction
    nbytes : int
        Bytes of the vector.
    layout : Layout
        The ranks, on their nodes.
    minima : bool
        Whether minima and maxima of numbers with NaN among them may be the MPI library's, and not NumPy's.
    at_once : bool
        Whether it is a blocking call, or for other reasons as good as one.
    """
    planned = len(layout.nodes) == 1 or not collective.reduces
    if not (at_once or (planned and nbytes <= PLANNED_NATIVE)):
        return False
    if not collective.reduces or reduction.dtype.kind in "biuV":
        return True
    return collective is not Collective.ALLREDUCE and (minima or reduction.name not in ("min", "max"))


def choose(case: Case, device: Device = HOST) -> Choice:
    """Return what ``"auto"`` means in a case, for vectors that lie on a device.

    Raises
    ------
    ValueError
        If the environment names a table that cannot be used, or an unknown algorithm.
    """
    if device is HOST:
        return settings().found(case).choice
    case = case._replace(learned=None)  # from vectors on the host
    if case.nbytes <= BY_WAY_OF_HOST:
        return settings().found(case._replace(library=None)).choice
    messages = settings().found(case._replace(memory=Memory.NONE, library=None)).choice
    serves = case.collective in algorithm(SHARED).schedules
    together = serves and case.memory is Memory.TOGETHER and len(case.layout.nodes) == 1
    return messages._replace(algorithm=SHARED, unregistered=messages.algorithm) if together else messages


def _as_sent(case: Case, coded: Codec | None) -> Case:
    """Return the case of vectors that have as many bytes as a wire makes of them, in messages of ours."""
    case = case._replace(library=None)
    if coded is None:
        return case
    return case._replace(memory=Memory.NONE, nbytes=coded.nbytes(case.nbytes // FLOAT32))


def pick(name: str, lanes: int | None, case: Case, wire: str | None = None, device: Device | None = None) -> Choice:
    """Return the algorithm, the lanes and the wire that a caller's words mean, for vectors that lie on a device.

    Without a device the words alone are looked at, as for vectors on the host.

    Raises
    ------
    ValueError
        If a name is unknown, or the algorithm not for this collective, wire or device, or the lanes are none or too
        many; or as for :func:`choose`.
    """
    coded = codec_of(wire)
    once = coded is not None and not coded.elementwise
    if name in (NATIVE, NCCL):
        if wire is not None:
            raise ValueError(f"algorithm {name!r} sends values as they are, not with wire {wire!r}")
        if name == NCCL and (case.collective.moves or case.collective.prefix):
            raise ValueError(f"algorithm 'nccl' does not serve {case.collective.value}")
        if name == NCCL and device is HOST:
            raise ValueError("algorithm 'nccl' is for arrays on CUDA devices")
        return Choice(name)
    if once and name not in ("auto", ENCODING_ONCE):
        raise ValueError(f"wire {wire!r} is for algorithm {ENCODING_ONCE!r}, which encodes a value once on each way")
    if name == "auto":
        chosen = choose(case if wire is None else _as_sent(case, coded), device or HOST)
        if once:
            chosen = Choice(ENCODING_ONCE, chosen.lanes)
    else:
        algorithm(name, ("auto", NATIVE)).generator(case.collective)  # refuses what it does not serve
        chosen = Choice(name)
    if lanes is not None:
        chosen = chosen._replace(lanes=check_integer("lanes", lanes, 1, MOST_LANES))
    return chosen if wire is None else chosen._replace(wire=wire)
