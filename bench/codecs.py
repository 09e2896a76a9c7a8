"""Measure the conversions between float32 and half precision, and the codecs, in one thread.

    python bench/codecs.py [FILE.json]

Each is timed in turns with what came before it: the conversions of NumPy and of ml_dtypes, and the steps of bf16 and u8
in arrays that are made anew. An addition of as many float32 takes turns, too, and torch's conversion where it is
installed. Saves ``results/codecs.json``.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from mpiagg.arrays import Array, codec
from mpiagg.arrays.codecs import EPSILON, HEADER_BYTES
from mpiagg.arrays.conversions import BLOCK, convert
from mpiagg.benchmarks import machine

RESULTS = Path(__file__).parent / "results" / "codecs.json"
LENGTHS = (2**8, 2**11, 2**14, 2**18, 2**22)
SECONDS = 0.5
"""How long the turns of one row take, at least."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WIRES = {"fp16": np.dtype(np.float16), "bf16": BFLOAT16}

Call = Callable[[], object]


def copy(target: Array, source: Array) -> None:
    """Convert as NumPy does, or as ml_dtypes does for its own dtype."""
    np.copyto(target, source, casting="unsafe")


def round_to_half(values: Array, encoded: Array) -> None:
    """Round to float16."""
    with np.errstate(over="ignore"):
        copy(encoded.view(np.float16), values)


def widen_half(encoded: Array, values: Array) -> None:
    """Widen float16."""
    copy(values, encoded.view(np.float16))


def round_in_new_arrays(values: Array, encoded: Array) -> None:
    """Round to bfloat16."""
    for start in range(0, len(values), BLOCK):
        single = values[start : start + BLOCK].astype(np.float32, copy=False)
        bits = single.view(np.uint32)
        upper = bits >> np.uint32(16)
        rounded = bits + ((upper & np.uint32(1)) + np.uint32(0x7FFF))
        rounded >>= np.uint32(16)
        upper |= np.uint32(0x40)
        np.copyto(rounded, upper, where=np.isnan(single))
        np.copyto(encoded.view(np.uint16)[start : start + BLOCK], rounded, casting="unsafe")


def widen_in_new_arrays(encoded: Array, values: Array) -> None:
    """Widen bfloat16."""
    for start in range(0, len(values), BLOCK):
        wide = encoded.view(np.uint16)[start : start + BLOCK].astype(np.uint32)
        wide <<= np.uint32(16)
        np.copyto(values[start : start + BLOCK], wide.view(np.float32))


def grid(least: float, greatest: float) -> tuple[Any, Any]:
    """Return the scale and the upper level of a chunk, for ranges that float32 is enough for."""
    span = greatest - least
    scale = np.float32(255) / (np.float32(span) + np.float32(min(EPSILON, span / 1024)))
    return scale, np.rint(np.float32(greatest) * scale)


def encode_in_new_arrays(values: Array, encoded: Array) -> None:
    """Encode with u8."""
    least, greatest = np.float32(values.min()), np.float32(values.max())
    header, codes = encoded[:HEADER_BYTES].view(np.float32), encoded[HEADER_BYTES:]
    header[:] = 0
    header[:2] = least, greatest
    codes[len(values) :] = 0
    scale, upper = grid(float(least), float(greatest))
    for start in range(0, len(values), BLOCK):
        level = values[start : start + BLOCK].astype(np.float32)
        level *= scale
        np.rint(level, out=level)
        np.clip(level, upper - np.float32(255), upper, out=level)
        level -= upper - np.float32(255)
        np.copyto(codes[: len(values)][start : start + BLOCK], level, casting="unsafe")


def decode_in_new_arrays(encoded: Array, values: Array) -> None:
    """Write the values of an encoded buffer of u8."""
    scale, upper = grid(*map(float, encoded[:8].view(np.float32)))
    for start in range(0, len(values), BLOCK):
        level = encoded[HEADER_BYTES:][: len(values)][start : start + BLOCK].astype(np.float32)
        level += upper - np.float32(255)
        level /= scale
        np.copyto(values[start : start + BLOCK], level, casting="same_kind")


