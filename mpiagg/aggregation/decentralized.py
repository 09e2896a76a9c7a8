"""Aggregation of weights without a centre: every rank averages with another one each time."""

from __future__ import annotations

from typing import get_args

from mpi4py import MPI

from mpiagg.aggregation.gossip import Nodes, PeerSelection, Phase, gossip
from mpiagg.aggregation.mixing import Mixing
from mpiagg.arrays import Array, device_of, reduction
from mpiagg.common.arguments import check_flag
from mpiagg.plans.choices import pick
from mpiagg.plans.program import Program
from mpiagg.schedules import Collective
from mpiagg.transport import SHARED_TAG, channel_of


class Decentralized(Mixing):
    """Average the weights of each rank with those of one peer, another one each time.

    After a local training step, ``aggregate(weights)`` replaces the weights of a rank by their mean with a peer's. The
    mean over all ranks is kept, and over the calls the ranks come together. ``start(weights)`` and ``wait()`` do the
    same while the next gradient is computed; see :class:`mpiagg.aggregation.mixing.Mixing`.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The ranks; the world by default.
    peer_selection : {"shift_one", "one_peer_exponential", "all"}
        ``"shift_one"`` pairs the ranks (see :func:`mpiagg.aggregation.gossip.shift_one`; from Bagua: Gan et al.,
        VLDB 2021); of an odd number one is idle in its turn. With ``"one_peer_exponential"`` a rank sends to the one
        2**k above and receives from the one 2**k below, k going round the log2 n powers of two below n (Assran et
        al., ICML 2019; Ying et al., NeurIPS 2021). ``"all"`` averages over all ranks.
    hierarchical : bool
        Average within each node, and let nodes be the peers of each other: little goes between nodes. Every rank counts
        the same, so that the mean over all ranks is kept. With one node this is the mean over its ranks.
    communication_interval : int
        Communicate on the first call and then on every so many; the calls between only count.

    Raises
    ------
    ValueError
        For an unknown peer_selection, a hierarchical that is no boolean, or an interval that is not an integer of at
        least 1.
    MismatchError
        On all ranks, if they disagree on any argument.

    Notes
    -----
    Values of float16 and bfloat16 are combined in float32. For weights of B bytes a rank sends B bytes in one step,
    whatever the number of ranks, and needs at most 1 MiB of scratch; ``"all"`` costs what an all-reduce does.

    Both of a pair of ``"shift_one"`` end with the same bits: (x + y) / 2 with the lower rank's x. The peers of
    ``"one_peer_exponential"`` are no pairs, and after one communication all ranks differ in general. If n is a power of
    two, log2 n communications in a row give every rank the mean of all, to rounding; ``"shift_one"`` does so for n = 2
    and 4 alone. At other n both bring the ranks together only by and by.

    Between nodes of different sizes ``"one_peer_exponential"`` moves half of the smallest node's share in a step: much
    larger nodes come together slowly then, and ``"shift_one"`` is better.

    It is wrong to use where all ranks must have the same weights after each step, and of little use on links so fast
    that an all-reduce costs no more than a step of it.

    Examples
    --------
    >>> weights = [np.full(3, float(rank))]
    >>> with mpiagg.Decentralized() as decentralized:
    ...     decentralized.aggregate(weights)  # the mean of the weights of this rank and of one other
    >>> mean = mpiagg.allreduce(weights[0], "avg")
    >>> bool(np.allclose(mean, (size - 1) / 2))
    True
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        peer_selection: PeerSelection = "shift_one",
        hierarchical: bool = False,
        communication_interval: int = 1,
    ) -> None:
        self.peer_selection, self.hierarchical = peer_selection, hierarchical

        def check() -> str:
            check_flag("hierarchical", hierarchical)
            known = get_args(PeerSelection)
            if peer_selection not in known:
                raise ValueError(f"unknown peer_selection {peer_selection!r}; known: {', '.join(known)}")
            return f"Decentralized with peers {peer_selection} among {'nodes' if hierarchical else 'ranks'}"

        super().__init__(comm, communication_interval, check)
        size = self._channel.size
        self._nodes = nodes_of(self.comm) if self.hierarchical else tuple((rank,) for rank in range(size))

    def _phases(self) -> tuple[Phase, ...]:
        return gossip(self._channel.rank, self._nodes, self.communications, self.peer_selection)

    def _bind(self, vector: Array, tag: int = SHARED_TAG) -> Program:
        if self.hierarchical or self.peer_selection != "all":
            return super()._bind(vector, tag)
        how = reduction("avg", vector.dtype, self._channel.size)
        case = self._channel.case(Collective.ALLREDUCE, vector.nbytes)
        choice = pick("auto", None, case, device=device_of(vector))
        return self._collective(vector, Collective.ALLREDUCE, how, choice, tag=tag)


def nodes_of(comm: MPI.Intracomm) -> Nodes:
    """Return the ranks of each node, the nodes in the order of their first ranks."""
    return channel_of(comm).layout.nodes
