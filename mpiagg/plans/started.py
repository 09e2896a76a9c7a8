"""Plans of nonblocking calls that are alike: kept, and run again by the next one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from mpiagg.arrays import Array
from mpiagg.plans.bound import COPIED_BYTES, STAGED_BYTES, bind_arrays, plan_of
from mpiagg.plans.calls import borrowed, place_of
from mpiagg.plans.choices import Memory
from mpiagg.plans.operation import Operation
from mpiagg.transport import Channel, FreedAfterUse


def kept_plan(  # noqa: PLR0917 - what a plan is made of
    channel: Channel, operation: Operation, x: Array | None, out: Array | None, key: Hashable, tag: int
) -> KeptPlan:
    """Return a plan for arrays like these; where they are long and come again, for those in their place."""
    calls, longest = channel.calls, max((part.nbytes for part in (x, out) if part is not None), default=0)
    if longest > STAGED_BYTES:
        placed = key, tag, x is out, place_of(x), place_of(out)
        if placed in calls or longest > COPIED_BYTES or calls.asked_before(placed):
            return calls.find(placed, lambda: KeptPlan(channel, operation, x, out, tag, copied=False))
    return calls.find((key, tag, x is out), lambda: KeptPlan(channel, operation, x, out, tag, copied=True))


class KeptPlan(FreedAfterUse):
    """A plan on vectors of its own, to which data is copied, or on the caller's, which it must not keep alive.

    Parameters
    ----------
    channel : Channel
    operation : Operation
    x, out : numpy.ndarray or None
        Vectors on the host.
    tag : int
    copied : bool
    """

    def __init__(
        self, channel: Channel, operation: Operation, x: Array | None, out: Array | None, tag: int, *, copied: bool
    ) -> None:
        super().__init__()
        self._copied = copied
        bound: list[Array | None] = [
            None if part is None else np.empty_like(part) if self._copied else borrowed(part) for part in (x, out)
        ]
        self._x, self._out = bound[1] if x is out else bound[0], bound[1]
        program = bind_arrays(channel, operation, self._x, self._out, tag, memory=Memory.NONE)
        self.plan = plan_of(channel, operation, program, None)
        # It is freed after its use: a call goes on when the communicator is freed.
        self.plan.by_messages = self.plan.lasts = True

    @property
    def nbytes(self) -> int:
        """The memory that belongs to it alone."""
        own = (self._x, self._out) if self._copied else ()
        return super().nbytes + sum(part.nbytes for part in own if part is not None)

    def on(self, x: Array | None, out: Array | None) -> PlanOnArrays:
        """Return the plan as one that runs on arrays like those that it was made for, in the same place if long."""
        self.begin_use()
        return PlanOnArrays(self, x, out)

    def bring(self, x: Array | None) -> None:
        """Take what is sent."""
        if self._copied and x is not None and self._x is not None:
            self._x[:] = x

    def give(self, out: Array | None) -> None:
        """Give what has been received."""
        if self._copied and out is not None and self._out is not None:
            out[:] = self._out


class PlanOnArrays:
    """One run of a kept plan, on arrays; it has the methods of a plan."""

    def __init__(self, kept: KeptPlan, x: Array | None, out: Array | None) -> None:
        self._kept = kept
        self._arrays: tuple[Array | None, Array | None] | None = (x, out)
        self._plan: Any = kept.plan

    def start(self) -> None:
        """Bring the data in and post the first messages."""
        assert self._arrays is not None
        self._kept.bring(self._arrays[0])
        self._plan.start()

    def test(self) -> bool:
        """Go as far as possible without waiting, and return whether the result is there."""
        if not self._plan.test():
            return False
        if self._arrays is not None:
            self._kept.give(self._arrays[1])
            self._arrays = None
        return True

    def wait(self) -> None:
        """Wait until the plan is done."""
        self._plan.wait()

    def free(self) -> None:
        """Let the plan be run by others."""
        self._kept.end_use()
