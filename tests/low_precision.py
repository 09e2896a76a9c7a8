"""What the tests of low-precision averaging share."""

import numpy as np
from mpi4py import MPI

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()


def noise(rank, step=0, length=300, dtype=np.float32):
    return np.random.default_rng([rank, step]).standard_normal(length).astype(dtype)


def replicas_of(aggregation):
    return [vector.replicas for entry in aggregation._entries for vector in entry.memory.vectors]


def neighbors_agree(aggregation):
    """Whether every rank's replicas of its neighbors are their own, bit for bit."""
    replicas = replicas_of(aggregation)
    own = COMM.allgather([rows[0].tobytes() for rows in replicas])
    kept = list(aggregation._place.neighbors)
    assert set(kept) == {(RANK - 1) % SIZE, (RANK + 1) % SIZE} - {RANK}
    agree = all(
        rows[row].tobytes() == own[peer][place]
        for place, rows in enumerate(replicas)
        for row, peer in enumerate(kept, 1)
    )
    return COMM.allreduce(agree, MPI.LAND)
