"""On which device an array lies, and devices by their names."""

import sys
import types

import numpy as np
import pytest
import standin

import mpiagg
from mpiagg.arrays import (
    HOST,
    accelerator_of,
    address,
    as_input,
    check_output,
    convert,
    device_of,
    find_device,
    flat,
    is_array,
    joined,
    load,
    same_memory,
    settle,
    to_host,
    writeable,
)


@pytest.mark.parametrize("x", [np.ones(3), np.float32(2), 3, [1, 2], None, "cuda"])
def test_what_is_no_array_of_an_accelerator_is_the_host_s(x):
    assert device_of(x) is HOST
    assert accelerator_of(x) is None
    assert is_array(x) == isinstance(x, np.ndarray)


def test_the_host_by_its_name():
    assert find_device(None) is find_device("cpu") is find_device(HOST) is HOST
    assert HOST.kind == "cpu"


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:one", "cuda:-1", "", "cpu:0"])
def test_unknown_devices(name):
    with pytest.raises(ValueError, match=r"unknown device .*; known: cpu, cuda, 'cuda:0' and so on"):
        find_device(name)


def test_what_is_no_name():
    with pytest.raises(TypeError, match="a device is 'cpu', 'cuda' or"):
        find_device(0)


def test_a_missing_cupy_is_an_error_only_where_a_device_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "mpiagg.cuda.device", raising=False)
    with pytest.raises(mpiagg.DeviceError, match=r"CuPy, which cannot be imported .*install 'cupy-cuda12x\[ctk\]', or"):
        find_device("cuda")


def test_a_broken_cupy_is_an_error_only_where_a_device_is_asked_for(monkeypatch):
    class Broken(types.ModuleType):
        def __getattr__(self, name):
            raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "cupy", Broken("cupy"))
    monkeypatch.delitem(sys.modules, "mpiagg.cuda.device", raising=False)
    with pytest.raises(mpiagg.DeviceError, match=r"OSError: libcudart.so.12: cannot open"):
        find_device("cuda:0")


def test_devices_of_a_kind(device):
    assert find_device("standin") is find_device("standin:0") is device
    assert find_device("standin:1") is standin.device(1) is not device
    with pytest.raises(mpiagg.DeviceError, match="there is no stand-in 7"):
        find_device("standin:7")
    assert device.kind == "standin"


def test_arrays_on_a_device_are_seen_as_those_of_the_host(device):
    values = np.arange(6.0).reshape(2, 3)
    x = device.from_host(values)
    assert device_of(x) is accelerator_of(x) is device
    assert is_array(x)
    assert writeable(x)
    assert as_input(x) is x
    assert flat(x).shape == (6,)
    assert address(flat(x)[2:]) == address(x) + 16
    assert same_memory(x, flat(x).reshape(2, 3))
    assert flat(x.T) is None
    assert joined([x[:1], x[1:]]).shape == (6,)
    assert joined([x[1:], x[:1]]) is None
    halves = device.empty((2, 3), np.float16)
    convert(halves, x)
    assert np.array_equal(to_host(halves), values)
    load(x, values + 1)
    settle(x, values)
    assert np.array_equal(standin.peek(x), values + 1)


def test_outputs_on_a_device(device):
    x = device.empty((2, 3), float)
    assert check_output(x, (2, 3), x.dtype, device) is x
    for out, error, words in (
        (x, ValueError, "on standin:0, the input on standin:1"),
        (np.ones((2, 3)), ValueError, "on cpu, the input on standin:1"),
        ([], TypeError, "must be an array on standin:1, not list"),
    ):
        with pytest.raises(error, match=words):
            check_output(out, (2, 3), np.dtype(float), standin.device(1))


def test_vectors_on_a_device_are_simulated_on_the_host(device):
    vectors = [np.arange(5.0) + rank for rank in range(3)]
    simulated = mpiagg.simulate([device.from_host(x) for x in vectors], "avg", "ring")
    assert np.array_equal(simulated, mpiagg.simulate(vectors, "avg", "ring"))
