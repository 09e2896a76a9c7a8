"""Clocks on one timeline: true offsets lie within what is told, and nothing ends before it has started everywhere."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mpiagg.watch.alignment import Offset, align
from mpiagg.watch.recordings import RecordedOperation, Recording

CHANNEL = "0123456789abcdef"
TIMES = st.integers(0, 10**6)


def operation(order, start, end, collective="allreduce", nbytes=8):
    state = "running" if end is None else "done"
    return RecordedOperation(CHANNEL, order, collective, collective, nbytes, start, end, state, "MainThread", ())


def recording(rank, boot, operations, clock=10**9, wall=10**18):
    return Recording(rank, 300, f"host-{boot}", 1, boot, clock, wall, "asked", 0, tuple(operations))


@st.composite
def runs(draw, most_boots=4):
    """Return recordings of a made-up run, and for each rank what its clock lacks."""
    boots = draw(st.lists(st.integers(0, most_boots - 1), min_size=1, max_size=6))
    offsets = [draw(st.integers(-(10**8), 10**8)) for _ in range(most_boots)]
    operations = [[] for _ in boots]
    for order in range(1, draw(st.integers(0, 6)) + 1):
        members = draw(st.sets(st.sampled_from(range(len(boots))), min_size=1))
        starts = {rank: 10**9 + draw(TIMES) for rank in members}
        last = max(starts.values())
        for rank, start in starts.items():
            end = draw(st.none() | st.integers(last, last + 1000))
            true = offsets[boots[rank]]
            operations[rank].append(operation(order, start - true, None if end is None else end - true))
    found = [recording(rank, str(boot), operations[rank]) for rank, boot in enumerate(boots)]
    return found, [offsets[boot] for boot in boots]


@given(runs(), st.randoms())
def test_true_offsets_lie_within_what_is_told_and_nothing_ends_before_it_has_started_everywhere(run, random):
    found, true = run
    offsets = align(found)
    for rank, offset in offsets.items():
        if offset.within is not None:
            assert abs(offset.ns - (true[rank] - true[0])) <= offset.within
        if found[rank].boot == found[0].boot:
            assert offset == Offset(0, 0)
    placed = [each for each in found if offsets[each.rank].within is not None]
    starts = [(one.order, one.start + offsets[each.rank].ns) for each in placed for one in each.operations]
    ends = [(one.order, one.end + offsets[each.rank].ns) for each in placed for one in each.operations if one.end]
    assert all(end >= start for order, end in ends for other, start in starts if order == other)
    assert align(random.sample(found, len(found))) == offsets  # whatever order they come in


@settings(max_examples=50)
@given(runs(most_boots=2))
def test_between_two_clocks_it_does_not_matter_whose_is_the_first(run):
    found, _ = run
    size = len(found)
    there, back = align(found), align([replace(each, rank=size - 1 - each.rank) for each in found])
    for i in range(size):
        for j in range(size):
            one, other = (there[j].ns - there[i].ns, back[size - 1 - j].ns - back[size - 1 - i].ns)
            assert abs(one - other) <= 1  # halves are rounded down


def test_an_operation_of_all_bounds_every_clock_in_both_directions():
    found = [recording(rank, str(rank), [operation(1, 1000 * rank, 1000 * rank + 10)]) for rank in range(3)]
    assert align(found) == {0: Offset(0, 0), 1: Offset(-1000, 10), 2: Offset(-2000, 10)}


def test_bounds_go_by_way_of_other_clocks():
    """Ranks 0 and 2 have nothing in common but rank 1."""
    first, second = operation(1, 0, 10), operation(2, 100, 110)
    found = [recording(0, "a", [first]), recording(1, "b", [first, second]), recording(2, "c", [second])]
    assert align(found) == {0: Offset(0, 0), 1: Offset(0, 10), 2: Offset(0, 20)}


def test_a_running_operation_bounds_from_one_side():
    running = recording(1, "b", [operation(1, 500, 600), operation(2, 700, None)])
    found = [recording(0, "a", [operation(1, 500, 600), operation(2, 600, 650)]), running]
    # From the first alone the offset is within 100; rank 0 has ended the second, so rank 1 had started it by then.
    assert align(found)[1] == Offset(-75, 25)


def test_what_says_nothing_is_not_used():
    """Empty vectors and other collectives hold nobody; then the time of day is all there is."""
    for kind in ({"nbytes": 0}, {"collective": "broadcast"}, {"collective": "reduce_scatter"}, {"collective": None}):
        early, late = (operation(1, start, start + 10, **kind) for start in (0, 5000))
        found = [recording(0, "a", [early]), recording(1, "b", [late], clock=10**9 - 77)]
        assert align(found) == {0: Offset(0, 0), 1: Offset(77, None)}
    other = replace(operation(1, 0, 10), channel="f" * 16)
    found = [recording(0, "a", [other]), recording(1, "b", [operation(1, 0, 10)], wall=10**18 + 5)]
    assert align(found) == {0: Offset(0, 0), 1: Offset(5, None)}


def test_clocks_that_have_each_other_alone_stay_together():
    """The second and third are placed by the time of day of the second, and one beside the other by what they did."""
    found = [recording(0, "a", []), recording(1, "b", [operation(1, 100, 110)], wall=10**18 + 5)]
    found.append(recording(2, "c", [operation(1, 300, 310)], wall=10**18 + 99))
    assert align(found) == {0: Offset(0, 0), 1: Offset(5, None), 2: Offset(-195, None)}


def test_clocks_that_run_at_other_rates_are_aligned_all_the_same():
    """One gains a millisecond between two operations: no offset fits both, and the middle is at most half a one off."""
    found = [
        recording(0, "a", [operation(1, 10**6, 10**6 + 10), operation(2, 10**8, 10**8 + 10)]),
        recording(1, "b", [operation(1, 10**6, 10**6 + 10), operation(2, 101 * 10**6, 101 * 10**6 + 10)]),
    ]
    offset = align(found)[1]
    assert abs(offset.ns + 500_000) <= 10
    assert offset.within is not None


def test_many_clocks_are_aligned():
    found = [
        recording(
            rank, str(rank), [operation(order, 10**6 * order - rank, 10**6 * order + 50) for order in range(1, 9)]
        )
        for rank in range(300)
    ]
    assert all(offset.within is not None for offset in align(found).values())
