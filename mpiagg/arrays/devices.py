"""Devices: where arrays lie, and in which order an accelerator does what it is asked for.

The host is NumPy. An accelerator's arrays have NumPy's interface, too: NumPy's own functions work on them (by
``__array_ufunc__`` and ``__array_function__``), so that what is computed is written once. What is left are
memory, streams, copies from and to the host, and kernels that NumPy has no words for: they stand here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy.typing as npt

from mpiagg.arrays.codecs import Codec
from mpiagg.arrays.reductions import Array, Reduction
from mpiagg.errors import DeviceError


class Device(ABC):
    """Where arrays lie.

    Attributes
    ----------
    name : str
        ``"cpu"``, ``"cuda:0"`` and so on.
    """

    name: str

    @property
    def description(self) -> str:
        """Where arrays lie, for words that ranks compare: which device of its kind matters to a rank alone."""
        return f" on {self.kind}"

    @property
    def kind(self) -> str:
        """The name without a number."""
        return self.name.partition(":")[0]

    @abstractmethod
    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return a new array, uninitialised."""

    @abstractmethod
    def borrow(self, start: int, length: int, dtype: npt.DTypeLike, owner: object = None) -> Array:
        """Return an array over memory that somebody else owns: ``owner``, or who keeps it alive while it is used."""

    @abstractmethod
    def address(self, array: Array) -> int:
        """Return where the first element lies."""

    @abstractmethod
    def convert(self, target: Array, source: Array) -> None:
        """Write an array's values in the dtype of another of the same shape, as ``casting="unsafe"`` does."""

    @abstractmethod
    def codec(self, name: str) -> Codec:
        """Return the codec of that name, for arrays that lie here.

        Raises
        ------
        ValueError
            If there is none; the message lists the known names.
        """

    @abstractmethod
    def from_host(self, array: Array) -> Array:
        """Return a copy of a NumPy array, here."""

    @abstractmethod
    def to_host(self, array: Array) -> Array:
        """Return a copy of an array as a NumPy array, when all that it waits for is done."""


class Stream(ABC):
    """What a device is asked for in one order; it goes on with that while the program does other things.

    Inside ``with stream:`` all that this thread asks of the device goes there.
    """

    @abstractmethod
    def __enter__(self) -> object: ...

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    @abstractmethod
    def follow(self) -> None:
        """Let what comes next wait for all that has been asked for so far in this thread's present stream."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all that was asked for here is done."""


class Accelerator(Device):
    """A device with memory of its own, which does what it is asked for in streams.

    All its work, copies included, is only asked for: it is done later, in the order of this thread's present stream.
    """

    @property
    @abstractmethod
    def identity(self) -> str:
        """What tells the device from all others, whatever number a process knows it by."""

    @property
    def visible(self) -> Sequence[str]:
        """The identities of all devices of this kind that the process could use."""
        return (self.identity,)

    def present(self) -> AbstractContextManager[object]:
        """Return a block in which this is the thread's present device of its kind."""
        return nullcontext()

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new stream, which waits for no other unless it is told to."""

    @abstractmethod
    def synchronise(self) -> None:
        """Wait until all that was asked for in this thread's present stream is done."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all that this process has asked for, in any stream, is done."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Array:
        """Return bytes of the host's, as a NumPy array, that the device copies from and to by itself."""

    @abstractmethod
    def copy(self, target: Array, source: Array) -> None:
        """Ask for a copy of bytes between contiguous arrays of equal length: one is here, the other here or pinned."""

    @abstractmethod
    def fold(self, vectors: Sequence[Array], how: Reduction) -> Callable[[], None]:
        """Return a call that asks for one kernel: it combines vectors, in their order, and writes the result to all.

        Parameters
        ----------
        vectors : sequence of arrays
            Contiguous, of one length and dtype, which is ``how.dtype`` or half precision combined in it.
        how : Reduction
            How they are combined, and what is done last.
        """

    @abstractmethod
    def kth_largest(self, magnitudes: Array, k: int) -> Any:
        """Return the k-th largest of a contiguous vector of numbers, none of them negative or NaN, when it is found."""

    # -- memory that processes share

    @abstractmethod
    def allocate(self, nbytes: int) -> Array:
        """Return bytes that other processes can map."""

    @abstractmethod
    def export(self, memory: Array) -> bytes:
        """Return a handle by which other processes map what :meth:`allocate` returned."""

    @abstractmethod
    def open(self, handle: bytes, nbytes: int) -> Array:
        """Map the bytes of another process's handle."""

    @abstractmethod
    def close(self, memory: Array) -> None:
        """Give back what :meth:`open` returned; nobody uses it any more."""

    # -- collectives

    def nccl(self) -> Nccl:
        """Return the device maker's own collectives, not connected yet.

        Raises
        ------
        DeviceError
            If there are none.
        """
        raise DeviceError(f"{self.name} has no NCCL")


class Nccl(ABC):
    """The device maker's own collectives, among ranks that have a device each.

    All its work is asked for in this thread's present stream. Vectors are contiguous; operators are ``"sum"``,
    ``"prod"``, ``"min"`` and ``"max"``. All ranks ask for the same, in one order.

    Attributes
    ----------
    device : Accelerator
        This rank's.
    """

    device: Accelerator

    @abstractmethod
    def unique_id(self) -> bytes:
        """Return by what the ranks of a new connection find one another; one of them asks for it."""

    @abstractmethod
    def connect(self, unique_id: bytes, rank: int, size: int) -> None:
        """Connect with the other ranks; all of them call it together."""

    @abstractmethod
    def all_reduce(self, vector: Array, op: str) -> None:
        """Reduce vectors in place, everywhere."""

    @abstractmethod
    def reduce(self, vector: Array, op: str, root: int) -> None:
        """Reduce vectors, in place on the root; elsewhere they stay as they are."""

    @abstractmethod
    def broadcast(self, vector: Array, root: int) -> None:
        """Write the root's vector to all."""

    @abstractmethod
    def all_gather(self, vector: Array, own: Array) -> None:
        """Write every rank's part, all of one length, to all vectors; ``own`` is this rank's part of its vector."""

    @abstractmethod
    def reduce_scatter(self, vector: Array, own: Array, op: str) -> None:
        """Leave that part of the reduction in ``own``, this rank's part of its vector, and anything in the others."""

    @abstractmethod
    def group(self) -> AbstractContextManager[None]:
        """Return the context in which collectives are collected, and asked for together at its end."""

    @abstractmethod
    def close(self, *, abort: bool) -> None:
        """Disconnect: together with the others, or in the middle of what is under way."""
