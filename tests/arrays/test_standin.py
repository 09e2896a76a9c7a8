"""The stand-in for a GPU: its results are NumPy's, and whatever it is to find, it finds."""

# ruff: noqa: ARG005 - all functions take the same arrays

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
import standin
from standin import LOG, TouchedByHost, peek

from mpiagg.arrays import CODECS, HOST, codec, device_of, find_device, is_array, reduction
from mpiagg.errors import DeviceError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def values(*shape, dtype=float):
    return (np.random.default_rng(sum(shape)).standard_normal(shape) * 3).astype(dtype)


# -- how it is found


def test_mpiagg_finds_it_where_it_is_installed():
    with standin.installed() as device:
        x = device.from_host(values(3))
        standin.install()
        assert find_device("standin:0") is find_device("standin") is device_of(x) is device
        assert find_device("standin:1") is device_of(find_device("standin:1").empty(2, float)) is not device
        assert is_array(x)
        assert device_of(device) is HOST
        assert device.identity != standin.device(1).identity
        with pytest.raises(DeviceError, match="no stand-in 2"):
            find_device("standin:2")
    assert not is_array(x)
    with pytest.raises(ValueError, match="unknown device"):
        find_device("standin")
    standin.uninstall()


# -- the host keeps its hands off


TOUCHES = [
    *(
        np.asarray,
        np.array,
        np.ascontiguousarray,
        float,
        int,
        bool,
        complex,
        list,
        tuple,
        str,
        bytes,
        sum,
        copy.deepcopy,
    ),
    *("{}".format, pickle.dumps, lambda x: 1.0 in x, lambda x: [1, 2][x], lambda x: x == 1 or x, lambda x: max([x, x])),
    *(lambda x: x.tolist(), lambda x: x.tobytes(), lambda x: x.__array_interface__),
]


@pytest.mark.parametrize("touch", TOUCHES)
def test_the_host_must_not_touch_it(device, touch):
    x = device.from_host(np.ones(1))
    with pytest.raises(TouchedByHost):
        touch(x)


def test_there_is_no_buffer_of_it(device):
    with pytest.raises(TypeError, match="bytes-like"):
        memoryview(device.empty(3, float))


MIXED = [
    *(np.add, np.multiply, lambda x, y: np.add(y, x), lambda x, y: y - x, lambda x, y: np.add(x, 1, out=y)),
    *(np.copyto, lambda x, y: np.copyto(y, x), np.matmul, np.dot, lambda x, y: np.concatenate([x, y])),
    *(lambda x, y: x.__setitem__(..., y), lambda x, y: x[y.astype(int)], lambda x, y: np.where(x > 0, x, y)),
    *(
        lambda x, y: np.add(x, [1, 2, 3]),
        lambda x, y: x[[0, 1]],
        lambda x, y: np.add.reduce(x),
        lambda x, y: np.isnat(x),
    ),
]


@pytest.mark.parametrize("mix", MIXED)
def test_what_cupy_refuses(device, mix):
    with pytest.raises(TypeError):
        mix(device.from_host(values(3)), values(3))


def test_numbers_of_the_host_are_taken_as_they_are_now(device):
    number = np.array(2.0)
    y = device.from_host(np.ones(3)) * number + np.float32(1) + 1
    number[...] = 77
    assert (peek(y) == 4).all()


def test_one_device_at_a_time(device):
    x, y = device.from_host(values(3)), standin.device(1).from_host(values(3))
    with pytest.raises(ValueError, match=r"standin:0, standin:1"):
        np.add(x, y)
    with pytest.raises(ValueError, match="is not on standin:1"):
        standin.device(1).convert(y, x)


# -- NumPy's interface


