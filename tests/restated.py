"""Collectives restated in NumPy, each reduction a left fold in rank order: what is made on a node, bit by bit."""

from functools import cache, reduce

import numpy as np

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


def same_bits(found, wanted):
    return found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()
