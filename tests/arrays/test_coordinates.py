"""Coordinates in few bits, beside their definition in plain Python."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpiagg.arrays import HOST, Coordinates


def restated(coordinates, length):
    """Return the bits of a message: the lowest of each coordinate, place by place, and a row in unary."""
    count = len(coordinates)
    low = math.floor(math.log2(length / count)) if count else 0
    bits = [x >> place & 1 for place in range(low) for x in coordinates]
    row = [0] * (count + (length >> low) if count else 0)
    for i, x in enumerate(coordinates):
        row[(x >> low) + i] = 1
    return bits + row


def message_of(coordinates, length):
    form = Coordinates(HOST, len(coordinates), length)
    encoded = np.full(form.nbytes, 0xA5, np.uint8)
    form.encode(np.array(coordinates, np.int64), encoded)
    return form, encoded


choices = st.integers(0, 3000).flatmap(
    lambda length: st.tuples(st.sets(st.integers(0, max(0, length - 1)), max_size=length), st.just(length))
)


@given(choices)
@example((set(), 0))
@example(({0}, 1))
@example((set(range(64)), 64))
@example(({0, 2**40 - 1}, 2**40))
def test_they_come_back_and_the_bits_are_as_defined(choice):
    coordinates, length = sorted(choice[0])[: choice[1]], choice[1]
    form, encoded = message_of(coordinates, length)
    wanted = restated(coordinates, length)
    assert np.unpackbits(encoded).tolist() == wanted + [0] * (8 * form.nbytes - len(wanted))
    back = form.decode(encoded)
    assert back.dtype == np.int64
    assert back.tolist() == coordinates


@given(st.integers(1, 2**50), st.floats(1e-12, 1))
def test_a_coordinate_takes_at_most_two_bits_and_the_logarithm(length, ratio):
    count = min(2**20, math.ceil(ratio * length))
    assert 8 * (Coordinates(HOST, count, length).nbytes - 1) < count * (2 + math.log2(length / count)) * (1 + 1e-12)


@pytest.mark.parametrize(("length", "count", "nbytes"), [(4096, 128, 112), (10**6, 10**4, 10704), (8, 0, 0)])
def test_bytes_of_some(length, count, nbytes):
    assert Coordinates(HOST, count, length).nbytes == nbytes


@pytest.mark.parametrize("fill", [0, 0xFF])
def test_another_number_of_them_is_refused(fill):
    form, encoded = message_of([1, 5, 900], 1000)
    encoded[:] = fill
    with pytest.raises(ValueError, match=r"\d coordinates, not 3"):
        form.decode(encoded)
