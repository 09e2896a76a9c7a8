"""The interface of a CUDA device, on a GPU."""

import subprocess
import sys
import threading
import time
from itertools import product
from shutil import which

import kernel_checks as checks
import numpy as np
import pytest

from mpiagg import allreduce
from mpiagg.arrays import HOST, accelerator_of, device_of, find_device, reduction
from mpiagg.cuda.kernels import MOST_VECTORS

checks.gpu()

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DTYPES = [*checks.BOOLEAN, *checks.INTEGERS, *checks.REALS, *checks.COMPLEXES]
MANY = MOST_VECTORS + 1


def wait_for(stream):
    deadline = time.monotonic() + 60
    while not stream.done():
        assert time.monotonic() < deadline


def run_python(script, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- which


def test_the_device_and_its_names(device):
    assert device.name == f"cuda:{device.ordinal}"
    assert device.kind == "cuda"
    assert find_device(device.name) is find_device("cuda") is find_device(device) is device
    x = device.empty(3, "f4")
    assert device_of(x) is accelerator_of(x) is device
    assert device_of(x[1:]) is device_of(x.reshape(3, 1)) is device
    assert device_of(np.zeros(3)) is HOST
    with pytest.raises(ValueError, match="there is no device 'cuda:1000': this process sees"):
        find_device("cuda:1000")


@pytest.mark.usefixtures("device")
def test_what_is_no_array_is_refused():
    import cupy

    stream = cupy.cuda.get_current_stream()
    assert device_of(stream) is HOST
    with pytest.raises(TypeError, match="arrays of dtype object cannot be aggregated"):
        allreduce(stream)


@pytest.mark.skipif(which("nvidia-smi") is None, reason="there is no nvidia-smi")
def test_the_identity_is_the_uuid(device):
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout  # noqa: S607 - the one of the machine
    assert device.identity.removeprefix("GPU-") in listed
    assert device.identity == device.visible[device.ordinal]
    assert len(set(device.visible)) == len(device.visible)


def test_threads_find_one_device(device):
    found = []
    threads = [threading.Thread(target=lambda: found.append(find_device(device.name))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each is device for each in found)
    assert len(found) == 8


# -- arrays


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_there_and_back(device, dtype):
    x = checks.values(dtype, 24, 1)
    for each in (x, x[:0], x[5], x.reshape(2, 3, 4), x.reshape(4, 6).T, x[::2], x.reshape(4, 6)[:, 1::2]):
        there = device.from_host(np.asarray(each))
        assert (there.shape, there.dtype) == (np.shape(each), dtype)
        back = device.to_host(there)
        assert isinstance(back, np.ndarray)
        assert (back.shape, back.dtype) == (np.shape(each), dtype)
        assert back.tobytes() == np.asarray(each).tobytes()
    apart = device.from_host(x.reshape(4, 6))[:, 1::2]
    assert device.to_host(apart).tobytes() == x.reshape(4, 6)[:, 1::2].tobytes()


def test_what_is_copied_from_the_host_can_be_changed_at_once(device, barrier):
    for source in (np.zeros(1000, np.uint8), device.pinned(1000)):
        source[:] = 3
        before = device.from_host(source)  # so that there is memory for the next one
        device.synchronise()
        del before
        barrier.close()
        there = device.from_host(source)
        source[:] = 4
        barrier.open()
        assert (device.to_host(there) == 3).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_borrowed_memory_is_the_owner_s(device, dtype):
    x = checks.values(dtype, 24, 2)
    owner = device.from_host(x)
    loan = device.borrow(device.address(owner[3:]), 10, dtype, owner)
    assert device_of(loan) is device
    assert (loan.shape, loan.dtype, device.address(loan)) == ((10,), dtype, device.address(owner) + 3 * dtype.itemsize)
    assert device.to_host(loan).tobytes() == x[3:13].tobytes()
    device.convert(loan, device.from_host(x[:10]))
    assert device.to_host(owner)[3:13].tobytes() == x[:10].tobytes()
    del owner
    assert device.to_host(loan).tobytes() == x[:10].tobytes()
    assert device.borrow(0, 0, dtype).shape == (0,)


# -- streams


def test_what_follows_waits_and_what_does_not_goes_on(device, barrier):
    x = device.from_host(np.zeros(1000, np.float32))
    follows, goes_on = device.stream(), device.stream()
    late, early = (device.pinned(4000).view("f4") for _ in range(2))
    x += 0  # loads what adds
    device.synchronise()
    barrier.close()
    x += 1
    follows.follow()
    with goes_on:
        device.copy(early, x)
    with follows:
        device.copy(late, x)
    wait_for(goes_on)
    assert (early == 0).all()
    assert not follows.done()
    barrier.open()
    wait_for(follows)
    assert (late == 1).all()


def test_a_stream_keeps_the_order(device):
    stream, x = device.stream(), device.from_host(np.zeros(10**6, np.int64))
    out = device.pinned(8 * 10**6).view("i8")
    device.synchronise()
    with stream:
        for _ in range(100):
            x += 1
        device.copy(out, x)
        x += 1
    wait_for(stream)
    assert (out == 100).all()
    assert (device.to_host(x) == 101).all()


def test_a_stream_is_the_thread_s_within_with(device):
    import cupy

    streams, seen = [device.stream() for _ in range(2)], {}
    outside = cupy.cuda.get_current_stream().ptr

    def look(name):
        before = cupy.cuda.get_current_stream().ptr
        with streams[0]:
            one = cupy.cuda.get_current_stream().ptr
            with streams[1]:
                two, ordinal = cupy.cuda.get_current_stream().ptr, cupy.cuda.runtime.getDevice()
            again = cupy.cuda.get_current_stream().ptr
        with pytest.raises(KeyError), streams[0]:
            raise KeyError
        seen[name] = (before, one, two, again, cupy.cuda.get_current_stream().ptr, ordinal)

    with streams[1]:
        thread = threading.Thread(target=look, args=("thread",))
        thread.start()
        thread.join()
    look("here")
    one, two = (stream.ptr for stream in streams)
    assert seen == dict.fromkeys(("thread", "here"), (outside, one, two, one, outside, device.ordinal))


def test_synchronise_waits_for_the_present_stream_alone(device, barrier):
    held, x = device.stream(), device.from_host(np.zeros(10))
    x.fill(2)  # loads what fills: a kernel that is loaded waits for all streams
    device.synchronise()
    with held:
        barrier.close()
    device.synchronise()
    x.fill(1)
    device.synchronise()
    assert not held.done()
    barrier.open()
    with held:
        device.synchronise()
        assert held.done()


@pytest.mark.usefixtures("device")
def test_what_has_failed_is_an_error_and_not_waited_for():
    script = """
import cupy, time
from mpiagg.arrays import find_device
from mpiagg.errors import DeviceError
device = find_device("cuda")
stream = device.stream()
with stream:
    cupy.RawKernel('extern "C" __global__ void fail(int *x) { *x = 1; }', "fail")((1,), (1,), (8,))
deadline = time.monotonic() + 60
try:
    while not stream.done():
        assert time.monotonic() < deadline
except DeviceError as error:
    print("IllegalAddress" in str(error), flush=True)
    import os
    os._exit(0)
"""
    assert run_python(script) == "True"


# -- copies


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 4096, 10**6 + 1])
def test_pinned_copies(device, nbytes):
    out, back = device.pinned(nbytes), device.pinned(nbytes)
    assert (out.shape, out.dtype, out.flags.writeable) == ((nbytes,), np.uint8, True)
    out[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes)
    there, other = device.empty(nbytes, np.uint8), device.empty(nbytes, np.uint8)
    stream = device.stream()
    stream.follow()
    with stream:
        device.copy(there, out)
        device.copy(other, there)
        device.copy(back, other)
    wait_for(stream)
    assert back.tobytes() == out.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_are_of_bytes(device, dtype):
    x = checks.values(dtype, 100, 3)
    there, back = device.from_host(x), device.pinned(x.nbytes)
    device.copy(back[dtype.itemsize :], there[1:])
    device.synchronise()
    assert back[dtype.itemsize :].tobytes() == x[1:].tobytes()


