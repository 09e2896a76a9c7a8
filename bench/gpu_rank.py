"""A rank of a part of ``bench/gpu.py``, which starts them; rank 0 saves what is measured, as it comes.

    mpiexec -n 2 python -m bench.gpu_rank PART FILE.json [--device cuda] [--quick] [--seconds 60]

It runs at the top of the repository.
"""

from __future__ import annotations

import faulthandler
import json
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from mpiagg.cuda.placement import bind_device
from mpiagg.errors import DeviceError
from mpiagg.launch import job

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiagg.arrays import Accelerator

PARTS = {
    "allreduce": "gpu_collectives",
    "messages": "gpu_collectives",
    "library": "gpu_collectives",
    "threshold": "gpu_collectives",
    "pieces": "gpu_collectives",
    "memory": "gpu_device",
    "folds": "gpu_device",
    "codecs": "gpu_device",
    "training": "gpu_training",
}
"""What can be measured, and the module whose function of that name does it; ``messages`` and ``library`` are of
device memory, and crash where the MPI library cannot."""

Call = Callable[[], object]


@dataclass
class Setting:
    """Where a part is measured, and how it is saved.

    Attributes
    ----------
    comm : MPI.Intracomm
        The ranks.
    device : Accelerator
        That of this rank.
    quick : bool
        Whether it is only tried out.
    largest : int
        Bytes of the longest vectors.
    path : Path
        The file.
    saved : dict
        What it holds.
    """

    comm: MPI.Intracomm
    device: Accelerator
    quick: bool
    largest: int
    path: Path
    saved: dict[str, Any] = field(default_factory=dict)

    def sizes(self, usual: list[int], quick: list[int]) -> list[int]:
        """Return the sizes in bytes to measure."""
        return [size for size in (quick if self.quick else usual) if size <= self.largest] or quick[:1]

    def time(self, calls: Mapping[str, Call], seconds: float) -> dict[str, dict[str, float]]:
        """Time calls in turns, all of them in so many seconds, about; collective.

        Returns
        -------
        dict of dict
            For each call, in microseconds, ``us``, the median over the blocks of the slowest rank's mean, the
            ``least`` and the ``most``, ``device_us`` where the device has a clock, and how many ``calls`` were timed.
        """
        from mpiagg.benchmarks import timing  # noqa: PLC0415 - needs MPI
        from mpiagg.benchmarks.on_device import DeviceWatch  # noqa: PLC0415 - needs MPI

        pace = timing.Pace(1000, 3, seconds / 20 if self.quick else seconds)
        entries = [timing.TimedContender(call) for call in calls.values()]
        results = timing.run(self.comm, entries, pace, partial(DeviceWatch, self.device))
        found = {}
        for name, (taken, repeats, by_device) in zip(calls, results, strict=True):
            us = 1e6 * taken
            times = {"us": float(np.median(us)), "least": float(us.min()), "most": float(us.max())}
            times |= {} if by_device is None else {"device_us": 1e6 * float(np.median(by_device))}
            found[name] = {**times, "calls": repeats * len(us)}
        return found

    def save(self, row: Mapping[str, Any] | None = None, **facts: object) -> None:
        """Add a row and facts to what is saved, and save it; on rank 0."""
        self.saved.update(facts)
        if row is not None:
            self.saved.setdefault("rows", []).append(row)
        if self.comm.rank == 0:
            unfinished = self.path.with_suffix(".new")
            unfinished.write_text(json.dumps(self.saved, indent=1) + "\n")
            unfinished.replace(self.path)


@click.command()
@click.argument("part", type=click.Choice(list(PARTS)))
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--device", "name", default="cuda")
@click.option("--quick", is_flag=True, help="Only try it out.")
@click.option("--largest", default=2**30, help="Bytes of the longest vectors.")
@click.option("--seconds", default=300.0, help="When this process ends itself, whatever it hangs in.")
def main(part: str, path: Path, name: str, *, quick: bool, largest: int, seconds: float) -> None:
    """Be a rank that measures a part."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    with suppress(DeviceError):  # what is wrong is told when all ranks are together
        if name == "cuda":
            bind_device()
    world = job.join()
    try:
        measure(world, part, path, name, quick=quick, largest=largest)
    except Exception:  # noqa: BLE001 - whatever it is, the other ranks would wait for this one
        traceback.print_exc()
        job.abort(world)


def measure(world: MPI.Intracomm, part: str, path: Path, name: str, *, quick: bool, largest: int) -> None:
    """Measure a part."""
    from mpiagg.benchmarks import machine  # noqa: PLC0415 - needs MPI
    from mpiagg.benchmarks.on_device import facts, take_device  # noqa: PLC0415 - needs MPI
    from mpiagg.transport import channel_of  # noqa: PLC0415 - needs MPI

    device: Any = take_device(channel_of(world), name)
    setting = Setting(world, device, quick, largest, path)
    setting.save(machine={**machine.facts(), "device": facts(device)}, rows=[])
    getattr(import_module(f"bench.{PARTS[part]}"), part)(setting)


if __name__ == "__main__":
    main()
