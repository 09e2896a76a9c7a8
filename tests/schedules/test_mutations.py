"""Whatever the check accepts also works: schedules are changed at random and run on integers."""

from collections import defaultdict, deque
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mpiagg.errors import ScheduleError
from mpiagg.schedules import TABLE, Action, Collective, Round, finish, prove, schedules, take

SERVED = [(name, collective) for name, entry in TABLE.items() for collective in entry.schedules]
NOTHING = (-(10**9), 0)
INWARD = (Action.RECEIVE, Action.REDUCE, Action.HOLD, Action.KEEP)


def execute(programs, collective, chunks):
    """Run schedules with messages that are buffered without end, on (sum, how often finished) for each chunk.

    Returns every rank's chunks, or None if some rank cannot go on. It shares nothing with the walk under test.
    """
    n = len(programs)
    held = [[start(collective, rank, chunk, n) for chunk in range(chunks)] for rank in range(n)]
    channels = defaultdict(deque)
    position, posted, kept = [0] * n, [False] * n, [{} for _ in range(n)]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if position[rank] == len(program):
                continue
            steps = program[position[rank]]
            if not posted[rank]:
                posted[rank] = moved = True
                for step in steps:
                    if step.action is Action.SEND:
                        channels[rank, step.peer].append(held[rank][step.chunk : step.chunk + step.count])
            wanted = [step.peer for step in steps if step.action in INWARD]
            if any(len(channels[peer, rank]) < wanted.count(peer) for peer in wanted):
                continue
            if not complete(steps, held[rank], kept[rank], lambda peer, rank=rank: channels[peer, rank].popleft()):
                return None
            position[rank], posted[rank], moved = position[rank] + 1, False, True
    return held if all(position[rank] == len(program) for rank, program in enumerate(programs)) else None


def added(left, right):
    return left[0] + right[0], left[1] + right[1]


def start(collective, rank, chunk, n):
    if collective is Collective.ALLTOALL:
        return (chunk + 1, 0) if chunk % n == rank else NOTHING
    has = {"broadcast": rank == 0, "scatter": rank == 0, "allgather": rank == chunk, "gather": rank == chunk}
    return (100**rank, 0) if has.get(collective.value, True) else NOTHING


def complete(steps, held, kept, receive):
    """Let the messages of a round land, then compute, as a plan does; False if a message does not fit."""
    arrived = [receive(step.peer) if step.action in INWARD else None for step in steps]
    fits = all(message is None or len(message) == step.count for message, step in zip(arrived, steps, strict=True))
    if not fits or any(step.chunk + step.count > len(held) for step in steps):
        return False
    aside = defaultdict(lambda: (0, 0))
    for message, step in zip(arrived, steps, strict=True):
        for offset in range(step.count):
            chunk = step.chunk + offset
            if step.action is Action.RECEIVE:
                held[chunk] = message[offset]
            elif step.action is Action.FINISH:
                held[chunk] = (held[chunk][0], held[chunk][1] + 1)
            elif step.action is Action.TAKE:
                held[chunk] = kept.get(chunk, NOTHING)
            elif step.action is Action.HOLD:
                aside[chunk] = added(aside[chunk], message[offset])
            elif step.action in (Action.REDUCE, Action.KEEP):
                received = added(aside.pop(chunk, (0, 0)), message[offset])
                held[chunk] = added(held[chunk], received)
                if step.action is Action.KEEP:
                    kept[chunk] = added(kept.get(chunk, (0, 0)), received)
    return True


def promised(collective, n, chunks):
    """The (rank, chunk) that must hold a value at the end, and the value."""
    for rank, chunk in product(range(n), range(chunks)):
        everything, at_root, own = (sum(100**r for r in range(n)), 1), rank == 0, rank == chunk
        there, held = {
            "allreduce": (True, everything),
            "reduce": (at_root, everything),
            "reduce_scatter": (own, everything),
            "broadcast": (True, (1, 0)),
            "scatter": (own, (1, 0)),
            "allgather": (True, (100 ** (chunk % n), 0)),
            "gather": (at_root, (100 ** (chunk % n), 0)),
            "alltoall": (chunk // n == rank, (chunk + 1, 0)),
            "scan": (True, (sum(100**r for r in range(rank + 1)), 0)),
            "exscan": (not at_root, (sum(100**r for r in range(rank)), 0)),
        }[collective.value]
        if there:
            yield rank, chunk, held


def works(programs, collective, chunks):
    held = execute(programs, collective, chunks)
    ends = promised(collective, len(programs), chunks)
    return held is not None and all(held[rank][chunk] == value for rank, chunk, value in ends)


def accepted(programs, collective, chunks):
    try:
        prove(programs, collective, chunks)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize(("name", "collective"), SERVED)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 7])
