"""What a collective costs inside ``jax.jit`` beside the array function, and whether calls keep their order.

    mpiexec -n 2 python -m mpi4py bench/jax_calls.py FILE

Medians of turns that are taken one after another, in microseconds. A further call is the difference between programs of
51 calls and of one, by 50. Long vectors are donated to the program, which then reduces them where they lie.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpiagg
import mpiagg.jax
from mpiagg.benchmarks import machine

FURTHER = 50
TURNS = 200
LONG = 2**24
"""Values of float32: 64 MiB."""
SKEWED = 1000


def timed(call: Callable[[], object]) -> float:
    """Return the microseconds that a call takes, after a barrier."""
    MPI.COMM_WORLD.Barrier()
    start = perf_counter()
    call()
    return 1e6 * (perf_counter() - start)


def in_turns(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Return the medians of calls that are timed in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 3):
        for name, call in calls.items():
            taken = timed(call)
            if turn >= 3:
                times[name].append(taken)
    return {name: round(median(each), 2) for name, each in times.items()}


def short() -> dict[str, float]:
    """Return what calls of 64 B cost."""
    x = np.ones(16, np.float32)
    given = jnp.asarray(x)

    def chain(calls: int) -> Any:
        def program(x: Any) -> Any:
            for _ in range(calls):
                x = mpiagg.jax.allreduce(x, "avg")
            return x

        return jax.jit(program)

    one, many = chain(1), chain(1 + FURTHER)

    def plain() -> None:
        for _ in range(FURTHER):
            mpiagg.allreduce(x, "avg", out=x)

    taken = in_turns(
        {
            "jit of 1 call": lambda: one(given).block_until_ready(),
            "jit of 51 calls": lambda: many(given).block_until_ready(),
            "outside jit": lambda: mpiagg.jax.allreduce(given, "avg"),
            "50 of mpiagg.allreduce": plain,
        },
        TURNS,
    )
    taken["a further call"] = round((taken["jit of 51 calls"] - taken["jit of 1 call"]) / FURTHER, 2)
    taken["mpiagg.allreduce"] = round(taken["50 of mpiagg.allreduce"] / FURTHER, 2)
    taken["over mpiagg.allreduce"] = round(taken["a further call"] - taken["mpiagg.allreduce"], 2)
    return taken


def long() -> dict[str, float]:
    """Return what a call of 64 MiB costs."""
    x = np.ones(LONG, np.float32)
    program = jax.jit(lambda x: mpiagg.jax.allreduce(x, "avg"), donate_argnums=0)
    held = [program(jnp.ones(LONG, jnp.float32))]

    def again() -> None:
        held[0] = program(held[0]).block_until_ready()

    taken = in_turns({"jit, donated": again, "mpiagg.allreduce": lambda: mpiagg.allreduce(x, "avg", out=x)}, 15)
    taken["ratio"] = round(taken["jit, donated"] / taken["mpiagg.allreduce"], 3)
    return taken


def wrong_under_skew() -> int:
    """Return how many results are wrong of a thousand programs of 24 independent calls, on ranks of random speeds."""
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    random = np.random.default_rng(rank)

    def late(x: Any, rounds: Any) -> Any:
        matrix = jnp.eye(48) + 0 * x.sum()
        return x + 0 * jax.lax.fori_loop(0, rounds, lambda _, m: m @ matrix, matrix).sum()

    @jax.jit
    def program(x: Any, rounds: Any) -> Any:
        return [mpiagg.jax.allreduce(late(x + number, rounds[number])) for number in range(24)]

    wrong = 0
    for _ in range(SKEWED):
        results = program(jnp.full(16, float(rank)), jnp.asarray(random.integers(0, 20, 24)))
        wanted = size * np.arange(24.0) + size * (size - 1) / 2
        wrong += int((np.stack(results) != wanted[:, None]).any(1).sum())
    return int(mpiagg.allreduce(np.array(wrong)))


def main() -> None:
    """Measure, and save what rank 0 has."""
    results = {"64 B": short(), "64 MiB": long(), f"wrong of {24 * SKEWED} calls under skew": wrong_under_skew()}
    if MPI.COMM_WORLD.rank == 0:
        print(results)
        found = {"machine": machine.facts(), "jax": jax.__version__, "ranks": MPI.COMM_WORLD.size, "us": results}
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