# -- conversions and codecs


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("of", DTYPES, ids=str)
def test_any_dtype_is_converted_to_any(device, of, to):
    x = (50 * np.random.default_rng(3).random((4, 6, 5))).astype(of)
    for each in (x, x[:, ::2], x.T, x[0, 0, 0], x[:0]):
        checks.check_conversion(device, np.asarray(each), to)


@pytest.mark.parametrize(("of", "to"), list(product(checks.REALS, repeat=2)))
def test_layouts_are_converted(device, of, to):
    source, target = device.from_host(np.arange(60).astype(of))[::2], device.from_host(np.zeros((30, 2), to))[:, 0]
    device.convert(target, source)
    assert (device.to_host(target) == np.arange(0, 60, 2)).all()


@pytest.mark.parametrize("dtype", checks.REALS, ids=str)
def test_long_vectors_are_converted(device, dtype):
    x = np.random.default_rng(5).standard_normal(5 * 10**6 + 3)
    with np.errstate(over="ignore"):
        checks.check_conversion(device, x, dtype)
        checks.check_conversion(device, x.astype(np.float32), dtype)
        checks.check_conversion(device, x.astype(dtype), np.dtype("f8"))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("values", [checks.singles, checks.doubles])
@pytest.mark.parametrize("offsets", [(0, 0), (1, 1), (0, 1)])
def test_half_precision_is_the_host_s(device, name, values, offsets):
    checks.check_half(device, name, values(), *offsets)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_eight_bits_are_the_host_s(device, dtype):
    for number, (values, _) in enumerate(checks.chunks()):
        with np.errstate(invalid="ignore"):
            checks.check_uint8(device, values.astype(dtype), number % 5)


