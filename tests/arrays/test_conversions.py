"""Conversions between float32 and half precision, bit for bit beside NumPy and ml_dtypes, whatever is imported."""

import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.arrays import conversions, libraries
from mpiagg.arrays.conversions import (
    BLOCK,
    SHORT,
    convert,
    round_to_bfloat16,
    round_to_float16,
    widen_bfloat16,
    widen_float16,
)


@pytest.fixture(scope="module", autouse=True, params=["torch", "ml_dtypes", "neither"])
def library(request):
    """Have one of the libraries imported, as far as conversions can see."""
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "torch":
            pytest.importorskip("torch")
        else:
            patched.delitem(sys.modules, "torch", raising=False)
        if request.param == "neither":
            patched.delitem(sys.modules, "ml_dtypes")
        yield request.param


HALVES = [np.float16, ml_dtypes.bfloat16]
PATTERNS = np.arange(2**16, dtype=np.uint16)
LENGTHS = [0, 1, SHORT - 1, SHORT, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 17]


def rounded(values, half):
    """Our conversion of a vector of float32, whatever its length, as uint16."""
    found = np.full(len(values), 0xA5A5, np.uint16)
    if half is np.float16:
        round_to_float16(values, found.view(half))
    else:
        round_to_bfloat16(values, found)
    return found


def widened(patterns, half):
    """Our conversion of a vector of uint16 that are halves, as float32."""
    found = np.full(len(patterns), 77, np.float32)
    if half is np.float16:
        widen_float16(patterns.view(half), found)
    else:
        widen_bfloat16(patterns, found)
    return found


def others(values, half):
    with np.errstate(all="ignore"):
        return values.astype(half).view(np.uint16)


def noise(length, seed=0):
    return np.random.default_rng(seed).standard_normal(length).astype(np.float32)


def ties(half):
    """What lies between two halves, with both neighbours: 2**16 ties, of normal and subnormal halves, of both signs."""
    numbers = PATTERNS[: 2**15].view(half).astype(np.float32)
    numbers = numbers[np.isfinite(numbers)].astype(np.float64)
    above = 2 * numbers[-1] - numbers[-2]  # where infinity begins
    middles = (numbers + np.append(numbers[1:], above)) / 2
    bits = middles.astype(np.float32).view(np.uint32)
    assert (bits.view(np.float32) == middles).all()
    magnitudes = np.concatenate([bits - np.uint32(1), bits, bits + np.uint32(1)])
    return np.concatenate([magnitudes, magnitudes | np.uint32(2**31)]).view(np.float32)


def dense():
    """2**19 float32: of both signs and every exponent, those of infinity and zero too, a thousand fractions."""
    fractions = np.random.default_rng(5).integers(0, 2**23, 1024).astype(np.uint32)
    fractions[:3] = 0, 1, 2**23 - 1
    return (np.arange(2**9, dtype=np.uint32)[:, None] << np.uint32(23) | fractions).ravel().view(np.float32)


def sample(half):
    return np.concatenate([dense(), ties(half), widened(PATTERNS, half), noise(2**18)])


# -- the same bits


@pytest.mark.parametrize("half", HALVES)
def test_matrices_are_converted_as_arrays_are(half):
    singles, back = np.arange(3 * SHORT, dtype=np.float32).reshape(3, -1), np.zeros((3, SHORT), np.float32)
    halves, wanted = np.zeros((3, SHORT), half), singles.astype(half)
    convert(halves.view(np.matrix), singles)
    assert (halves == wanted).all()
    convert(back.view(np.matrix), halves.view(np.matrix))
    assert (back == wanted.astype(np.float32)).all()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("first", [0, 1, 2**10, 2**15])
def test_every_half_is_widened_as_by_others(half, first):
    # One that is not finite has its block converted otherwise: so alone, too, and with those that are.
    finite = PATTERNS[np.isfinite(PATTERNS.view(half).astype(np.float32))]
    for patterns in (PATTERNS[first:], finite[first:]):
        expected = patterns.view(half).astype(np.float32)
        found = widened(patterns, half)
        numbers = ~np.isnan(expected)
        assert (found.view(np.uint32)[numbers] == expected.view(np.uint32)[numbers]).all()
        assert np.isnan(found[~numbers]).all()


