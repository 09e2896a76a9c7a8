"""The kernels of CUDA devices, compiled by NVRTC, and what is used of CuPy: both need CuPy, and no GPU."""

import ast
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import kernel_checks as checks
import pytest
from kernel_checks import MANY, SOME, folds, others

import mpiagg.cuda
from mpiagg.arrays import HOST, device_of
from mpiagg.cuda import kernels
from mpiagg.cuda.kernels import MOST_VECTORS, OPTIONS, fold

PACKAGE = Path(mpiagg.cuda.__file__).parent


@pytest.fixture(scope="module")
def nvrtc():
    module = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed")
    try:
        module.getVersion()
    except Exception as error:  # noqa: BLE001 - whatever a missing library is reported by
        pytest.skip(f"there is no NVRTC: {error}")
    return module


def assembled(nvrtc, text, architecture, options=OPTIONS):
    program = nvrtc.createProgram(text, "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={architecture}", *options))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assembler = nvrtc.getPTX(program)
    return assembler if isinstance(assembler, str) else assembler.decode()


@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
@pytest.mark.parametrize("op", checks.DTYPES_OF)
def test_every_fold_compiles_for_devices(nvrtc, op, architecture):
    cases = [(op, dtype) for dtype in checks.DTYPES_OF[op]]
    every = [*folds((2, 8, MANY), cases), *folds((1, 4, MOST_VECTORS), [case for case in SOME if case[0] == op])]
    text = assembled(nvrtc, kernels.PRELUDE + "".join(kernel.body for kernel in every), architecture)
    assert all(f".entry {kernel.name}(" in text for kernel in every)
    assert "fma" not in text
    assert "ftz" not in text


@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
def test_everything_else_compiles_for_devices(nvrtc, architecture):
    every = list(others())
    text = assembled(nvrtc, kernels.PRELUDE + "".join(kernel.body for kernel in every), architecture)
    assert all(f".entry {kernel.name}(" in text for kernel in every)
    assert "fma" not in text
    assert "ftz" not in text


@pytest.mark.usefixtures("nvrtc")
def test_subnormal_numbers_are_not_flushed_to_zero(monkeypatch):
    compiler = pytest.importorskip("cupy").cuda.compiler
    # It asks for a device, though it is told for which to compile.
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda _: ("-arch=sm_90", "cubin"))
    asked = []
    compile_ = compiler._NVRTCProgram.compile
    monkeypatch.setattr(
        compiler._NVRTCProgram,
        "compile",
        lambda program, options=(), *rest: asked.append(options) or compile_(program, options, *rest),
    )
    kernel = fold("float32", 4, "sum", 2, divided=False)
    binary, _ = compiler.compile_using_nvrtc(kernel.source, OPTIONS, arch="90", filename=f"{kernel.name}.cu")
    assert binary
    assert set(OPTIONS) <= set(asked[0])
    assert not any("ftz" in option for option in asked[0])


@pytest.mark.parametrize("dtype", [*checks.REALS, *checks.INTEGERS, *checks.COMPLEXES], ids=str)
def test_sixteen_bytes_are_read_and_written_at_once(nvrtc, dtype):
    text = assembled(nvrtc, fold(dtype.name, dtype.itemsize, "sum", 4, divided=False).source, "compute_90")
    assert text.count("ld.global.v") >= 4
    assert text.count("st.global.v") >= 4
    assert "local" not in text  # the table of the vectors is taken apart


def test_without_the_options_products_and_sums_would_be_one(nvrtc):
    source = fold("complex64", 8, "prod", 2, divided=False).source
    assert "fma" in assembled(nvrtc, source, "compute_90", options=("-std=c++17",))


@pytest.mark.usefixtures("nvrtc")
def test_what_is_used_of_cupy_is_there():
    cupy = pytest.importorskip("cupy")
    names = set()
    for path in (*PACKAGE.glob("*.py"), *(PACKAGE.parent / "ddp").glob("torch_*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        names |= {each for each in used if re.fullmatch(r"cupy(\.\w+)+", each)}
    assert len(names) >= 20
    for each in sorted(names):
        attrgetter(each.removeprefix("cupy."))(cupy)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.filterwarnings("error")
def test_streams_are_no_arrays_and_those_of_others_are_taken_without_a_warning():
    cupy = pytest.importorskip("cupy")
    assert device_of(cupy.cuda.Stream.null) is HOST
    assert cupy.cuda.Stream.from_external(SimpleNamespace(__cuda_stream__=lambda: (0, 4096))).ptr == 4096


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    "name", ["compiled", "cubins", "device", "digits", "kernels", "nccl", "packed", "placement", "present", "uint8"]
)
def test_every_module_is_imported_without_a_driver(name):
    script = f"import warnings; warnings.simplefilter('ignore', UserWarning); import mpiagg.cuda.{name}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
