"""A rank of ``bench/soak.py``, which starts them: it works, and now and then writes down what it holds.

    mpiexec -n 4 python -m mpi4py -m bench.soak_rank FOLDER SECONDS EVERY SEED

FOLDER/R.json gets rank R's samples, as they come.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

from mpi4py import MPI

from bench.soak_actions import Scene, draw
from mpiagg.benchmarks import machine
from mpiagg.transport import Channel, channels

TOGETHER = 20
"""After how many actions the ranks agree on whether it is time to look, or to end."""


def sample() -> dict[str, int]:
    """Return what this process holds."""
    gc.collect()
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    open_channels = list(channels._channels.values())  # noqa: SLF001 - what is not to be seen is what leaks
    page = os.sysconf("SC_PAGE_SIZE")
    return {
        "rss": resident * page,
        "rss of its own": (resident - shared) * page,
        "file descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - and what lists them
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208 - no folder of the disk
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "channels": len(open_channels),
        "plans": sum(len(channel.open) - len(kept_plans(channel)) for channel in open_channels),
        "objects": len(gc.get_objects()),
    }


def kept_plans(channel: Channel) -> list[object]:
    """Return the plans of the calls that a channel keeps."""
    return [call.plan for call in channel.calls.values() if call.plan is not None]


def main() -> None:
    """Work for so many seconds."""
    folder, seconds, every, seed = Path(sys.argv[1]), *map(float, sys.argv[2:5])
    world = MPI.COMM_WORLD
    scene, done, samples = Scene(world, int(seed), folder / "checkpoint"), Counter[str](), []
    start = time.monotonic()
    told = {"machine": machine.facts()} if world.rank == 0 else {}
    look, end = 0.0, False
    while not end:
        for _ in range(TOGETHER):
            action = draw(scene.rng)
            action(scene)
            done[action.__name__] += 1
        now = world.bcast(time.monotonic() - start)
        end = now > seconds
        if now >= look or end:
            look += every
            samples.append({"seconds": now, **sample()})
            text = json.dumps({**told, "samples": samples, "done": done, "ended": end})
            (folder / f"{world.rank}.json").write_text(text + "\n")
    scene.free()


if __name__ == "__main__":
    main()
