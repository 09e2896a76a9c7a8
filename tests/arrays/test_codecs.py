"""Codecs beside NumPy, ml_dtypes and the golden values of Bagua's format."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiagg.arrays import CODECS, codec
from mpiagg.arrays.codecs import GROUP, HEADER_BYTES, check_wire_dtype
from mpiagg.arrays.conversions import BLOCK

HALVES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
FLOATS = [np.float32, np.float64]
BITS = {"u4": 4, "u2": 2}
LENGTHS = [0, 1, 2, 31, 32, 33, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 17]


def encoded_of(name, values):
    encoded = np.full(codec(name).nbytes(len(values)), 0xA5, np.uint8)
    codec(name).encode(values, encoded)
    return encoded


def values_of(name, encoded, length, dtype=np.float32):
    values = np.full(length, 77, dtype)
    codec(name).decode(encoded, values)
    return values


def there_and_back(name, values):
    return values_of(name, encoded_of(name, values), len(values), values.dtype)


def noise(length, dtype=np.float32):
    return np.random.default_rng(length).standard_normal(length).astype(dtype)


# -- which


def test_the_codecs():
    assert list(CODECS) == ["fp16", "bf16", "u8", "u4", "u2"]
    assert [(name, each.name, each.elementwise) for name, each in CODECS.items()] == [
        ("fp16", "fp16", True),
        ("bf16", "bf16", True),
        ("u8", "u8", False),
        ("u4", "u4", False),
        ("u2", "u2", False),
    ]
    assert all(codec(name) is each for name, each in CODECS.items())


@pytest.mark.parametrize("name", ["u1", "FP16", "", None, 8, ["u8"]])
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError, match=r"unknown wire .*; known: fp16, bf16, u8, u4, u2"):
        codec(name)


@pytest.mark.parametrize("name", CODECS)
def test_codecs_are_for_real_floating_point_numbers(name):
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
        check_wire_dtype(name, np.dtype(dtype))
    for dtype in (np.int32, np.bool_, np.complex64):
        check_wire_dtype(None, np.dtype(dtype))
        with pytest.raises(TypeError, match=f"wire '{name}' is for real floating-point numbers, not for"):
            check_wire_dtype(name, np.dtype(dtype))


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="long double is double here")
def test_exact_sums_are_not_for_numbers_longer_than_float64():
    check_wire_dtype("u8", np.dtype(np.longdouble))
    check_wire_dtype("exact", np.dtype(np.float64))
    with pytest.raises(TypeError, match="wire 'exact' is for float64 and shorter numbers, not for"):
        check_wire_dtype("exact", np.dtype(np.longdouble))


# -- half precision, bit for bit

SPECIAL = np.array(
    [0.0, -0.0, 1, -1, np.inf, -np.inf, 65504, 65519.996, 65520, 1e5, 3.4e38, 1e-45, 6e-8, 2.98e-8, 2.9802322e-8, 1e-39]
)
TIES = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 1 + 2**-8 - 2**-20, 2**-25])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("length", LENGTHS)
def test_half_precision_is_that_of_others(name, length, dtype):
    values = (noise(length) * np.exp(10 * noise(length + 1)[:length])).astype(dtype)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float32).astype(HALVES[name])
    encoded = encoded_of(name, values)
    assert encoded.tobytes() == expected.tobytes()
    assert values_of(name, encoded, length, dtype).tobytes() == expected.astype(dtype).tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", HALVES)
def test_ties_subnormals_and_infinities(name, dtype):
    values = np.concatenate([SPECIAL, TIES, -TIES]).astype(np.float32).astype(dtype)
    with np.errstate(over="ignore"):
        expected = values.astype(HALVES[name])
    encoded = encoded_of(name, values)
    assert encoded.tobytes() == expected.tobytes()
    # Not by cutting off.
    assert encoded.tobytes() != (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes()


@pytest.mark.parametrize("name", HALVES)
def test_every_half_goes_there_and_back(name):
    patterns = np.arange(2**16, dtype=np.uint16)
    values = values_of(name, patterns.view(np.uint8), 2**16)
    expected = patterns.view(HALVES[name]).astype(np.float32)
    assert np.array_equal(values, expected, equal_nan=True)
    assert (np.signbit(values) == np.signbit(expected)).all()
    again = encoded_of(name, values).view(np.uint16)
    numbers = ~np.isnan(values)
    assert again[numbers].tolist() == patterns[numbers].tolist()
    # A NaN stays one, and from then on it is the same.
    once = values_of(name, again.view(np.uint8), 2**16)
    assert (np.isnan(once) == ~numbers).all()
    assert encoded_of(name, once).tobytes() == again.tobytes()


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7FFFFFFE, 0xFFFFFFFF])
def test_no_nan_becomes_a_number(name, bits):
    values = np.array([bits], np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        assert np.isnan(there_and_back(name, values)).all()
    assert np.signbit(there_and_back(name, values))[0] == (bits >= 2**31)


FLOAT32 = st.floats(width=32, allow_nan=False)


@pytest.mark.parametrize("name", HALVES)
@given(values=st.lists(FLOAT32, max_size=40), start=st.integers(0, 40), stop=st.integers(0, 40))
def test_the_image_of_a_part_is_a_part_of_the_image(name, values, start, stop):
    values = np.array(values, np.float32)
    encoded = encoded_of(name, values)
    with np.errstate(over="ignore"):
        assert encoded.tobytes() == values.astype(HALVES[name]).tobytes()
    assert encoded_of(name, values[start:stop]).tobytes() == encoded[2 * start : max(2 * start, 2 * stop)].tobytes()
    assert encoded_of(name, values_of(name, encoded, len(values))).tobytes() == encoded.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CODECS)
def test_what_is_coded_again_needs_no_memory(name, dtype, repeated_peak):
    values = noise(3 * BLOCK, dtype)
    encoded = encoded_of(name, values)

    def once():
        codec(name).encode(values, encoded)
        codec(name).decode(encoded, values)

    # Views and small numbers; a block of bytes would have 2**15. NumPy buffers 8192 values that it broadcasts.
    assert repeated_peak(once) < (2**17 if name in BITS else 2**13)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CODECS)
def test_values_need_not_lie_one_after_the_other(name, dtype):
    apart = np.zeros(2 * BLOCK + 6, dtype)[::2]
    apart[:] = noise(len(apart))
    encoded = encoded_of(name, apart)
    assert encoded.tobytes() == encoded_of(name, apart.copy()).tobytes()
    expected = values_of(name, encoded, len(apart), dtype)
    codec(name).decode(encoded, apart)
    assert (apart == expected).all()


# -- eight bits


def codes_of(values):
    return encoded_of("u8", values)[HEADER_BYTES:][: len(values)].tolist()


def plain(values, epsilon=1e-7):
    """Bagua's formula for a chunk of float32, with or without its own epsilon: the codes, and what they stand for."""
    low, high = values.min(), values.max()
    scale = np.float32(255) / (high - low + np.float32(epsilon))
    upper = np.rint(high * scale)
    level = np.minimum(np.rint(values * scale), upper)
    return level - (upper - 255), level / scale


