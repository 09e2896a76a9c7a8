"""Decentralized averaging in few bits: ranks in a ring tell their neighbors how they change, in a byte a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.decentralized import nodes_of
from mpiagg.aggregation.gossip import Nodes, among
from mpiagg.aggregation.memory import AggregationMemory, Remembering, check_arrays
from mpiagg.aggregation.packing import Group, Packing, TensorLayout
from mpiagg.aggregation.resharding import with_each
from mpiagg.arrays import CODECS, Array, Reduction, check_wire_dtype, even_ranges, load, reduction, settle, to_host
from mpiagg.checkpoints import PerRank
from mpiagg.collectives.flags import Flags
from mpiagg.common.arguments import check_flag, check_integer
from mpiagg.plans.binding import Lane, bind
from mpiagg.plans.plan import Plan
from mpiagg.plans.program import Program, in_turn
from mpiagg.schedules import Collective, Round, finish, receive, send
from mpiagg.transport import Channel, signature


def ring_weights(own: int, sizes: Sequence[int]) -> dict[int, Fraction]:
    """Return how much a node takes of each neighbor in a ring of nodes, which have so many ranks.

    It is a third of each neighbor, or less of a smaller one: W_ij = min(1, p_j / p_i) / 3. So p_i W_ij is symmetric,
    and the mean over all ranks is kept. A neighbor on both sides counts twice.
    """
    weights: dict[int, Fraction] = {}
    for neighbor in ((own - 1) % len(sizes), (own + 1) % len(sizes)):
        if neighbor != own:
            share = min(Fraction(1), Fraction(sizes[neighbor], sizes[own])) / 3
            weights[neighbor] = weights.get(neighbor, Fraction(0)) + share
    return weights


class _NodePlace:
    """Where a rank stands: its node, whether it leads that, and the leaders of the nodes beside it."""

    def __init__(self, channel: Channel, nodes: Nodes) -> None:
        self.channel = channel
        own = next(number for number, node in enumerate(nodes) if channel.rank in node)
        self.node = nodes[own]
        self.leads = self.node[0] == channel.rank
        weights = ring_weights(own, [len(node) for node in nodes]) if self.leads else {}
        self.neighbors = {nodes[number][0]: float(weight) for number, weight in weights.items()}

    def mean(self, vector: Array) -> Program:
        """Return the program that leaves the mean over the node in the leader's vector."""
        rounds = [*among(self.node, Collective.REDUCE, self.channel.rank)]
        if self.leads and len(self.node) > 1:
            rounds.append(Round(finish()))
        how = reduction("avg", vector.dtype, len(self.node))
        return self._bind(rounds, vector, [(0, vector.size)], how, "mean over a node")

    def broadcast(self, vector: Array) -> Program:
        """Return the program that gives the leader's vector to its node."""
        rounds = among(self.node, Collective.BROADCAST, self.channel.rank)
        how = reduction("sum", vector.dtype, 1)
        return self._bind(rounds, vector, [(0, vector.size)], how, "broadcast in a node")

    def swap(self, rows: Array) -> Program:
        """Return the program that sends the first row to all neighbors, and receives theirs in the other rows."""
        peers = list(self.neighbors)
        a_round = Round(*(receive(peer, row) for row, peer in enumerate(peers, 1)), *(send(peer, 0) for peer in peers))
        flat, how = rows.reshape(-1), reduction("sum", rows.dtype, 1)
        return self._bind([a_round], flat, even_ranges(0, flat.size, len(rows)), how, "ring")

    def _bind(self, rounds: Sequence[Round], vector: Array, lane: Lane, how: Reduction, label: str) -> Program:
        start, stop = lane[0]  # ranks may have different numbers of neighbors, but chunks of one length
        tag = self.channel.tags.shared(signature(f"{label}, {stop - start} {vector.dtype}"))
        return bind(self.channel, rounds, vector, [lane], how, label=label, tag=tag)


