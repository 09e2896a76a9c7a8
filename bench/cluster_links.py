"""Measure the links of a cluster: from rank 0 to the first rank of every other node, and to its neighbour on its own.

    python bench/cluster.py --nodes 2 --ranks 2 -- python bench/cluster_links.py            prints a table
    python bench/cluster.py --nodes 2 --ranks 2 -- python bench/cluster_links.py FILE.json  and saves it

It runs under any mpiexec. One pair of ranks after the other is measured, while the others wait. The latency is half of
the median time that 8 bytes take to the peer and back; the rates are those of the payload, in MB/s (10^6 bytes), in
messages of 1 MiB, one way, and of each way where both are used at once; medians over the rounds. Both ways are used in
two orders: the receive is started before the send, as most programs do, or after it, as mpiagg's long messages are.
Last, all ranks send to the next at once, as a ring does: what several messages under way reach is what the machine that
plays the cluster can do; and then one of 256 KiB after the other, whole, and in the pieces that mpiagg cuts Open MPI's
into.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiagg.benchmarks import machine
from mpiagg.transport.messages import PIECE

COMM = MPI.COMM_WORLD
TRIPS = 1000
MESSAGE, MESSAGES, ROUNDS = 2**20, 16, 7
IN_FLIGHT = 4
SHORTER = 2**18


def latency(peer: int) -> float:
    """Return how long a small message takes to the peer, in us."""
    message, times = np.zeros(8, np.uint8), []
    for _ in range(TRIPS):
        start = time.perf_counter()
        if COMM.rank < peer:
            COMM.Send(message, peer)
            COMM.Recv(message, peer)
        else:
            COMM.Recv(message, peer)
            COMM.Send(message, peer)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / 2 * 1e6


def rate(peer: int, ways: int, *, sends_first: bool = False) -> float:
    """Return what goes from the lower rank to the higher in a second, in MB; with 2 ways as much goes back."""
    incoming, outgoing, token = np.zeros(MESSAGE, np.uint8), np.zeros(MESSAGE, np.uint8), np.zeros(1, np.uint8)
    requests = []
    if ways == 2 or COMM.rank > peer:
        requests.append(COMM.Recv_init(incoming, peer))
    if ways == 2 or COMM.rank < peer:
        requests.append(COMM.Send_init(outgoing, peer))
    if sends_first:
        requests.reverse()
    rates = []
    for _ in range(ROUNDS):
        COMM.Sendrecv(token, peer, 0, token.copy(), peer, 0)
        start = time.perf_counter()
        for _ in range(MESSAGES):
            MPI.Prequest.Startall(requests)
            MPI.Request.Waitall(requests)
        # The last message has arrived when the peer says so.
        COMM.Sendrecv(token, peer, 0, token.copy(), peer, 0)
        rates.append(MESSAGE * MESSAGES / (time.perf_counter() - start) / 1e6)
    for request in requests:
        request.Free()
    return statistics.median(rates)


def ring_rate(nbytes: int, longest: int) -> float:
    """Return what every rank sends to the next in a second, and receives from the one before, in MB; all at once.

    So many bytes are under way at a time, in messages of ``longest``.
    """
    incoming, outgoing = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    before, after = (COMM.rank - 1) % COMM.size, (COMM.rank + 1) % COMM.size
    pieces = [slice(start, start + longest) for start in range(0, nbytes, longest)]
    requests = [COMM.Recv_init(incoming[piece], before) for piece in pieces]
    requests += [COMM.Send_init(outgoing[piece], after) for piece in pieces]
    rates = []
    for _ in range(ROUNDS):
        COMM.Barrier()
        start = time.perf_counter()
        for _ in range(MESSAGE * MESSAGES // nbytes):
            MPI.Prequest.Startall(requests)
            while not MPI.Request.Testall(requests):
                os.sched_yield()
        COMM.Barrier()
        rates.append(MESSAGE * MESSAGES / (time.perf_counter() - start) / 1e6)
    for request in requests:
        request.Free()
    return statistics.median(rates)


def rest_until_done() -> None:
    """Wait for all ranks without taking a processor from those who measure."""
    barrier = COMM.Ibarrier()
    while not barrier.Test():
        time.sleep(0.01)


def main() -> None:
    """Measure all pairs, and print and save what came out."""
    names = COMM.allgather(MPI.Get_processor_name())
    peers = [rank for rank in range(1, COMM.size) if rank == 1 or names[rank] not in names[:rank]]
    rows: list[dict[str, Any]] = []
    for peer in peers:
        if COMM.rank in (0, peer):
            other = peer - COMM.rank
            rows.append(
                {
                    "from": names[0],
                    "to": names[peer],
                    "latency_us": latency(other),
                    "one_way_MBps": rate(other, ways=1),
                    "both_ways_MBps": rate(other, ways=2),
                    "both_ways_sends_first_MBps": rate(other, ways=2, sends_first=True),
                }
            )
        rest_until_done()
    rings = {
        "ring_MBps": ring_rate(IN_FLIGHT * MESSAGE, MESSAGE),
        "ring_one_whole_MBps": ring_rate(SHORTER, SHORTER),
        "ring_one_in_pieces_MBps": ring_rate(SHORTER, PIECE),
    }
    if COMM.rank:
        return
    print("from      to         latency us   one way MB/s   both ways MB/s   sends first MB/s")
    for row in rows:
        print(f"{row['from']:9} {row['to']:9}", end=" ")
        print(f"{row['latency_us']:11.1f} {row['one_way_MBps']:14.1f} {row['both_ways_MBps']:16.1f}", end=" ")
        print(f"{row['both_ways_sends_first_MBps']:18.1f}")
    several, whole, cut = rings.values()
    print(f"every rank to the next, all at once: {several:.1f} MB/s; one message of 256 KiB at a time: {whole:.1f};")
    print(f"that one in pieces: {cut:.1f}")
    if sys.argv[1:]:
        saved = {"machine": machine.facts(), "ranks": COMM.size, "rows": rows, **rings}
        Path(sys.argv[1]).write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
