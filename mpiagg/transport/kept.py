"""What calls were resolved into, found again by what was passed; the longest unused goes, with all that it holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from threading import Lock
from typing import Any, Final, Protocol, TypeVar

from mpiagg.errors import PlanError

MOST: Final = 256
"""How many calls a communicator keeps."""

MOST_BYTES: Final = 64 * 2**20
"""How much memory of their own they may have together."""


class _Freed(Protocol):
    def free(self) -> object: ...


def free_if_over(plan: _Freed) -> None:
    """Free a plan, unless an error has left it in the middle: to free it then could hang, and its channel keeps it."""
    with suppress(PlanError):
        plan.free()


class Keepable:
    """Something that is kept until it has not been used for long.

    Attributes
    ----------
    used : bool
        Whether it was used since this was last looked at.
    once : bool
        Whether it cannot be found again, and is freed when it has run.
    plan : object
        The plan that it runs, if it has one of its own; else None.
    """

    used: bool = True
    once: bool = True
    plan: Any = None

    @property
    def nbytes(self) -> int:
        """The memory that belongs to it alone, as much at all times."""
        return 0 if self.plan is None else int(self.plan.nbytes)

    def free(self) -> None:
        """Free the plan, unless an error has left it in the middle: the channel keeps it then."""
        if self.plan is not None:
            free_if_over(self.plan)


class FreedAfterUse(Keepable):
    """Something that may be forgotten while it is used, by other threads among others: it is given back after that."""

    def __init__(self) -> None:
        self._users, self._forgotten, self._counting = 0, False, Lock()

    def begin_use(self) -> None:
        """Be used by one more."""
        with self._counting:
            self._users += 1

    def end_use(self) -> None:
        """Be used by one less."""
        with self._counting:
            self._users -= 1
            last = self._forgotten and not self._users
        if last:
            self.give_back()

    def free(self) -> None:
        """Give back what it holds, now or when it is not used any more."""
        with self._counting:
            self._forgotten = True
            unused = not self._users
        if unused:
            self.give_back()

    def give_back(self) -> None:
        """Give back what it holds."""
        super().free()


Kept = TypeVar("Kept", bound=Keepable)


class Calls(dict[Hashable, Keepable]):
    """The calls of one communicator.

    Finding one is a look-up and setting ``used``. When there are too many, those are freed that were not used since
    they were last passed over, the oldest first (the CLOCK rule).
    """

    def __init__(self) -> None:
        super().__init__()
        self._nbytes = 0
        self._asked: set[Hashable] = set()

    def find(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Return what is kept for a key, or make it."""
        found = self.get(key)
        if found is None:
            found = make()
            self._keep(key, found)
            self._make_room(key)
        found.used = True
        return found  # type: ignore[return-value]  # a key stands for one kind of call

    def forget(self, key: Hashable) -> Keepable:
        """Return what is kept for a key, and keep it no longer."""
        call = self.pop(key)
        self._nbytes -= call.nbytes
        return call

    def asked_before(self, key: Hashable) -> bool:
        """Return whether this has been asked of a key before: what has come twice is taken to come again."""
        if key in self._asked:
            self._asked.remove(key)
            return True
        if len(self._asked) >= MOST:
            self._asked.clear()
        self._asked.add(key)
        return False

    def _keep(self, key: Hashable, call: Keepable) -> None:
        self[key] = call
        self._nbytes += call.nbytes

    def _make_room(self, newest: Hashable) -> None:
        while len(self) > 1 and (len(self) > MOST or self._nbytes > MOST_BYTES):
            oldest = next(iter(self))
            call = self.forget(oldest)
            if call.used or oldest == newest:
                call.used = False
                self._keep(oldest, call)
            else:
                call.free()

    def free(self) -> None:
        """Free all of them."""
        self._asked.clear()
        while self:
            self.forget(next(iter(self))).free()
