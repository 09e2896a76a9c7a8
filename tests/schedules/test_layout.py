"""Layouts: which rank is on which node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.schedules import Layout


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any))
def test_nodes_one_after_the_other(sizes):
    layout = Layout.of(sizes)
    assert [rank for node in layout.nodes for rank in node] == list(range(sum(sizes)))
    assert [len(node) for node in layout.nodes] == [size for size in sizes if size]
    assert layout.size == sum(sizes)
    assert layout.widest == max(sizes)
    assert layout.even == (len({size for size in sizes if size}) == 1)
    assert all(rank in layout.nodes[layout.node_of(rank)] for rank in range(layout.size))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_nodes_by_name(names):
    layout = Layout.by_name(names)
    assert sorted(rank for node in layout.nodes for rank in node) == list(range(len(names)))
    for node in layout.nodes:
        assert len({names[rank] for rank in node}) == 1
        assert list(node) == sorted(node)
    assert len(layout.nodes) == len(set(names))
    assert list(layout.nodes) == sorted(layout.nodes)
    assert Layout.by_name([layout.node_of(rank) for rank in range(layout.size)]) == layout


def test_a_number_of_ranks_is_a_node():
    assert Layout.of_ranks(3) == Layout(((0, 1, 2),))
    assert Layout.of_ranks(Layout.of([1, 2])) == Layout(((0,), (1, 2)))


@pytest.mark.parametrize(
    ("sizes", "words"), [([2, 2, 2], "3 x 2"), ([1], "1 x 1"), ([3, 1], "3 + 1"), ([1, 2, 1], "1 + 2 + 1")]
)
def test_in_words(sizes, words):
    assert str(Layout.of(sizes)) == words
