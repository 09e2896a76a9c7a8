"""The kernels of CUDA devices without one: run as plain C++."""

import importlib
import sys
from itertools import product

import kernel_checks as checks
import kernel_shim as shim
import ml_dtypes
import numpy as np
import pytest
from kernel_checks import MANY, SOME, WIDE, folds, others

import mpiagg.arrays
from mpiagg.cuda.kernels import MOST_VECTORS, share


class OnHost:
    """A device whose kernels run here."""

    def __init__(self, module):
        self.kernels = module.Kernels(shim.FakeDevice())
        codecs = (
            module.CudaFloat16,
            module.CudaBFloat16,
            module.CudaMinMaxUInt8,
            module.CudaMinMaxUInt4,
            module.CudaMinMaxUInt2,
        )
        self.codec = {each.name: each(self.kernels) for each in codecs}.get
        self.convert, self.fold = self.kernels.convert, self.kernels.fold
        self.kth_largest = self.kernels.kth_largest
        self.from_host, self.to_host = shim.array, np.array


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    if shim.COMPILER is None:
        pytest.skip("there is no g++ to compile the kernels with")
    all_of_them = [*folds((3,)), *folds((1, 2, 8, MOST_VECTORS, MANY), SOME), *others()]
    library = shim.compiled(all_of_them, tmp_path_factory.mktemp("kernels"))
    name = "mpiagg.cuda.compiled"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", shim.fake_cupy(library))
        patch.delitem(sys.modules, name, raising=False)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        module = importlib.import_module(name)
        sys.modules.pop(name)
        yield OnHost(module)


# -- as plain C++


@pytest.mark.parametrize(("op", "dtype"), checks.CASES, ids=checks.NAMES)
def test_folds_are_numpy_s(device, op, dtype):
    checks.check_fold(device, op, dtype, 3, 1000)


@pytest.mark.parametrize(("op", "dtype"), SOME)
@pytest.mark.parametrize("count", [1, 2, 8, MOST_VECTORS, MANY])
def test_folds_of_many_vectors(device, op, dtype, count):
    checks.check_fold(device, op, dtype, count, 300, offsets=(1,))


@pytest.mark.parametrize(("op", "dtype"), SOME)
@pytest.mark.parametrize("offsets", [(0,), (1,), (3,), (7,), (0, 8), (1, 2, 3), (0, 4, 1)])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 17, 64, 5003])
def test_folds_wherever_vectors_lie(device, op, dtype, offsets, length):
    checks.check_fold(device, op, dtype, 3, length, offsets=offsets)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("values", [checks.singles, checks.doubles])
def test_half_precision_is_the_host_s(device, name, values):
    checks.check_half(device, name, values())


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("offsets", [(0, 0), (1, 1), (3, 7), (0, 1), (2, 0)])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100])
def test_half_precision_wherever_it_lies(device, name, dtype, offsets, length):
    checks.check_half(device, name, checks.singles()[1000 : 1000 + length].astype(dtype), *offsets)


@pytest.mark.parametrize("dtype", WIDE)
def test_eight_bits_are_the_host_s(device, dtype):
    for values, which in checks.chunks():
        with np.errstate(invalid="ignore"):
            checks.check_uint8(device, values.astype(dtype)), which


@pytest.mark.parametrize("offset", [1, 4])
@pytest.mark.parametrize("length", [0, 1, 9, 100])
def test_eight_bits_wherever_they_lie(device, offset, length):
    checks.check_uint8(device, np.linspace(-1, 3, length, dtype=np.float32), offset)
    checks.check_uint8(device, np.linspace(0, 1e300, length) * (length > 9), offset)


def test_eight_bits_of_what_is_out_of_float32(device):
    checks.check_uint8(device, np.array([0.0, 1e300]))
    checks.check_uint8(device, np.array([1.0, 1.0 + 2**-40, 1.0 + 2**-23]))


@pytest.mark.parametrize("name", ["u4", "u2"])
@pytest.mark.parametrize("dtype", WIDE)
def test_few_bits_are_the_host_s(device, name, dtype):
    for values, which in checks.chunks():
        with np.errstate(invalid="ignore"):
            checks.check_packed(device, name, values.astype(dtype)), which


@pytest.mark.parametrize("name", ["u4", "u2"])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 8, 9, 255, 256, 257, 1023, 5003])
def test_few_bits_wherever_they_lie(device, name, offset, length):
    checks.check_packed(device, name, np.linspace(-1, 3, length, dtype=np.float32), offset)
    checks.check_packed(device, name, np.linspace(0, 1e300, length), offset)