@pytest.mark.parametrize("half", HALVES)
def test_float32_is_rounded_as_by_others(half):
    values = sample(half)
    numbers = values[~np.isnan(values)]
    with np.errstate(over="ignore"):  # NumPy's
        assert (rounded(numbers, half) == others(numbers, half)).all()
        nan = rounded(values, half)[np.isnan(values)]
    assert np.isnan(nan.view(half).astype(np.float32)).all()
    assert (nan >> 15 == np.signbit(values[np.isnan(values)])).all()


def test_float16_within_its_range_is_rounded_as_by_numpy():
    # Blocks with others in them are NumPy's anyway.
    values = sample(np.float16)
    values = values[np.abs(values) < 65520]
    assert len(values) > 2**19
    assert (rounded(values, np.float16) == others(values, np.float16)).all()


@pytest.mark.parametrize(
    ("half", "name", "bit"),
    [
        (np.float16, "_TO_MAGIC", 0),
        (np.float16, "_FOLD", 0),
        (np.float16, "_LEAST_NORMAL", 23),
        (ml_dtypes.bfloat16, "_JUST_BELOW_HALF", 0),
        (ml_dtypes.bfloat16, "_ONE", 0),
    ],
)
def test_other_numbers_in_the_steps_would_be_noticed(monkeypatch, library, half, name, bit):
    if library != "neither":
        pytest.skip("the library has steps of its own")
    values = sample(half)
    values = values[np.abs(values) < 65520]
    monkeypatch.setattr(conversions, name, getattr(conversions, name) ^ np.uint32(1 << bit))
    assert (rounded(values, half) != others(values, half)).any()


@given(values=st.lists(st.floats(width=32, allow_nan=False), max_size=40))
@pytest.mark.parametrize("half", HALVES)
def test_any_float32_is_rounded_as_by_others(half, values):
    values = np.array(values, np.float32)
    with np.errstate(over="ignore"):
        for some in (values, values[np.abs(values) < 65520], values / np.float32(2**112)):
            assert (rounded(some, half) == others(some, half)).all()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("payload", [1, 0xFFFF, 0x10000, 0x3FFFFF, 0x400000, 0x7FFFFF])
@pytest.mark.parametrize("sign", [0, 2**31])
def test_nan_stays_nan(half, payload, sign):
    values = noise(100)
    values.view(np.uint32)[50] = sign | 0x7F800000 | payload
    found = rounded(values, half)
    there = found.view(half).astype(np.float32)
    assert np.isnan(there[50])
    assert np.signbit(there[50]) == bool(sign)
    assert np.delete(found, 50).tolist() == np.delete(others(values, half), 50).tolist()
    again = widened(found, half)
    assert np.isnan(again[50])
    assert rounded(again, half).tolist() == found.tolist()


def test_float64_goes_through_float32_to_bfloat16_and_back():
    values = noise(BLOCK + 3).astype(np.float64) * (1 + 1e-12)
    found = rounded(values, ml_dtypes.bfloat16)
    assert found.tolist() == others(values.astype(np.float32), ml_dtypes.bfloat16).tolist()
    wide = np.empty(len(values))
    widen_bfloat16(found, wide)
    assert (wide == found.view(ml_dtypes.bfloat16).astype(np.float64)).all()


def test_flushed_subnormals_are_left_to_numpy(monkeypatch):
    # Where 5e-324 + 5e-324 is 0, the product that widens halves would be, too.
    monkeypatch.setattr(conversions, "_SUBNORMAL", 0.0)
    monkeypatch.setattr(conversions, "_REBIAS", np.array(0, np.float32))
    assert (widened(PATTERNS[:100], np.float16) == PATTERNS[:100].view(np.float16)).all()


# -- any arrays

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("of", DTYPES)
def test_any_dtype_is_converted_to_any(of, to, length):
    source, target = (100 * noise(length)).astype(of), np.full(length, 7, to)
    convert(target, source)
    assert target.tobytes() == source.astype(to).tobytes()


