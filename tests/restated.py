"""Collectives restated in NumPy, each reduction a left fold in rank order: what is made on a node, bit by bit."""

from functools import cache, reduce

import numpy as np

from mpiagg.arrays import codec

UFUNCS = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
HALVES = ("float16", "bfloat16")


@cache
def values(rank, length, dtype="float32", turn=0):
    """Return the vector of a rank, others each turn; not to be written to."""
    rng = np.random.default_rng([rank, length, turn])
    kind = np.dtype(dtype).kind
    if kind == "b":
        made = rng.random(length) < 0.5
    elif kind in "iu":
        made = rng.integers(0, 100, length)
    else:
        made = rng.normal(size=length) + (1j * rng.normal(size=length) if kind == "c" else 0)
    made = made.astype(dtype)
    made.flags.writeable = False
    return made


def fold(op, vectors, root=0):
    """Reduce vectors one after the other, from the root's on; half precision in float32, rounded once."""
    dtype = vectors[0].dtype
    work = [x.astype(np.float32) if dtype.name in HALVES else x for x in (*vectors[root:], *vectors[:root])]
    total = reduce(UFUNCS[op], work)
    return (np.divide(total, len(work)) if op == "avg" else total).astype(dtype)


def result(collective, vectors, rank, *, cuts=None, op="sum", root=0):
    """Return what a rank has in its buffer at the end, and where: (slice, values); None if it has nothing.

    Every rank's buffer is as long as the others', and ``cuts`` says where in it the ranks' chunks lie.
    """
    everything = slice(0, vectors[0].size)
    if collective == "broadcast":
        return everything, vectors[root]
    if collective in ("reduce", "gather") and rank != root:
        return None
    if collective in ("allgather", "gather"):
        chunks = [x[cuts[place] : cuts[place + 1]] for place, x in enumerate(vectors)]
        return everything, np.concatenate(chunks)
    total = vectors[root] if collective == "scatter" else fold(op, vectors, root)
    if collective in ("reduce_scatter", "scatter"):
        own = slice(cuts[rank], cuts[rank + 1])
        return own, total[own]
    return everything, total


def through(wire, values):
    """Return what is left of values that have been encoded together."""
    encoded, after = np.zeros(codec(wire).nbytes(len(values)), np.uint8), np.empty_like(values)
    codec(wire).encode(values, encoded)
    codec(wire).decode(encoded, after)
    return after


def averaged(vectors, wire=None, residuals=None, divisor=None):
    """Average by the algorithm ``direct``: the rank that has a chunk adds up what arrives, in the order of the ranks.

    With a wire, others' chunks are encoded on their way to their owner, and its result on its way back. ``residuals``,
    one a rank, are added first, and become what was lost.
    """
    size = len(vectors)
    divisor = size if divisor is None else divisor
    if residuals is not None:
        vectors = [x + left for x, left in zip(vectors, residuals, strict=True)]
    result, stop = np.empty_like(vectors[0]), 0
    for owner, part in enumerate(np.array_split(vectors[0], size)):
        chunk, stop = slice(stop, stop + len(part)), stop + len(part)
        own = [x[chunk] for x in vectors]
        sent = [x if wire is None or rank == owner else through(wire, x) for rank, x in enumerate(own)]
        mean = sum(sent[1:], start=sent[0]) / vectors[0].dtype.type(divisor)
        result[chunk] = mean if wire is None else through(wire, mean)
        if residuals is not None:
            for rank in range(size):
                residuals[rank][chunk] = (mean - result[chunk]) * divisor if rank == owner else own[rank] - sent[rank]
    return result


def same_bits(found, wanted):
    return found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()
