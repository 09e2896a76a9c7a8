"""DeMo: each rank keeps its momentum, and sends the few waves in it that are strongest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.cosines import CosineTransform
from mpiagg.aggregation.exchanges import Gather
from mpiagg.aggregation.memory import AggregationMemory, Remembering
from mpiagg.aggregation.packing import Group, Packing, TensorLayout
from mpiagg.aggregation.selection import top_k
from mpiagg.arrays import INDEX, Array, check_wire_dtype, codec_of, reduction
from mpiagg.common.arguments import check_flag, check_integer, check_number
from mpiagg.plans.plan import Plan
from mpiagg.plans.program import Program, in_turn
from mpiagg.transport import Channel


class DeMo(Remembering["_Momentum"]):
    """Aggregate the strongest waves of each rank's momentum, and keep the rest of it: decoupled momentum.

    Each rank adds its gradients to its momentum, ``m <- decay m + gradient``. It takes the cosine transform of m, chunk
    by chunk, sends the k largest coefficients of each chunk, and subtracts what they stand for from m. The tensors
    become the sign of what all ranks' coefficients stand for on average. Step with ``weights -= lr * tensor``, without
    momentum.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The ranks; the world by default.
    k : int
        How many coefficients of a chunk are sent, or all of a chunk that has fewer.
    chunk : int
        How long the sides of the squares are that a matrix is cut into; at its edges they are smaller. A tensor of more
        dimensions is a matrix with the first for rows; one of fewer is a row.
    decay : float
        How much of the momentum is left after a step, from 0 to 1.
    sign : bool
        Whether the tensors become signs; else what the coefficients stand for.
    wire : {None, "fp16", "bf16", "u8", "u4", "u2"}
        How coefficients travel; what a codec loses of them stays in the momentum.

    Raises
    ------
    ValueError
        For an argument out of its range, or an unknown wire.
    MismatchError
        On all ranks, if they disagree on any argument. When aggregating: if a rank has sent coordinates that there are
        not.

    Notes
    -----
    All ranks end with the same bits. Values of float16 and bfloat16 are kept and transformed in float32. What is not
    finite shows in the chunk where it is, and is not remembered.

    Cost: for n ranks and K coefficients in all, (n - 1) K (c + s) bytes, of s bytes each; c, for a coordinate, is at
    most 2 bits and log2(chunk^2 / k): 1.1 bytes by default. Three transforms, of 4 ``chunk`` operations a value each.
    Memory: three vectors as long as the tensors, n messages, and a matrix of chunk^2 values. It is wrong for an
    optimizer that has momentum or scales by the size of gradients, as Adam; for many ranks, since messages grow with
    their number; and for tensors whose neighbours have nothing to do with one another, where no wave is stronger than
    others.

    Source: Peng, Quesnelle and Kingma, "DeMo: Decoupled momentum optimization", 2024, arXiv 2411.19870 (chunks of 64, k
    from 1 to 32, a decay of 0.999, signs). There sides of chunks divide those of matrices.

    Examples
    --------
    >>> weights, gradients = [np.ones((4, 4))], [np.full((4, 4), 2.0)]
    >>> with mpiagg.DeMo(k=8) as demo, mpiagg.DDP(weights, aggregation=demo) as ddp:
    ...     ddp.sync_gradients(gradients)
    >>> weights[0] -= 0.1 * gradients[0]  # of which the sign is left
    >>> print(weights[0][0])
    [0.9 0.9 0.9 0.9]
    """

    averaged: ClassVar[tuple[str, ...]] = ("kept",)

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        k: int = 32,
        *,
        chunk: int = 64,
        decay: float = 0.999,
        sign: bool = True,
        wire: str | None = None,
    ) -> None:
        super().__init__(comm)
        self.k, self.chunk, self.decay, self.sign, self.wire = k, chunk, decay, sign, wire

        def check() -> str:
            self.k = check_integer("k", k, 1)
            self.chunk = check_integer("chunk", chunk, 1)
            self.decay = check_number("decay", decay, "a number from 0 to 1", lambda x: 0 <= x <= 1)
            self.sign = check_flag("sign", sign)
            if wire is not None and codec_of(wire) is None:
                raise ValueError(f"wire {wire!r} is for sums, not for single values")
            return f"DeMo of {k} of squares of {chunk}, decay {self.decay}, sign {sign}, wire {wire}"

        self._channel.agree_on(check)

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        super()._check_dtype(dtype)
        if dtype.kind == "c":
            raise TypeError(f"DeMo is for real numbers, not for {dtype}")
        check_wire_dtype(self.wire, dtype)

    def _new_memory(self, layout: TensorLayout, tensors: Sequence[Array]) -> _Momentum:
        return _Momentum(self, self._channel, layout, tensors, self._plan)


class _Momentum(AggregationMemory):
    """The momentum of one list of tensors, and the plan that sends some of it."""

    def __init__(
        self,
        owner: DeMo,
        channel: Channel,
        layout: TensorLayout,
        tensors: Sequence[Array],
        plan: Callable[[Program], Plan[None]],
    ) -> None:
        self.tensors = tensors
        self._parts = [_MomentumPart(owner, channel, group) for group in Packing(layout, in_place=False).groups]
        programs = [
            in_turn(partial(self._load, part), part.exchange.program, partial(self._store, part))
            for part in self._parts
        ]
        self.plan = plan(in_turn(*programs))

    def _load(self, part: _MomentumPart) -> None:
        part.load(self.tensors)

    def _store(self, part: _MomentumPart) -> None:
        part.store(self.tensors)

    def kept(self) -> dict[str, list[Array]]:
        """Return the momentum: a vector for each dtype."""
        return {"kept": [part.kept for part in self._parts]}


class _MomentumPart:
    """The tensors of one dtype in a row: their momentum, and its coefficients."""

    def __init__(self, owner: DeMo, channel: Channel, group: Group) -> None:
        self._owner, self._group = owner, group
        device, length = group.device, sum(group.lengths)
        self.kept = device.empty(length, group.working)
        self.kept.fill(0)
        self._coefficients = device.empty(length, group.working)
        self._vector = self.kept[:0]
        self._transform = CosineTransform(group.shapes, owner.chunk, group.working, device)
        count = sum(region.chunks * min(owner.k, region.length) for region in self._transform.regions)
        how = reduction("avg", group.working, channel.size)
        coded = None if owner.wire is None else device.codec(owner.wire)
        self.exchange = Gather(channel, how, device, length, count, codec=coded)

    def load(self, tensors: Sequence[Array]) -> None:
        """Add tensors to the momentum, and take out what is to be sent."""
        self._vector = self._group.pack(tensors)
        self.kept *= self._owner.decay
        self.kept += self._vector
        self._transform.forward(self.kept, self._coefficients)
        chosen = [self._group.device.empty(0, INDEX)]
        for region in self._transform.regions:
            part = slice(region.start, region.start + region.chunks * region.length)
            rows = self._coefficients[part].reshape(region.chunks, region.length)
            chosen.append(region.start + top_k(rows, min(self._owner.k, region.length), self._vector[part]))
        self.exchange.take(np.concatenate(chosen), self._coefficients)
        np.copyto(self._coefficients, 0, where=~np.isfinite(self._coefficients))
        self._transform.back(self._coefficients, self.kept)

    def store(self, tensors: Sequence[Array]) -> None:
        """Write what all ranks have sent to the tensors."""
        self._coefficients.fill(0)
        self.exchange.give(self._coefficients)
        self._transform.back(self._coefficients, self._vector)
        if self._owner.sign:
            np.sign(self._vector, out=self._vector)
        self._group.unpack(self._vector, tensors)
