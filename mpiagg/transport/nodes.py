"""Which ranks of a communicator are on which node, and the communicator of those on ours."""

from __future__ import annotations

import os
from typing import Final

import numpy as np
from mpi4py import MPI

from mpiagg.common.arguments import NODES, ranks_of_nodes
from mpiagg.schedules import Layout
from mpiagg.transport.failures import Failures
from mpiagg.watch import Aside, OperationLog

MOST_CPUS: Final = 4096
"""Processors are told apart up to this number."""


class Node:
    """The node of this rank, and the layout of all ranks of a communicator.

    Parameters
    ----------
    comm : MPI.Intracomm
        The communicator; making the object is collective on it.
    failures : Failures, optional
        What is known of ranks of it that have died; it learns of the node's communicator.

    Attributes
    ----------
    comm : MPI.Intracomm
        The ranks of ``comm`` on this node, in their order.
    ranks : tuple of int
        Their ranks in ``comm``.
    place : int
        This rank's number among them.
    layout : Layout
        All ranks of ``comm``.
    crowded : bool
        Whether the node has more ranks than processors to run them.

    Raises
    ------
    ValueError
        If the environment variable MPIAGG_NODES is set and does not say how many ranks each node has.
    """

    def __init__(self, comm: MPI.Intracomm, failures: Failures | None = None, log: OperationLog | None = None) -> None:
        self.failures = Failures(comm) if failures is None else failures
        self.log = Aside(OperationLog("", comm.Get_rank(), comm.Get_size()) if log is None else log)
        group = _group_of_world_rank(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
        sharing = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
        self.comm = MPI.Intracomm(sharing.Split(group, comm.Get_rank()))
        sharing.Free()
        self.failures.comms.append(self.comm)
        self.place = self.comm.Get_rank()
        self.size = self.comm.Get_size()
        first = np.array([comm.Get_rank()])
        self.comm.Bcast(first)
        firsts = np.empty(comm.Get_size(), first.dtype)
        comm.Allgather(first, firsts)
        self.layout = Layout.by_name(firsts.tolist())
        self.ranks = self.layout.nodes[self.layout.node_of(comm.Get_rank())]
        self.crowded = self.size > _processors(self.comm)

    def free(self) -> None:
        """Free the node's communicator."""
        self.comm.Free()


def _group_of_world_rank(rank: int, size: int) -> int:
    """Return the number of the node that MPIAGG_NODES puts a rank of the world on; 0 where it is not set."""
    text = os.environ.get(NODES)
    return Layout.of(ranks_of_nodes(text, size)).node_of(rank) if text else 0


def fault_of_nodes() -> str:
    """Return what is wrong with MPIAGG_NODES on this rank, if anything is."""
    try:
        _group_of_world_rank(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
    except ValueError as error:
        return str(error)
    return ""


def _processors(comm: MPI.Intracomm) -> int:
    """Return how many processors the ranks of a node may run on together."""
    mine = np.zeros(MOST_CPUS // 8, np.uint8)
    for cpu in os.sched_getaffinity(0):
        mine[cpu % MOST_CPUS // 8] |= 1 << cpu % 8
    everyone = np.empty_like(mine)
    comm.Allreduce(mine, everyone, MPI.BOR)
    return int(np.unpackbits(everyone).sum())
