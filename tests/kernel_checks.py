"""What a device's kernels must do, said in NumPy: for the kernels as plain C++ and for those on a GPU.

A device here is an object with ``from_host``, ``to_host``, ``convert``, ``codec`` and ``fold``.
"""

import warnings
from itertools import product

import numpy as np
import pytest

from mpiagg.arrays import codec, find_device, reduction
from mpiagg.arrays.codecs import GROUP, HEADER_BYTES
from mpiagg.cuda import packed
from mpiagg.cuda import uint8 as cuda_uint8
from mpiagg.cuda.digits import digits
from mpiagg.cuda.kernels import MOST_VECTORS, conversion, fold
from mpiagg.errors import DeviceError

try:
    import ml_dtypes
except ImportError:  # the machine with a GPU may have no more than pytest and what mpiagg needs
    BFLOATS = []
else:
    BFLOATS = [np.dtype(ml_dtypes.bfloat16)]
HALVES = [np.dtype(np.float16), *BFLOATS]
REALS = [*HALVES, np.dtype("f4"), np.dtype("f8")]
COMPLEXES = [np.dtype("c8"), np.dtype("c16")]
INTEGERS = [np.dtype(char) for char in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")]
BOOLEAN = [np.dtype(bool)]

DTYPES_OF = {
    "sum": INTEGERS + REALS + COMPLEXES,
    "avg": REALS + COMPLEXES,
    "min": BOOLEAN + INTEGERS + REALS,
    "max": BOOLEAN + INTEGERS + REALS,
    "prod": INTEGERS + REALS + COMPLEXES,
    **dict.fromkeys(("land", "lor", "lxor"), BOOLEAN + INTEGERS),
    **dict.fromkeys(("band", "bor", "bxor"), INTEGERS),
}
CASES = [(op, dtype) for op, dtypes in DTYPES_OF.items() for dtype in dtypes]
NAMES = [f"{op}-{dtype.name}" for op, dtype in CASES]

SPECIAL = [
    0.0,
    -0.0,
    1,
    -1,
    np.inf,
    -np.inf,
    np.nan,
    65504,
    65519.996,
    65520,
    3.4e38,
    1e-45,
    6e-8,
    2.98e-8,
    1e-39,
    2**-14,
]


def gpu():
    """Return the GPU in use at present, or skip what asks for it: a test, or all tests of a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # what CuPy has to say about its surroundings is no failure
        try:
            return find_device("cuda")
        except DeviceError as error:
            pytest.skip(str(error), allow_module_level=True)


# -- kernels

MANY = MOST_VECTORS + 1
SOME = [("sum", np.dtype("f4")), *(("avg", dtype) for dtype in BFLOATS), ("max", np.dtype("i2"))]
WIDE = ("float32", "float64")


def folds(counts, cases=CASES):
    """Yield the kernels that combine so many vectors."""
    for (op, dtype), count in product(cases, counts):
        yield fold(dtype.name, dtype.itemsize, op, count, divided=op == "avg")


def others():
    """Yield the kernels that combine nothing."""
    for half, wide in product(("float16", "bfloat16"), WIDE):
        yield conversion(half, wide)
        yield conversion(wide, half)
    for text, wide in product((cuda_uint8.ends, cuda_uint8.encode, cuda_uint8.decode), WIDE):
        yield text(wide)
    for text, wide, bits in product((packed.encode, packed.decode), WIDE, (4, 2)):
        yield text(wide, bits)
    for itemsize in (2, 4, 8):
        yield digits(itemsize)


# -- values


def values(dtype, length, seed):
    """Return values of all kinds."""
    random = np.random.default_rng([seed, length])
    if dtype.kind == "b":
        return random.integers(0, 2, length).astype(bool)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        mixed = random.integers(info.min, info.max, length, dtype, endpoint=True)
        mixed[random.random(length) < 0.3] = 0  # for what is logical
        return mixed
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return np.stack([values(part, length, seed), values(part, length, seed + 1000)], -1).view(dtype).reshape(-1)
    mixed = random.standard_normal(length) * np.exp(8 * random.standard_normal(length))
    special = random.random(length) < 0.1
    mixed[special] = random.choice(SPECIAL, special.sum())
    with np.errstate(over="ignore"):
        return mixed.astype(np.float32).astype(dtype)


def singles():
    """Return float32 in which every half occurs, what is just beside it, what is in the middle of two, and any bits."""
    patterns = np.arange(2**16, dtype=np.uint16)
    halves = [patterns.view(np.float16).astype(np.float32).view(np.uint32), patterns.astype(np.uint32) << 16]
    ties = [halves[0] + np.uint32(0x1000), halves[1] + np.uint32(0x8000), halves[0] // 2 + halves[0][::-1] // 2]
    near = [bits + np.uint32(step) for bits in halves + ties for step in (0, 1, 2**32 - 1)]
    return np.concatenate([*near, np.random.default_rng(0).integers(0, 2**32, 10**5, np.uint32)]).view(np.float32)


def doubles():
    """Return float64 of the same kinds, and such as are between two float32."""
    with np.errstate(all="ignore"):
        wide = singles().astype(np.float64).view(np.uint64)
    near = [wide + np.uint64(step) for step in (0, 1, 2**64 - 1, 2**28)]
    return np.concatenate([*near, np.random.default_rng(1).integers(0, 2**64, 10**5, np.uint64)]).view(np.float64)


def chunks():
    """Yield vectors of float32 for ``u8``, of all kinds, with what they are: an error's report shows it."""
    random = np.random.default_rng(2)
    for number in range(150):
        length = int(random.choice([1, 2, 7, 31, 32, 33, 200, 3000]))
        spread, offset = 10.0 ** random.uniform(-44, 38), random.choice([0, 0, 1, 1e3, 1e5, 1e7]) * random.normal()
        with np.errstate(over="ignore"):
            yield ((random.uniform(-0.5, 0.5, length) + offset) * spread).astype(np.float32), number
    for span in (5e-5, 7e-5, 1e-4, 1.03e-4, 2e-4):  # about where epsilon is the range's part
        yield np.linspace(-span / 2, span / 2, 300, dtype=np.float32), span
    yield np.linspace(16383.5, 16384.5, 500, dtype=np.float32), "about where float32 is left"
    for value in (0.0, -0.0, 1.0, -3.5, 1e-45, 123456.0, 3.4e38, -3.4e38, np.inf, np.nan):
        yield np.full(37, value, np.float32), value
    for bad in (np.inf, -np.inf, np.nan, -np.nan):
        spoiled = random.standard_normal(100).astype(np.float32)
        spoiled[50] = bad
        yield spoiled, bad
    yield np.array([-3.4e38, 3.4e38], np.float32), "wide"
    for span in (2.0, 0.3, 0.2, 1e-3):  # half a step above them is infinite
        yield np.linspace((1 - span) * 3.4028234e38, 3.4028234e38, 400).astype(np.float32), span
    yield np.array([1, np.nextafter(np.float32(1), np.float32(2))], np.float32), "narrow"
    yield random.standard_normal(20011).astype(np.float32), "long"


# -- comparisons


def parts(x):
    return x.view(f"f{x.itemsize // 2}") if x.dtype.kind == "c" else x


def assert_same(found, expected):
    """Assert the same bits, but for those of NaN: they are the processor's own."""
    found, expected = parts(found), parts(expected)
    assert found.dtype == expected.dtype
    word = np.dtype(f"u{found.itemsize}")
    differ = found.view(word) != expected.view(word)
    if found.dtype.kind in "fV":
        differ &= ~(np.isnan(found) & np.isnan(expected))
    places = np.flatnonzero(differ)
    assert not len(places), (places[:5], found[places[:5]], expected[places[:5]])


class Placed:
    """A vector that begins so many values after a place in memory; nothing beside it may change."""

    def __init__(self, device, x, offset):
        before, after = (np.full(count * x.itemsize, 0x55, np.uint8).view(x.dtype) for count in (offset, 3))
        self.whole, self.device = np.concatenate([before, x, after]), device
        self.memory = device.from_host(self.whole)
        self.part = slice(offset, offset + len(x))
        self.array = self.memory[self.part]

    def read(self):
        """Return the vector."""
        found = self.device.to_host(self.memory)
        for beside in (slice(0, self.part.start), slice(self.part.stop, None)):
            assert found[beside].tobytes() == self.whole[beside].tobytes()
        return found[self.part]


# -- folds


def folded(vectors, how):
    """Return what NumPy makes of vectors, one after the other."""
    with np.errstate(all="ignore"):
        total = vectors[0].astype(how.dtype)
        for vector in vectors[1:]:
            other = vector.astype(how.dtype)
            if (how.name, how.dtype.kind) == ("prod", "c"):  # NumPy rounds once or twice, as the processor has it
                real = total.real * other.real - total.imag * other.imag
                total.imag = total.real * other.imag + total.imag * other.real
                total.real = real
            else:
                how.combine(total, other, total)
        how.finish(total)
        return total.astype(vectors[0].dtype)


def check_fold(device, op, dtype, count, length, *, offsets=(0,)):
    """Assert that vectors at some offsets, in turn, all become what NumPy makes of them."""
    how = reduction(op, dtype, count)
    vectors = [values(dtype, length, seed) for seed in range(count)]
    placed = [Placed(device, x, offsets[number % len(offsets)]) for number, x in enumerate(vectors)]
    call = device.fold([each.array for each in placed], how)
    expected = folded(vectors, how)
    call()
    for each in placed:
        found = each.read()
        if op in ("min", "max") and dtype.kind not in "biu":  # which zero, is the processor's to say
            found, expected = found + dtype.type(0), expected + dtype.type(0)
        assert_same(found, expected)
    # The same again, with the results.
    expected = folded([each.read() for each in placed], how)
    call()
    assert placed[0].read().shape == expected.shape


# -- codecs and conversions


def check_half(device, name, x, offset=0, encoded_offset=0):
    """Assert that a codec of half precision gives the host's encoded buffers and values."""
    encoded = np.zeros(codec(name).nbytes(len(x)), np.uint8)
    with np.errstate(all="ignore"):
        codec(name).encode(x, encoded)
        back = np.zeros_like(x)
        codec(name).decode(encoded, back)
    read, written = Placed(device, x, offset), Placed(device, np.zeros_like(encoded), 2 * encoded_offset)
    device.codec(name).encode(read.array, written.array)
    half = np.dtype(np.float16) if name == "fp16" else np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    assert_same(written.read().copy().view(half), encoded.view(half))
    assert (np.signbit(written.read().copy().view(half)) == np.signbit(x)).all()
    decoded = Placed(device, np.full_like(x, 77), offset)
    device.codec(name).decode(written.array, decoded.array)
    assert_same(decoded.read(), back)


def check_uint8(device, x, offset=0):
    """Assert that ``u8`` gives the host's encoded buffers and values."""
    encoded = np.full(codec("u8").nbytes(len(x)), 0xA5, np.uint8)
    with np.errstate(all="ignore"):
        codec("u8").encode(x, encoded)
        back = np.zeros_like(x)
        codec("u8").decode(encoded, back)
    read, written = Placed(device, x, offset), Placed(device, np.full_like(encoded, 0xA5), 32)
    device.codec("u8").encode(read.array, written.array)
    found = written.read().copy()
    assert found[HEADER_BYTES:].tolist() == encoded[HEADER_BYTES:].tolist()
    assert np.array_equal(found[:HEADER_BYTES].view("f4"), encoded[:HEADER_BYTES].view("f4"), equal_nan=True)
    decoded = Placed(device, np.full_like(x, 77), offset)
    device.codec("u8").decode(written.array, decoded.array)
    assert_same(decoded.read(), back)


def check_packed(device, name, x, offset=0):
    """Assert that a codec of a few bits gives the host's encoded buffers and values."""
    encoded = np.full(codec(name).nbytes(len(x)), 0xA5, np.uint8)
    with np.errstate(all="ignore"):
        codec(name).encode(x, encoded)
        back = np.zeros_like(x)
        codec(name).decode(encoded, back)
    read, written = Placed(device, x, offset), Placed(device, np.full_like(encoded, 0xA5), 8)
    device.codec(name).encode(read.array, written.array)
    found, cut = written.read().copy(), 8 * -(-len(x) // GROUP)
    assert found[cut:].tolist() == encoded[cut:].tolist()
    assert_same(found[:cut].view("f4"), encoded[:cut].view("f4"))
    decoded = Placed(device, np.full_like(x, 77), offset)
    device.codec(name).decode(written.array, decoded.array)
    assert_same(decoded.read(), back)


def check_conversion(device, x, to):
    """Assert that values are written in another dtype as NumPy does."""
    with np.errstate(all="ignore"):
        expected = x.astype(to)
    target = device.from_host(np.zeros(x.shape, to))
    device.convert(target, device.from_host(x))
    assert_same(device.to_host(target).reshape(-1), expected.reshape(-1))


def check_kth(device, dtype, length, offset=0):
    """Assert that the k-th largest magnitude is NumPy's, also among many that are equal."""
    random = np.random.default_rng(length)
    for spread in (1, 20, 0):
        some = np.exp(spread * random.standard_normal(length)) * (random.random(length) < 0.8)
        with np.errstate(over="ignore"):
            magnitudes = some.astype(dtype)
        ordered = np.sort(magnitudes)
        placed = Placed(device, magnitudes, offset)
        for k in {1, 2, length // 3 + 1, length - 1, length} & set(range(1, length + 1)):
            found = device.kth_largest(placed.array, k)
            assert found.dtype == dtype
            assert found == ordered[length - k]
        assert (placed.read() == magnitudes).all()