@pytest.mark.parametrize("length", [0, 1, 9, 10**7 + 1])
def test_eight_bits_of_any_length(device, length):
    checks.check_uint8(device, np.random.default_rng(6).standard_normal(length).astype(np.float32))


@pytest.mark.parametrize("name", ["u4", "u2"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_few_bits_are_the_host_s(device, name, dtype):
    for number, (values, _) in enumerate(checks.chunks()):
        with np.errstate(invalid="ignore"):
            checks.check_packed(device, name, values.astype(dtype), number % 5)


@pytest.mark.parametrize("name", ["u4", "u2"])
@pytest.mark.parametrize("length", [0, 1, 9, 10**7 + 1])
def test_few_bits_of_any_length(device, name, length):
    checks.check_packed(device, name, np.random.default_rng(6).standard_normal(length).astype(np.float32))


def test_codecs_are_the_host_s_by_name(device):
    for name in ("fp16", "bf16", "u8", "u4", "u2"):
        assert device.codec(name) is device.codec(name)
        assert device.codec(name).name == name
        assert device.codec(name).nbytes(33) == HOST.codec(name).nbytes(33)
    with pytest.raises(ValueError, match="unknown wire 'u1'; known: fp16, bf16, u8, u4, u2"):
        device.codec("u1")


@pytest.mark.parametrize("name", ["fp16", "bf16", "u8", "u4", "u2"])
def test_codecs_never_wait(device, barrier, name):
    x, codec, stream = np.linspace(-1, 1, 1000, dtype=np.float32), device.codec(name), device.stream()
    there, back = (device.from_host(x) for _ in range(2))
    encoded = device.empty(codec.nbytes(1000), np.uint8)

    def once():
        codec.encode(there, encoded)
        codec.decode(encoded, back)

    stream.follow()
    with stream:
        once()
    wait_for(stream)
    with stream:
        barrier.close()
        once()
    assert not stream.done()
    barrier.open()
    wait_for(stream)
    found, wanted = np.empty(codec.nbytes(1000), np.uint8), np.empty_like(x)
    HOST.codec(name).encode(x, found)
    HOST.codec(name).decode(found, wanted)
    assert np.array_equal(device.to_host(back), wanted)


# -- folds


@pytest.mark.parametrize(("op", "dtype"), checks.CASES, ids=checks.NAMES)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_folds_are_numpy_s(device, op, dtype, count):
    checks.check_fold(device, op, dtype, count, 10007)


@pytest.mark.parametrize("dtype", checks.REALS, ids=str)
@pytest.mark.parametrize("count", [4, 5, 16, MOST_VECTORS, MANY])
def test_folds_of_many_vectors(device, dtype, count):
    checks.check_fold(device, "avg", dtype, count, 3001, offsets=(0, 1))


@pytest.mark.parametrize("dtype", [np.dtype("f4"), *checks.BFLOATS, np.dtype("i1"), np.dtype("c16")], ids=str)
@pytest.mark.parametrize("offsets", [(0,), (1,), (3,), (0, 8), (1, 2, 3)])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 17, 5003])
def test_folds_wherever_vectors_lie(device, dtype, offsets, length):
    checks.check_fold(device, "sum", dtype, 3, length, offsets=offsets)


