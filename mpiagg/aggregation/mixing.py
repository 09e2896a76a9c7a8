"""Aggregations of weights: every so many calls the ranks mix theirs, by a row of a matrix each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, ClassVar, Final, Literal

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.base import Aggregation, expect_keys
from mpiagg.aggregation.elementwise import Elementwise
from mpiagg.aggregation.gossip import MixingRow, Phase, in_pieces
from mpiagg.arrays import Array, device_of, even_ranges, reduction, settle
from mpiagg.common.arguments import check_integer
from mpiagg.errors import PlanError
from mpiagg.plans.background import InBackground
from mpiagg.plans.binding import Lane, bind
from mpiagg.plans.neighbors import NeighborExchange, bind_exchanges
from mpiagg.plans.plan import Plan
from mpiagg.plans.program import Program, in_turn
from mpiagg.schedules import MOST_LANES
from mpiagg.transport import SHARED_TAG, Channel, signature

PIECE_BYTES: Final = 2**20
"""Vectors are exchanged in pieces of at most this length, so that a plan needs no more scratch than one a peer."""


class Mixing(Elementwise):
    """An aggregation of weights: on the first call and then on every so many, the ranks mix theirs.

    :meth:`aggregate` mixes at once. :meth:`start` and :meth:`wait` do so in the background, while the gradient is
    computed: x <- mixed(x) - lr g(x), with the gradient of the weights as they were (Lian et al., "Can decentralized
    algorithms outperform centralized algorithms?", NeurIPS 2017).

    A subclass says by :meth:`_phases` what a rank does.

    Parameters
    ----------
    comm : MPI.Intracomm or None
        The ranks.
    communication_interval : int
        Communicate on the first call and then on every so many; the calls between only count.
    check : callable
        Checks the subclass's arguments, and says what they are in words that are the same on all ranks.

    Attributes
    ----------
    calls, communications : int
        How many there have been.

    Examples
    --------
    >>> weights = [np.full(3, float(rank))]
    >>> with mpiagg.Decentralized() as decentralized:
    ...     decentralized.start(weights)
    ...     step = 0.1 * weights[0]  # computed while the weights are averaged
    ...     decentralized.wait()
    ...     weights[0] -= step
    >>> mean = mpiagg.allreduce(weights[0], "avg")
    >>> bool(np.allclose(mean, 0.9 * (size - 1) / 2))
    True
    """

    aggregates: ClassVar[Literal["gradients", "weights"]] = "weights"

    def __init__(self, comm: MPI.Intracomm | None, communication_interval: int, check: Callable[[], str]) -> None:
        super().__init__(comm)
        self.communication_interval = communication_interval
        self.calls = self.communications = 0
        self._finish: Callable[[], None] | None = None

        def check_all() -> str:
            words = check()
            self.communication_interval = check_integer("communication_interval", communication_interval, 1)
            return f"{words}, every {communication_interval} calls"

        self._channel.agree_on(check_all)
        # What runs in the background must not meet the messages of the calls beside it.
        self._tag = self._channel.tags.in_turn(MOST_LANES)

    @abstractmethod
    def _phases(self) -> tuple[Phase, ...]:
        """Return what this rank does in the next communication."""

    def aggregate(self, tensors: Sequence[Array]) -> None:
        """Mix every array of the list with those of other ranks, in place; between communications, only count.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray
            As for :meth:`Aggregation.aggregate`.

        Raises
        ------
        TypeError, ValueError, MismatchError, StallError
            As :meth:`Aggregation.aggregate`.
        PlanError
            If the aggregation is freed, or something was started and not waited for.
        """
        self._require_open()
        with self._channel.one_thread:
            self._require_idle()
            if self._communicates():
                self._run(tensors, self._bind, variant=self._phases())
            self._count()

    def start(self, tensors: Sequence[Array]) -> None:
        """Take a copy of the arrays and begin to mix it; :meth:`wait` brings the result back.

        Between the two the arrays can be read, and the communicator used; what is written to them then is lost. The
        communication goes on by itself where the MPI library lets several threads call it (``MPI_THREAD_MULTIPLE``),
        and in :meth:`wait` where not. Costs as :meth:`aggregate`, and a copy of the weights in memory. Between
        communications it only counts.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray
            As for :meth:`aggregate`.

        Raises
        ------
        TypeError, ValueError, MismatchError, PlanError
            As :meth:`aggregate`.
        """
        self._require_open()
        with self._channel.one_thread:
            self._require_idle()
            self._finish = self._start(tensors) if self._communicates() else _nothing
            self._count()

    def wait(self) -> None:
        """Wait for what was started, and write the mixed weights into its arrays.

        Raises
        ------
        PlanError
            If nothing was started, or the aggregation is freed.
        StallError
            If a message does not complete within the timeout; then ``wait()`` can be called again.
        """
        self._require_open()
        if self._finish is None:
            raise PlanError(f"{type(self).__name__}: wait() comes after start()")
        self._finish()
        self._finish = None

    def aggregate_init(self, tensors: Sequence[Array]) -> Plan[None]:
        """Plan the mixing of arrays that stay where they are; the plan calls :meth:`aggregate` when it is started.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray
            As for :meth:`Aggregation.aggregate`.
        """
        return Aggregation.aggregate_init(self, tensors)

    def state_dict(self) -> dict[str, Any]:
        """Return how many calls and communications there have been: they decide who meets whom next.

        Returns
        -------
        dict
            ``"calls"`` and ``"communications"``.

        Raises
        ------
        PlanError
            If something has been started and not waited for: the weights are not yet what the counts say.
        """
        self._require_idle()
        return {"calls": self.calls, "communications": self.communications}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned; collective.

        Parameters
        ----------
        state : dict
            What :meth:`state_dict` returned, the same on all ranks.

        Raises
        ------
        ValueError
            If the keys are others, or a value is not a count.
        MismatchError
            On all ranks, if their states differ.
        PlanError
            If something has been started and not waited for.
        """

        def check() -> str:
            self._require_idle()
            expect_keys(state, ("calls", "communications"))
            for key, count in state.items():
                check_integer(key, count, 0)
            return f"{type(self).__name__} after {state['calls']} calls and {state['communications']} communications"

        self._channel.agree_on(check)
        self.calls, self.communications = int(state["calls"]), int(state["communications"])

    def free(self) -> None:
        """Free the plans that are kept; a second call does nothing.

        What was started and not waited for is given up: its arrays stay as they are.
        """
        super().free()
        self._finish = None

    def _require_idle(self) -> None:
        """Raise PlanError if something is under way."""
        if self._finish is not None:
            raise PlanError(f"{type(self).__name__}: start() was called; call wait() first")

    def _communicates(self) -> bool:
        return self.calls % self.communication_interval == 0

    def _count(self) -> None:
        self.communications += self._communicates()
        self.calls += 1

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        reduction("avg", dtype, 2)

    def _start(self, tensors: Sequence[Array]) -> Callable[[], None]:
        """Start to mix a copy of the tensors, and return what waits for it and writes it back."""
        packing = self._packing(tensors, self._check_dtype, in_place=False)
        vectors = [group.pack(tensors) for group in packing.groups]
        if not vectors:
            return _nothing

        def make(_: Array) -> Plan[None]:
            return self._plan(in_turn(*(self._bind(vector, self._tag) for vector in vectors)))

        # One plan for all vectors: they stay where they are, so the first stands for the others.
        plan = packing.plan(vectors[0], self._phases(), make)
        communication, arrays = InBackground(plan), list(tensors)
        communication.start()

        def finish() -> None:
            communication.wait()
            for group, vector in zip(packing.groups, vectors, strict=True):
                group.unpack(vector, arrays)
            settle(*arrays)

        return finish

    def _bind(self, vector: Array, tag: int = SHARED_TAG) -> Program:
        pieces = even_ranges(0, vector.size, max(1, ceil(vector.nbytes / PIECE_BYTES)))
        how = reduction("avg", vector.dtype, self._channel.size)
        label = type(self).__name__
        if tag == SHARED_TAG:
            tag = self._channel.tags.shared(signature(f"{label} of {vector.size} {vector.dtype}"))
        parts: list[Program] = []
        for phase in self._phases():
            if isinstance(phase, MixingRow):
                parts.append(bind_row(self._channel, phase, vector, pieces, label=label, tag=tag))
            else:
                rounds = list(in_pieces(phase, len(pieces)))
                parts.append(bind(self._channel, rounds, vector, [pieces], how, label=label, tag=tag))
        return in_turn(*parts)


def bind_row(channel: Channel, row: MixingRow, vector: Array, pieces: Lane, *, label: str, tag: int) -> Program:
    """Return the program that replaces a vector by a weighted sum of vectors of several ranks, piece by piece.

    The sum is taken in the order of the ranks. The largest weight is left out of it and comes in by a division at the
    end, so that an average of equal weights is a sum and one division.
    """
    largest = max(weight for _, weight in row.weights)
    factors = [float(weight / largest) for _, weight in row.weights]
    sources = [peer for peer, _ in row.weights if peer != channel.rank]
    if not row.targets and not sources and largest == 1:
        return Program((), (), 0)
    longest = max(stop - start for start, stop in pieces)
    device = device_of(vector)
    arrived = {peer: device.empty(longest, vector.dtype) for peer in sources}
    exchanges: list[NeighborExchange] = []
    for start, stop in pieces:
        own = vector[start:stop]
        operands = {**{peer: spare[: own.size] for peer, spare in arrived.items()}, channel.rank: own}
        summands = [operands[peer] for peer, _ in row.weights]
        reduction = partial(weighted_mean, own, summands, factors, float(1 / largest))
        received = [(peer, operands[peer]) for peer in sources]
        exchanges.append(NeighborExchange(received, [(peer, own) for peer in row.targets], reduction))
    program = bind_exchanges(channel, exchanges, vector, label=label, tag=tag)
    return replace(program, nbytes=program.nbytes + sum(spare.nbytes for spare in arrived.values()))


def weighted_mean(out: Array, summands: Sequence[Array], factors: Sequence[float], divisor: float) -> None:
    """Write (factor * summand + ...) / divisor into ``out``, which may be a summand; the summands are overwritten."""
    for summand, factor in zip(summands, factors, strict=True):
        if factor != 1:
            np.multiply(summand, factor, out=summand)
    total, *others = summands
    for summand in others:
        np.add(total, summand, out=total)
    np.divide(total, divisor, out=out)


def _nothing() -> None:
    """Be what a call waits for that has only counted."""
