"""Aggregation of a few coordinates of each tensor; what is not sent is kept for later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.exchanges import CountedGather, Exchange, Gather, Reduce
from mpiagg.aggregation.memory import AggregationMemory, Remembering
from mpiagg.aggregation.packing import Group, Packing, TensorLayout
from mpiagg.aggregation.selection import Selection, at_least, how_many, random_block, random_k, top_k
from mpiagg.arrays import INDEX, Array, cuts_of, ranges, reduction
from mpiagg.common.arguments import check_integer, check_number
from mpiagg.plans.plan import Plan
from mpiagg.plans.program import Program, in_turn
from mpiagg.transport import Channel


class Sparsified(Remembering["_SparsifiedState"]):
    """Aggregate a few coordinates of each tensor, and keep the rest for later: sparse gradients with error feedback.

    Each rank adds its tensors to its memory, and takes the values of some coordinates out of it to send them. The
    tensors become the average of what all ranks have sent, with zeros elsewhere. What a rank has sent and what it
    keeps always make up what came in: nothing is lost, it is late.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The ranks; the world by default.
    ratio : float
        Which part of a tensor's coordinates is sent, above 0 and up to 1: k = ceil(ratio size), so at least one. It
        means nothing to ``"threshold"``.
    selection : {"topk", "randomk", "blockk", "threshold"}
        Which coordinates of a tensor are sent:

        - ``"topk"``: the k with the largest magnitude, of equal ones those that come first; on each rank its own.
        - ``"randomk"``: k at random, the same on all ranks, so that values are sent alone, and reduced on the way.
        - ``"blockk"``: k in a row from a random multiple of k on, or the last k; on each rank its own.
        - ``"threshold"``: all with a magnitude of at least ``threshold``, as many as there are, also none.
    threshold : float, optional
        For ``"threshold"``, and for it alone: above 0.
    seed : int
        Random choices are drawn anew in each step from the seed, the number of the step, that of the memory, and the
        rank for ``"blockk"``; there is no other random state.
    op : {"avg", "sum"}
        How values are combined; ``"avg"`` is the sum divided by the number of ranks.
    momentum : float
        From 0 to less than 1: the momentum of the optimizer, taken here and not there. Each rank keeps a velocity, u <-
        momentum u + gradient, and adds it to its memory in place of the gradient; where values are sent, the velocity
        becomes zero, too. The optimizer steps without momentum then.

    Raises
    ------
    ValueError
        For an argument that is not as described.
    MismatchError
        On all ranks, if they disagree on any argument.

    Notes
    -----
    All ranks end with the same bits; except by ``"randomk"``, values are added in the order of the ranks. Those of
    float16 and bfloat16 are kept, sent and combined in float32. Received coordinates that are out of range are a
    MismatchError, and are not written.

    The learning rate is not in the memory: gradients are kept as they are, and what is sent late is applied with the
    learning rate of that time. As long as the rate is constant, that is the same as keeping ``lr * gradient`` like
    Stich et al.; once it has fallen, what was kept from before counts less. Apply weight decay after the aggregation.

    An optimizer with momentum must not be used after it: what was kept for t steps comes at once, and momentum goes on
    with it for as long again, in a direction that is old by then. Training ended worse than without communication that
    way, with a ratio of 0.05. Give the momentum to the aggregation: then it acts where and when gradients arise.

    Cost: for n ranks and K chosen values of s bytes, a rank sends (n-1) K (c + s) bytes by ``"topk"``, c being at most
    2 bits and log2(1 / ratio) for a coordinate: 1.1 bytes for a ratio of 0.01; by ``"blockk"`` (n-1) K s and some bytes
    for each tensor; by ``"randomk"`` what an all-reduce of K s bytes sends; by ``"threshold"`` about as much as
    ``"topk"`` with the average K of the ranks, in one exchange more, for the counts, and with new requests in each
    step. Memory: two vectors as long as the tensors, one more with momentum, and n messages; while a rank chooses, up
    to a byte (8 by ``"randomk"`` for ratios above 0.02, or where many magnitudes are equal) for each element of a
    tensor more.

    It is wrong for weights; and a waste by ``"topk"`` for a ratio above 2 s / (n (c + s)), where an all-reduce of
    everything sends less. A threshold must suit the gradients, which shrink in training: else all is sent, or nothing.

    Sources: S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018: SGD with a memory
    converges at the rate of SGD by any selection that takes a fixed part of the memory's square norm on average, as
    the first three do; ranks may choose alike or not. That random choices in common need no indices and can be
    all-reduced is from T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD", NeurIPS 2019. Momentum is that of Y. Lin, S.
    Han, H. Mao, Y. Wang, W. J. Dally, "Deep gradient compression", ICLR 2018 (arXiv 1712.01887): its momentum
    correction and momentum factor masking.

    Examples
    --------
    Of four values the two with the largest magnitude are sent, and the others one step later:

    >>> gradients = [np.array([1.0, -8.0, 2.0, 4.0])]
    >>> with mpiagg.Sparsified(ratio=0.5) as sparsified:
    ...     sparsified.aggregate(gradients)
    ...     print(gradients[0])
    ...     gradients[0][:] = 0
    ...     sparsified.aggregate(gradients)
    ...     print(gradients[0])
    [ 0. -8. 0. 4.]
    [1. 0. 2. 0.]
    """

    averaged: ClassVar[tuple[str, ...]] = ("kept", "velocities")

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        ratio: float = 0.01,
        selection: Selection = "topk",
        *,
        threshold: float | None = None,
        seed: int = 0,
        op: Literal["avg", "sum"] = "avg",
        momentum: float = 0.0,
    ) -> None:
        super().__init__(comm)
        self.ratio, self.selection, self.threshold, self.seed, self.op = ratio, selection, threshold, seed, op
        self.momentum = momentum

        def check() -> str:
            self._check_arguments()
            some = f"ratio {self.ratio}" if threshold is None else f"threshold {self.threshold}"
            return f"Sparsified by {selection}, {some}, seed {self.seed}, op {op}, momentum {self.momentum}"

        self._channel.agree_on(check)

    def _check_arguments(self) -> None:
        if self.selection not in get_args(Selection):
            raise ValueError(f"unknown selection {self.selection!r}; known: {', '.join(get_args(Selection))}")
        if self.op not in ("avg", "sum"):
            raise ValueError(f"unknown op {self.op!r}; known: avg, sum")
        if (self.threshold is not None) != (self.selection == "threshold"):
            raise ValueError("selection 'threshold' needs a threshold, and the others have none")
        self.ratio = check_number("ratio", self.ratio, "a number above 0 and up to 1", lambda x: 0 < x <= 1)
        if self.threshold is not None:
            self.threshold = check_number("threshold", self.threshold, "a finite number above 0", lambda x: x > 0)
        self.seed = check_integer("seed", self.seed, 0)
        self.momentum = check_number("momentum", self.momentum, "a number from 0 to less than 1", lambda x: 0 <= x < 1)

    def _new_memory(self, layout: TensorLayout, tensors: Sequence[Array]) -> _SparsifiedState:
        return _SparsifiedState(
            self, self._channel, layout, tensors, self._plan, place=len(self._entries), worth=self._worth()
        )

    def _worth(self) -> float:
        return 1 if self.op == "avg" else self._channel.size


class _SparsifiedState(AggregationMemory):
    """What is kept of one list of tensors, and the plan that sends some of it.

    Random choices depend on the place, which is that in the order of all memories when this one was made.
    """

    counters = "step", "place"

    def __init__(
        self,
        owner: Sparsified,
        channel: Channel,
        layout: TensorLayout,
        tensors: Sequence[Array],
        plan: Callable[[Program], Plan[None]],
        *,
        place: int,
        worth: float,
    ) -> None:
        self.tensors, self.step, self.place, self._worth = tensors, 0, place, worth
        self._parts: list[_SparsifiedPart] = []
        for number, group in enumerate(Packing(layout, in_place=False).groups):
            self._parts.append(_SparsifiedPart(owner, channel, group, number))
        programs = [
            in_turn(partial(self._load, part), part.exchange.program, partial(self._store, part))
            for part in self._parts
        ]
        self.plan = plan(in_turn(*programs, self._finish))
        self._fixed_bytes = self.plan.sent_bytes

    def _load(self, part: _SparsifiedPart) -> None:
        part.load(self.tensors, (self.place, self.step))

    def _store(self, part: _SparsifiedPart) -> None:
        part.store(self.tensors)

    def _finish(self) -> None:
        self.step += 1
        self.plan.sent_bytes = self._fixed_bytes + sum(part.exchange.more_bytes for part in self._parts)

    def kept(self) -> dict[str, list[Array]]:
        """Return what was not sent, and velocities: a vector for each dtype."""
        velocities = [part.velocity for part in self._parts if part.velocity is not None]
        return {"kept": [part.kept for part in self._parts], "velocities": velocities}

    def more(self) -> dict[str, Any]:
        """Return what the mean of that counts for."""
        return {"worth": self._worth}


class _SparsifiedPart:
    """The tensors of one dtype in a row: what is kept of them, and what is chosen of that.

    ``number`` tells this part's random choices from those of other parts.
    """

    def __init__(self, owner: Sparsified, channel: Channel, group: Group, number: int) -> None:
        self._owner, self._group = owner, group
        self._number, self._rank = number, channel.rank if owner.selection == "blockk" else 0
        self.kept = group.device.empty(sum(group.lengths), group.working)
        self.kept.fill(0)
        self.velocity: Array | None = np.zeros_like(self.kept) if owner.momentum else None
        # What came in, then scratch, then what goes out.
        self._vector = self.kept[:0]
        filled = [(start, stop) for start, stop in ranges(cuts_of(group.lengths)) if start < stop]
        self._pieces = [(start, stop, how_many(stop - start, owner.ratio)) for start, stop in filled]
        counts = [k for _, _, k in self._pieces]
        how = reduction(owner.op, group.working, channel.size)
        self.exchange: Exchange
        if owner.selection == "threshold":
            self.exchange = CountedGather(channel, how, group.device, len(self.kept))
        elif owner.selection == "randomk":
            self.exchange = Reduce(channel, how, group.device, sum(counts))
        else:
            widths = counts if owner.selection == "blockk" else None
            self.exchange = Gather(channel, how, group.device, len(self.kept), sum(counts), widths=widths)

    def load(self, tensors: Sequence[Array], turn: tuple[int, int]) -> None:
        """Add tensors to what is kept, and take out what is to be sent in a turn: of which memory, and which step."""
        self._vector = self._group.pack(tensors)
        if self.velocity is not None:
            self.velocity *= self._owner.momentum
            self.velocity += self._vector
        self.kept += self._vector if self.velocity is None else self.velocity
        place, step = turn
        random = np.random.default_rng((self._owner.seed, place, self._number, self._rank, step))
        chosen = [start + self._chosen(start, stop, k, random) for start, stop, k in self._pieces]
        starts = np.concatenate([self._group.device.empty(0, INDEX), *chosen])
        self.exchange.take(starts, self.kept)
        if self.velocity is not None:
            self.velocity[self.exchange.coordinates(starts)] = 0

    def _chosen(self, start: int, stop: int, k: int, random: np.random.Generator) -> Array:
        """Return which coordinates of a tensor are sent, or where those in a row start."""
        values, spare = self.kept[start:stop], self._vector[start:stop]
        if self._owner.threshold is not None:
            return at_least(values, self._owner.threshold, spare)
        if self._owner.selection == "randomk":
            return self._group.device.from_host(random_k(len(values), k, random))
        if self._owner.selection == "blockk":
            return self._group.device.from_host(random_block(len(values), k, random))
        return top_k(values[None], k, spare)

    def store(self, tensors: Sequence[Array]) -> None:
        """Write what all ranks have sent to the tensors."""
        self._vector.fill(0)
        self.exchange.give(self._vector)
        self._group.unpack(self._vector, tensors)
