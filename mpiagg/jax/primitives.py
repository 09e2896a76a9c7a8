"""Collectives as primitives of JAX: how they are traced, differentiated, batched, compiled and run.

Calls keep the order of the program on every rank, also where their results do not depend on one another or are not
used: they have an *ordered effect*, for which JAX passes a token from each to the next. (Mere side effects keep no
order: XLA runs independent calls as it likes, and ranks would combine arrays of different calls.)
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, effects  # tokens and ordered effects of one's own have no public names
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.collectives.comm import Comm
from mpiagg.collectives.functions import allreduce, reduce_scatter
from mpiagg.collectives.moving_functions import allgather, alltoall, broadcast
from mpiagg.errors import PlanError
from mpiagg.jax.frames import c_function
from mpiagg.transport import Channel, channel_of

TARGET: Final = "mpiagg_collective"
"""The name by which compiled programs call the function here."""


class TracedCall(NamedTuple):
    """A collective call, as compiled programs name it.

    Attributes
    ----------
    verb : str
        ``"allreduce"``, ``"broadcast"``, ``"allgather"``, ``"reduce_scatter"`` or ``"alltoall"``.
    op : str
        How values are combined, where they are.
    root : int
        The rank that gives, in a broadcast.
    algorithm : str
        As :func:`mpiagg.allreduce` takes it.
    comm : int
        The communicator, numbered in the order in which they come: programs in JAX's cache on disk find theirs again.
    size, rank : int
        Of the communicator.
    """

    verb: str
    op: str
    root: int
    algorithm: str
    comm: int
    size: int
    rank: int

    @property
    def text(self) -> str:
        """What a compiled program says to name this call."""
        return " ".join(map(str, self))

    def run(self, x: Array, out: Array) -> None:
        """Do the call: all ranks are here."""
        given: dict[str, Any] = {"out": out, "comm": _COMMS[self.comm], "algorithm": self.algorithm}
        if self.verb == "allreduce":
            allreduce(x, self.op, **given)
        elif self.verb == "reduce_scatter":
            reduce_scatter(x, self.op, **given)
        elif self.verb == "broadcast":
            broadcast(x, root=self.root, **given)
        else:
            _MOVING[self.verb](x, **given)

    def shape(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result, for an array of a shape."""
        if self.verb == "allgather":
            return (self.size, *x)
        if self.verb == "reduce_scatter":
            return (x[0] // self.size, *x[1:])
        return x


_MOVING: Final = {"allgather": allgather, "alltoall": alltoall}

_COMMS: Final[list[Comm]] = []
"""Private duplicates: their calls are made by JAX's threads, and must not meet other calls of the program."""

_NUMBERS: Final[dict[Channel, int]] = {}
"""The numbers of duplicates, by the channel of the communicator that was duplicated."""


def comm_of(comm: MPI.Intracomm | None) -> tuple[int, int, int]:
    """Return the number of a communicator's duplicate, its size and this rank; the first call on it is collective.

    Raises
    ------
    PlanError
        If MPI was not started with ``MPI.THREAD_MULTIPLE``: compiled programs run in threads of JAX.
    """
    channel = channel_of(comm)
    if channel not in _NUMBERS:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise PlanError("mpiagg.jax needs MPI.THREAD_MULTIPLE: JAX calls from threads of its own")
        _COMMS.append(Comm(MPI.COMM_WORLD if comm is None else comm))
        _NUMBERS[channel] = len(_COMMS) - 1
    return _NUMBERS[channel], channel.size, channel.rank


@cache
def _call_of(text: bytes) -> TracedCall:
    verb, op, root, algorithm, *numbers = text.decode().split(" ")
    comm, size, rank = map(int, numbers)
    if comm >= len(_COMMS) or (_COMMS[comm].size, _COMMS[comm].rank) != (size, rank):
        raise PlanError(f"this program was compiled for rank {rank} of {size} of a communicator that is not there")
    return TracedCall(verb, op, int(root), algorithm, comm, size, rank)


_FUNCTION: Final = c_function(lambda text, x, out: _call_of(text).run(x, out))
jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_FUNCTION), platform="cpu")


class Order(effects.Effect):  # type: ignore[misc]  # mypy sees no classes of JAX's
    """The effect of a collective: others must not come before it that come after it in the program."""

    def __str__(self) -> str:
        """Return what JAX prints in a program."""
        return "mpiagg"


_ORDER: Final = Order()
for _kind in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _kind.add_type(Order)

collective_p: Final = Primitive("mpiagg")
"""A collective call."""