class _Vector:
    """The weights of one dtype, and what this rank and its neighbors are known to have.

    Attributes
    ----------
    x : numpy.ndarray
        The weights, packed.
    replicas : numpy.ndarray
        In row 0 what the neighbors know of this rank; in the others, what this rank knows of each neighbor. A rank
        that does not lead its node has none.
    """

    def __init__(self, place: _NodePlace, group: Group, tensors: Sequence[Array], codec: str) -> None:
        self.group, self._place = group, place
        self.x = group.pack(tensors)
        rows = 1 + len(place.neighbors) if place.leads else 0
        device = group.device
        self.replicas = device.empty((rows, self.x.size), self.x.dtype)
        self.replicas.fill(0)
        self._codec = device.codec(codec)
        nbytes = self._codec.nbytes(self.x.size)
        self._encoded_buffers = device.empty((rows, nbytes), np.uint8)
        self._room = device.empty(self.x.size if rows else 0, self.x.dtype)

    def check(self, tensors: Sequence[Array]) -> None:
        """Pack the tensors, and raise ValueError if a value is not finite."""
        self.group.pack(tensors)
        # A NaN is both the least and the greatest; unlike isfinite, these need no memory.
        if self.x.size and not (np.isfinite(self.x.min().item()) and np.isfinite(self.x.max().item())):
            raise ValueError(f"weights of {self.group.dtype} have NaN or infinity in them")

    def communicate(self) -> Program:
        """Return the program of a communication."""
        place = self._place
        mean, broadcast = place.mean(self.x), place.broadcast(self.x)
        if not place.leads:
            return in_turn(mean, broadcast)
        return in_turn(mean, self._encode, place.swap(self._encoded_buffers), self._apply, broadcast)

    def introduce(self, *, fresh: bool) -> Program:
        """Return the program that gives neighbors this rank's replica; a fresh one is made of the weights."""
        place = self._place
        take = in_turn(place.mean(self.x), self._take) if fresh else None
        return in_turn(take, place.swap(self.replicas) if place.leads else None)

    def _take(self) -> None:
        self.replicas[:1] = self.x

    def _encode(self) -> None:
        """Encode how this rank should differ from its replica: by its own step, and by a part of each difference."""
        own, room = self.replicas[0], self._room
        np.subtract(self.x, own, out=self.x)
        for theirs, weight in zip(self.replicas[1:], self._place.neighbors.values(), strict=True):
            np.subtract(theirs, own, out=room)
            np.multiply(room, weight, out=room)
            np.add(self.x, room, out=self.x)
        self._codec.encode(self.x, self._encoded_buffers[0])

    def _apply(self) -> None:
        """Add to every replica what its rank has sent; the weights become the own one."""
        for replica, encoded in zip(self.replicas, self._encoded_buffers, strict=True):
            self._codec.decode(encoded, self._room)
            np.add(replica, self._room, out=replica)
        np.copyto(self.x, self.replicas[0])


