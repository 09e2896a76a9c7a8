"""Parts of ``bench/gpu.py``: a device's memory, and kernels beside what the memory takes."""

from __future__ import annotations

from functools import partial

import numpy as np

from bench.gpu_rank import Call, Setting
from mpiagg.arrays import Accelerator, Array, reduction
from mpiagg.benchmarks.flags import dtype_of

MIB = 2**20
MEMORY = [MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB]
VECTOR = 64 * MIB
QUICK = MIB // 4

DTYPES = ("float32", "float16", "bfloat16")
WIRES = ("fp16", "bf16", "u8", "u4", "u2")


def memory(setting: Setting) -> None:
    """Measure copies on the device, and from and to pinned memory of the host's, by all ranks at the same time."""
    device = setting.device
    for nbytes in setting.sizes(MEMORY, [QUICK]):
        here, there = zeros(device, nbytes), zeros(device, nbytes)
        pinned = device.pinned(nbytes)
        calls = {
            "on the device": done(device, partial(device.copy, there, here)),
            "to the host": done(device, partial(device.copy, pinned, here)),
            "from the host": done(device, partial(device.copy, here, pinned)),
        }
        setting.save({"size": nbytes, "times": setting.time(calls, 0.5)})


def folds(setting: Setting) -> None:
    """Measure the kernel that adds n vectors and writes the sum to all, beside a copy of as many bytes."""
    device, nbytes = setting.device, setting.sizes([VECTOR], [QUICK])[-1]
    for name in DTYPES:
        dtype = dtype_of(name)
        for count in (2, 4, 8):
            vectors = [zeros(device, nbytes).view(dtype) for _ in range(count)]
            fold = device.fold(vectors, reduction("sum", dtype, 1))
            source, target = zeros(device, count * nbytes), zeros(device, count * nbytes)
            calls = {
                "fold": done(device, fold),
                "limit": done(device, partial(device.copy, target, source)),
            }
            row = {"dtype": name, "vectors": count, "size": nbytes, "wrong": wrong_sums(device, dtype, count)}
            setting.save({**row, "times": setting.time(calls, 0.5)})


def wrong_sums(device: Accelerator, dtype: np.dtype, count: int) -> int:
    """Return how many values of a fold of small whole numbers are wrong, in all vectors."""
    values = [(np.arange(1001) % (7 + number)).astype(dtype) for number in range(count)]
    vectors = [device.from_host(each) for each in values]
    device.fold(vectors, reduction("sum", dtype, 1))()
    wanted = sum(each.astype(np.float64) for each in values)
    return sum(int(np.count_nonzero(device.to_host(x).astype(np.float64) != wanted)) for x in vectors)


def codecs(setting: Setting) -> None:
    """Measure what turns float32 into fewer bytes and back, beside a copy of as many bytes."""
    device, nbytes = setting.device, setting.sizes([VECTOR], [QUICK])[-1]
    values = device.from_host(np.random.default_rng(0).standard_normal(nbytes // 4).astype(np.float32))
    back = zeros(device, nbytes).view(np.float32)
    source, target = zeros(device, nbytes), zeros(device, nbytes)
    for name in WIRES:
        codec = device.codec(name)
        encoded = zeros(device, codec.nbytes(nbytes // 4))
        half = (nbytes + encoded.nbytes) // 2  # a copy reads and writes it
        calls = {
            "encode": done(device, partial(codec.encode, values, encoded)),
            "decode": done(device, partial(codec.decode, encoded, back)),
            "limit": done(device, partial(device.copy, target[:half], source[:half])),
        }
        setting.save({"wire": name, "size": nbytes, "times": setting.time(calls, 0.5)})


def zeros(device: Accelerator, nbytes: int) -> Array:
    """Return bytes on the device."""
    made = device.empty(nbytes, np.uint8)
    made.fill(0)
    return made


def done(device: Accelerator, ask: Call) -> Call:
    """Return a call that asks for something, and waits until it is done."""

    def call() -> None:
        ask()
        device.synchronise()

    return call