def test_the_schedules_themselves_work(name, collective, n):
    assert works(schedules(name, collective, n), collective, TABLE[name].chunks(collective, n))


@st.composite
def mutants(draw):
    """A schedule of the table with one to three changes, each on one rank or on all alike."""
    name, collective = draw(st.sampled_from(SERVED))
    n = draw(st.integers(2, 6))
    chunks = TABLE[name].chunks(collective, n)
    programs = schedules(name, collective, n)
    for _ in range(draw(st.integers(1, 3))):
        change = draw(st.sampled_from(CHANGES))
        ranks = draw(st.sampled_from([[rank] for rank in range(n)] + [list(range(n))]))
        index = draw(st.integers(0, 12))
        for rank in ranks:
            if programs[rank]:
                change(programs[rank], index % len(programs[rank]), draw(st.integers(0, 5)), n, chunks)
    return programs, collective, chunks


def duplicate_round(program, index, *_):
    program.insert(index, program[index])


def drop_round(program, index, *_):
    del program[index]


def swap_rounds(program, index, other, *_):
    other %= len(program)
    program[index], program[other] = program[other], program[index]


def merge_rounds(program, index, *_):
    if index + 1 < len(program):
        program[index : index + 2] = [Round(*program[index], *program[index + 1])]


def split_round(program, index, slot, *_):
    program[index : index + 1] = [Round(*program[index][:slot]), Round(*program[index][slot:])]


def reverse_steps(program, index, *_):
    program[index] = Round(*program[index][::-1])


def changed_step(program, index, slot, **changes):
    steps = list(program[index])
    if steps:
        steps[slot % len(steps)] = replace(steps[slot % len(steps)], **changes)
        program[index] = Round(*steps)


def change_chunk(program, index, slot, n, chunks):
    del n
    changed_step(program, index, slot, chunk=slot % chunks)


def change_peer(program, index, slot, n, chunks):
    del chunks
    changed_step(program, index, slot, peer=slot % n)


def replace_instead_of_reduce(program, index, slot, *_):
    changed_step(program, index, slot, action=Action.RECEIVE)


def reduce_instead_of_replace(program, index, slot, *_):
    changed_step(program, index, slot, action=Action.REDUCE)


def keep_instead_of_reduce(program, index, slot, *_):
    changed_step(program, index, slot, action=Action.KEEP)


def add_take(program, index, slot, n, chunks):
    del n
    program[index] = Round(*program[index], take(slot % chunks))


def add_finish(program, index, slot, n, chunks):
    del n
    program[index] = Round(*program[index], finish(slot % chunks))


def hold_instead_of_reduce(program, index, slot, *_):
    changed_step(program, index, slot, action=Action.HOLD)


def turn_side(program, index, slot, *_):
    changed_step(program, index, slot, received_first=bool(slot % 2))


CHANGES = [
    duplicate_round,
    drop_round,
    swap_rounds,
    merge_rounds,
    split_round,
    reverse_steps,
    change_chunk,
    change_peer,
    replace_instead_of_reduce,
    reduce_instead_of_replace,
    keep_instead_of_reduce,
    add_take,
    hold_instead_of_reduce,
    turn_side,
    add_finish,
]


@given(mutants())
@settings(max_examples=1500)
def test_what_is_accepted_works(mutant):
    if accepted(*mutant):
        assert works(*mutant)


@given(mutants())
@settings(max_examples=300)
def test_what_does_not_work_is_refused(mutant):
    assume(not works(*mutant))
    assert not accepted(*mutant)


def test_some_changes_are_harmless():
    # Without this, a check that refuses everything would pass.
    programs = schedules("parameter_server", Collective.BROADCAST, 5)
    for program in programs:
        duplicate_round(program, 0)
    assert accepted(programs, Collective.BROADCAST, 1)
    assert works(programs, Collective.BROADCAST, 1)
