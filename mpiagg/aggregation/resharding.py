"""States that another number of ranks has made, for the ranks that there are now.

What a rank keeps of its own may count by the mean over the ranks: what has been lost or not been sent so far. Each of
the new ranks gets that mean. Where old and new ranks are the same in number, or ranks are left of more, a rank has
kept its own, and goes on with it. ``worth`` says how much the mean counts for in the results: a sum of n ranks has n
times as much in it. It is kept, too, and what is late is scaled so that it comes to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.packing import describe_layout, layout_of
from mpiagg.arrays import Array
from mpiagg.checkpoints import PerRank
from mpiagg.collectives.functions import allreduce
from mpiagg.common.arguments import check_number
from mpiagg.transport import channel_of

AggregationState = Mapping[str, Any]


class _PartOfMean(NamedTuple):
    """Part of a mean over the ranks that there were: the sum over some, how many there are in all, and the dtype."""

    total: Array
    ranks: int
    dtype: np.dtype[Any]


def with_each(state: AggregationState, change: Callable[[AggregationState], AggregationState]) -> AggregationState:
    """Return an aggregation's state with the state of each memory changed; what is malformed is left to be refused."""
    if not isinstance(state, Mapping) or not isinstance(state.get("memories"), list):
        return state

    def changed(each: Any) -> Any:
        known = isinstance(each, Mapping) and isinstance(each.get("state"), Mapping)
        return {**each, "state": change(each["state"])} if known else each

    return {**state, "memories": [changed(each) for each in state["memories"]]}


def resharded(
    state: AggregationState, name: str, averaged: Collection[str], worth: float, comm: MPI.Intracomm
) -> AggregationState:
    """Return an aggregation's state for these ranks; collective.

    Parameters
    ----------
    state : dict
        What it is to go on from.
    name : str
        The aggregation's.
    averaged : collection of str
        Which lists of arrays in the state of a memory count by the mean over the ranks.
    worth : float
        How much that mean counts for in the results.
    comm : MPI.Intracomm
        The ranks.

    Raises
    ------
    ValueError
        If there is :class:`PerRank` in the state in the place of anything else, or a worth that is none.
    MismatchError
        On the other ranks then, and on all, if the means differ in number or shape.
    """
    channel, parts = channel_of(comm), list[_PartOfMean]()

    def take(own: AggregationState) -> AggregationState:
        taken = {key: _mapped(value, partial(part, key)) for key, value in own.items()}
        if "worth" in own:
            check_number("worth", taken["worth"], "a finite number other than zero", lambda x: x != 0)
        return taken

    def part(key: str, value: Any) -> Any:
        if not isinstance(value, PerRank):
            return value
        if key not in averaged:
            raise ValueError(
                f"{name}: {key} was not the same on the {len(value)} ranks that saved it, but must be: there is no "
                f"going on with {channel.size}"
            )
        parts.append(_part_of(key, value, channel.rank, channel.size))
        return parts[-1]

    def check() -> str:
        nonlocal state
        state = with_each(state, take)
        means = ", ".join(f"{x.dtype} {x.total.shape} of {x.ranks} ranks" for x in parts)
        return f"{name} with means of {means or 'nothing'}"

    def give(own: AggregationState) -> AggregationState:
        factor = own.get("worth", worth) / worth
        given = {key: _mapped(value, lambda x: _mean(x, comm)) for key, value in own.items()}
        if factor != 1:
            given["worth"] = worth
            given.update({key: _mapped(given[key], lambda x: _scaled(x, factor)) for key in averaged if key in given})
        return given

    channel.agree_on(check)
    return with_each(state, give)


def _mapped(value: Any, call: Callable[[Any], Any]) -> Any:
    return [call(each) for each in value] if isinstance(value, list) else call(value)


def _part_of(key: str, value: PerRank, rank: int, size: int) -> _PartOfMean:
    """Return the sum of what every ``size``-th rank had: so all ranks together read everything once."""
    first = value[rank % len(value)]
    if not isinstance(first, np.ndarray) or first.dtype.kind not in "fc":
        raise ValueError(f"{key} must be arrays of floating-point numbers, not {type(first).__name__}")
    total = np.zeros(first.shape, np.result_type(first.dtype, np.float64))
    for old in range(rank, len(value), size):
        each = value[old]
        if layout_of([each]) != layout_of([first]):
            raise ValueError(f"{key} must be {describe_layout(layout_of([first]))} of all ranks")
        total += each
    return _PartOfMean(total, len(value), first.dtype)


def _mean(part: Any, comm: MPI.Intracomm) -> Any:
    if not isinstance(part, _PartOfMean):
        return part
    mean = allreduce(part.total, comm=comm) / part.ranks
    return np.asarray(mean, part.dtype)


def _scaled(x: Any, factor: float) -> Any:
    return x * factor if isinstance(x, np.ndarray) and x.dtype.kind in "fc" else x