def test_golden_codes():
    values = np.array([-1, -0.5, 0, 0.25, 0.3, 1, 0.999], np.float32)
    encoded = encoded_of("u8", values)
    assert encoded[:8].view(np.float32).tolist() == [-1, 1]
    assert encoded[8:HEADER_BYTES].tolist() == [0] * 24
    assert encoded[HEADER_BYTES:].tolist() == [0, 63, 127, 159, 165, 255, 254] + [0] * 25
    decoded = [-0.99608, -0.50196, 0, 0.25098, 0.29804, 1.00392, 0.99608]
    assert there_and_back("u8", values).tolist() == pytest.approx(decoded, abs=5e-6)
    assert codes_of(np.array([2, 3, 2.5, 2.001], np.float32)) == [0, 255, 127, 0]


@pytest.mark.parametrize(("length", "nbytes"), [(0, 0), (1, 64), (32, 64), (33, 96), (1024, 1056), (125, 160)])
def test_wire_sizes(length, nbytes):
    assert codec("u8").nbytes(length) == nbytes
    assert codec("fp16").nbytes(length) == codec("bf16").nbytes(length) == 2 * length


def test_wire_sizes_of_several_chunks():
    assert 4 * codec("u8").nbytes(1024 // 4) == 1152
    assert 8 * codec("u8").nbytes(1000 // 8) == 1280


def test_most_codes_are_bagua_s_and_the_others_are_clamped():
    below = above = 0
    rng = np.random.default_rng(7)
    for _ in range(4000):
        values = (rng.uniform(-1, 1) * 10 ** rng.uniform(0, 6) + rng.standard_normal(16)).astype(np.float32)
        if values.max() - values.min() < 0.1:
            continue
        codes, _ = plain(values)
        below, above = below + (codes.min() < 0), above + (codes.max() > 255)
        ours = np.array(codes_of(values))
        if np.abs(values).max() < 2**10:  # Bagua's float32 does well here.
            assert ours.tolist() == np.clip(codes, 0, 255).tolist()
        decoded, step = there_and_back("u8", values), (values.max() - values.min()) / 255
        assert np.abs(decoded - values).max() <= 1.01 * step + np.spacing(np.abs(values).max())
    # Without the clamp these would wrap around, from one end of the range to the other.
    assert below > 20
    assert above > 20


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("magnitude", [1e-8, 1e-7, 1e-12, 1e-30, 1e-36])
def test_small_values_have_all_codes(magnitude, dtype):
    values = (np.linspace(-1, 1, 256) * magnitude).astype(dtype)
    assert len(set(codes_of(values))) >= 250
    step = 2 * magnitude / 255
    assert np.abs(there_and_back("u8", values) - values).max() <= 0.6 * step
    # With Bagua's epsilon, they would not.
    assert len(set(plain(values.astype(np.float32))[0].tolist())) < 250


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 1e-8, 1e30, 123456.0, 3.4e38])
@pytest.mark.parametrize("length", [1, 5, BLOCK + 1])
def test_constants_are_exact(value, length, dtype):
    values = np.full(length, value, np.float32).astype(dtype)
    assert (there_and_back("u8", values) == values).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("span", [2.0, 1.0, 0.3, 0.2, 1e-3])
