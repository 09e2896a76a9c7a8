"""How long the pieces of messages are that go by way of the host."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.plans.staging import LEAST_COST, LEAST_PIECE, MOST_PIECE, PIECE_COST, piece_bytes, piece_cost


@given(st.integers(0, 2**50))
def test_pieces_are_neither_short_nor_long(chunk):
    piece = piece_bytes(chunk)
    assert LEAST_PIECE <= piece <= MOST_PIECE
    assert chunk < 2 * LEAST_PIECE or -(-chunk // piece) >= 2


@given(st.integers(2 * LEAST_PIECE, 2**28))
def test_no_other_number_of_pieces_would_be_faster_by_the_model(chunk):
    def cost(piece):
        count = -(-chunk // piece)
        return (count + 1) * chunk / count + count * PIECE_COST  # pieces are of equal lengths

    others = [piece for piece in range(LEAST_PIECE, MOST_PIECE + 1, LEAST_PIECE // 4) if chunk / piece >= 2]
    assert cost(piece_bytes(chunk)) <= 1.1 * min(map(cost, others))


@given(st.integers(2, 16), st.integers(20, 26).map(lambda power: 2**power))
def test_pieces_go_by_what_one_was_measured_to_cost(count, chunk):
    piece = piece_bytes(chunk, chunk // count**2)
    assert piece == min(max(-(-chunk // count), LEAST_PIECE), MOST_PIECE)


@given(st.integers(2**24 // 100, 2**24), st.floats(0, 0.1))
def test_what_a_piece_costs_comes_of_times(cost, noise):
    """By times that are those of the model, and a little off. A cost is a whole number of bytes."""
    chunk, whole = 2**24, 1.0
    each = cost / chunk
    times = {p: whole * (1 + 1 / p) + each * p for p in (2, 4, 8, 16)}
    assert piece_cost(chunk, times) == pytest.approx(chunk * each, rel=1e-6)
    times[2] *= 1 + noise
    assert LEAST_COST <= piece_cost(chunk, times) <= chunk


def test_times_that_fit_no_model_give_what_can_be_used():
    assert piece_cost(2**24, {2: 4.0, 4: 3.0, 8: 2.0, 16: 1.0}) == LEAST_COST
    assert piece_cost(2**24, {2: 1.0, 4: 2.0, 8: 4.0, 16: 8.0}) == 2**24
