"""Streams and threads of torch's: in which gradients are computed, copied, and waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from mpiagg.arrays import find_device
from mpiagg.errors import PlanError


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies on the CPU."""
    return bool(tensor.device.type == "cpu")


@contextmanager
def stream_of(tensor: torch.Tensor) -> Iterator[None]:
    """Ask a tensor's device in torch's present stream, in this block, so that it follows torch's work."""
    if is_on_host(tensor):
        yield
        return
    with present_source(tensor.device.index).inside():
        yield


def present_source(ordinal: int) -> TorchSource:
    """Return torch's present stream on a CUDA device: a hook asks for it once a gradient."""
    return _source_at(ordinal, _present_stream(ordinal))


def _by_object(ordinal: int) -> int:
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


_present_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _by_object)  # noqa: SLF001 - it has no other
"""Returns the present stream of a device by its number, as torch's compiler asks for it: the public function makes an
object, in ten calls."""


@lru_cache(maxsize=256)
def _source_at(ordinal: int, pointer: int) -> TorchSource:
    """Return a stream of torch's. It has few of them, which it never gives back."""
    return TorchSource(ordinal, pointer)


class TorchSource:
    """A stream of torch's, in which gradients are computed."""

    def __init__(self, ordinal: int, pointer: int) -> None:
        self._ordinal, self._pointer = ordinal, pointer
        self._device: Any = find_device(f"cuda:{ordinal}")  # says what is wrong, if anything is
        import cupy  # noqa: PLC0415 - CuPy is an extra

        self._stream = cupy.cuda.Stream.from_external(_TorchStream(pointer))  # which owns nothing

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Return a block in which it is the present stream of CuPy's."""
        with self._device.present(), self._stream:
            yield

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy tensors, (to, from), in this stream: in few kernels."""
        pairs = [(into, gradient) for into, gradient in pairs if into is not gradient]
        if not pairs:
            return
        into, gradients = (list(each) for each in zip(*pairs, strict=True))
        with torch.no_grad(), self._torch_inside():
            torch._foreach_copy_(into, gradients)  # of such functions torch's optimizers consist, from 2.1 on

    def _torch_inside(self) -> AbstractContextManager[object]:
        """Return a block in which it is the present stream of torch's, as it is but for gradients that came before."""
        if _present_stream(self._ordinal) == self._pointer:
            return nullcontext()
        return torch.cuda.stream(torch.cuda.ExternalStream(self._pointer, self._ordinal))  # type: ignore[no-any-return]  # of no type


class _TorchStream(NamedTuple):
    """A stream of torch's, as other libraries take it: torch's own streams say this only in newer versions."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, and the stream."""
        return 0, self.pointer


def require_threads(parameters: Iterable[Any]) -> None:
    """Raise PlanError if gradients come in a thread that must not call MPI.

    Those of a module on a GPU come in a thread of torch's, one for each device, which also ends the backward pass.
    """
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED and any(parameter.is_cuda for parameter in parameters):
        raise PlanError(
            "torch hands over the gradients of a module on a GPU in a thread of its own, and MPI was not initialised "
            "for calls from there: it needs MPI.THREAD_SERIALIZED, or MPI.THREAD_MULTIPLE, which is mpi4py's default"
        )
