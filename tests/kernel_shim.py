"""The kernels of a CUDA device on the host's processor: their texts as C++, and so much of CuPy as launches them.

The threads of a block are coroutines, so that barriers are what they are on a device. Between any two barriers they
take turns in another order, so that what works only in some of them fails sooner or later.
"""

import ctypes
import shutil
import subprocess
import types

import numpy as np

from mpiagg.cuda.kernels import PRELUDE

COMPILER = shutil.which("g++")

CUDA = r"""
#include <math.h>
#include <stdlib.h>
#include <ucontext.h>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(threads)

struct Place { unsigned x; };
static Place gridDim, blockDim, blockIdx, threadIdx;

static const int MOST = 256, STACK = 1 << 16;
static ucontext_t scheduler, threads[MOST];
static bool ended[MOST];
static int waiting;

static void __syncthreads() {
    const unsigned own = threadIdx.x;
    ++waiting;
    swapcontext(&threads[own], &scheduler);
    threadIdx.x = own;
}

static unsigned atomicAdd(unsigned *place, unsigned more) {
    const unsigned before = *place;
    *place += more;
    return before;
}

static void (*work)(void **);
static void **work_arguments;

static void run_thread() {
    const unsigned own = threadIdx.x;
    work(work_arguments);
    ended[own] = true;
}

static void run_block(unsigned count) {
    static char *stacks = (char *)malloc((size_t)MOST * STACK);
    for (unsigned own = 0; own < count; ++own) {
        getcontext(&threads[own]);
        threads[own].uc_stack.ss_sp = stacks + (size_t)own * STACK;
        threads[own].uc_stack.ss_size = STACK;
        threads[own].uc_link = &scheduler;
        makecontext(&threads[own], run_thread, 0);
        ended[own] = false;
    }
    static unsigned drawn = 1;
    for (;;) {
        unsigned running = 0;
        waiting = 0;
        const unsigned step = (drawn = 1664525 * drawn + 1013904223) >> 8 | 1, start = drawn >> 16;
        for (unsigned i = 0; i < count; ++i) {
            const unsigned own = (start + i * step) % count;  // count is a power of two, and step is odd
            if (ended[own]) continue;
            ++running;
            threadIdx.x = own;
            swapcontext(&scheduler, &threads[own]);
        }
        if (!running) return;
        if (waiting && waiting != (int)count) abort();  // a barrier that not all threads come to
    }
}

template <class... P, size_t... I> void call(void (*kernel)(P...), void **arguments, std::index_sequence<I...>) {
    kernel(*(P *)arguments[I]...);
}

template <class... P> constexpr int parameters(void (*kernel)(P...)) { return sizeof...(P); }

template <class... P> void call(void (*kernel)(P...), void **arguments) {
    call(kernel, arguments, std::make_index_sequence<sizeof...(P)>());
}

static void launch(void (*kernel)(void **), int blocks, int count, void **arguments) {
    work = kernel;
    work_arguments = arguments;
    gridDim.x = blocks;
    blockDim.x = count;
    for (int block = blocks - 1; block >= 0; --block) {
        blockIdx.x = block;
        run_block(count);
    }
}

#define LAUNCHED(name) \
    static void call_##name(void **arguments) { call(name, arguments); } \
    extern "C" int parameters_##name() { return parameters(name); } \
    extern "C" void launch_##name(int blocks, int count, void **arguments) { \
        launch(call_##name, blocks, count, arguments); \
    }
"""


def compiled(kernels, folder):
    """Return the library of some kernels, compiled by g++."""
    text = CUDA + PRELUDE + "".join(kernel.body + f"LAUNCHED({kernel.name})\n" for kernel in kernels)
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(text)
    # Rounded as on a device, each sum and each product; and to be compiled soon rather than to run fast.
    flags = ["-std=c++17", "-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-fPIC", "-shared"]
    done = subprocess.run([COMPILER, *flags, source, "-o", library], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(library)


class Memory:
    def __init__(self, address):
        self.ptr = address


class HostArray(np.ndarray):
    """An array with CuPy's interface, as far as kernels are launched by it."""

    @property
    def data(self):
        return Memory(self.__array_interface__["data"][0])

    def get(self):
        return np.array(self)


def array(x):
    return np.array(x).view(HostArray)


class FakeDevice:
    """A device of few multiprocessors, so that every thread has several turns."""

    attributes = {"MultiProcessorCount": 1}  # noqa: RUF012 - as CuPy has it
    depth = 0

    def __enter__(self):
        FakeDevice.depth += 1
        return self

    def __exit__(self, *error):
        FakeDevice.depth -= 1


def fake_cupy(library):
    """Return as much of CuPy as the launching of kernels takes."""

    def compile_using_nvrtc(source, options, filename):
        assert FakeDevice.depth
        assert source.startswith(PRELUDE)
        assert f"\n{filename.removesuffix('.cu')}(" in source
        assert "--fmad=false" in options
        return source.encode(), None

    class Module:
        def load(self, binary):
            self.source = binary.decode()

        def get_function(self, name):
            assert f"\n{name}(" in self.source
            return Function(name)

    class Function:
        def __init__(self, name):
            self.launch = getattr(library, f"launch_{name}")
            self.parameters = getattr(library, f"parameters_{name}")()

        def __call__(self, grid, block, arguments):
            assert FakeDevice.depth
            assert len(arguments) == self.parameters
            values = [ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int64(x) for x in arguments]
            places = [ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values]
            (blocks,), (threads,) = grid, block
            self.launch(blocks, threads, (ctypes.c_void_p * len(places))(*places))

    def empty(shape, dtype):
        return np.full(shape, 0x55, dtype).view(HostArray)

    stream = types.SimpleNamespace(synchronize=lambda: None)
    return types.SimpleNamespace(
        __version__="14.2.0",
        empty=empty,
        zeros=lambda shape, dtype: np.zeros(shape, dtype).view(HostArray),
        asarray=array,
        ascontiguousarray=lambda x: np.ascontiguousarray(x).view(HostArray),
        copyto=np.copyto,
        cuda=types.SimpleNamespace(
            get_current_stream=lambda: stream,
            Device=lambda _: types.SimpleNamespace(compute_capability="90"),
            nvrtc=types.SimpleNamespace(getVersion=lambda: (12, 9)),
            runtime=types.SimpleNamespace(getDevice=lambda: 0),
            compiler=types.SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc),
            function=types.SimpleNamespace(Module=Module),
        ),
    )
