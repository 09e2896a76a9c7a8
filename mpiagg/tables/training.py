"""What aggregations cost in training: from the time of a step, the parameters, the ranks and their links.

Collectives are priced by the model of the schedules on a cluster, or taken from what ``mpiagg tune`` has measured. The
rest is arithmetic: how many bytes an aggregation gives to which collective in how many steps, how long it works on them
itself, and how much of that a step can hide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from mpiagg.arrays import HOST, Coordinates, codec
from mpiagg.schedules import Collective
from mpiagg.tables.times import Times

ITEM: Final = 4
"""Bytes of a parameter: float32."""


@dataclass(frozen=True)
class Training:
    """What is to be trained, and how.

    Attributes
    ----------
    step : float
        Seconds that a rank computes in a step, above 0.
    shapes : sequence of tuple of int
        Of the parameters.
    period, fragments, delay : int
        Of the methods that communicate every so many steps.
    backward : float
        Which part of a step is left when the first gradients are there: what an all-reduce in ``DDP`` can hide behind.
    codec_rate : float
        Bytes of float32 that a rank encodes and decodes, or looks through for the largest, in a second.

    Raises
    ------
    ValueError
        If a number is out of its range.
    """

    step: float
    shapes: Sequence[tuple[int, ...]]
    period: int = 30
    fragments: int = 3
    delay: int = 5
    backward: float = 0.6
    codec_rate: float = 1e9

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        if not (0 < self.step < math.inf and 0 < self.codec_rate < math.inf and 0 <= self.backward <= 1):
            raise ValueError("a step takes more than 0 seconds, a codec has a rate, and backward is from 0 to 1")
        if not self.parameters:
            raise ValueError("there are no parameters")
        if not (self.period >= 1 <= self.fragments and 0 <= self.delay < self.period):
            raise ValueError(
                "period and fragments are at least 1, and the delay is from 0 to less than the period: "
                f"not period {self.period}, fragments {self.fragments}, delay {self.delay}"
            )

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return ITEM * self.parameters


@dataclass(frozen=True)
class Planned:
    """What an aggregation costs.

    Attributes
    ----------
    name : str
        How it is made.
    bytes_a_step, most_bytes : float
        What a rank sends on average in a step, and at most in one.
    seconds : float
        What communication takes a step, on average.
    work : float
        What the aggregation itself computes a step, on average: codecs, selection, linear algebra.
    exposed : float
        What is left of the seconds where they overlap with computation as far as the aggregation lets them.
    share, share_overlapped : float
        Which part of the time the ranks compute, one after the other and overlapped.
    memory : float
        Bytes beside the parameters and gradients.
    alike : bool
        Whether training is that of one process, but for rounding.
    caution : str
        When another one is better.
    """

    name: str
    bytes_a_step: float
    most_bytes: float
    seconds: float
    work: float
    exposed: float
    share: float
    share_overlapped: float
    memory: float
    alike: bool
    caution: str


@dataclass(frozen=True)
class _Method:
    """An aggregation, as far as its cost goes.

    Attributes
    ----------
    calls : list of (Collective or int or None, int)
        What one exchange consists of, and the bytes of its vector: a collective, so many peers, or None for an
        all-reduce by way of one rank.
    sent : float
        What a rank sends in an exchange.
    exchanges : float
        How many there are in a step, on average.
    window : float
        Seconds of computation that an exchange can hide behind.
    passes : float
        How often it goes through the parameters' bytes in a step, on average, at the codecs' rate.
    copies : float
        Its memory, in bytes of the parameters.
    """

    name: str
    calls: Sequence[tuple[Collective | int | None, int]]
    sent: float
    exchanges: float
    window: float
    passes: float
    copies: float
    alike: bool
    caution: str


_LATE: Final = "the learning rate jumps, or the optimizer's momentum is large: what is late is applied with the new one"
_APART: Final = "ranks see very different data, or the period is long: they drift apart"
_FAST: Final = "the learning rate is so large that ranks drift apart faster than they meet"
_DENSE: Final = "gradients are dense and alike in size; the optimizer has momentum: give it to the aggregation"


def plan_training(training: Training, times: Times) -> list[Planned]:
    """Price every aggregation.

    Parameters
    ----------
    training : Training
        What is to be trained.
    times : Modelled or Measured
        What collectives take.

    Returns
    -------
    list of Planned
        The nearer to the training of one process, the earlier.

    Examples
    --------
    >>> from mpiagg.schedules import Cluster, Layout
    >>> from mpiagg.tables.times import Modelled
    >>> from mpiagg.tables.training import Training, plan_training
    >>> slow = Modelled(Layout.by_name(range(4)), Cluster(alpha=1e-3, beta=8 / 100e6))
    >>> found = plan_training(Training(0.3, [(1000, 1000)] * 10), slow)
    >>> [each.name for each in found if each.share_overlapped > 0.95]  # doctest: +SKIP
    """
    methods = _Methods(training, times.layout.size)
    every = chain(methods.gradients(), methods.gossip(), methods.local())
    return [_planned(method, training, times) for method in every]


def advised(found: Sequence[Planned], target: float) -> Planned:
    """Return the first that keeps ranks computing for so much of the time; if none does, the one that does most."""
    busy = [each for each in found if each.share_overlapped >= target]
    return busy[0] if busy else max(found, key=lambda each: each.share_overlapped)


def _seconds(times: Times, what: Collective | int | None, nbytes: int) -> float:
    """Return what a part of an exchange takes; see :class:`_Method`."""
    if what is None:
        return times.central(nbytes)
    return times.exchange(nbytes, what) if isinstance(what, int) else times.seconds(what, nbytes)


def _planned(method: _Method, training: Training, times: Times) -> Planned:
    seconds = sum(_seconds(times, what, nbytes) for what, nbytes in method.calls)
    average, work = seconds * method.exchanges, method.passes * training.nbytes / training.codec_rate
    # What is hidden of one exchange may still be more than there is time for in all.
    exposed = max(0.0, (seconds - method.window) * method.exchanges, average - training.step)
    exposed = min(exposed, average)
    return Planned(
        method.name,
        method.sent * method.exchanges,
        method.sent * max(1, math.ceil(method.exchanges)),  # of more fragments than steps, some go together
        average,
        work,
        exposed,
        training.step / (training.step + average + work),
        training.step / (training.step + exposed + work),
        method.copies * training.nbytes,
        method.alike,
        method.caution,
    )


class _Methods:
    """All aggregations for a training on some ranks."""

    def __init__(self, training: Training, size: int) -> None:
        self._training, self._size, self._whole = training, size, training.nbytes

    def _placed(self, count: int) -> int:
        """Return the bytes of so many parameters' coordinates."""
        return Coordinates(HOST, count, self._training.parameters).nbytes

    def _reduced(self, nbytes: float) -> float:
        """Return what a rank sends for an all-reduce."""
        return 2 * (self._size - 1) / self._size * nbytes

    def _coded(self, wire: str, length: int) -> int:
        """Return the bytes of the encoded buffers of all ranks' chunks."""
        return self._size * codec(wire).nbytes(-(-length // self._size))

    def _all_reduce(
        self, name: str, nbytes: int, passes: float, copies: float, caution: str, *, alike: bool = False
    ) -> _Method:
        calls = [(Collective.ALLREDUCE, nbytes)]
        return _Method(name, calls, self._reduced(nbytes), 1, self._behind, passes, copies, alike, caution)

    @property
    def _behind(self) -> float:
        return self._training.backward * self._training.step

    def gradients(self) -> Iterator[_Method]:
        """Yield those of gradients, which hide behind the backward pass."""
        whole, size = self._whole, self._size
        yield self._all_reduce("AllReduce()", whole, 0, 1, "links are much slower than computing", alike=True)
        few = "8 significant bits are too few"
        yield self._all_reduce('AllReduce(wire="bf16")', whole // 2, 1, 1.9, few, alike=True)
        hub, caution = [(None, whole)], "there are many ranks: the root is the bottleneck"
        sent = min(1, size - 1) * whole
        yield _Method("ParameterServer()", hub, sent, 1, self._behind, 0, 1, alike=True, caution=caution)
        for wire, copies in (("u8", 3.0), ("u4", 2.6), ("u2", 2.6)):
            nbytes = self._coded(wire, self._training.parameters)
            yield self._all_reduce(f'ErrorFeedback(AllReduce(wire="{wire}"))', nbytes, 2, copies, _LATE)
        yield self._power_sgd(2)
        k = math.ceil(0.01 * self._training.parameters)
        for more, nbytes in (("", self._placed(k) + k * ITEM), (', selection="blockk"', k * ITEM)):
            name, gathered = f"Sparsified(ratio=0.01, momentum=0.9{more})", [(Collective.ALLGATHER, nbytes * size)]
            copies = 3 + size * nbytes / whole
            sent = (size - 1) * nbytes
            yield _Method(name, gathered, sent, 1, self._behind, 1, copies, alike=False, caution=_DENSE)

        yield self._demo(32, 64)

    def _demo(self, k: int, side: int) -> _Method:
        count = 0
        for shape in self._training.shapes:
            rows = shape[0] if len(shape) > 1 else 1
            columns = math.prod(shape) // max(1, rows)
            for height, down in ((side, rows // side), (rows % side, 1)):
                for width, across in ((side, columns // side), (columns % side, 1)):
                    count += down * across * min(k, height * width)
        nbytes = self._placed(count) + count * ITEM
        calls, sent = [(Collective.ALLGATHER, nbytes * self._size)], (self._size - 1) * nbytes
        copies = 3 + self._size * nbytes / self._whole
        caution = "the optimizer has momentum or scales gradients; neighbours in a tensor are not alike"
        return _Method(f"DeMo(k={k})", calls, sent, 1, self._behind, 4, copies, alike=False, caution=caution)

    def _power_sgd(self, rank: int) -> _Method:
        first = second = alone = 0
        for shape in self._training.shapes:
            rows = shape[0] if shape else 1
            columns = math.prod(shape) // max(1, rows)
            if rows * columns > 2 * rank * (rows + columns):
                first, second = first + rank * rows, second + rank * columns
            else:
                alone += rows * columns
        calls = [(Collective.ALLREDUCE, ITEM * (first + alone)), (Collective.ALLREDUCE, ITEM * second)]
        sent = self._reduced(ITEM * (first + second + alone))
        caution = "gradients have no few main directions, or parameters are no large matrices"
        return _Method(f"PowerSGD(rank={rank})", calls, sent, 1, self._behind, 2, 2, alike=False, caution=caution)

    def gossip(self) -> Iterator[_Method]:
        """Yield those of weights in each step, which hide behind a step where they have ``start`` and ``wait``."""
        step, encoded = self._training.step, self._coded("u8", self._training.parameters)
        for name, most, nbytes, window, passes, copies in (
            ("Decentralized()", 1, self._whole, step, 0, 1.0),
            ("NeighborAverage()", 2, self._whole, step, 0, 1.0),
            ("LowPrecisionDecentralized()", 2, encoded, 0.0, 3, 5.8),
        ):
            peers = min(most, self._size - 1)
            calls = [(peers, nbytes)]
            yield _Method(name, calls, peers * nbytes, 1, window, passes, copies, alike=False, caution=_FAST)

    def local(self) -> Iterator[_Method]:
        """Yield those of weights every so many steps."""
        training, period, size = self._training, self._training.period, self._size

        def averaged(more: str, nbytes: int, passes: float, copies: float) -> _Method:
            name, calls = f"LocalSGD(period={period}{more})", [(Collective.ALLREDUCE, nbytes)]
            sent = self._reduced(nbytes)
            return _Method(name, calls, sent, 1 / period, 0, passes / period, copies, alike=False, caution=_APART)

        yield averaged("", self._whole, 0, 2.3)
        outer = ', outer_learning_rate=0.7, outer_momentum=0.9, wire="u4", error_feedback=True'
        yield averaged(outer, self._coded("u4", training.parameters), 2, 4.3)
        parts = f", fragments={training.fragments}, delay={training.delay}, mixing=0.5"
        outer = ', outer_learning_rate=0.4, outer_momentum=0.9, wire="u4"'
        yield replace(
            averaged(parts + outer, self._coded("u4", -(-training.parameters // training.fragments)), 2, 3.3),
            exchanges=training.fragments / period,
            window=training.delay * training.step,
            caution=f"{_APART}; the delay is more than a few steps: averages are old",
        )
        k = math.ceil(training.parameters / 32)
        message = self._placed(k) + codec("u2").nbytes(k)
        calls, copies = [(Collective.ALLGATHER, message * size)], 3 + size * message / self._whole
        caution = f"{_APART}; there are many ranks: what they gather grows with their number"
        name, sent = f"SparseLoCo(period={period})", (size - 1) * message
        yield _Method(name, calls, sent, 1 / period, 0, 3 / period, copies, alike=False, caution=caution)