own_p: Final = Primitive("mpiagg_own")
"""What is the transpose of a collective whose result all ranks have: each rank's own part, without a message."""


# -- run at once


@collective_p.def_impl  # type: ignore[untyped-decorator]  # JAX's primitives have no types
def _run(x: Any, *, call: TracedCall) -> jax.Array:
    jax.effects_barrier()  # compiled programs that run in other threads come first
    given = np.asarray(x)
    out = _aligned(call.shape(given.shape), given.dtype)
    call.run(given, out)
    return jnp.asarray(out) if given.dtype.kind in "bV" else jax.dlpack.from_dlpack(out)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return a new array where JAX takes arrays without a copy."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes].view(dtype).reshape(shape)


# -- traced


@collective_p.def_effectful_abstract_eval  # type: ignore[untyped-decorator]  # JAX's primitives have no types
def _traced(x: Any, *, call: TracedCall) -> tuple[Any, set[Order]]:
    return x.update(shape=call.shape(x.shape), weak_type=False), {_ORDER}


@own_p.def_abstract_eval  # type: ignore[untyped-decorator]  # JAX's primitives have no types
def _traced_own(x: Any, *, call: TracedCall) -> Any:
    return x.update(shape=x.shape[1:], weak_type=False) if call.verb == "allgather" else x


# -- compiled


def _lowered(ctx: mlir.LoweringRuleContext, x: mlir.ir.Value, *, call: TracedCall) -> Any:
    (given,), (result,) = ctx.avals_in, ctx.avals_out
    # XLA copies the input first, where it is needed afterwards.
    aliases = {1: 1} if given.shape == result.shape else None
    lower = jax.ffi.ffi_lowering(TARGET, has_side_effect=True, operand_output_aliases=aliases)
    inner = ctx.replace(avals_in=[core.abstract_token, given], avals_out=[core.abstract_token, result])
    token, out = lower(inner, ctx.tokens_in.get(_ORDER), x, call=call.text)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_ORDER: token})))
    return [out]


mlir.register_lowering(collective_p, _lowered, platform="cpu")


@own_p.def_impl  # type: ignore[untyped-decorator]  # JAX's primitives have no types
def _own(x: Any, *, call: TracedCall) -> Any:
    if call.verb == "allgather":
        return x[call.rank]
    if call.verb == "broadcast":
        return x if call.rank == call.root else jnp.zeros_like(x)
    return x / call.size if call.op == "avg" else x


mlir.register_lowering(own_p, mlir.lower_fun(_own, multiple_results=False))


# -- differentiated


def _differentiated(primals: Any, tangents: Any, *, call: TracedCall) -> Any:
    if call.verb in ("allreduce", "reduce_scatter") and call.op not in ("sum", "avg"):
        raise TypeError(f"{call.verb} by {call.op!r} cannot be differentiated; sums and averages can")
    return _linear(primals, tangents, call=call)


def _transposed(cotangent: Any, x: Any, *, call: TracedCall) -> list[Any]:
    del x
    if call.verb == "alltoall":
        return [collective_p.bind(cotangent, call=call)]
    if call.verb == "reduce_scatter":
        rows = collective_p.bind(cotangent, call=call._replace(verb="allgather"))
        whole = rows.reshape(-1, *rows.shape[2:])
        return [whole / call.size if call.op == "avg" else whole]
    return [own_p.bind(cotangent, call=call)]


def _own_transposed(cotangent: Any, x: Any, *, call: TracedCall) -> list[Any]:
    del x
    return [collective_p.bind(cotangent, call=call)]


ad.deflinear2(collective_p, _transposed)
_linear: Final = ad.primitive_jvps[collective_p]
ad.primitive_jvps[collective_p] = _differentiated
ad.deflinear2(own_p, _own_transposed)


# -- batched


def _batched(primitive: Any, arrays: Any, axes: Any, *, call: TracedCall) -> tuple[Any, int]:
    """All ranks have a batch, and it travels as a whole: behind the first axis, where a collective looks at that."""
    (x,), (axis,) = arrays, axes
    if call.verb in ("allreduce", "broadcast"):
        return primitive.bind(x, call=call), axis
    if call.verb == "allgather" and primitive is collective_p:
        return primitive.bind(x, call=call), axis + 1
    return primitive.bind(jnp.moveaxis(x, axis, 1), call=call), 0 if primitive is own_p else 1


batching.primitive_batchers[collective_p] = partial(_batched, collective_p)
batching.primitive_batchers[own_p] = partial(_batched, own_p)