def test_values_near_the_largest_float_stay_finite(span, dtype):
    largest = float(np.finfo(np.float32).max)
    values = np.linspace((1 - span) * largest, largest, 400).astype(np.float32).astype(dtype)
    for sent in (values, -values):
        decoded = there_and_back("u8", sent)
        assert np.isfinite(decoded).all()
        assert sent.min() <= decoded.min() <= decoded.max() <= sent.max()
        assert np.abs(decoded / largest - sent / largest).max() <= 0.6 * span / 255


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("length", [1, 40, BLOCK + 5])
def test_what_is_not_finite_spoils_the_chunk(bad, length, dtype):
    values = noise(length, dtype)
    assert np.isfinite(there_and_back("u8", values)).all()
    values[length // 2] = bad
    assert np.isnan(there_and_back("u8", values)).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_are_one_chunk(length, dtype):
    values = noise(length, dtype)
    encoded = encoded_of("u8", values)
    assert encoded[HEADER_BYTES:][length:].tolist() == [0] * (-length % 32)
    if length:
        assert np.array_equal(encoded[HEADER_BYTES:][:length], np.clip(plain(values.astype(np.float32))[0], 0, 255))
        assert encoded[:8].view(np.float32).tolist() == [np.float32(values.min()), np.float32(values.max())]
        decoded, level = there_and_back("u8", values), plain(values.astype(np.float32))[1]
        assert np.allclose(decoded, level, rtol=0, atol=float(np.ptp(values)) / 254)


def test_there_is_no_room_for_values_out_of_float32():
    with np.errstate(over="ignore"):
        assert np.isnan(there_and_back("u8", np.array([0.0, 1e300]))).all()


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(2, 200),
    magnitude=st.integers(-36, 37),
    offset=st.floats(-1e5, 1e5),
    dtype=st.sampled_from(FLOATS),
)
def test_an_error_is_about_half_a_step(seed, length, magnitude, offset, dtype):
    values = np.random.default_rng(seed).uniform(-0.5, 0.5, length)
    values = ((values + offset) * 10.0**magnitude * (1 if magnitude <= 32 else 1e-5)).astype(np.float32).astype(dtype)
    span = float(values.max()) - float(values.min())
    decoded = there_and_back("u8", values)
    assert decoded.dtype == dtype
    # Half a step at the ends may be clamped away; epsilon is a 1024th of the range; the last digit is rounded.
    bound = span / 255 * (1 + 1 / 1024) + np.spacing(np.float32(np.abs(values).max()))
    error = np.abs(decoded.astype(np.float64) - values)
    assert error.max() <= bound
    inner = (values > values.min() + span / 200) & (values < values.max() - span / 200)
    assert error[inner].max(initial=0) <= bound / 2 + np.spacing(np.float32(np.abs(values).max()))


# -- four bits and two

ODD = [1, 2, 3, 4, 5, 7, 8, 9, 31, 255, 256, 257, 511, 513, 1001, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 259]


