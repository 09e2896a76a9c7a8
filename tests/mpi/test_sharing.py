"""Programs of barriers, mailboxes, owners and rounds, with all ranks of a node played by one process, in any order."""

import os
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from restated import result, same_bits, values

from mpiagg import simulate
from mpiagg.arrays import cuts_of, reduction
from mpiagg.plans import on_node, one_shot, program
from mpiagg.plans.choices import Choice
from mpiagg.plans.operation import Operation, even_counts
from mpiagg.plans.program import Copying
from mpiagg.plans.sharing import NodeTask, VectorRange, Vectors, rounds_in_place
from mpiagg.schedules import TABLE, Collective, Layout, Round, receive, schedules, send
from mpiagg.transport import LINE, Block, NodeBarrier, Position, Positions, SharedMemory, Some

pytestmark = pytest.mark.mpi

EXAMPLES = 150 if MPI.COMM_WORLD.size == 1 else 1
"""One process is enough for what needs no other."""


def programs(size, collective, counts, root, choice, *, in_place):
    """Return every rank's program and buffer, over memory of this process; ``in_place`` or by mailboxes.

    What is read in the memory of other processes is read in this one's, by its address.
    """
    layout = Layout.of([size])
    vectors = [np.empty(sum(counts), np.float32) for _ in range(size)]
    block = Block([np.zeros(LINE + 2 * 4096, np.uint8) for _ in range(size)], lambda: None, 0, Position(0, 0))
    block = block._replace(nbytes=block.parts[0].nbytes)
    memory = SimpleNamespace(
        position=lambda *_, **__: Position(0, 0), found=lambda place, *_: vectors[place].view(np.uint8)
    )
    if choice.reads:
        memory = SharedMemory(SimpleNamespace(size=size))
        memory.processes = [os.getpid()] * size
    parts, made = [], []
    for rank in range(size):
        node = SimpleNamespace(size=size, place=rank, ranks=tuple(range(size)))
        channel = SimpleNamespace(node=node, memory=SimpleNamespace(host=memory, read=lambda: True))
        how = reduction("sum", np.dtype(np.float32), size)
        operation = Operation(Collective(collective), rank, layout, root, counts, how, choice, MPI.SUM)
        own = vectors[rank]
        x, out = (None if part is None else own[part] for part in (operation.source, operation.target))
        parts.append(on_node.OnNode(channel, operation, x, out, lambda own=own: Copying(own, None, None), 1))
    here = [Positions(Position(0, 0), Position(0, 0))] * size
    positions = [part.places.positions(apart=False) for part in parts] if choice.reads else here
    for rank, part in enumerate(parts):
        barrier = NodeBarrier(block, rank, range(size))
        with patch.object(one_shot, "SEGMENT", choice.segment):  # of mailboxes, too
            made.append(part.in_place(barrier, positions) if in_place else part.by_mailboxes(barrier, block))
    return made, vectors


def in_any_order(order, runs):
    """Let all ranks run, one of them far ahead most of the time, and another each time."""
    left = dict(enumerate(runs))
    favourite = 0
    while left:
        rank = favourite if favourite in left and order.random() < 0.7 else order.choice(sorted(left))
        favourite = rank if order.random() < 0.8 else order.randrange(len(runs))
        if next(left[rank], None) is None:
            del left[rank]


def run_three_times(made, buffers, order):
    """Return what each rank has after each of three runs, for which its vector is that of each turn."""
    results = [[] for _ in made]

    def runs(rank):
        # Every rank runs its program as fast as it can: the memory of a run is that of the next.
        for turn in range(3):
            buffers[rank][:] = values(rank, buffers[rank].size, turn=turn)
            yield from program.run(made[rank].rounds)
            results[rank].append(buffers[rank].copy())

    in_any_order(order, [runs(rank) for rank in range(len(made))])
    return results


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
    read = data.draw(st.booleans(), label="read")
    segment = data.draw(st.sampled_from([64, 256, 4096]), label="segment")
    choice = Choice("shared", segment=segment, unregistered="shared" if read else None)
    in_place = read or data.draw(st.booleans(), label="in place")
    made, buffers = programs(size, collective, counts, root, choice, in_place=in_place)
    results = run_three_times(made, buffers, Random(data.draw(st.integers(0, 10_000), label="order")))
    for turn in range(3):
        vectors = [values(rank, length, turn=turn) for rank in range(size)]
        for rank in range(size):
            wanted = result(collective, vectors, rank, cuts=cuts_of(counts), root=root)
            if wanted is not None:
                assert same_bits(results[rank][turn][wanted[0]], wanted[1])


IN_STEP = ["multi_radix", "multi_radix-2", "multi_radix-3x2", "multi_radix-2x4"]


