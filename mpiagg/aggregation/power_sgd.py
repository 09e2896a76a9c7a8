"""PowerSGD: gradients as products of thin matrices, found by one step of a power iteration over all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.low_rank import LowRank
from mpiagg.aggregation.memory import AggregationMemory, Remembering
from mpiagg.aggregation.packing import TensorLayout
from mpiagg.arrays import Array, Device, device_of, reduction, working_dtype
from mpiagg.common.arguments import check_flag, check_integer, check_number
from mpiagg.plans.choices import choose
from mpiagg.plans.program import Deferred, Program, in_turn
from mpiagg.schedules import Collective

ErrorFeedback = Literal["local", "aggregated"]

DTYPES: Final = (np.dtype(np.float32), np.dtype(np.float64))
"""In which matrices are factored."""


class PowerSGD(Remembering["_PowerSGDState"]):
    """Average gradients in low rank: matrices travel as two thin factors, and what is lost comes with the next step.

    A tensor of shape (n, ...) is a matrix M of n rows and m columns, to which the error E of the step before is added:
    D = M + E. With k = min(n, m, rank) and a Q of shape (m, k), the same on all ranks, a step computes the mean over
    the ranks of P = D Q, makes its columns orthonormal, computes the mean of Q = Dᵀ P, and returns P Qᵀ.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The ranks; the world by default.
    rank : int
        The rank to which matrices are approximated; 1 to 4 is usual.
    reuse_query : bool
        Start each step from the last Q, so that the steps together are a power iteration; else from a random one.
    start_after : int
        Average plainly for so many steps first, while gradients change fast.
    min_compression_rate : float
        A tensor goes as it is, and is averaged plainly, if n m < min_compression_rate k (n + m); and so do vectors
        and scalars. 0 compresses every matrix, even where that makes it longer.
    error_feedback : {"local", "aggregated"}
        The error that a rank keeps: D - P Q'ᵀ with its own Q', or D - P Qᵀ with the mean. Their means over the ranks
        are the same. The first is zero on a rank whose D lies in the space of P, and costs one more product; the
        second keeps how the rank differs from the mean, as the paper does.
    seed : int
        Of the random numbers, which are the aggregation's own.

    Raises
    ------
    ValueError
        For an argument that is none of the above.
    TypeError
        When aggregating: for tensors that are not of float16, bfloat16, float32 or float64.
    MismatchError
        On all ranks, if they disagree on any argument.

    Notes
    -----
    The result is the projection of the mean D on the columns of the mean D Q. It is the mean D, to rounding, if that is
    of rank k at most, whatever the ranks' own are, and D Q is of the same rank: with a random Q it is, and with a
    reused one as long as the rows of D span the same space. The sum of all results and the mean error is always the
    sum of all means, to rounding.

    Half precision is computed in float32. All ranks end with the same bits, if their processors and linear algebra
    libraries compute alike. A gradient that is not finite makes the result so on all ranks, and what was kept of that
    matrix is forgotten. Columns of Q that are zero or not finite are drawn anew: neither lasts. Lists of the same
    dtypes and shapes share their errors: for layers one by one, make a plan for each by :meth:`aggregate_init`.

    A step is two all-reduces for each of float32 and float64: one of all P and what goes as it is, one of all Q;
    together k (n + m) numbers for a matrix in place of n m. Computing takes about 6 n m k operations a matrix, 8 with
    local errors. Memory: the bytes of the tensors for the errors, and those of all matrices of one shape once more.

    It is wrong for weights, and where gradients are of high rank and the steps few: what is lost arrives late.
    Momentum and weight decay belong after it.

    T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD: practical low-rank gradient compression for distributed
    optimization, NeurIPS 2019.

    Examples
    --------
    A matrix of rank 1 is averaged exactly, to rounding, though a quarter of its values travel:

    >>> matrix = np.outer(np.arange(8.0), np.ones(8))
    >>> gradients = [matrix * (rank + 1)]
    >>> with mpiagg.PowerSGD(rank=1) as power_sgd:
    ...     power_sgd.aggregate(gradients)
    >>> bool(np.allclose(gradients[0], matrix * (size + 1) / 2))
    True
    """

    averaged: ClassVar[tuple[str, ...]] = ("errors",)

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        rank: int = 1,
        reuse_query: bool = True,
        *,
        start_after: int = 0,
        min_compression_rate: float = 2.0,
        error_feedback: ErrorFeedback = "local",
        seed: int = 1,
    ) -> None:
        super().__init__(comm)
        self.reuse_query, self.error_feedback = reuse_query, error_feedback
        self.rank, self.start_after, self.seed = rank, start_after, seed
        self.min_compression_rate = min_compression_rate

        def check() -> str:
            self.reuse_query = check_flag("reuse_query", reuse_query)
            self.rank = check_integer("rank", rank, 1)
            self.start_after = check_integer("start_after", start_after, 0)
            self.seed = check_integer("seed", seed, 0)
            self.min_compression_rate = check_number(
                "min_compression_rate", min_compression_rate, "a finite number of at least 0", lambda x: x >= 0
            )
            known = get_args(ErrorFeedback)
            if error_feedback not in known:
                raise ValueError(f"unknown error_feedback {error_feedback!r}; known: {', '.join(known)}")
            query = "reused" if reuse_query else "fresh"
            return (
                f"PowerSGD of rank {self.rank} with {query} queries, after {self.start_after} steps, "
                f"from a compression of {self.min_compression_rate}, {error_feedback} errors, seed {self.seed}"
            )

        self._channel.agree_on(check)

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        if working_dtype(dtype) not in DTYPES:
            raise TypeError(f"PowerSGD is for float16, bfloat16, float32 and float64, not for {dtype}")

    def _new_memory(self, layout: TensorLayout, tensors: Sequence[Array]) -> _PowerSGDState:
        shapes: dict[tuple[np.dtype[Any], Device], dict[int, tuple[int, ...]]] = {}
        for index, (dtype, shape, device) in enumerate(layout):
            shapes.setdefault((working_dtype(dtype), device), {})[index] = shape
        local = self.error_feedback == "local"
        parts = [
            LowRank(members, dtype, self.rank, self.min_compression_rate, local=local, device=device)
            for (dtype, device), members in shapes.items()
        ]
        # A generator for each memory: matrices of one shape in two of them start from different queries.
        memory = _PowerSGDState(
            tensors, parts, np.random.default_rng([self.seed, len(self._entries)]), self.start_after
        )
        memory.plan = self._plan(memory.program(self._mean, reuse_query=self.reuse_query))
        return memory

    def _mean(self, vector: Array) -> Program:
        """Return the program of the mean over the ranks, in place."""
        choice = choose(self._channel.case(Collective.ALLREDUCE, vector.nbytes), device_of(vector))
        how = reduction("avg", vector.dtype, self._channel.size)
        tag = self._channel.tags.in_turn(choice.lanes)
        return self._collective(vector, Collective.ALLREDUCE, how, choice, tag=tag)


class _PowerSGDState(AggregationMemory):
    """What is kept for one list of tensors: errors, queries, how many steps there were, and the generator."""

    counters = ("step",)

    def __init__(
        self, tensors: Sequence[Array], parts: Sequence[LowRank], random: np.random.Generator, start_after: int
    ) -> None:
        self.tensors = tensors
        self._parts = parts
        self._random = random
        self._start_after = start_after
        self.step = 0
        self._plain = self._low_rank = in_turn()

    def program(self, mean: Callable[[Array], Program], *, reuse_query: bool) -> Program:
        """Return the program of a step."""
        low_rank: list[Program | Callable[[], object] | None] = []
        plain: list[Program | Callable[[], object]] = []
        for part in self._parts:
            load = partial(self._with_tensors, part.load)
            low_rank += [
                load,
                None if reuse_query else partial(part.second.fill, 0),
                partial(part.project, self._random),
                mean(part.first),
                part.project_back,
                mean(part.second),
                partial(self._with_tensors, part.reconstruct),
            ]
            if self._start_after:
                plain += [load, mean(part.whole), partial(self._with_tensors, part.unload)]
        self._low_rank, self._plain = in_turn(*low_rank), in_turn(*plain)
        both = in_turn(self._low_rank, self._plain)
        return replace(both, rounds=(Deferred(self._next).as_round(),), sent_bytes=0)

    def _with_tensors(self, call: Callable[[Sequence[Array]], object]) -> None:
        call(self.tensors)

    def _next(self) -> Program:
        """Return what the next step runs."""
        chosen = self._plain if self.step < self._start_after else self._low_rank
        self.step += 1
        self.plan.sent_bytes = chosen.sent_bytes
        return chosen

    def kept(self) -> dict[str, list[Array]]:
        """Return errors and queries, those of matrices of one shape together."""
        stacks = [stack for part in self._parts for stack in part.stacks]
        return {"errors": [stack.errors for stack in stacks], "queries": [stack.q for stack in stacks]}

    def more(self) -> dict[str, Any]:
        """Return the state of the generator."""
        return {"random": self._random.bit_generator.state}

    def check_state(self, state: Mapping[str, Any]) -> str:
        """Validate a state, and describe what of it must be the same on all ranks."""
        words = super().check_state(state)
        try:
            np.random.PCG64().state = state["random"]
        except (TypeError, ValueError, KeyError, IndexError, OverflowError):
            raise ValueError(f"random is not the state of a generator: {state['random']!r}") from None
        common = hashlib.sha256(repr(state["random"]).encode())
        for query in state["queries"]:
            common.update(query.tobytes())
        return f"{words}, queries {common.hexdigest()[:16]}"

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that has been checked."""
        super().load(state)
        self._random.bit_generator.state = state["random"]
