"""Aggregation of weights without a centre: every rank averages with one peer at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.base import expect_keys
from mpiagg.aggregation.elementwise import Elementwise
from mpiagg.aggregation.gossip import Nodes, PeerSelection, gossip, in_pieces
from mpiagg.arguments import check_integer
from mpiagg.arrays import Array, even_ranges, reduction
from mpiagg.operations import pick
from mpiagg.plan import Plan
from mpiagg.program import Program, bind, in_turn
from mpiagg.schedules import Collective, Round
from mpiagg.transport import SHARED_TAG

PIECE_BYTES: Final = 2**20
"""Vectors are exchanged in pieces of at most this length, so that a plan needs no more scratch than one."""


class Decentralized(Elementwise):
    """Average the weights of each rank with those of one peer, another one each time.

    After a local training step, ``aggregate(weights)`` replaces the weights of a rank and of its peer by their mean.
    The mean over all ranks is kept, and over the calls the ranks come together.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The ranks; the world by default.
    peer_selection : {"shift_one", "all"}
        ``"shift_one"`` pairs the ranks, differently each time (see :func:`mpiagg.aggregation.gossip.shift_one`); of
        an odd number one is idle in its turn. ``"all"`` averages over all ranks.
    hierarchical : bool
        Average within each node, and let nodes be the peers of each other: little goes between nodes. A node counts as
        much as it has ranks, so that the mean over all ranks is kept.
    communication_interval : int
        Communicate on the first call and then on every so many; the calls between only count.

    Raises
    ------
    ValueError
        For an unknown peer_selection, or an interval that is not an integer of at least 1.
    MismatchError
        On all ranks, if they disagree on any argument.

    Notes
    -----
    Both of a pair end with the same bits: (x + y) / 2 with the lower rank's x. Values of float16 and bfloat16 are
    combined in float32. A pair sends B bytes each way for weights of B bytes, whatever the number of ranks.
    """

    aggregates: ClassVar[Literal["gradients", "weights"]] = "weights"

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        peer_selection: PeerSelection = "shift_one",
        hierarchical: bool = False,
        communication_interval: int = 1,
    ) -> None:
        super().__init__(comm)
        self.peer_selection, self.hierarchical = peer_selection, bool(hierarchical)
        self.communication_interval = communication_interval
        self.calls = self.communications = 0

        def check() -> str:
            known = get_args(PeerSelection)
            if peer_selection not in known:
                raise ValueError(f"unknown peer_selection {peer_selection!r}; known: {', '.join(known)}")
            self.communication_interval = check_integer("communication_interval", communication_interval, 1)
            where = "nodes" if hierarchical else "ranks"
            return f"Decentralized with peers {peer_selection} among {where}, every {communication_interval} calls"

        self._channel.agree_on(check)
        comm = self._channel.comm
        self._nodes = nodes_of(comm) if self.hierarchical else tuple((rank,) for rank in range(comm.size))

    def aggregate(self, tensors: Sequence[Array]) -> None:
        """Average every array of the list with the peer's, in place; between communications, only count.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray
            Arrays of any shapes and layouts, the same number, shapes and dtypes on all ranks.

        Raises
        ------
        TypeError
            For what is not an array of numbers, or an array of integers.
        ValueError
            For a read-only array.
        MismatchError
            On all ranks, if the layout is new and not the same everywhere.
        PlanError
            If the aggregation is freed.
        StallError
            If a message does not complete within the timeout.
        """
        self._require_open()
        if self.calls % self.communication_interval == 0:
            self._communicate(tensors)
            self.communications += 1
        self.calls += 1

    def aggregate_init(self, tensors: Sequence[Array]) -> Plan[None]:
        """Plan the average of arrays that stay where they are; the plan communicates when it is started."""
        self._agree_on_tensors(tensors)
        return self._plan(in_turn(partial(self.aggregate, tensors)))

    def state_dict(self) -> dict[str, int]:
        """Return how many calls and communications there have been: they decide who the next peer is."""
        return {"calls": self.calls, "communications": self.communications}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned; collective.

        Raises
        ------
        ValueError
            If the keys are others, or a value is not a count.
        MismatchError
            On all ranks, if their states differ.
        """

        def check() -> str:
            expect_keys(state, ("calls", "communications"))
            for key, count in state.items():
                check_integer(key, count, 0)
            return f"Decentralized after {state['calls']} calls and {state['communications']} communications"

        self._channel.agree_on(check)
        self.calls, self.communications = state["calls"], state["communications"]

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        reduction("avg", dtype, 2)

    def _communicate(self, tensors: Sequence[Array]) -> None:
        if self.peer_selection == "all" and not self.hierarchical:
            self._run(tensors, self._bind)
            return
        rounds, divisor = gossip(self._channel.rank, self._nodes, self.communications, self.peer_selection)
        self._run(tensors, partial(self._bind_rounds, rounds=rounds, divisor=divisor), variant=(tuple(rounds), divisor))

    def _bind_rounds(self, vector: Array, rounds: Sequence[Round], divisor: int) -> Program:
        pieces = max(1, ceil(vector.nbytes / PIECE_BYTES))
        lane = even_ranges(0, vector.size, pieces)
        how = reduction("avg", vector.dtype, divisor)
        label = f"gossip with {self.peer_selection}"
        return bind(self._channel, list(in_pieces(rounds, pieces)), vector, [lane], how, label=label)

    def _bind(self, vector: Array, tag: int = SHARED_TAG) -> Program:
        how = reduction("avg", vector.dtype, self._channel.size)
        choice = pick("auto", None, Collective.ALLREDUCE, vector.nbytes)
        return self._collective(vector, Collective.ALLREDUCE, how, choice, tag=tag)


def nodes_of(comm: MPI.Intracomm) -> Nodes:
    """Return the ranks of each node, the nodes in the order of their first ranks; collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leader = np.array(comm.rank)
    node.Bcast(leader)
    node.Free()
    leaders = np.empty(comm.size, leader.dtype)
    comm.Allgather(leader, leaders)
    return tuple(tuple(np.flatnonzero(leaders == first).tolist()) for first in np.unique(leaders))
