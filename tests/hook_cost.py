"""What a hook of DDP costs a parameter on a device, on the stand-in: no test, as it is a time. It is run by hand.

    python -m mpi4py tests/hook_cost.py

It prints microseconds of a core: the median, and the mean, in which what starts the buckets is, and what the stand-in
itself computes for them. Of forty steps the quickest.
"""

import sys
import time
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parent / "mpi_torch"))

import pytest
import torch
import torch_on_standin
from test_device_modules import CAP, COMM, Many, zero

import mpiagg
from mpiagg.ddp import hooks
from mpiagg.transport import channel_of


def main():
    """Measure and print."""
    torch.set_num_threads(1)
    channel_of(COMM).aware = False
    times, arrive = [], hooks.Hooks._arrive

    def timed(self, index):
        began = time.thread_time_ns()
        arrive(self, index)
        times.append((time.thread_time_ns() - began) / 1e3)

    with pytest.MonkeyPatch.context() as patched, torch_on_standin.installed(patched):
        patched.setattr(hooks.Hooks, "_arrive", timed)
        model, found = Many(), []
        with mpiagg.DDP(model, COMM, bucket_bytes=CAP) as ddp:
            for step in range(40):
                zero(model, to_none=True)
                loss = ddp(1.0 + step)
                times.clear()
                loss.backward()
                found.append((median(times), fmean(times)))
    medians, means = zip(*found, strict=True)
    print(f"{len(times)} parameters: median {min(medians):.1f} us, mean {min(means):.1f} us")  # noqa: T201 - what it is run for


if __name__ == "__main__":
    main()