def times(calls: dict[str, Call]) -> dict[str, float]:
    """Return the median time of each call in microseconds; they take turns."""
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until or len(taken["add"]) < 11:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return {name: 1e6 * median(some) for name, some in taken.items()}


def by_torch(target: Array, source: Array) -> dict[str, Call]:
    """Return torch's conversion on views of two arrays, if torch is there."""
    try:
        import torch  # noqa: PLC0415 - an extra
    except ImportError:
        return {}
    torch.set_num_threads(1)

    def tensor(array: Array) -> Any:
        if array.dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    return {"torch": lambda: tensor(target).copy_(tensor(source))}


def conversions(values: Array) -> dict[str, tuple[dict[str, Call], Array]]:
    """Return the calls for every conversion of an array, and where they write."""
    found: dict[str, tuple[dict[str, Call], Array]] = {}
    for half in WIRES.values():
        for source in (values.astype(half), values):
            target = np.empty(len(values), half if source is values else np.float32)

            def call(way: Callable[[Array, Array], None], target: Array = target, source: Array = source) -> Call:
                return lambda: way(target, source)

            calls = {"before": call(copy), "now": call(convert), **by_torch(target, source)}
            found[f"{source.dtype.name} to {target.dtype.name}"] = calls, target
    return found


def wires(values: Array) -> dict[str, tuple[dict[str, Call], Array]]:
    """Return the calls for the two ways of every wire, and where they write."""
    before: dict[str, tuple[Callable[[Array, Array], None], Callable[[Array, Array], None]]] = {
        "fp16": (round_to_half, widen_half),
        "bf16": (round_in_new_arrays, widen_in_new_arrays),
        "u8": (encode_in_new_arrays, decode_in_new_arrays),
    }
    found: dict[str, tuple[dict[str, Call], Array]] = {}
    for name, (encode, decode) in before.items():
        encoded, back = np.empty(codec(name).nbytes(len(values)), np.uint8), np.empty_like(values)

        def call(way: Callable[[Array, Array], None], source: Array, target: Array) -> Call:
            return lambda: way(source, target)

        there = {"before": call(encode, values, encoded), "now": call(codec(name).encode, values, encoded)}
        again = {"before": call(decode, encoded, back), "now": call(codec(name).decode, encoded, back)}
        found[f"{name} encode {values.dtype}"], found[f"{name} decode {values.dtype}"] = (there, encoded), (again, back)
    return found


def row(length: int, what: str, calls: dict[str, Call], target: Array) -> dict[str, Any]:
    """Compare what the calls write, time them, and return a row."""
    calls["before"]()
    expected = target.tobytes()
    calls["now"]()
    if target.tobytes() != expected:
        raise SystemExit(f"{what}: other bytes than before")
    left, right = np.zeros((2, length), np.float32)
    taken = times({**calls, "add": lambda: np.add(left, right, out=left)})
    print(f"{what:24}", " ".join(f"{name} {value:10.1f} us" for name, value in taken.items()), flush=True)
    ratios = {"ratio": taken["now"] / taken["before"], "over_add": taken["now"] / taken["add"]}
    return {"values": length, "what": what, **{f"{name}_us": value for name, value in taken.items()}, **ratios}


def main() -> None:
    """Measure all, and save."""
    rows = []
    for length in LENGTHS:
        print(f"# {length} values")
        values = np.random.default_rng(0).standard_normal(length).astype(np.float32)
        cases = {**conversions(values), **wires(values), **wires(values.astype(np.float64))}
        for what, (calls, target) in cases.items():
            rows.append(row(length, what, calls, target))
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    path.write_text(json.dumps({"machine": machine.facts(), "rows": rows}, indent=1) + "\n")
    print(f"saved {path}")


if __name__ == "__main__":
    main()
