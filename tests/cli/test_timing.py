"""How contenders share the time of a benchmark."""

from hypothesis import given
from hypothesis import strategies as st

from mpiagg.benchmarks.timing import BLOCKS, FEWEST_BLOCKS, Pace, takes_part, turns


@given(st.integers(1, 200), st.data())
def test_turns_are_taken_evenly_from_the_first_on(all_turns, data):
    blocks = data.draw(st.integers(1, all_turns))
    taken = [turn for turn in range(all_turns) if takes_part(turn, blocks, all_turns)]
    assert len(taken) == blocks
    assert taken[0] == 0
    gaps = {after - before for before, after in zip(taken, [*taken[1:], all_turns], strict=True)}
    assert max(gaps) - min(gaps) <= 1


@given(st.floats(1e-9, 1e3), st.floats(1e-3, 1e3), st.integers(1, 10000), st.booleans())
def test_every_contender_keeps_to_its_share(seconds, share, iterations, singly):
    pace = Pace(iterations, 0, 0.0, singly)
    repeats, blocks = turns(seconds, share, pace)
    fewest = min(FEWEST_BLOCKS, pace.blocks)
    assert repeats >= 1
    assert fewest <= blocks <= pace.blocks
    assert repeats * blocks <= iterations
    assert repeats * blocks * seconds <= share * 1.001 or (repeats, blocks) == (1, fewest)


def test_a_slow_contender_does_not_slow_down_the_others():
    pace = Pace(iterations=1000, warmup=0, seconds=4.0)
    assert turns(1e-5, 1.0, pace) == (1000 // BLOCKS, BLOCKS)
    assert turns(1e-2, 1.0, pace) == (5, BLOCKS)
    assert turns(0.125, 1.0, pace) == (1, 8)
    assert turns(10.0, 1.0, pace) == (1, FEWEST_BLOCKS)


TIMING = """
import sys
from mpi4py import MPI
from mpiagg.benchmarks.timing import TimedContender, Pace, run
calls = {"one": 0, "other": 0}
def entry(name):
    def call():
        calls[name] += 1
    def before():
        calls[name + " before"] = calls.get(name + " before", 0) + 1
    return TimedContender(call, before)
for singly in (False, True):
    results = run(MPI.COMM_WORLD, [entry("one"), entry("other")], Pace(100, 2, 60.0, singly))
    for name, (seconds, repeats, by_device) in zip(("one", "other"), results):
        assert by_device is None
        assert (len(seconds), repeats) == ((100, 1) if singly else (20, 5)), (len(seconds), repeats)
        assert (seconds >= 0).all()
# Warm-up calls; timed calls, of which every block of five begins with one more; and all of it again, each timed alone.
assert calls == {name: 2 + 20 * 6 + 2 + 100 for name in ("one", "other")} | {
    f"{name} before": 2 + 20 + 2 + 100 for name in ("one", "other")
}, calls
if MPI.COMM_WORLD.rank == 0:
    sys.stdout.write("all right")
"""


def test_calls_are_timed_in_blocks_or_singly(run_ranks):
    done = run_ranks(2, TIMING)
    assert done.status == 0, done.err
    assert done.out == "all right"
