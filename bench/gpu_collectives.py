"""Parts of ``bench/gpu.py``: all-reduces of float32 on a device, each way beside the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiagg
from bench.gpu_rank import Call, Setting
from bench.gpu_report import LONG
from mpiagg.arrays import Array
from mpiagg.benchmarks.contenders import Contender, registered_zeros
from mpiagg.benchmarks.on_device import DeviceTask
from mpiagg.errors import DeviceError
from mpiagg.plans import binding, bound, on_node, slots
from mpiagg.plans import choices as tuning
from mpiagg.schedules import Collective
from mpiagg.transport import channel_of

KIB, MIB = 2**10, 2**20
FLOAT = np.dtype(np.float32)

SIZES = [KIB * 4**power for power in range(11)]
"""1 KiB to 1 GiB."""

SHORT = [4 * KIB * 2**power for power in range(9)]
"""4 KiB to 1 MiB: where vectors go by way of the host, or by messages."""

PIECED = [16 * MIB, 64 * MIB, 256 * MIB]
PIECES = [256 * KIB * 2**power for power in range(6)]
"""256 KiB to 8 MiB."""
MOST_PIECED = 512 * MIB
"""Bytes of all ranks' vectors together: longer ones take too long."""

QUICK = [KIB, 128 * KIB]

NEVER, ALWAYS = -1, 2**62

MODULES = (binding, bound, tuning, on_node, slots)
"""Those of which something is given another value."""

Builder = Callable[[DeviceTask], Contender]


def allreduce(setting: Setting) -> None:
    """Measure all sizes: staged, by slots, by CUDA IPC, by hand, and the limit of the device's memory."""
    ways = Ways(setting, aware=False)
    # Those that the goals are about first: there may be no time for all.
    sizes = sorted(setting.sizes(SIZES, QUICK), key=lambda nbytes: (nbytes < LONG, nbytes))
    ways.measure(
        sizes,
        {
            "staged": staged,
            "slots": auto,
            "ipc": ways.mapped(max(sizes)),
            "native": DeviceTask.native,
            "by hand": DeviceTask.by_hand,
            "by hand, mpiagg": by_hand,
            "by hand, mpiagg registered": ways.by_hand_registered(max(sizes)),
        },
        limit=True,
    )


def messages(setting: Setting) -> None:
    """Measure messages of the device's memory beside staged ones."""
    _of_device_memory(setting, {"aware": auto})


def library(setting: Setting) -> None:
    """Measure the MPI library's own all-reduce of the device's arrays beside messages that are staged."""
    _of_device_memory(setting, {"mpi": DeviceTask.library})


def _of_device_memory(setting: Setting, builders: Mapping[str, Builder]) -> None:
    if not channel_of(setting.comm).aware:
        setting.save(left_out=dict.fromkeys(builders, "messages do not reach the device's memory"))
        return
    other = Ways(setting, aware=False)

    def elsewhere(task: DeviceTask) -> Contender:
        own = replace(task, comm=other.comm, aware=False)
        return staged(own)._replace(task=own)

    Ways(setting, aware=True).measure(setting.sizes(SIZES, QUICK), {"staged": elsewhere, **builders})


def threshold(setting: Setting) -> None:
    """Measure from which size on messages are faster than going by way of the host as a whole."""
    ways = Ways(setting, aware=channel_of(setting.comm).aware)
    sizes = setting.sizes(SHORT, QUICK)
    mapped = ways.mapped(max(sizes))
    builders = {
        "by way of the host": partial(built_with, BY_WAY_OF_HOST=ALWAYS, build=auto),
        "messages": partial(built_with, BY_WAY_OF_HOST=NEVER, build=staged),
        "slots": partial(built_with, BY_WAY_OF_HOST=NEVER, build=auto),
        "ipc": partial(built_with, BY_WAY_OF_HOST=NEVER, build=mapped),
    }
    ways.measure(sizes, builders, seconds=1.0)
    setting.save(at_present=tuning.BY_WAY_OF_HOST)


def pieces(setting: Setting) -> None:
    """Measure how long the pieces of staged messages should be, and what it gains that they overlap."""
    ways = Ways(setting, aware=False)
    lengths = [64 * KIB, 256 * KIB] if setting.quick else PIECES
    builders: dict[str, Builder] = {
        f"pieces of {length // KIB} KiB": partial(built_with, piece_bytes=always(length), build=staged)
        for length in lengths
    }
    builders["in one piece"] = partial(built_with, piece_bytes=always(ALWAYS), build=staged)
    builders |= {"pieces as they are": staged, "by hand": DeviceTask.by_hand, "by hand, mpiagg": by_hand}
    sizes = [nbytes for nbytes in PIECED if nbytes * setting.comm.size <= MOST_PIECED]
    ways.measure(setting.sizes(sizes, [MIB]), builders, seconds=3.0)


def always(length: int) -> Callable[..., int]:
    """Return what says that pieces are of one length, of whatever chunk."""
    return lambda *_: length


# -- how it is measured


