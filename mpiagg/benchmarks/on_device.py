"""The benchmark on a device: its arrays and their check, what is measured there beside the usual, and the clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpiagg.arrays import HOST, Accelerator, Array, Device, convert, find_device
from mpiagg.benchmarks.contenders import Contender, Task, TimedCall, cleared
from mpiagg.benchmarks.flags import CUDA
from mpiagg.benchmarks.timing import Watch
from mpiagg.collectives.mpi_ops import mpi_op
from mpiagg.cuda import placement
from mpiagg.errors import DeviceError, MismatchError
from mpiagg.plans.choices import BY_WAY_OF_HOST, NATIVE
from mpiagg.transport import Channel
from mpiagg.transport.awareness import awareness


def take_device(channel: Channel, name: str) -> Accelerator | None:
    """Return this rank's device, None being the host; collective. ``"cuda"`` alone is that of its place on the node.

    Raises
    ------
    click.ClickException
        On all ranks, if a rank cannot use it.
    """
    if name == HOST.name:
        return None
    found: list[Accelerator] = []

    def take() -> str:
        if name == CUDA:
            placement.bind_device()  # again, where the launcher did not tell the place
        device = find_device(name)
        if device.kind == CUDA:
            placement.runtime().use(_ordinal(device))
        assert isinstance(device, Accelerator)
        found.append(device)
        return f"bench on {device.kind}"

    try:
        channel.agree_on(take)
    except (DeviceError, ValueError, MismatchError) as error:  # on all ranks, in words of each one's own
        raise click.ClickException(str(error)) from None
    return found[0]


def facts(device: Accelerator) -> dict[str, Any]:
    """Return what is known of a device."""
    known: dict[str, Any] = {"name": device.name, "identity": device.identity}
    if device.kind == CUDA:
        cupy: Any = import_module("cupy")
        runtime = cupy.cuda.runtime
        known["model"] = runtime.getDeviceProperties(_ordinal(device))["name"].decode()
        known |= {"cupy": cupy.__version__, "driver": runtime.driverGetVersion(), "cuda": runtime.runtimeGetVersion()}
    return known


def title(device: Accelerator, channel: Channel) -> str:
    """Return the lines of a table's head that say where its arrays lie, and how messages reach them."""
    own = awareness()
    way = "are of the device's memory (CUDA-aware)" if channel.aware else "go by way of the host (staged)"
    reason = own.reason if own.able == channel.aware else "as all ranks have agreed; mpiagg info says why"
    model = facts(device).get("model", device.identity)
    short = f"vectors of up to {BY_WAY_OF_HOST // 2**10} KiB go to the host as a whole"
    long = "" if channel.aware or channel.node.size < channel.size else "; longer ones by slots that ranks map"
    return f"# on {device.name}, {model}; {short}{long}\n# messages of longer ones {way}: {reason}"


@dataclass(frozen=True)
class DeviceTask(Task):
    """A collective of arrays on a device.

    Attributes
    ----------
    device : Accelerator
        Where its memory lies.
    aware : bool
        Whether messages reach that.
    """

    device: Accelerator = field(kw_only=True)
    aware: bool = field(default=False, kw_only=True)

    def zeros(self, length: int) -> Array:
        """Return a new vector of zeros."""
        return cleared(self.device.empty(length, self.dtype))

    # -- contenders

    def native(self) -> Contender:
        """Return the MPI library's blocking collective of copies on the host, as this package calls it."""
        return self.ours(NATIVE, None, planned=False)

    def by_hand(self) -> Contender:
        """Return what a user does without this package: a copy to the host, MPI_Allreduce, a copy back.

        Raises
        ------
        ValueError
            If MPI has no such operator or dtype.
        """
        op, device = self._mpi_op(), self.device
        vector = self.vector.view(np.uint8)
        pinned = device.pinned(vector.nbytes)
        on_host = pinned.view(self.dtype)

        def call() -> None:
            device.copy(pinned, vector)
            device.synchronise()
            self.comm.Allreduce(MPI.IN_PLACE, on_host, op)
            device.copy(vector, pinned)
            device.synchronise()

        return Contender("by-hand", call)

    def library(self) -> Contender:
        """Return the MPI library's blocking collective of the device's arrays themselves.

        Raises
        ------
        ValueError
            If messages do not reach them, or MPI has no such operator or dtype.
        """
        if not self.aware:
            raise ValueError("messages do not reach the device's memory")
        self._mpi_op()
        library = self.library_call()

        def call() -> None:
            self.device.synchronise()
            library()

        return Contender("mpi", call)

    def _mpi_op(self) -> MPI.Op:
        if not self.has_mpi_op:
            raise ValueError("MPI has no averages and no half precision")
        return mpi_op(self.op, self.dtype)

    def copy(self) -> TimedCall:
        """Return a plain copy of the vector to other memory of the device."""
        other, vector = (x.view(np.uint8) for x in (self.zeros(self.count), self.vector))

        def call() -> None:
            self.device.copy(other, vector)
            self.device.synchronise()

        return call

    # -- test data, which never comes to the host

    def repeated(self, period: npt.NDArray[Any], length: int) -> Array:
        """Return a vector in which some values repeat, in the task's dtype."""
        result = self.device.empty(length, self.dtype)
        filled = min(len(period), length)
        convert(result[:filled], self.device.from_host(period[:filled].astype(self.dtype)))
        while filled < length:
            more = min(filled, length - filled)
            convert(result[filled : filled + more], result[:more])
            filled += more
        return result

    def count_wrong(self, out: Array, expected: Array, off: float) -> int:
        """Return how many elements are off the expected ones by more than ``off``."""
        if not off:
            # As words, since not every device knows every dtype.
            found, wanted = (_words(x) for x in (out, expected))
            return int((found != wanted).any(axis=1).sum().item())
        right = np.abs(self._as_float32(out) - self._as_float32(expected)) <= off
        return int(np.logical_not(right).sum().item())  # a NaN is wrong, too

    def _as_float32(self, array: Array) -> Array:
        single = self.device.empty(array.shape, np.float32)
        convert(single, array)
        return single


class DeviceWatch(Watch):
    """Times a block until the device is done, and by its events, too, where it has them."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._events = _Events(_ordinal(device)) if device.kind == CUDA else None

    def start(self) -> None:
        """Begin, when the device has done what was asked of it."""
        self._device.synchronise()
        if self._events is not None:
            self._events.start()
        super().start()

    def stop(self) -> tuple[float, ...]:
        """Return the seconds until the device is done, by the processor's clock and by its own."""
        self._device.synchronise()
        taken = super().stop()  # before the events, whose cost is not the block's
        return taken if self._events is None else (*taken, self._events.stop())


class _Events:
    """Two events of CUDA's, when all streams of the device are done."""

    def __init__(self, ordinal: int) -> None:
        self._cuda: Any = import_module("cupy").cuda
        self._device = self._cuda.Device(ordinal)
        with self._device:
            self._first, self._last = self._cuda.Event(), self._cuda.Event()

    def start(self) -> None:
        with self._device:
            self._device.synchronize()
            self._first.record()

    def stop(self) -> float:
        with self._device:
            self._device.synchronize()
            self._last.record()
            self._last.synchronize()
        return 1e-3 * float(self._cuda.get_elapsed_time(self._first, self._last))


def _words(array: Array) -> Array:
    """Return a contiguous array's values as rows of unsigned integers."""
    return array.view(f"u{min(array.itemsize, 8)}").reshape(array.size, -1)


def _ordinal(device: Device) -> int:
    return int(device.name.partition(":")[2])