def packed_image(values, bits):
    """Restate an encoded buffer value by value, with Python's numbers."""
    ends, packed = b"", b""
    singles = values.astype(np.float32)
    for start in range(0, len(values), GROUP):
        group = [float(x) for x in singles[start : start + GROUP]]
        least, greatest = min(group) + 0.0, max(group) + 0.0
        ends += np.array([least, greatest], np.float32).tobytes()
        scale = (2**bits - 1) / (greatest - least) if greatest > least else 0
        codes = [round((x - least) * scale) for x in group]
        per_byte = 8 // bits
        codes += [0] * (-len(codes) % per_byte)
        for place in range(0, len(codes), per_byte):
            packed += bytes([sum(code << bits * lane for lane, code in enumerate(codes[place : place + per_byte]))])
    return ends + packed + bytes(-len(packed) % 8)


def packed_values(encoded, length, bits):
    """Read an encoded buffer value by value."""
    cut, per_byte = 8 * -(-length // GROUP), 8 // bits
    ends = encoded[:cut].view(np.float32).astype(np.float64).reshape(-1, 2)
    values = []
    for place in range(length):
        least, greatest = ends[place // GROUP]
        code = int(encoded[cut + place // per_byte]) >> place % per_byte * bits & (2**bits - 1)
        values.append(code * ((greatest - least) / (2**bits - 1)) + least)
    return np.array(values)


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", ODD)
def test_few_bits_are_their_restatement(name, dtype, length):
    values = noise(length, dtype) * np.exp(noise(length + 1, dtype)[:length])
    encoded = encoded_of(name, values)
    assert encoded.tobytes() == packed_image(values, BITS[name])
    decoded = values_of(name, encoded, length, dtype)
    assert decoded.tobytes() == packed_values(encoded, length, BITS[name]).astype(dtype).tobytes()


@pytest.mark.parametrize(("name", "length", "nbytes"), [
    ("u4", 0, 0), ("u4", 1, 16), ("u4", 16, 16), ("u4", 17, 24), ("u4", 256, 136), ("u4", 257, 152),
    ("u2", 0, 0), ("u2", 1, 16), ("u2", 32, 16), ("u2", 33, 24), ("u2", 256, 72), ("u2", 257, 88),
])  # fmt: skip
def test_wire_sizes_of_few_bits(name, length, nbytes):
    assert codec(name).nbytes(length) == nbytes


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize(
    "values", [[0.0], [-3.5], [3.4e38], [1e-45, -1e-45], [-1e30, 2e-30], [-3.4e38, 3.4e38], [1, 2] * 200]
)
def test_groups_of_two_values_are_exact(name, values):
    values = np.array(values, np.float32)
    decoded = there_and_back(name, values)
    assert np.abs(decoded - values).max() <= 2e-16 * np.ptp(values.astype(float))


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_group_alone(name, dtype, bad):
    values = noise(3 * GROUP + 5, dtype)
    clean = there_and_back(name, values)
    values[GROUP + 3] = bad
    decoded = there_and_back(name, values)
    assert np.isnan(decoded[GROUP : 2 * GROUP]).all()
    for part in (slice(0, GROUP), slice(2 * GROUP, None)):
        assert decoded[part].tobytes() == clean[part].tobytes()
    assert not encoded_of(name, values)[4 * 8 + GROUP * BITS[name] // 8 :][: GROUP * BITS[name] // 8].any()


@pytest.mark.parametrize("name", BITS)
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(1, 600),
    magnitude=st.integers(-40, 37),
    offset=st.floats(-1e5, 1e5),
    dtype=st.sampled_from(FLOATS),
)
def test_half_a_step_of_few_bits(name, seed, length, magnitude, offset, dtype):  # noqa: PLR0917 - drawn by name
    values = np.random.default_rng(seed).uniform(-0.5, 0.5, length)
    values = ((values + offset) * 10.0**magnitude * (1 if magnitude <= 32 else 1e-5)).astype(np.float32).astype(dtype)
    encoded = encoded_of(name, values)
    assert encoded.tobytes() == packed_image(values, BITS[name])
    decoded = values_of(name, encoded, length, dtype)
    for start in range(0, length, GROUP):
        own = values[start : start + GROUP].astype(np.float64)
        step = np.ptp(own) / (2 ** BITS[name] - 1)
        error = np.abs(decoded[start : start + GROUP] - own)
        assert error.max() <= 0.5 * step * (1 + 1e-9) + np.spacing(np.float32(np.abs(own).max()))
