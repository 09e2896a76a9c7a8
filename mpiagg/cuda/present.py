"""A CUDA device that is the thread's own for a block."""

from __future__ import annotations

import cupy


class Present(cupy.cuda.Device):  # type: ignore[misc]  # CuPy ships no types
    """A device of CuPy's that makes no context on another one.

    At the end of a block CuPy goes back to the device before. Of a thread that has used none the driver says 0, and to
    go back there would make a context on it, of some 500 MiB: such a thread keeps this device instead.
    """

    def __enter__(self) -> object:
        if not cupy.cuda.driver.ctxGetCurrent():
            self.use()
        return super().__enter__()