FUNCTIONS = [
    *(np.add, np.subtract, np.minimum, np.less, np.hypot, np.matmul),
    *(
        lambda x, y: x - 2 * y,
        lambda x, y: -(x**2) / (1 + abs(y)),
        lambda x, y: (x > y) & ~(y == 1),
        lambda x, y: x @ y.T,
    ),
    *(lambda x, y: np.concatenate([x, y], axis=1), lambda x, y: np.stack((x, y)), lambda x, y: np.clip(x, -1, 1)),
    *(lambda x, y: np.where(x > 0, x, y), lambda x, y: np.isfinite(x).all(), np.array_equal),
    *(lambda x, y: x.sum(axis=0), lambda x, y: x.max(), lambda x, y: np.mean(x), lambda x, y: x.T.astype(np.float32)),
    *(
        lambda x, y: x[1],
        lambda x, y: x[1, 2],
        lambda x, y: x[::-1, 1:3],
        lambda x, y: x[None, ..., 0],
        lambda x, y: x.T,
    ),
    *(
        lambda x, y: x.reshape(-1)[3:5],
        lambda x, y: x.T.reshape(-1),
        lambda x, y: x.view(np.uint8),
        lambda x, y: x.copy(),
    ),
    *(lambda x, y: np.linalg.qr(x)[0], lambda x, y: x.swapaxes(0, 1), lambda x, y: x.take(np.argmax(y, axis=1), 1)),
    *(
        lambda x, y: x[x > 0],
        lambda x, y: np.flatnonzero(x < y),
        lambda x, y: np.nonzero(x[0])[0],
        lambda x, y: np.zeros_like(x),
    ),
    *(
        lambda x, y: x.reshape(-1)[np.argsort(x, axis=None)[-3:]],
        lambda x, y: x[np.argmax(x, axis=0), np.argmin(y, axis=1)],
    ),
    *(
        lambda x, y: np.broadcast_to(x[0], (2, 3)),
        lambda x, y: np.array_split(x.ravel(), 2)[1],
        lambda x, y: x.cumsum(),
    ),
    *(lambda x, y: np.partition(np.abs(x).reshape(-1), 4), lambda x, y: x[:1][np.argmin(x[:1], axis=0)]),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_are_numpys(device, function):
    x, y = values(3, 3), values(3, 3) * 0 + 1
    a, b = device.from_host(x), device.from_host(y)
    wanted, found = np.asarray(function(x, y)), function(a, b)
    assert isinstance(found, standin.DeviceArray)
    assert found.flags == (wanted.flags.c_contiguous, wanted.flags.f_contiguous)
    for fact in ("shape", "dtype", "size", "ndim", "nbytes", "itemsize"):
        assert getattr(found, fact) == getattr(wanted, fact)
    assert peek(found).tobytes() == wanted.tobytes()
    assert (peek(a) == x).all()


def _partial_sort(x, y):
    x.sort(0)
    y.partition(2)


CHANGES = [
    *(lambda x, y: np.add(x, y, x), lambda x, y: np.multiply(x, 2, out=y), lambda x, y: x.fill(3), _partial_sort),
    *(
        lambda x, y: np.copyto(x, 0, where=y > 0),
        lambda x, y: np.copyto(x[1:], y[:-1]),
        lambda x, y: np.negative(x.T, x.T),
    ),
    *(lambda x, y: x.__setitem__(0, 5), lambda x, y: x.__setitem__((slice(None), 1), y[0]), lambda x, y: x.__iadd__(y)),
    *(
        lambda x, y: x[1:].__imul__(2),
        lambda x, y: x.__setitem__(np.argmax(y, axis=1), 0),
        lambda x, y: x.__setitem__(y > 0, 1),
    ),
    *(
        lambda x, y: np.add(x, y, out=x, where=y > 0),
        lambda x, y: np.matmul(x, x, out=y),
        lambda x, y: np.put(x, 1, y[0, 0]),
    ),
    *(
        lambda x, y: np.divide(x, 0, out=x),
        lambda x, y: np.concatenate([x, x[:0]], out=y),
        lambda x, y: np.sum(x, 0, out=y[0]),
    ),
]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_in_place_are_numpys(device, change):
    x, y = values(3, 3), values(3, 3).T.copy()
    a, b = device.from_host(x), device.from_host(y)
    with np.errstate(all="ignore"):
        change(x, y)
    change(a, b)
    assert np.array_equal(peek(a), x, equal_nan=True)
    assert np.array_equal(peek(b), y, equal_nan=True)


def test_views_are_no_kernels_and_have_a_base(device):
    x = device.empty((4, 6), np.float32)
    y = x[1:, ::2].T[..., None].reshape(3, 3, 1, order="C")
    assert y.base is x[2:][1:].base is x.view(np.int32).base is x
    assert x.base is None
    assert len(x) == 4
    assert (x.flags.c_contiguous, x.flags.f_contiguous, x.T.flags.c_contiguous) == (True, False, False)
    assert not hasattr(x.flags, "writeable")
    assert not LOG
    x.T.reshape(-1)
    assert LOG.counts() == {"kernel": 1}
    assert repr(x).startswith("<DeviceArray float32 (4, 6) at 0x")


def test_half_precision(device):
    for dtype in (np.float16, BFLOAT16):
        x = values(5, dtype=dtype)
        y = device.from_host(x)
        assert peek(y + y).tobytes() == (x + x).tobytes()
        assert peek(y.view(np.uint16)).tobytes() == x.tobytes()
        assert y.astype(dtype, copy=False) is y


def test_setting_a_part_to_itself_is_no_kernel(device):
    x = device.from_host(values(4))
    LOG.clear()
    x[1:] += 1
    assert [entry.name for entry in LOG.of("kernel")] == ["add"]


def test_errors_are_raised_at_once(device):
    x = device.from_host(values(3))
    for call in (lambda: x + device.empty(4, float), lambda: x[3], lambda: x.reshape(2, 2)):
        with pytest.raises((ValueError, IndexError)):
            call()
    with pytest.raises(TypeError, match="same_kind"):
        np.add(x, 1, out=device.empty(3, int))
    assert LOG.counts() == {"in": 1}


def test_elements_begin_at_multiples_of_their_size(device):
    memory = device.empty(48, np.uint8)
    assert memory[16:32].view(np.complex128).size == 1
    for start, dtype in ((8, np.complex128), (4, np.float64), (1, np.float16)):
        with pytest.raises(standin.Misaligned, match=np.dtype(dtype).name):
            memory[start : start + 16].view(dtype)


def test_memory_is_poisoned(device):
    assert (peek(device.empty(3, np.uint8)) == 0xA5).all()
    assert (device.pinned(3) == 0xA5).all()


def test_the_interface_of_cuda(device):
    x = device.from_host(values(4, 4))
    interface = x[1:, 0].__cuda_array_interface__
    assert interface["data"] == (device.address(x) + 32, False)
    assert (interface["shape"], interface["strides"], interface["typestr"]) == ((3,), (32,), "<f8")
    assert (interface["version"], interface["stream"], x.__cuda_array_interface__["strides"]) == (3, None, None)


# -- the rest of the device's interface


def test_the_device_converts(device):
    x = values(3, 4)
    for dtype in (np.float16, BFLOAT16, np.int8, np.complex64):
        y = device.empty((4, 3), dtype)
        device.convert(y.T, device.from_host(x))
        assert peek(y.T).tobytes() == x.astype(dtype).tobytes()
    with pytest.raises(ValueError, match="differ"):
        device.convert(device.empty(3, float), device.empty(1, float))


@pytest.mark.parametrize("name", CODECS)
def test_the_codecs_are_the_hosts_in_one_kernel(device, name):
    x, there = values(70, dtype=np.float32), device.codec(name)
    encoded, back = np.empty(there.nbytes(70), np.uint8), np.empty(70, np.float32)
    codec(name).encode(x, encoded)
    codec(name).decode(encoded, back)
    y, z = device.empty(encoded.size, np.uint8), device.empty(70, np.float32)
    there.encode(device.from_host(x), y)
    there.decode(y, z)
    assert [entry.name for entry in LOG.of("kernel")] == [f"encode {name}", f"decode {name}"]
    assert (there.name, there.elementwise) == (name, codec(name).elementwise)
    assert (peek(y) == encoded).all()
    assert (peek(z) == back).all()
    with pytest.raises(ValueError, match="an encoded buffer of"):
        there.encode(z, y[1:])
    with pytest.raises(ValueError, match="unknown wire"):
        device.codec("u5")


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.int32, np.complex128])
def test_a_fold_is_one_kernel_from_left_to_right(device, dtype):
    for op in ("sum", "avg", "prod", "max"):
        try:
            how = reduction(op, np.dtype(dtype), 3)
        except TypeError:
            continue
        vectors = [values(length, dtype=dtype)[:9] for length in (9, 10, 11)]
        total = vectors[0].astype(how.dtype)
        for vector in vectors[1:]:
            how.combine(total, vector.astype(how.dtype), total)
        how.finish(total)
        there = [device.from_host(vector) for vector in vectors]
        LOG.clear()
        fold = device.fold(there, how)
        assert not LOG
        fold()
        assert [(entry.what, entry.name, entry.nbytes) for entry in LOG] == [
            ("fold", op, 27 * np.dtype(dtype).itemsize)
        ]
        for x in there:
            assert peek(x).tobytes() == total.astype(dtype).tobytes()
        fold()
        assert len(LOG) == 2


