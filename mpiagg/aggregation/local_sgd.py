"""Local SGD: ranks train by themselves for a while, and average what they have come to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.all_reduce import AllReduce
from mpiagg.aggregation.error_feedback import check_reduction
from mpiagg.aggregation.local_steps import LocalSteps
from mpiagg.arrays import Array, check_wire_dtype
from mpiagg.common.arguments import check_flag
from mpiagg.plans.plan import Plan
from mpiagg.plans.program import in_turn


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
        Average in every so-manieth call; the calls between only count.
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
    >>> diloco = mpiagg.LocalSGD(  # doctest: +SKIP
    ...     period=30, fragments=3, delay=5, mixing=0.5, outer_learning_rate=0.4, outer_momentum=0.9, wire="u4"
    ... )
    >>> for batch in batches:  # doctest: +SKIP
    ...     step(weights, batch)
    ...     diloco.aggregate(weights)
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
    ) -> None:
        self.wire, self.error_feedback = wire, error_feedback
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
            check=lambda: f"error feedback {check_flag('error_feedback', error_feedback)}",
        )
        self.feedback = error_feedback
        self._differences = AllReduce(comm, algorithm=algorithm, wire=wire)
        if error_feedback:
            self._channel.agree_on(partial(check_reduction, self._differences))

    def free(self) -> None:
        """Free the plans, once what is under way is over; a second call does nothing."""
        super().free()
        self._differences.free()

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
