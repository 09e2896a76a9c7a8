"""The aggregators that ``mpiagg demo`` can train with, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import mpiagg

if TYPE_CHECKING:
    from mpi4py import MPI


class Aggregator(NamedTuple):
    """A way to train together.

    Attributes
    ----------
    make : callable
        Makes the aggregation on a communicator; the second argument is the algorithm, for those that take one.
    what : str
        What it does, in words.
    exact : bool
        Whether every step is that of the serial training, but for rounding.
    full_precision : bool
        Whether values are aggregated as they are: nothing is rounded, left out or approximated on the way.
    learning_rate : float
        With which the demo learns well: lower where gradients come late or ranks go apart, since momentum adds to that.
    momentum : float
        Of the demo's optimizer: none where the aggregation has it.
    """

    make: Callable[[MPI.Intracomm, str], mpiagg.Aggregation]
    what: str
    exact: bool = False
    full_precision: bool = False
    learning_rate: float = 0.2
    momentum: float = 0.9


def _on_a_ring(comm: MPI.Intracomm, _: str) -> mpiagg.Aggregation:
    from mpiagg.aggregation.gossip import ring  # noqa: PLC0415 - needs MPI, which only a rank may load

    return mpiagg.NeighborAverage(comm, ring(comm.rank, comm.size))


AGGREGATORS: Final[Mapping[str, Aggregator]] = {
    "allreduce": Aggregator(
        lambda comm, algorithm: mpiagg.AllReduce(comm, algorithm=algorithm),
        "gradients, averaged",
        exact=True,
        full_precision=True,
    ),
    "parameter-server": Aggregator(
        lambda comm, _: mpiagg.ParameterServer(comm), "the same, on rank 0", exact=True, full_precision=True
    ),
    "allreduce-fp16": Aggregator(
        lambda comm, _: mpiagg.AllReduce(comm, wire="fp16"), "gradients, averaged, in float16 on the way"
    ),
    "allreduce-bf16": Aggregator(lambda comm, _: mpiagg.AllReduce(comm, wire="bf16"), "the same, in bfloat16"),
    "allreduce-u8": Aggregator(lambda comm, _: mpiagg.AllReduce(comm, wire="u8"), "the same, in 8 bits"),
    "error-feedback": Aggregator(
        lambda comm, _: mpiagg.ErrorFeedback(mpiagg.AllReduce(comm, wire="u8")), "the same, with error feedback"
    ),
    "error-feedback-u4": Aggregator(
        lambda comm, _: mpiagg.ErrorFeedback(mpiagg.AllReduce(comm, wire="u4")), "the same, in 4 bits"
    ),
    "error-feedback-u2": Aggregator(
        lambda comm, _: mpiagg.ErrorFeedback(mpiagg.AllReduce(comm, wire="u2")), "the same, in 2 bits"
    ),
    "sparsified-topk": Aggregator(
        lambda comm, _: mpiagg.Sparsified(comm, ratio=0.05, selection="topk"),
        "the largest 5 % of each gradient",
        learning_rate=0.1,
    ),
    "dgc": Aggregator(
        lambda comm, _: mpiagg.Sparsified(comm, ratio=0.05, momentum=0.9),
        "the same, with momentum before it is chosen",
        momentum=0,
    ),
    "sparsified-randomk": Aggregator(
        lambda comm, _: mpiagg.Sparsified(comm, ratio=0.25, selection="randomk", momentum=0.9),
        "a quarter of each gradient, at random, with momentum",
        momentum=0,
    ),
    "sparsified-blockk": Aggregator(
        lambda comm, _: mpiagg.Sparsified(comm, ratio=0.25, selection="blockk", momentum=0.9),
        "a run of a quarter of each gradient, with momentum",
        momentum=0,
    ),
    "sparsified-threshold": Aggregator(
        lambda comm, _: mpiagg.Sparsified(comm, selection="threshold", threshold=0.01), "what is at least 0.01"
    ),
    "decoupled-momentum": Aggregator(
        lambda comm, _: mpiagg.DeMo(comm, k=4, chunk=16),
        "signs of the 4 strongest waves of 16 x 16",
        learning_rate=0.003,
        momentum=0,
    ),
    "power-sgd": Aggregator(lambda comm, _: mpiagg.PowerSGD(comm, rank=2), "gradients, as matrices of rank 2"),
    "decentralized": Aggregator(
        lambda comm, _: mpiagg.Decentralized(comm, "shift_one"), "weights, with one peer in turn", full_precision=True
    ),
    "decentralized-all": Aggregator(
        lambda comm, _: mpiagg.Decentralized(comm, "all"), "weights, with all ranks", full_precision=True
    ),
    "decentralized-exponential": Aggregator(
        lambda comm, _: mpiagg.Decentralized(comm, "one_peer_exponential"),
        "weights, with the rank 1, 2, 4, ... below",
        full_precision=True,
    ),
    "neighbor-average": Aggregator(_on_a_ring, "weights, with both neighbours", full_precision=True),
    "low-precision": Aggregator(
        lambda comm, _: mpiagg.LowPrecisionDecentralized(comm), "the same, as differences in 8 bits"
    ),
    "local-sgd": Aggregator(
        lambda comm, _: mpiagg.LocalSGD(comm, period=8),
        "weights, averaged every 8 steps",
        full_precision=True,
        learning_rate=0.1,
    ),
    "local-sgd-outer": Aggregator(
        lambda comm, _: mpiagg.LocalSGD(comm, period=8, outer_learning_rate=0.7, outer_momentum=0.5, wire="u8"),
        "the same in 8 bits, with an outer optimizer",
        learning_rate=0.1,
    ),
    "sparse-loco": Aggregator(
        lambda comm, _: mpiagg.SparseLoCo(comm, period=8),
        "weights, by the largest 3 % of what they have moved in 8 steps, in 2 bits",
        learning_rate=0.1,
    ),
    "streaming-diloco": Aggregator(
        lambda comm, _: mpiagg.LocalSGD(
            comm,
            period=8,
            outer_learning_rate=0.7,
            outer_momentum=0.5,
            wire="u4",
            error_feedback=True,
            fragments=2,
            delay=1,
            mixing=0.25,
        ),
        "the same in 4 bits, in two parts, each applied a step later",
        learning_rate=0.1,
    ),
}