DTYPES = [np.dtype(x) for x in (np.float16, ml_dtypes.bfloat16, "f4", "f8", "i4", "?")]


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("of", DTYPES, ids=str)
def test_any_dtype_is_converted_to_any(device, of, to):
    x = (100 * np.random.default_rng(3).standard_normal((4, 6, 5))).astype(of)
    for each in (x, x[:, ::2], x.T, x[0, 0, 0], x[:0]):
        checks.check_conversion(device, each, to)


@pytest.mark.parametrize(("of", "to"), [("f4", ml_dtypes.bfloat16), (ml_dtypes.bfloat16, "f8"), ("f8", "e")])
def test_what_does_not_lie_in_one_piece_is_converted(device, of, to):
    source, target = shim.array(np.arange(60).astype(of)[::2]), shim.array(np.zeros((30, 2), to))[:, 0]
    device.convert(target, source)
    assert (np.array(target) == np.arange(0, 60, 2)).all()


@pytest.mark.parametrize("name", ["fp16", "bf16", "u8", "u4", "u2"])
def test_codecs_of_what_does_not_lie_in_one_piece(device, name):
    apart = shim.array(np.random.default_rng(4).standard_normal((100, 2)))[:, 0]
    codec = device.codec(name)
    encoded, again = (shim.array(np.zeros(codec.nbytes(100), np.uint8)) for _ in range(2))
    codec.encode(apart, encoded)
    codec.encode(shim.array(np.ascontiguousarray(apart)), again)
    assert encoded.tobytes() == again.tobytes()
    whole = shim.array(np.zeros(100))
    codec.decode(encoded, whole)
    codec.decode(encoded, apart)
    assert (apart == whole).all()


def test_what_a_kernel_cannot_reach_is_refused(device):
    x, encoded = shim.array(np.zeros(101)), shim.array(np.zeros(65, np.uint8))
    short = shim.array(np.zeros(4, ml_dtypes.float8_e5m2))
    odd = shim.array(np.zeros(802, np.uint8))[1:801].view("f8")
    with pytest.raises(ValueError, match=r"cannot reach float64 at .*: it must be aligned"):
        device.fold([odd, odd], mpiagg.arrays.reduction("sum", odd.dtype, 2))
    with pytest.raises(ValueError, match="must be aligned"):
        device.codec("u8").encode(x[:32], encoded[1:])
    with pytest.raises(ValueError, match=r"an encoded buffer of 64 bytes is none of 101 values"):
        device.codec("u8").encode(x, encoded[:64])
    with pytest.raises(ValueError, match="must be aligned"):
        device.codec("u4").encode(x[:64], encoded[1:41])
    with pytest.raises(ValueError, match=r"an encoded buffer of 64 bytes is none of 101 values"):
        device.codec("u2").decode(encoded[:64], x)
    with pytest.raises(ValueError, match=r"shape \(101,\) cannot be written to shape \(32,\)"):
        device.codec("fp16").encode(x, encoded[:64])
    with pytest.raises(TypeError, match="arrays of dtype float8_e5m2 cannot be combined on a CUDA device"):
        device.fold([short, short], mpiagg.arrays.reduction("sum", short.dtype, 2))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("length", [1, 2, 9, 2000])
def test_the_kth_largest_is_numpy_s(device, dtype, offset, length):
    checks.check_kth(device, np.dtype(dtype), length, offset)


# -- how threads share out


def test_every_value_is_taken_once():
    for length, first, second in product(range(40), range(0, 24, 4), range(0, 24, 2)):
        shared = share(length, 8, [(first, 4), (second, 2)])
        assert 0 <= shared.head <= shared.length == length
        assert shared.head + 8 * shared.groups <= length
        assert shared.threads == max(shared.groups, length - 8 * shared.groups)
        if shared.groups:
            assert (first + 4 * shared.head) % 16 == (second + 2 * shared.head) % 16 == 0


def test_as_many_as_possible_are_taken_at_once():
    assert share(100, 4, [(0, 4), (256, 4)]) == (100, 0, 25, 25)
    assert share(100, 4, [(4, 4), (260, 4)]) == (100, 3, 24, 24)
    assert share(100, 4, [(4, 4), (256, 4)]) == (100, 0, 0, 100)
    assert share(100, 8, [(0, 4), (32, 1)]) == (100, 0, 12, 12)