def check_in_step(data, *, in_place):
    """Run what waits for some ranks alone in any order, and compare its bits with those of the simulation."""
    size = data.draw(st.integers(2, 12), label="size")
    name = data.draw(st.sampled_from(IN_STEP), label="name")
    collective = data.draw(st.sampled_from([c.value for c in TABLE["multi_radix"].schedules]), label="collective")
    length = data.draw(st.integers(0, 300), label="length")
    counts = (length,) if collective == "allreduce" else even_counts(length, size)
    segment, lanes = (data.draw(st.sampled_from(found)) for found in ([128, 512, 4096], [1, 3]))
    choice = Choice(name, lanes, segment=segment)
    made, buffers = programs(size, collective, counts, 0, choice, in_place=in_place)
    results = run_three_times(made, buffers, Random(data.draw(st.integers(0, 10_000), label="order")))
    for turn in range(3):
        vectors = [values(rank, length, turn=turn) for rank in range(size)]
        for rank in range(size):
            place, bits = result(collective, vectors, rank, cuts=cuts_of(counts))
            if collective != "allgather":  # whose chunks are all the same sum
                bits = simulate(vectors, algorithm=name)[rank][place]
            assert same_bits(results[rank][turn][place], bits)


@settings(max_examples=EXAMPLES)
@given(data=st.data(), in_place=st.booleans())
def test_ranks_in_step_may_run_in_any_order(data, in_place):
    check_in_step(data, in_place=in_place)


def test_a_round_that_waits_for_nobody_is_noticed(monkeypatch):
    # The control of the test above.
    monkeypatch.setattr(Some, "passed", lambda _: True)
    made, buffers = programs(4, "allreduce", (500,), 0, Choice("multi_radix-2"), in_place=True)
    results = run_three_times(made, buffers, Random(0))
    wanted = simulate([values(rank, 500) for rank in range(4)], algorithm="multi_radix-2")
    assert not all(same_bits(results[rank][0], wanted[rank]) for rank in range(4))


HANDED_ON = [
    [[send(1)], [receive(3)]],
    [[receive(0)], [send(2)]],
    [[send(3)], [receive(1)]],
    [[receive(2)], [send(0)]],
]
"""What rank 0 sends in the first round, it changes in the second, for which it exchanges with another rank."""


def handed_on(order):
    """Return what four ranks have when they have carried this out."""
    vectors = [np.full(3, float(rank)) for rank in range(4)]
    block = Block([np.zeros(LINE, np.uint8) for _ in range(4)], lambda: None, LINE, Position(0, 0))
    places = {rank: VectorRange(vector) for rank, vector in enumerate(vectors)}
    how = reduction("sum", np.dtype(np.float64), 4)
    runs = []
    for rank, rounds in enumerate(HANDED_ON):
        task = NodeTask(vectors[rank], [[(0, 3)]], how)
        reached = Vectors(places[rank], places[rank], rank, places, places)
        barrier = NodeBarrier(block, rank, range(4))
        runs.append(program.run(list(rounds_in_place([Round(*r) for r in rounds], task, reached, barrier, 4096, ""))))
    in_any_order(order, runs)
    return [vector[0] for vector in vectors]


@pytest.mark.parametrize("ignored", [False, True])
def test_a_rank_waits_for_those_that_have_read_what_it_changes(monkeypatch, ignored):
    if ignored:  # the control
        among, readers = NodeBarrier.among, {0: 1, 2: 3}
        monkeypatch.setattr(
            NodeBarrier, "among", lambda barrier, ranks: among(barrier, ranks - {readers.get(barrier.place)})
        )
    found = [handed_on(Random(order)) for order in range(100)]
    assert all(each == [2, 0, 0, 2] for each in found) is not ignored


def test_what_is_sent_must_not_be_changed_in_the_same_round():
    vector = np.zeros(3)
    part = VectorRange(vector)
    task = NodeTask(vector, [[(0, 3)]], reduction("sum", np.dtype(np.float64), 2))
    rounds = schedules("recursive_doubling", Collective.ALLREDUCE, 2)[0]
    with pytest.raises(AssertionError, match="a rank changes what others read in the same round"):
        list(rounds_in_place(rounds, task, Vectors(part, part, 0, {1: part}, {1: part}), None, 64, ""))


@pytest.mark.parametrize("read", [False, True])
def test_a_barrier_less_is_noticed(monkeypatch, read):
    # The control of the test above: without waiting at barriers, a rank that is ahead finds nothing of the others.
    monkeypatch.setattr(NodeBarrier, "passed", lambda barrier: barrier.count > 0)
    choice = Choice("shared", segment=4096, unregistered="shared" if read else None)
    made, buffers = programs(2, "allreduce", (500,), 0, choice, in_place=read)
    for rank, buffer in enumerate(buffers):
        buffer[:] = values(rank, 500)
    for rank_program in made:
        assert list(program.run(rank_program.rounds)) == []
    wanted = result("allreduce", [values(rank, 500) for rank in range(2)], 0)[1]
    assert not same_bits(buffers[0], wanted)