@pytest.mark.parametrize("dtype", [np.dtype("f4"), *checks.BFLOATS, np.dtype("f2")], ids=str)
def test_folds_of_long_vectors(device, dtype):
    checks.check_fold(device, "avg", dtype, 4, 10**7 + 3, offsets=(1,))


@pytest.mark.parametrize("count", [2, MANY])
def test_a_fold_runs_in_the_stream_in_which_it_is_called(device, barrier, count):
    x = [device.from_host(np.full(100, number, np.float32)) for number in range(count)]
    stream, how = device.stream(), reduction("sum", np.dtype("f4"), count)
    call = device.fold(x, how)
    call()
    device.synchronise()
    before = device.to_host(x[0])
    stream.follow()
    with stream:
        barrier.close()
        call()
    assert not stream.done()
    assert (device.to_host(x[0]) == before).all()
    barrier.open()
    wait_for(stream)
    assert (device.to_host(x[0]) == count * before).all()


def test_a_fold_of_a_dtype_that_no_device_has(device):
    x = np.zeros(3, pytest.importorskip("ml_dtypes").float8_e5m2)
    with pytest.raises(TypeError, match="cannot be combined on a CUDA device"):
        device.fold([x, x], reduction("sum", x.dtype, 2))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("length", [1, 9, 10**6 + 3])
def test_the_kth_largest_is_numpy_s(device, dtype, length):
    for offset in (0, 1):
        checks.check_kth(device, np.dtype(dtype), length, offset)


# -- memory that processes share

OPEN = """
import sys, numpy as np
from mpiagg.arrays import find_device
device = find_device(sys.argv[1])
nbytes = int(sys.argv[3])
memory = device.open(bytes.fromhex(sys.argv[2]), nbytes)
print(device.to_host(memory).tobytes().hex())
memory += 1
device.synchronise()
device.close(memory)
"""


@pytest.mark.parametrize("nbytes", [1, 1000, 2**21, 2**21 + 1])
def test_another_process_maps_memory(device, nbytes):
    memory = device.allocate(nbytes)
    assert (memory.shape, memory.dtype, device_of(memory)) == ((nbytes,), np.uint8, device)
    values = np.random.default_rng(nbytes).integers(0, 200, nbytes).astype(np.uint8)
    device.convert(memory, device.from_host(values))
    device.synchronise()
    handle = device.export(memory)
    assert len(handle) == 64
    assert run_python(OPEN, device.name, handle.hex(), str(nbytes)) == values.tobytes().hex()
    assert (device.to_host(memory) == values + 1).all()


def test_pieces_of_memory_do_not_share_what_another_process_maps(device):
    first, second = device.allocate(1000), device.allocate(1000)
    assert abs(device.address(first) - device.address(second)) >= 2**21
    assert device.export(first) != device.export(second)


def test_no_bytes_can_be_shared_too(device):
    memory = device.allocate(0)
    assert memory.shape == (0,)
    assert run_python(OPEN, device.name, device.export(memory).hex(), "0") == ""


def test_other_memory_cannot_be_shared(device):
    for memory in (device.empty(2**22, np.uint8), device.allocate(100)[1:]):
        with pytest.raises(ValueError, match=r"only whole memory that allocate\(\) has returned can be shared"):
            device.export(memory)


def test_more_memory_than_there_is(device):
    import cupy

    _, total = cupy.cuda.Device(device.ordinal).mem_info
    with pytest.raises(MemoryError, match="has not got"):
        device.allocate(2 * total)
    assert device.allocate(1).shape == (1,)


def test_a_handle_of_nothing(device):
    from mpiagg.errors import DeviceError

    with pytest.raises(DeviceError, match="cannot map memory of another process"):
        device.open(bytes(64), 100)
