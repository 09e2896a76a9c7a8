"""Where buffers are cut."""

from hypothesis import given
from hypothesis import strategies as st

from mpiagg.arrays import cuts_of, even_cuts, even_ranges, ranges

lengths = st.integers(0, 10_000)
parts = st.integers(1, 200)


@given(lengths, parts)
def test_even_cuts_cover_everything_and_differ_by_at_most_one(length, parts):
    cuts = even_cuts(length, parts)
    sizes = [stop - start for start, stop in ranges(cuts)]
    assert (cuts[0], cuts[-1], len(sizes)) == (0, length, parts)
    assert sum(sizes) == length
    assert sizes == sorted(sizes, reverse=True)
    assert sizes.count(length // parts + 1) == length % parts
    assert max(sizes) - min(sizes) <= 1


@given(lengths, lengths, parts)
def test_even_ranges_are_the_cuts_moved(start, length, parts):
    expected = [(start + a, start + b) for a, b in ranges(even_cuts(length, parts))]
    assert even_ranges(start, start + length, parts) == expected


@given(st.lists(st.integers(0, 50), max_size=20))
def test_cuts_of_counts(counts):
    cuts = cuts_of(counts)
    assert cuts[0] == 0
    assert [stop - start for start, stop in ranges(cuts)] == counts


def test_examples():
    assert even_cuts(10, 4) == [0, 3, 6, 8, 10]
    assert even_cuts(2, 4) == [0, 1, 2, 2, 2]
    assert even_cuts(2**40 + 1, 2) == [0, 2**39 + 1, 2**40 + 1]
