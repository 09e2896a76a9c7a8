"""The collective methods of a communicator: what each takes, and the operation that it asks for.

A method's arguments are read into an operation where we can carry it out, if need be on copies (``packed``); where we
cannot, it is for the MPI library as it came: operators of the user's, structures, memory of devices that we do not
know, and arguments that are wrong. Buffers on two devices are a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Final, NamedTuple

from mpi4py import MPI

from mpiagg.collectives import keys, moving, reducing
from mpiagg.collectives.asked import BYTES, Asked
from mpiagg.collectives.packed import Buffer
from mpiagg.plans.choices import NATIVE, Choice
from mpiagg.plans.operation import Operation
from mpiagg.schedules import Collective
from mpiagg.transport import Channel


class Method(NamedTuple):
    """A collective method of mpi4py's communicators, in its three forms.

    Attributes
    ----------
    name : str
        The collective.
    now, start, init : callable
        mpi4py's own methods: the blocking, the nonblocking and the persistent one.
    key : callable
        Returns what a call depends on of the arguments; raises one of ``keys.NO_KEY`` for what cannot be kept.
    read : callable
        Returns what the arguments ask for, or None if that is for the MPI library alone.
    ragged : bool
        Whether a rank knows the lengths of those blocks alone that it has.
    buffers : tuple of Buffer
        What is in the buffers of a method that moves blocks whose lengths all ranks know; none for others.
    """

    name: str
    now: Callable[..., object]
    start: Callable[..., MPI.Request]
    init: Callable[..., MPI.Prequest]
    key: Callable[..., Hashable]
    read: Callable[..., Asked | None]
    ragged: bool = False
    buffers: tuple[Buffer, ...] = ()

    def unread(self, channel: Channel, given: tuple[Any, ...]) -> str:
        """Return what all ranks must agree on of a call whose arguments are for the MPI library alone.

        A rank whose blocks lie apart makes the same call as others, who do not know: where blocks lie is its own
        affair, and so are their lengths in a gather or a scatter.
        """
        if not self.ragged:
            return f"{self.name} of arguments for the MPI library alone"
        root, none = (given[3] if len(given) > 3 else 0), (0,) * channel.size
        choice = Choice(NATIVE)
        same = Operation(
            Collective(self.name), channel.rank, channel.layout, root, none, BYTES, choice, MPI.SUM, ragged=True
        )
        return same.description


def _method(
    collective: str,
    name: str,
    key: Callable[..., Hashable],
    read: Callable[..., Asked | None],
    *,
    ragged: bool = False,
    buffers: tuple[Buffer, ...] = (),
) -> Method:
    """Return the collective method of a name, with mpi4py's own in its three forms."""
    forms = (name, f"I{name[0].lower()}{name[1:]}", f"{name}_init")
    now, start, init = (getattr(MPI.Intracomm, form) for form in forms)
    return Method(collective, now, start, init, key, read, ragged, buffers)


BCAST: Final = _method(
    "broadcast",
    "Bcast",
    keys.bcast,
    moving.bcast,
    buffers=(Buffer.ONE,),
)
ALLGATHER: Final = _method(
    "allgather",
    "Allgather",
    keys.of_two("Allgather"),
    partial(moving.allgather, counted=False),
    buffers=(Buffer.ONE, Buffer.EACH),
)
ALLREDUCE: Final = _method("allreduce", "Allreduce", keys.with_op("Allreduce"), reducing.allreduce)
REDUCE: Final = _method("reduce", "Reduce", keys.reduce, reducing.reduce)
REDUCE_SCATTER_BLOCK: Final = _method(
    "reduce_scatter",
    "Reduce_scatter_block",
    keys.with_op("Reduce_scatter_block"),
    reducing.reduce_scatter_block,
)
REDUCE_SCATTER: Final = _method("reduce_scatter", "Reduce_scatter", keys.scatter, reducing.reduce_scatter)
ALLGATHERV: Final = _method(
    "allgather",
    "Allgatherv",
    keys.of_two("Allgatherv"),
    partial(moving.allgather, counted=True),
    buffers=(Buffer.ONE, Buffer.COUNTED),
)
GATHER: Final = _method(
    "gather",
    "Gather",
    keys.rooted("Gather"),
    partial(moving.rooted, collective=Collective.GATHER, counted=False),
    buffers=(Buffer.ONE, Buffer.EACH),
)
GATHERV: Final = _method(
    "gather",
    "Gatherv",
    keys.of_blocks("Gatherv"),
    partial(moving.rooted, collective=Collective.GATHER, counted=True),
    ragged=True,
)
SCATTER: Final = _method(
    "scatter",
    "Scatter",
    keys.rooted("Scatter"),
    partial(moving.rooted, collective=Collective.SCATTER, counted=False),
    buffers=(Buffer.EACH, Buffer.ONE),
)
SCATTERV: Final = _method(
    "scatter",
    "Scatterv",
    keys.of_blocks("Scatterv"),
    partial(moving.rooted, collective=Collective.SCATTER, counted=True),
    ragged=True,
)
ALLTOALL: Final = _method(
    "alltoall",
    "Alltoall",
    keys.of_two("Alltoall"),
    partial(moving.alltoall, counted=False),
    buffers=(Buffer.EACH, Buffer.EACH),
)
ALLTOALLV: Final = _method(
    "alltoall",
    "Alltoallv",
    keys.of_blocks("Alltoallv"),
    partial(moving.alltoall, counted=True),
    ragged=True,
)
ALLTOALLW: Final = _method("alltoallw", "Alltoallw", keys.of_two("Alltoallw"), moving.alltoallw)
SCAN: Final = _method("scan", "Scan", keys.with_op("Scan"), reducing.scan)
EXSCAN: Final = _method("exscan", "Exscan", keys.with_op("Exscan"), reducing.exscan)
