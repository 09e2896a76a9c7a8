"""All ranks of an all-reduce in one process, without MPI: for tests, for teaching, and to see what the bits will be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from mpiagg.arguments import check_integer
from mpiagg.arrays import Array, Reduction, as_input, even_ranges, reduction
from mpiagg.schedules import Action, Collective, Message, RoundDone, Step, schedules, walk
from mpiagg.schedules import algorithm as find_algorithm
from mpiagg.tuning import Choice, choose


def simulate(
    vectors: Sequence[npt.ArrayLike], op: str = "sum", algorithm: str = "auto", *, lanes: int | None = None
) -> list[Array]:
    """All-reduce a list of arrays, one for each rank, exactly as the ranks of an MPI job would.

    Parameters
    ----------
    vectors : sequence of array_like
        Every rank's array, all of one shape and dtype.
    op : {"sum", "avg", "min", "max", "prod"}
        How values are combined.
    algorithm : str
        A name from :func:`mpiagg.algorithms`, or ``"auto"``.
    lanes : int, optional
        As for :func:`mpiagg.allreduce`.

    Returns
    -------
    list of numpy.ndarray
        Every rank's result, with the bits that :func:`mpiagg.allreduce` gives it.

    Raises
    ------
    ValueError
        For an unknown op or algorithm, no lanes, no vectors, or vectors of different shapes or dtypes.
    TypeError
        For a dtype that the op is not for.
    """
    inputs = [as_input(vector) for vector in vectors]
    if not inputs:
        raise ValueError("simulate needs the vector of at least one rank")
    first = inputs[0]
    for rank, x in enumerate(inputs):
        if (x.shape, x.dtype) != (first.shape, first.dtype):
            raise ValueError(f"rank {rank} has {x.dtype} {x.shape}, rank 0 has {first.dtype} {first.shape}")
    how = reduction(op, first.dtype, len(inputs))
    nbytes = first.size * how.dtype.itemsize
    choice = choose(Collective.ALLREDUCE, nbytes) if algorithm == "auto" else Choice(algorithm)
    if lanes is not None:
        choice = choice._replace(lanes=check_integer("lanes", lanes, 1))
    buffers = [x.ravel().astype(how.dtype) for x in inputs]
    for start, stop in even_ranges(0, first.size, choice.lanes):
        _run_lane([buffer[start:stop] for buffer in buffers], choice.algorithm, how)
    return [buffer.astype(first.dtype).reshape(first.shape) for buffer in buffers]


def _run_lane(buffers: Sequence[Array], algorithm: str, how: Reduction) -> None:
    """Run the ranks' schedules on their buffers, in place."""
    size = len(buffers)
    lane = even_ranges(0, buffers[0].size, find_algorithm(algorithm).chunks(size))
    arrived: dict[tuple[int, int], Array] = {}

    def part(rank: int, step: Step) -> Array:
        return buffers[rank][lane[step.chunk][0] : lane[step.chunk + step.count - 1][1]]

    for event in walk(schedules(algorithm, Collective.ALLREDUCE, size)):
        if isinstance(event, Message):
            arrived[event.target, event.slot] = part(event.source, event.sent).copy()
        else:
            _apply(event, arrived, part, how)


def _apply(
    done: RoundDone, arrived: dict[tuple[int, int], Array], part: Callable[[int, Step], Array], how: Reduction
) -> None:
    for slot, step in enumerate(done.steps):
        own = part(done.rank, step)
        if step.action is Action.FINISH:
            how.finish(own)
        elif step.action is Action.RECEIVE:
            np.copyto(own, arrived.pop((done.rank, slot)))
        elif step.action is Action.REDUCE:
            received = arrived.pop((done.rank, slot))
            pair = (received, own) if step.received_first else (own, received)
            how.combine(*pair, own)
