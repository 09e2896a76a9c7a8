"""How long the pieces of messages are that go by way of the host."""

from hypothesis import given
from hypothesis import strategies as st

from mpiagg.plans.staging import LEAST_PIECE, MOST_PIECE, WORTH, piece_bytes


@given(st.integers(0, 2**50))
def test_pieces_are_neither_short_nor_long(chunk):
    piece = piece_bytes(chunk)
    assert LEAST_PIECE <= piece <= MOST_PIECE
    assert chunk < 2 * LEAST_PIECE or -(-chunk // piece) >= 2


@given(st.integers(2 * LEAST_PIECE, 2**28))
def test_no_other_number_of_pieces_would_be_faster_by_the_model(chunk):
    def cost(piece):
        count = -(-chunk // piece)
        return (count + 1) * chunk / count + count * WORTH  # pieces are of equal lengths

    others = [piece for piece in range(LEAST_PIECE, MOST_PIECE + 1, LEAST_PIECE // 4) if chunk / piece >= 2]
    assert cost(piece_bytes(chunk)) <= 1.1 * min(map(cost, others))
