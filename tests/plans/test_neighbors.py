"""The comparison of graphs, without ranks: what all of them say of their edges, and what is found in it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mpiagg.plans.neighbors import Neighbors, differences

SIZE = 5
EDGES = st.lists(st.tuples(*[st.integers(0, SIZE - 1)] * 2, st.integers(0, 3)), max_size=20)


def said(edges):
    """Return what each rank sends, and what it receives, in a graph of edges from a source to a target."""
    sent = [[(target, rows) for source, target, rows in edges if source == rank] for rank in range(SIZE)]
    received = [[(source, rows) for source, target, rows in edges if target == rank] for rank in range(SIZE)]
    return sent, received


@given(EDGES, st.randoms())
def test_a_graph_agrees_with_itself(edges, random):
    sent, received = said(edges)
    assert not list(differences(sent, received))
    unknown = [[(source, -1) for source, _ in each] for each in received]
    assert not list(differences(sent, unknown))
    # Only edges between the same ranks must be in one order.
    for each in sent:
        kinds = sorted({target for target, _ in each}, key=lambda _: random.random())
        each[:] = [edge for target in kinds for edge in each if edge[0] == target]
    assert not list(differences(sent, received))


@given(EDGES, EDGES)
def test_each_pair_of_ranks_that_disagrees_is_told_once(one, other):
    sent, received = said(one)[0], said(other)[1]
    rows = [{}, {}]
    for edges, ends in zip((one, other), rows, strict=True):
        for source, target, count in edges:
            ends.setdefault((source, target), []).append(count)
    wrong = {pair for pair in {*rows[0], *rows[1]} if rows[0].get(pair) != rows[1].get(pair)}
    found = list(differences(sent, received))
    assert len(found) == len(wrong)
    for source, target in wrong:
        assert any(words.startswith(f"rank {source} ") and f" rank {target} " in words for words in found)


@given(EDGES.filter(bool), st.data())
def test_an_edge_that_one_rank_forgets_is_found(edges, data):
    sent, received = said(edges)
    source, target, _ = data.draw(st.sampled_from(edges))
    if data.draw(st.booleans()):
        sent[source].remove(next(edge for edge in sent[source] if edge[0] == target))
    else:
        received[target].remove(next(edge for edge in received[target] if edge[0] == source))
    (words,) = differences(sent, received)
    assert f"rank {source} names rank {target} as a destination" in words
    assert f"rank {target} names rank {source} as a source" in words


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        ([0], [], "rank 0 names rank 1 as a destination once, and rank 1 names rank 0 as a source never"),
        ([0, 0, 0], [0], "rank 0 names rank 1 as a destination 3 times, and rank 1 names rank 0 as a source once"),
        ([2, 3], [3, 2], "rank 0 sends rank 1 2 and 3 rows, which expects 3 and 2 rows"),
    ],
)
def test_differences_in_words(there, here, words):
    assert list(differences([[(1, rows) for rows in there], []], [[], [(0, rows) for rows in here]])) == [words]


@given(st.lists(st.one_of(st.integers(0, 3), st.just(MPI.PROC_NULL)), max_size=6).map(lambda half: half + half[::-1]))
def test_sources_are_matched_in_order_and_on_a_grid_the_one_above_comes_first(sources):
    places = list(range(len(sources)))
    swapped = [place + 1 - place % 2 * 2 for place in places]
    for grid, order in ((False, places), (True, swapped)):
        matched = Neighbors(tuple(sources), (), grid=grid).matched
        assert matched == [place for place in order if sources[place] != MPI.PROC_NULL]
        assert Counter(sources[place] for place in matched) == Counter(sources) - Counter({MPI.PROC_NULL: len(sources)})