class Ways:
    """Tasks on the ranks of a setting, on a communicator of their own.

    Parameters
    ----------
    setting : Setting
    aware : bool
        Whether messages are of the device's memory; all ranks say the same.
    """

    def __init__(self, setting: Setting, *, aware: bool) -> None:
        self.setting = setting
        self.comm = setting.comm.Dup()
        self.aware = channel_of(self.comm).aware = aware

    def task(self, nbytes: int, memory: Array | None = None) -> DeviceTask:
        """Return a sum of float32 in place."""
        return DeviceTask(
            *(Collective.ALLREDUCE, self.comm, nbytes // FLOAT.itemsize, FLOAT, "sum", 0, memory),
            device=self.setting.device,
            aware=self.aware,
        )

    def mapped(self, most: int) -> Builder:
        """Return what builds auto on memory that all ranks have mapped; of so many bytes at most."""
        device = self.setting.device
        memory = self._if_possible(lambda: registered_zeros(self.comm, most // FLOAT.itemsize, FLOAT, device))

        def build(task: DeviceTask) -> Contender:
            other = replace(task, memory=memory())
            return auto(other)._replace(task=other)

        return build

    def by_hand_registered(self, most: int) -> Builder:
        """Return what builds `by_hand` on memory of the host's that all ranks have mapped."""

        def make() -> Array:
            memory = registered_zeros(self.comm, most // FLOAT.itemsize, FLOAT)
            pin(self.setting.device.kind, memory)
            return memory

        memory = self._if_possible(make)
        return lambda task: by_hand(task, memory())

    def _if_possible(self, make: Callable[[], Array]) -> Callable[[], Array]:
        """Make an array, and return what returns it, or raises why a rank has none; collective."""
        made, fault = None, ""
        try:
            made = make()
        except (MemoryError, DeviceError, ValueError) as error:
            fault = str(error)
        missing = np.array(made is None)
        self.comm.Allreduce(MPI.IN_PLACE, missing, MPI.LOR)

        def get() -> Array:
            if missing or made is None:
                raise ValueError(fault or "another rank has no such memory")
            return made

        return get

    def measure(
        self, sizes: list[int], builders: Mapping[str, Builder], *, seconds: float | None = None, limit: bool = False
    ) -> None:
        """Check and time all ways at all sizes, and save every size when it is done; collective.

        Without ``seconds``, a size takes two, or one if it is shorter than 1 MiB.
        A ``limit`` is how long the device takes to read and write as many bytes as all ranks' vectors have.
        """
        s = self.setting
        s.save(sizes=sizes, left_out={})
        whole = self._whole(max(sizes)) if limit else None
        for nbytes in sizes:
            task = self.task(nbytes)
            built = {name: self._built(name, build, task) for name, build in builders.items()}
            contenders = {name: one for name, one in built.items() if one is not None}
            wrong = np.array([(one.task or task).check(one.call) for one in contenders.values()])
            s.comm.Allreduce(MPI.IN_PLACE, wrong)
            calls: dict[str, Call] = {name: one.call for name, one in contenders.items()}
            if whole is not None:
                calls["limit"] = partial(whole, nbytes)
            row = {"size": nbytes, "times": s.time(calls, seconds or (1.0 if nbytes < MIB else 2.0))}
            for one in contenders.values():
                one.free()
            s.save({**row, "wrong": dict(zip(contenders, wrong.tolist(), strict=True))})

    def _built(self, name: str, build: Builder, task: DeviceTask) -> Contender | None:
        """Return a way to carry a task out, or None where it is left out, as on all ranks."""
        try:
            return build(task)
        except ValueError as error:
            self.setting.saved["left_out"][name] = str(error)
            return None

    def _whole(self, most: int) -> Callable[[int], None]:
        """Return a call in which rank 0 copies as many bytes as all ranks' vectors have, on the device."""
        device, ranks = self.setting.device, self.comm.size
        if self.comm.rank:
            return lambda _: None
        source, target = (device.empty(most * ranks, np.uint8) for _ in range(2))
        source.fill(0)

        def copy(nbytes: int) -> None:
            device.copy(target[: nbytes * ranks], source[: nbytes * ranks])
            device.synchronise()

        return copy


def auto(task: DeviceTask) -> Contender:
    """Return what a user gets who names no algorithm, as a plan."""
    return task.ours("auto", None, planned=True)


def staged(task: DeviceTask) -> Contender:
    """Return what such a user gets where ranks have no slots to go by, and messages do not reach the device."""
    return built_with(task, by_slots=lambda *_: False, build=auto)


def by_hand(task: DeviceTask, memory: Array | None = None) -> Contender:
    """Return a copy to the host, this package's all-reduce there, and a copy back, one after the other."""
    device, vector = task.device, task.vector.view(np.uint8)
    host = (device.pinned(vector.nbytes) if memory is None else memory.view(np.uint8))[: vector.nbytes]
    values = host.view(task.dtype)
    plan = mpiagg.allreduce_init(values, task.op, out=values, comm=task.comm)

    def call() -> None:
        device.copy(host, vector)
        device.synchronise()
        plan()
        device.copy(vector, host)
        device.synchronise()

    return Contender("by hand", call, plan.free)


def pin(kind: str, memory: Array) -> None:
    """Let a device reach memory of the host's by itself.

    Raises
    ------
    ValueError
        If it cannot.
    """
    if kind != "cuda":
        raise ValueError(f"{kind} does not pin memory that is there")
    runtime: Any = import_module("cupy").cuda.runtime
    try:
        runtime.hostRegister(memory.__array_interface__["data"][0], memory.nbytes, 0)
    except runtime.CUDARuntimeError as error:
        raise ValueError(str(error)) from error


@contextmanager
def constants(**values: object) -> Iterator[None]:
    """Let some constants and functions of the package be others."""
    kept = {(m, name): getattr(m, name) for m in MODULES for name in values if hasattr(m, name)}
    try:
        for module, name in kept:
            setattr(module, name, values[name])
        yield
    finally:
        for (module, name), value in kept.items():
            setattr(module, name, value)


@contextmanager
def unknown(comm: MPI.Intracomm, **values: object) -> Iterator[None]:
    """Let some constants have other values, and let no call know what was worked out with those it had."""
    calls = channel_of(comm).calls
    calls.free()
    try:
        with constants(**values):
            yield
    finally:
        calls.free()


def built_with(task: DeviceTask, build: Builder, **values: object) -> Contender:
    """Return what is built while some constants of the package have other values."""
    with unknown(task.comm, **values):
        return build(task)
