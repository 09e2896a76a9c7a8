"""Local SGD: ranks train by themselves for a while, and average what they have come to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.all_reduce import AllReduce
from mpiagg.aggregation.error_feedback import check_reduction
from mpiagg.aggregation.local_steps import Anchor, Fragment, LocalSteps
from mpiagg.aggregation.packing import TensorLayout, layout_of
from mpiagg.aggregation.participation import Members, Participation
from mpiagg.arrays import Array, check_wire_dtype, settle
from mpiagg.collectives.moving_plans import broadcast_init
from mpiagg.common.arguments import check_flag, check_number
from mpiagg.errors import PlanError
from mpiagg.plans.plan import Plan
from mpiagg.plans.program import in_turn
from mpiagg.transport import communicator_among, free_channel_of


class LocalSGD(LocalSteps):
    """Let every rank take some steps by itself, then go on from the average of where they have come to.

    Call ``aggregate(weights)`` after every step of the local optimizer. All ranks start from a common point, the
    anchor. In every ``period``-th call the difference d between the anchor and the weights is averaged over the ranks,
    an outer optimizer takes it for a gradient and moves the anchor, and all weights are set to the anchor. With an
    outer learning rate of 1 and no momentum, that is the average of the weights.

    With ``fragments`` the tensors are averaged in as many parts, each every ``period`` calls, at other calls than the
    others; with ``delay`` an average is under way while the ranks take so many more steps: then the anchor moves, and
    the weights become ``anchor + mixing (weights - anchor)``. With an outer learning rate, Nesterov's momentum and
    ``wire="u4"`` that is Streaming DiLoCo; without the first two, it is DiLoCo.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The ranks; the world by default.
    period : int
        Average in every ``period``-th call; the calls between only count.
    warmup_steps : int
        In so many calls at the beginning, average each time, and leave the outer optimizer out. The period begins
        after them.
    outer_learning_rate : float
        The outer optimizer's, greater than 0.
    outer_momentum : float
        The outer optimizer's, from 0 to less than 1: v <- momentum v + d.
    nesterov : bool
        Whether the anchor moves by d + momentum v (Nesterov's momentum) or by v, each times the learning rate.
    wire : {None, "fp16", "bf16", "u8", "u4", "u2", "exact"}
        How the differences travel; as for :class:`AllReduce`.
    algorithm : str
        As for :class:`AllReduce`.
    error_feedback : bool
        Whether to add to a difference what the wire lost of the last one, as :class:`ErrorFeedback` does, with what
        that asks of the wire and the algorithm.
    fragments : int
        How many parts the list of tensors is averaged in, at least 1. A part is a run of whole tensors; part p of P is
        averaged when ``period p / P`` calls, rounded down, are over, and then every ``period`` calls.
    delay : int
        How many calls later an average is applied, from 0 to less than ``period``.
    mixing : float
        How much of their own way the ranks keep, from 0 to less than 1.
    patience : float, optional
        How many seconds rank 0, when it has come to an average, waits for others; by default all are waited for. It
        goes without error feedback, fragments, delay and mixing. See the notes.

    Attributes
    ----------
    present : tuple of int
        With patience: who took part in the last average that this rank has taken part in.
    missed : int
        With patience: how many averages this rank has missed.

    Raises
    ------
    ValueError
        For an argument out of its range, or an unknown wire or algorithm.
    MismatchError
        On all ranks, if they disagree on any argument.

    Notes
    -----
    All ranks have the same anchor, bit for bit, and after an average without mixing the same weights. The first call
    with a layout averages the weights themselves, in full precision, also with a wire: the average is the anchor.
    Weights of float16 and bfloat16 are kept and averaged in float32.

    Each list of tensors counts its own calls; lists of one layout are taken for the same tensors. A plan of
    :meth:`aggregate_init` has an anchor of its own, and does all of a call when it is started. With a delay, what is
    under way goes on by itself where the MPI library lets several threads call it (``MPI_THREAD_MULTIPLE``), and in
    later calls where not; ``state_dict()`` and ``free()`` wait for it.

    With ``patience`` a rank that comes late misses that average. It goes on from its own weights and is put down for
    the next average, which it joins in the first call after this has begun; the others wait for it then. The mean is
    over those who take part, each with the same weight. A rank that comes back gets the anchor of the others; its
    difference is that from the anchor it had, so that each of its steps counts once. Who takes part depends on time;
    what comes out is the same on all who do, bit for bit, and the same whenever the same ranks take part. Rank 0 says
    who does, and is always waited for. :meth:`finish` brings all together: call it at the end, and before states are
    saved.

    Cost: an all-reduce of the weights' bytes every ``period`` steps, at most of a part of them in one step. Memory: two
    vectors as long as the weights, one more with momentum, one with error feedback, and the all-reduce's scratch. It is
    wrong to use where ranks see very different data and the period is long: they drift apart, and the average need not
    be good. A long delay makes averages old: steps that are taken meanwhile are lost, but for what ``mixing`` keeps. A
    NaN on one rank reaches all.

    Source: Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD", ICLR 2020 (the warm-up); Wang,
    Tantia, Ballas and Rabbat, "SlowMo", ICLR 2020 (outer momentum); Douillard et al., "DiLoCo: Distributed
    low-communication training of language models", 2023 (outer Nesterov momentum, with 0.7 and 0.9); Douillard et al.,
    "Streaming DiLoCo with overlapping communication", 2025, arXiv 2501.18512 (fragments, the delay of up to 5 steps,
    mixing of 0.5, outer gradients of 4 bits; there they are floats with 3 bits of exponent, here ``"u4"``).

    Examples
    --------
    Each rank comes nearer to its own number; every second time all go on from their average:

    >>> weights = [np.zeros(3)]
    >>> with mpiagg.LocalSGD(period=2) as local_sgd:
    ...     for step in range(4):
    ...         weights[0] -= 0.5 * (weights[0] - rank)
    ...         local_sgd.aggregate(weights)
    >>> bool(np.allclose(weights[0], (1 - 0.5**4) * (size - 1) / 2))
    True

    Streaming DiLoCo:

    >>> weights = [np.zeros(64) for _ in range(3)]
    >>> streaming = {"fragments": 3, "delay": 5, "mixing": 0.5, "wire": "u4"}
    >>> with mpiagg.LocalSGD(period=30, outer_learning_rate=0.4, outer_momentum=0.9, **streaming) as diloco:
    ...     for step in range(60):
    ...         for x in weights:
    ...             x -= 0.1 * (x - 1)
    ...         diloco.aggregate(weights)
    >>> max(float(abs(x - 1).max()) for x in weights) < 0.5
    True
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        period: int = 8,
        *,
        warmup_steps: int = 0,
        outer_learning_rate: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = True,
        wire: str | None = None,
        algorithm: str = "auto",
        error_feedback: bool = False,
        fragments: int = 1,
        delay: int = 0,
        mixing: float = 0.0,
        patience: float | None = None,
    ) -> None:
        self.wire, self.error_feedback = wire, error_feedback
        self.patience = patience
        self.present: tuple[int, ...] = ()
        self._participations: list[Participation] = []
        super().__init__(
            comm,
            period,
            warmup_steps=warmup_steps,
            outer_learning_rate=outer_learning_rate,
            outer_momentum=outer_momentum,
            nesterov=nesterov,
            algorithm=algorithm,
            fragments=fragments,
            delay=delay,
            mixing=mixing,
            check=self._checked,
        )
        self.feedback = error_feedback
        self._differences = AllReduce(comm, algorithm=algorithm, wire=wire)
        if error_feedback:
            self._channel.agree_on(partial(check_reduction, self._differences))

    def _checked(self) -> str:
        words = f"error feedback {check_flag('error_feedback', self.error_feedback)}"
        if self.patience is None:
            return words
        check_number("patience", self.patience, "a number of at least 0", lambda x: x >= 0)
        if self.error_feedback or self.fragments > 1 or self.delay or self.mixing:
            raise ValueError("patience goes without error_feedback, fragments, delay and mixing")
        return f"{words}, with patience"

    @property
    def missed(self) -> int:
        """How many averages this rank has missed."""
        return sum(each.missed for each in self._participations)

    def finish(self, tensors: Sequence[Array]) -> None:
        """Average once more, when all ranks have come, however late some of them are; collective.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray
            A list of a layout that :meth:`aggregate` was called with.

        Raises
        ------
        PlanError
            If the aggregation is freed, has no patience, or was not called with such a list.
        StallError
            If a rank does not come within the timeout.
        """
        self._require_open()
        memory = self._by_layout.get(layout_of(tensors))
        participation = None if memory is None else memory.participation
        if memory is None or participation is None:
            raise PlanError("finish is for patience, and for tensors that aggregate was called with")
        with self._channel.one_thread:
            self._check_tensors(tensors, self._check_dtype)
            memory.tensors, final = tensors, False
            while not final:  # a late rank may have taken part in the one before
                members = participation.come(memory.calls, None, due=True, final=True)
                assert members is not None
                self._average(memory, members)
                final = members.final
            memory.tensors = ()
            settle(*tensors)

    def aggregate_init(self, tensors: Sequence[Array]) -> Plan[None]:
        """Plan the aggregation of arrays that stay where they are; see :meth:`Aggregation.aggregate_init`.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray
            As for :meth:`Aggregation.aggregate`.

        Raises
        ------
        PlanError
            With patience: :meth:`finish` knows the lists that :meth:`aggregate` was called with alone.
        """
        if self.patience is not None:
            raise PlanError("patience goes without aggregate_init: call aggregate, and finish at the end")
        return super().aggregate_init(tensors)

    def _new_memory(self, layout: TensorLayout, tensors: Sequence[Array]) -> Anchor:
        memory = super()._new_memory(layout, tensors)
        if self.patience is not None:
            memory.participation = Participation(self.comm)
            self._participations.append(memory.participation)
        return memory

    def _run(self, memory: Anchor, tensors: Sequence[Array]) -> None:
        participation = memory.participation
        # The first call and the warm-up are for all.
        if participation is None or memory.calls < max(1, self.warmup_steps):
            super()._run(memory, tensors)
            return
        self._check_tensors(tensors, self._check_dtype)
        memory.tensors = tensors
        calls = memory.calls + 1
        members = participation.come(calls, self.patience, due=self._due(calls, 0))
        memory.calls = calls
        if members is not None:
            self._average(memory, members)
        settle(*tensors)

    def _average(self, memory: Anchor, members: Members) -> None:
        """Average among some ranks, of which some may have missed the last average."""
        (fragment,) = memory.fragments
        fragment.pack(memory.tensors)
        fragment.subtract()
        if len(members.ranks) == self.comm.Get_size() and not members.back:
            fragment.average()
            fragment.wait()
        else:
            self._among(fragment, members)
        self._step(fragment, warming=False)
        fragment.unpack(memory.tensors, 0)
        memory.calls, self.present = members.calls, members.ranks

    def _among(self, fragment: Fragment, members: Members) -> None:
        """Average the vectors among some ranks, and give those who are back the anchor and the velocity."""
        comm = communicator_among(self.comm, members.ranks)
        with AllReduce(comm, algorithm=self._differences.algorithm, wire=self.wire) as differences:
            for x in [*fragment.anchors, *fragment.velocities] if members.back else []:
                plan = broadcast_init(x, out=x, comm=comm)
                plan()
                self.bytes_sent += plan.sent_bytes
                plan.free()
            differences.aggregate(fragment.vectors)
            self.bytes_sent += differences.bytes_sent
        free_channel_of(comm)
        comm.Free()

    def free(self) -> None:
        """Free the plans, once what is under way is over; a second call does nothing."""
        super().free()
        self._differences.free()
        while self._participations:
            self._participations.pop().free()

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        super()._check_dtype(dtype)
        check_wire_dtype(self.wire, dtype)

    def _averaging(
        self, vectors: Sequence[Array], residuals: Sequence[Array], lengths: Sequence[Sequence[int]]
    ) -> Plan[None]:
        del lengths
        how, tags = self._differences, self._channel.tags
        kept: Sequence[Array | None] = residuals or [None] * len(vectors)
        programs = [
            how.bind(vector, tags.in_turn(how.choice(vector).lanes), residual)
            for vector, residual in zip(vectors, kept, strict=True)
        ]
        return self._plan(in_turn(*programs))