def test_what_cannot_be_folded(device):
    how = reduction("sum", np.dtype(float), 1)
    x = device.empty(6, float)
    for vectors in ([x, x[:3]], [x[::2], x[::2]], [x, x.view(np.int64)], [x.view(np.int64)]):
        with pytest.raises(ValueError, match=r"fold|combined"):
            device.fold(vectors, how)


def test_memory_is_borrowed_by_its_address(device):
    x = device.from_host(values(6))
    y = device.borrow(device.address(x) + 16, 2, np.float64)
    y.fill(1)
    del x
    assert (peek(y) == 1).all()
    assert device.borrow(0, 0, float).shape == (0,)
    for start, length in ((device.address(y) + 24, 2), (values(5).__array_interface__["data"][0], 5)):
        with pytest.raises(AssertionError, match="no memory of standin:0"):
            device.borrow(start, length, float)


def test_copies_are_logged_and_synchronise_where_they_must(device):
    x = values(4)
    there = device.from_host(x)
    x[:] = 0  # it is free
    assert (device.to_host(there) == values(4)).all()
    assert there.sum().item() == values(4).sum()
    words = [(entry.what, entry.name, entry.nbytes) for entry in LOG]
    assert words == [
        ("in", "from_host", 32),
        *(("out", "to_host", 32), ("synchronise", "to_host", 0)),
        *(("kernel", "sum", 8), ("out", "item", 8), ("synchronise", "item", 0)),
    ]
    assert LOG.nbytes("in", "out") == 72
    LOG.clear()
    np.flatnonzero(there)
    assert [entry.what for entry in LOG] == ["kernel", "synchronise"]
