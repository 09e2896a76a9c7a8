"""Which device of its node a rank takes, chosen before MPI starts, and which ranks share one."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

from mpiagg.arrays import Accelerator, find_device, import_for_cuda
from mpiagg.errors import DeviceError

CONTEXT_BYTES: Final = 2**29
"""What a context of one process takes of a device's memory, about."""

LIMIT: Final = "CUPY_GPU_MEMORY_LIMIT"
"""CuPy's own variable for what its memory pool may take; where it is set, the user has decided."""

_NO_DEVICE: Final = 100
"""``cudaErrorNoDevice``."""

_DRIVER: Final = Path("/proc/driver/nvidia/gpus")
"""Where the driver lists the devices of the node, also those that this process may not use."""


class _LocalVariables(NamedTuple):
    """Where a launcher tells a rank its number among those of its node, and how many these are."""

    rank: str
    size: str


_LAUNCHERS: Final = (
    _LocalVariables("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    _LocalVariables("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Hydra: MPICH, Intel MPI
    _LocalVariables("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),  # MVAPICH
    _LocalVariables("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),  # PALS
    _LocalVariables("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # Cray's PMI
    # Slurm is last: where another launcher runs inside of an allocation, Slurm's rank is that of the launcher.
    _LocalVariables("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)

_RANKS: Final = ("PMI_RANK", "PMIX_RANK")
"""What a process has that is a rank of some launcher's job, also of one that does not tell the rank on the node."""


class Runtime(Protocol):
    """What is asked of CUDA to take a device."""

    def count(self) -> int:
        """Return how many devices this process sees; 0 where there is no driver."""

    def identity(self, ordinal: int) -> str:
        """Return the UUID of a device, which is the same in all processes that see it."""

    def use(self, ordinal: int) -> None:
        """Make a device the present one of this thread."""

    def limit(self, share: int) -> None:
        """Let the memory pool take one part in ``share`` of the present device's memory."""


class Sharing(NamedTuple):
    """Ranks that have one device.

    Attributes
    ----------
    ranks : tuple of int
        Two of them at least.
    accident : bool
        Whether a device that one of them sees has no rank at all: they need not share.
    """

    ranks: tuple[int, ...]
    accident: bool


def bind_device(count: int | None = None) -> int | None:
    """Take the CUDA device of this rank: call it first of all, before MPI is imported and before a device is used.

    The ranks of a node take its devices in turn: rank r of the node takes device r modulo ``count``. Which rank of its
    node this is says the launcher, in the environment; a process that none has started takes device 0. Where a rank
    sees one device alone (Slurm's ``--gpus-per-task``, a CUDA_VISIBLE_DEVICES of its own), it takes that. The device
    becomes the present one of this thread in CuPy, and in torch if that is imported and knows CUDA.

    Where several ranks of the node certainly share the device, CuPy's default memory pool is limited to three
    quarters of an equal part of its memory, less 512 MiB for a context, unless CUPY_GPU_MEMORY_LIMIT is set.
    ``mpiagg info`` shows what every rank gets.

    Parameters
    ----------
    count : int, optional
        How many devices of those that this process sees are taken, from the first one on; all of them by default.

    Returns
    -------
    int or None
        The number of the device, as CuPy and torch count them; None where there is no driver or no device, so that a
        script can go on without.

    Raises
    ------
    ValueError
        If ``count`` is less than 1, or more than the devices that this process sees.
    DeviceError
        If CuPy is missing or broken, the driver is too old for it, or the launcher does not say which rank of the node
        this is. In the last case call it after MPI is initialised: then it is collective, and the ranks find out.

    Examples
    --------
    >>> import mpiagg
    >>> device = mpiagg.bind_device()  # doctest: +SKIP
    >>> from mpi4py import MPI  # doctest: +SKIP
    """
    return bind(runtime(), count)


def bind(cuda: Runtime, count: int | None = None) -> int | None:
    """Do what `bind_device` does, by a runtime that is given."""
    if count is not None and count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    visible = cuda.count()
    if visible == 0:
        return None
    if count is not None and count > visible:
        raise ValueError(f"count={count}, but this process sees {visible} devices")
    devices = count or visible
    rank, size = _place(certain=devices > 1)
    ordinal = rank % devices
    cuda.use(ordinal)
    share = sharers(rank, size, devices, devices_of_node() if visible == 1 else devices)
    if share > 1 and not os.environ.get(LIMIT):
        cuda.limit(share)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(ordinal)
    return ordinal


def local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return which of the ranks of its node this process is, as its launcher says; None if none does."""
    launcher = _launcher(environment)
    return None if launcher is None else int(environment[launcher.rank])


def local_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many ranks are on this process's node, as its launcher says; None if none does."""
    launcher = _launcher(environment)
    if launcher is None:
        return None
    text = environment.get(launcher.size, "")
    if launcher.rank == "SLURM_LOCALID":
        return _of_node(text, environment.get("SLURM_NODEID", ""))
    return int(text) if text.isdecimal() else None


def sharers(rank: int, size: int | None, devices: int, of_node: int | None) -> int:
    """Return how many ranks certainly have the device of this one; 1 where that is not known.

    Parameters
    ----------
    rank, size : int
        This rank's number among those of its node, and how many these are, where it is known.
    devices : int
        Among how many devices this rank has its choice.
    of_node : int or None
        How many devices the node has for the job, where it is known.
    """
    if size is None:
        return 1
    if devices > 1:
        return len(range(rank % devices, size, devices))
    # One that is seen alone may be the only one for all ranks, or each rank's own.
    return 1 if of_node is None else -(-size // of_node)


def devices_of_node() -> int | None:
    """Return how many devices the node has for all ranks of the job together, whatever this process sees of them."""
    text = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if text.isdecimal():
        return int(text) or None
    try:
        return len(list(_DRIVER.iterdir())) or None
    except OSError:
        return None


def shared_devices(identities: Sequence[str], visible: Sequence[Sequence[str]] = ()) -> list[Sharing]:
    """Return which ranks share a device, and whether they need not.

    Parameters
    ----------
    identities : sequence of str
        The UUID of each rank's device; empty for a rank without one.
    visible : sequence of sequences of str
        For each rank the UUIDs of the devices that it sees. Without them no sharing is an accident.
    """
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, identity in enumerate(identities):
        if identity:
            ranks[identity].append(rank)
    return [
        Sharing(tuple(together), any(other not in ranks for rank in together if visible for other in visible[rank]))
        for together in ranks.values()
        if len(together) > 1
    ]


def runtime() -> Runtime:
    """Return CUDA, by way of CuPy.

    Raises
    ------
    DeviceError
        If CuPy cannot be imported.
    """
    return _CuPy(import_for_cuda("cupy"))


class _CuPy:
    """The runtime of CuPy."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._cuda = cupy.cuda.runtime

    def count(self) -> int:
        try:
            return int(self._cuda.getDeviceCount())
        except self._cuda.CUDARuntimeError as error:
            # Without any driver CUDA complains that the driver is too old.
            if error.status == _NO_DEVICE or self._cuda.driverGetVersion() == 0:
                return 0
            raise DeviceError(
                f"CUDA cannot be used: {error} (the driver is for CUDA {_version(self._cuda.driverGetVersion())}, CuPy "
                f"for {_version(self._cuda.runtimeGetVersion())}); take the CuPy that the driver is for"
            ) from error

    def identity(self, ordinal: int) -> str:
        return cast("Accelerator", find_device(f"cuda:{ordinal}")).identity

    def use(self, ordinal: int) -> None:
        with self._told():
            self._cupy.cuda.Device(ordinal).use()

    def limit(self, share: int) -> None:
        with self._told():
            _, total = self._cuda.memGetInfo()
            self._cupy.get_default_memory_pool().set_limit(size=pool_bytes(total, share))

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except self._cuda.CUDARuntimeError as error:
            raise DeviceError(
                f"this rank's CUDA device cannot be used: {error}; in exclusive mode ranks share one through MPS alone"
            ) from error


def pool_bytes(total: int, share: int) -> int:
    """Return how much of a device's memory CuPy's pool may have in each of the processes that share it.

    Three quarters of an equal part, without a context: the rest is for memory that ranks map, for torch and libraries.
    """
    return max(0, total // share - CONTEXT_BYTES) * 3 // 4


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _launcher(environment: Mapping[str, str]) -> _LocalVariables | None:
    return next((one for one in _LAUNCHERS if environment.get(one.rank, "").isdecimal()), None)


def _of_node(text: str, node: str) -> int | None:
    """Return what a list of Slurm's, like ``2(x3),1``, says of the node with a number."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.removesuffix(")").partition("(x")
        if not count.isdecimal():
            return None
        counts += [int(count)] * int(times or 1)
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def _place(*, certain: bool) -> tuple[int, int | None]:
    """Return this rank's number among those of its node, and how many these are; ``certain`` if it matters."""
    rank = local_rank()
    if rank is not None:
        return rank, local_size()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        node = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
        place = node.Get_rank(), node.Get_size()
        node.Free()
        return place
    variable = next((variable for variable in _RANKS if variable in os.environ), None)
    if variable is not None and certain:
        raise DeviceError(
            f"this process is a rank of a job ({variable} is set), but its launcher does not say which rank of the "
            "node; import mpi4py.MPI before bind_device(), and the ranks find out"
        )
    return 0, 1 if variable is None else None
