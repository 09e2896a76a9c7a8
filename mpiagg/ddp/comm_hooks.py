"""Communication hooks as torch's DDP has them: a function of the user's aggregates the buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpiagg.ddp.buckets import Bucket
from mpiagg.ddp.torch_modules import tensor_of

CommHook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]
"""Takes its state and a bucket, and returns a future of the bucket's buffer, aggregated."""


class GradBucket:
    """A bucket as a communication hook sees it: what ``torch.distributed.GradBucket`` has, which Python cannot make.

    Attributes
    ----------
    own : torch.Tensor
        The memory in which the result is wanted.
    """

    def __init__(self, number: int, bucket: Bucket, parameters: Sequence[torch.Tensor], *, last: bool) -> None:
        self._number, self._last = number, last
        self.own = self._buffer = tensor_of(bucket.vector)
        self._parameters = [parameters[index] for index in bucket.views]

    def index(self) -> int:
        """Return the bucket's number, in the order in which buckets are aggregated."""
        return self._number

    def buffer(self) -> torch.Tensor:
        """Return all gradients in one vector."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, which are views of the buffer."""
        parts = self._buffer.split([x.numel() for x in self._parameters])
        return [part.view(x.shape) for part, x in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients they are."""
        return self._parameters

    def is_last(self) -> bool:
        """Return whether it is the last bucket of a backward pass."""
        return self._last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another vector in the buffer's place until the hook is done; it may have another dtype."""
        self._buffer = buffer


class HookFlight:
    """Aggregates a bucket by a communication hook.

    Attributes
    ----------
    fault : Exception or None
        What was wrong with the hook this time. It is raised when all buckets are back: the other ranks wait for them.
    """

    def __init__(self, hook: CommHook, state: Any, bucket: GradBucket) -> None:
        self._hook, self._state, self._bucket = hook, state, bucket
        self._future: torch.futures.Future[torch.Tensor] | None = None
        self.fault: Exception | None = None

    def start(self) -> None:
        """Call the hook."""
        self._future = self.fault = None
        self._bucket.set_buffer(self._bucket.own)
        try:
            self._future = self._hook(self._state, self._bucket)
        except Exception as error:  # noqa: BLE001 - see above
            self.fault = error

    def test(self) -> bool:
        """Return whether it is done."""
        return self._future is None or not hasattr(self._future, "done") or self._future.done()

    def wait(self, meanwhile: Sequence[Any] = ()) -> None:
        """Wait for the future, and bring its result into the bucket."""
        del meanwhile
        if self.fault is None:
            try:
                self._take_result()
            except Exception as error:  # noqa: BLE001 - see above
                self.fault = error

    def _take_result(self) -> None:
        if self._future is None or not hasattr(self._future, "wait"):  # of torch's there are two classes
            raise TypeError(f"a communication hook returns a torch.futures.Future, not {type(self._future).__name__}")
        result = self._future.wait()
        result = result[0] if isinstance(result, list | tuple) else result
        buffer = self._bucket.own
        if result.data_ptr() != buffer.data_ptr():
            buffer.copy_(result.reshape(buffer.shape))

    def __call__(self) -> None:
        """Call the hook and wait."""
        self.start()
        self.wait()