class Replicas(AggregationMemory):
    """What is kept for one list of tensors.

    Attributes
    ----------
    tensors : sequence of numpy.ndarray
        The tensors that are averaged next.
    calls : int
        How many calls there have been.
    fresh : bool
        Whether replicas are yet to be made, of the weights of the next communication; on all ranks or on none.
    vectors : list
        The tensors' vectors, one for each dtype.
    plan : Plan
        Communicates.
    """

    counters = ("calls",)

    def __init__(
        self,
        place: _NodePlace,
        layout: TensorLayout,
        tensors: Sequence[Array],
        codec: str,
        plan: Callable[[Program], Plan[None]],
    ) -> None:
        self.tensors = tensors
        self.calls, self.fresh = 0, True
        self.vectors = [_Vector(place, group, tensors, codec) for group in Packing(layout, in_place=False).groups]
        self._known = False
        self._plan = plan
        self.plan = self._make(*(vector.communicate() for vector in self.vectors))

    def check(self) -> list[bool]:
        """Pack the tensors, and raise ValueError if a value is not finite."""
        for vector in self.vectors:
            vector.check(self.tensors)
        return []

    def introduce(self) -> None:
        """Exchange replicas with the neighbors, if they do not know each other."""
        if self._known:
            return
        with self._make(*(vector.introduce(fresh=self.fresh) for vector in self.vectors)) as plan:
            plan()
        self._known, self.fresh = True, False
        self.check()  # packs again: a leader's vector holds the mean by now

    def unpack(self) -> None:
        """Bring the vectors into the tensors."""
        for vector in self.vectors:
            vector.group.unpack(vector.x, self.tensors)

    def _make(self, *programs: Program) -> Plan[None]:
        return self._plan(in_turn(*programs))

    def kept(self) -> dict[str, list[Array]]:
        """Return nothing: there may be no replicas; see :meth:`more`."""
        return {}

    def more(self) -> dict[str, Any]:
        """Return copies of the replicas, None for those to be made; the neighbors' are theirs to keep."""
        return {"replicas": None if self.fresh else [to_host(own) for own in self._own()]}

    def check_state(self, state: Mapping[str, Any]) -> str:
        """Raise ValueError if this is not what :meth:`state` returns; say what all ranks must have of it."""
        words = super().check_state(state)
        if state["replicas"] is not None:
            check_arrays("replicas", state["replicas"], self._own())
        return f"{words}, {'without' if state['replicas'] is None else 'with'} replicas"

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` returned."""
        super().load(state)
        self._known = False
        self.fresh = state["replicas"] is None
        for own, loaded in zip(self._own(), state["replicas"] or (), strict=not self.fresh):
            load(own, loaded)

    def _own(self) -> list[Array]:
        return [replica for vector in self.vectors for replica in vector.replicas[:1]]


class LowPrecisionDecentralized(Remembering[Replicas]):
    """Average the weights of each rank with those of its two neighbors in a ring, in a byte a value.

    Every rank keeps replicas of its neighbors' weights, and they keep one of its own; what travels is how a rank
    changes from its replica. Call ``aggregate(weights)`` after every step of the optimizer: x, the weights of a rank,
    with replica w, and those of its neighbors L and R, become w + Q(z) for

        z = (x - w) + (L - w) / 3 + (R - w) / 3,

    and w becomes the same. Q is what the codec makes of z, with one range for the whole vector of a dtype. Neighbors
    receive the same bytes, so their replicas are bitwise equal to w.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The ranks; the world by default.
    hierarchical : bool
        Average within each node, and let the nodes make up the ring: only their first ranks keep replicas. A node of
        p_i ranks takes min(1, p_j / p_i) / 3 of a neighbor of p_j, so that the mean over all ranks is kept.
    communication_interval : int
        Communicate on the first call and then on every so many; the calls between only count.
    codec : {"u8", "fp16", "bf16", "u4", "u2"}
        How differences travel; see :mod:`mpiagg.arrays.codecs`.

    Raises
    ------
    ValueError
        For an unknown codec, or an interval that is not an integer of at least 1. When aggregating: on the ranks whose
        weights are not all finite; nothing has changed then.
    TypeError
        When aggregating: for what is not an array of real floating-point numbers.
    MismatchError
        On all ranks, if they disagree on any argument. When aggregating: on the others, if weights are not finite.

    Notes
    -----
    Two ranks are each other's only neighbor, which counts twice: they take 2/3 of it. One rank alone becomes
    w + Q(x - w). The mean over all ranks is kept up to what the codec rounds, which vanishes as steps become small.

    In the first communication for a layout, the replica is the weights themselves; in the first after a state was
    loaded, it is the saved one, or the weights again if ranks have not what they need of those. It is sent to the
    neighbors in full precision then. So replicas are right wherever ranks start, and also when weights come in other
    lists than before. Weights of float16 and bfloat16 are kept in float32.

    Each list of tensors counts its own calls; lists of one layout are taken for the same tensors. A plan of
    :meth:`aggregate_init` has replicas of its own, and does all of a call when it is started.

    Cost: with u8, a byte a value to each of two neighbors, whatever the number of ranks, and a short all-reduce to find
    NaN and infinity. Memory: five vectors as long as the weights, and the bytes. It is wrong to use where ranks
    must have equal weights: they come together only as training ends. fp16 has no differences beyond 65504.

    Source: Tang, Gan, Zhang, Zhang and Liu, "Communication compression for decentralized training", NeurIPS 2018
    (DCD-PSGD); Gan et al., "BAGUA: Scaling up distributed learning with system relaxations", VLDB 2021.

    Examples
    --------
    >>> weights = [np.linspace(0, 1, 5) + rank]
    >>> with mpiagg.LowPrecisionDecentralized() as decentralized:
    ...     for _ in range(20):
    ...         decentralized.aggregate(weights)
    >>> mean = mpiagg.allreduce(weights[0], "avg")
    >>> bool(np.allclose(mean, np.linspace(0, 1, 5) + (size - 1) / 2, atol=0.1))
    True
    """

    aggregates: ClassVar[Literal["gradients", "weights"]] = "weights"

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        hierarchical: bool = False,
        *,
        communication_interval: int = 1,
        codec: str = "u8",
    ) -> None:
        super().__init__(comm)
        self.hierarchical, self.codec = hierarchical, codec
        self.communication_interval = communication_interval

        def check() -> str:
            check_flag("hierarchical", hierarchical)
            if not isinstance(codec, str) or codec not in CODECS:
                raise ValueError(f"unknown codec {codec!r}; known: {', '.join(CODECS)}")
            self.communication_interval = check_integer("communication_interval", communication_interval, 1)
            where = "nodes" if hierarchical else "ranks"
            return f"LowPrecisionDecentralized by {codec} among {where}, every {communication_interval} calls"

        self._channel.agree_on(check)
        size = self._channel.size
        nodes = nodes_of(self.comm) if self.hierarchical else tuple((rank,) for rank in range(size))
        self._place = _NodePlace(self._channel, nodes)
        self._faults = Flags(self.comm)

    def free(self) -> None:
        """Free the plans; a second call does nothing."""
        super().free()
        self._faults.free()

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        check_wire_dtype(self.codec, dtype)

    def _new_memory(self, layout: TensorLayout, tensors: Sequence[Array]) -> Replicas:
        return Replicas(self._place, layout, tensors, self.codec, self._plan)

    def _plan_of(self, memory: Replicas, tensors: Sequence[Array]) -> Plan[None]:
        return self._plan(in_turn(partial(self._run, memory, tensors)))

    def _carried(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let replicas be made anew on all ranks, if a rank has not what it needs: the mean is kept with any."""
        leads, fit = self._place.leads, True

        def look(own: Mapping[str, Any]) -> Mapping[str, Any]:
            nonlocal fit
            replicas = own.get("replicas")
            several = [replicas, *(replicas if isinstance(replicas, list) else ())]
            if any(isinstance(each, PerRank) for each in several):
                fit = False
            if self.hierarchical and isinstance(replicas, list) and bool(replicas) != leads:
                fit = False
            return own

        with_each(state, look)
        told = self._channel.gather(b"" if fit else b"-", "load a state")
        if any(told):
            state = with_each(state, lambda own: {**own, "replicas": None} if "replicas" in own else own)
        return super()._carried(state)

    def _run(self, memory: Replicas, tensors: Sequence[Array]) -> None:
        def check() -> list[bool]:
            self._check_tensors(tensors, self._check_dtype)
            memory.tensors = tensors
            return memory.check()

        if memory.calls % self.communication_interval == 0:
            self._faults.share(check)
            self.bytes_sent += self._faults.sent_bytes
            memory.introduce()
            memory.plan()
            memory.unpack()
            settle(*tensors)
        memory.calls += 1