def views(length, dtype):
    """Vectors and matrices of a length, of all kinds of layouts."""
    yield np.zeros(2 * length, dtype)[::2]
    yield np.zeros(length, dtype)[::-1]
    yield np.zeros((2, length // 2), dtype)
    yield np.zeros((length // 2, 2), dtype).T
    yield np.zeros(length * np.dtype(dtype).itemsize + 1, np.uint8)[1:].view(dtype)
    yield np.zeros((length, 1, 1), dtype)


@pytest.mark.parametrize(("of", "to"), [(np.float16, np.float32), (np.float32, np.float16)])
def test_any_layout_is_converted(of, to):
    length = 2 * SHORT
    for source in views(length, of):
        for target in views(length, to):
            if source.size == target.size == length and source.shape == target.shape:
                source[...] = noise(length).reshape(source.shape)
                convert(target, source)
                assert (target == source.astype(to)).all()


@pytest.mark.parametrize(("of", "to"), [(">f2", "<f4"), ("<f2", ">f4"), (">f4", "<f2"), ("<f4", ">f2")])
def test_any_byte_order_is_converted(of, to):
    source, target = noise(SHORT).astype(of), np.zeros(SHORT, to)
    convert(target, source)
    assert target.tobytes() == source.astype(to).tobytes()


def test_what_is_read_only_is_converted():
    source, target = noise(SHORT), np.zeros(SHORT, np.float16)
    source.flags.writeable = False
    convert(target, source)
    assert (target == source.astype(np.float16)).all()


@pytest.mark.parametrize(("of", "to"), [(np.float16, np.float32), (np.float32, np.float16)])
def test_other_shapes_are_refused_or_broadcast_as_by_numpy(of, to):
    with pytest.raises(ValueError, match="could not broadcast"):
        convert(np.zeros(2 * SHORT, to), np.zeros(SHORT, of))
    target = np.zeros((2, SHORT), to)
    convert(target, np.ones(SHORT, of))
    assert (target == 1).all()


def test_a_library_converts_what_it_can_convert_alike(library):
    values, bits = noise(SHORT), np.zeros(SHORT, np.uint16)
    for half, by in (("float16", {"torch"}), ("bfloat16", {"torch", "ml_dtypes"})):
        assert libraries.converted(values, bits, half) == libraries.converted(bits, values.copy(), half)
        assert libraries.converted(values, bits, half) == (library in by)
        for refused in (values[:9], values.astype(np.float64), np.append(values[1:], np.float32(np.nan))):
            assert not libraries.converted(refused, bits[: len(refused)], half)


@pytest.mark.parametrize("threads", [1, 2])
def test_torch_converts_in_one_thread(library, threads):
    if library != "torch":
        pytest.skip("not imported")
    torch, before = sys.modules["torch"], sys.modules["torch"].get_num_threads()
    try:
        torch.set_num_threads(threads)
        values = noise(5 * libraries.PIECE + 3)
        for half in HALVES:
            assert (rounded(values, half) == others(values, half)).all()
    finally:
        torch.set_num_threads(before)


# -- warnings, threads, memory


def test_overflow_warns_as_in_numpy_and_nothing_else_does():
    values = noise(SHORT)
    values[9] = 1e5
    with pytest.warns(RuntimeWarning, match="overflow encountered in cast"):
        convert(np.zeros(SHORT, np.float16), values)
    with np.errstate(all="raise"):
        numbers = dense()
        for half in HALVES:
            numbers = numbers[np.abs(numbers) < 65520]
            found = rounded(numbers, half)
            widened(found, half)
            widened(PATTERNS, half)
            rounded(np.array([0x7F800001, 0xFF800001, 0x7F800000], np.uint32).view(np.float32), ml_dtypes.bfloat16)


def test_threads_do_not_share_room():
    expected = [others(noise(BLOCK, seed), np.float16) for seed in range(4)]
    wrong = []

    def work(seed):
        values, found = noise(BLOCK, seed), np.zeros(BLOCK, np.float16)
        for _ in range(50):
            convert(found, values)
            if (found.view(np.uint16) != expected[seed]).any():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_repeated_conversion_needs_no_memory(repeated_peak):
    single, half, bits = noise(3 * BLOCK), np.zeros(3 * BLOCK, np.float16), np.zeros(3 * BLOCK, np.uint16)
    double = single.astype(np.float64)

    def once():
        convert(half, single)
        convert(single, half)
        for values in (single, double):
            round_to_bfloat16(values, bits)
            widen_bfloat16(bits, values)

    assert repeated_peak(once) < 2**13  # views and small numbers; a block of bytes would have 2**15
