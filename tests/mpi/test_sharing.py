"""Programs of gates, mailboxes and owners, with all ranks of a node played by one process, in any order."""

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from restated import result, same_bits, values

from mpiagg.arrays import cuts_of, reduction
from mpiagg.plans import on_node, program
from mpiagg.plans.choices import Choice
from mpiagg.plans.operation import Operation, even_counts
from mpiagg.plans.program import Copying
from mpiagg.schedules import TABLE, Collective, Layout
from mpiagg.transport import LINE, Block, Gate, Position, Positions

pytestmark = pytest.mark.mpi

EXAMPLES = 150 if MPI.COMM_WORLD.size == 1 else 1
"""One process is enough for what needs no other."""


def programs(size, collective, counts, root, segment, *, in_place):
    """Return every rank's program and buffer, over memory of this process."""
    layout = Layout.of([size])
    vectors = [np.empty(sum(counts), np.float32) for _ in range(size)]
    block = Block([np.zeros(LINE + 2 * 4096, np.uint8) for _ in range(size)], lambda: None, 0, Position(0, 0))
    block = block._replace(nbytes=block.parts[0].nbytes)
    memory = SimpleNamespace(position=lambda _: Position(0, 0), view=lambda place, *_: vectors[place].view(np.uint8))
    made = []
    for rank in range(size):
        node = SimpleNamespace(size=size, place=rank, ranks=tuple(range(size)))
        channel = SimpleNamespace(node=node, memory=SimpleNamespace(host=memory))
        how = reduction("sum", np.dtype(np.float32), size)
        operation = Operation(
            Collective(collective), rank, layout, root, counts, how, Choice("shared", segment=segment), MPI.SUM
        )
        own = vectors[rank]
        x, out = (None if part is None else own[part] for part in (operation.source, operation.target))
        parts = on_node.OnNode(channel, operation, x, out, lambda own=own: Copying(own, None, None), 1)
        gate = Gate(block, rank, range(size))
        here = Positions(Position(0, 0), Position(0, 0))
        made.append(parts.in_place(gate, [here] * size) if in_place else parts.by_mail(gate, block))
    return made, vectors


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_ranks_may_run_in_any_order(data):
    size = data.draw(st.integers(2, 5), label="size")
    collective = data.draw(
        st.sampled_from([c.value for c in TABLE["shared"].schedules if c is not Collective.ALLTOALL]),
        label="collective",
    )
    length = data.draw(st.integers(0, 700), label="length")
    chunked = collective in ("allgather", "reduce_scatter", "gather", "scatter")
    counts = even_counts(length, size) if chunked else (length,)
    root = data.draw(st.integers(0, size - 1), label="root") if Collective(collective).rooted else 0
    segment = data.draw(st.sampled_from([64, 256, 4096]), label="segment")
    in_place = data.draw(st.booleans(), label="in place")
    made, buffers = programs(size, collective, counts, root, segment, in_place=in_place)
    # Every rank runs its program three times, as fast as it can: the memory of a run is that of the next.
    results = [[] for _ in range(size)]

    def runs(rank):
        for turn in range(3):
            buffers[rank][:] = values(rank, length, turn=turn)
            yield from program.run(made[rank].rounds)
            results[rank].append(buffers[rank].copy())

    left = {rank: runs(rank) for rank in range(size)}
    order = Random(data.draw(st.integers(0, 10_000), label="order"))
    favourite = 0
    while left:
        # One rank is far ahead most of the time, and another each time.
        rank = favourite if favourite in left and order.random() < 0.7 else order.choice(sorted(left))
        favourite = rank if order.random() < 0.8 else order.randrange(size)
        if next(left[rank], None) is None:
            del left[rank]
    for turn in range(3):
        vectors = [values(rank, length, turn=turn) for rank in range(size)]
        for rank in range(size):
            wanted = result(collective, vectors, rank, cuts=cuts_of(counts), root=root)
            if wanted is not None:
                assert same_bits(results[rank][turn][wanted[0]], wanted[1])


def test_a_gate_less_is_noticed(monkeypatch):
    # The control of the test above: without waiting at gates, a rank that is ahead finds nothing of the others.
    monkeypatch.setattr(Gate, "passed", lambda gate: gate.count > 0)
    made, buffers = programs(2, "allreduce", (500,), 0, 4096, in_place=False)
    for rank, buffer in enumerate(buffers):
        buffer[:] = values(rank, 500)
    for rank_program in made:
        assert list(program.run(rank_program.rounds)) == []
    wanted = result("allreduce", [values(rank, 500) for rank in range(2)], 0)[1]
    assert not same_bits(buffers[0], wanted)
