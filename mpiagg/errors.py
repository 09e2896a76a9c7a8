"""The exceptions that mpiagg raises.

::

    Error                     anything that goes wrong in mpiagg itself
    |-- ScheduleError         a schedule that is not a correct collective
    |-- MismatchError         ranks that disagree about what they are doing
    |-- StallError            a wait that passed its deadline (also a TimeoutError)
    |-- PlanError             a plan used after it was freed, or while it runs; two threads on one communicator
    |-- RankFailedError       ranks that have died
    |-- NonFiniteError        gradients with NaN or infinity in them (also a FloatingPointError)
    `-- DeviceError           a device that cannot be used

Bad arguments are plain ``ValueError`` and ``TypeError``.
"""

from __future__ import annotations


class Error(Exception):
    """The base of the exceptions of this package."""


class ScheduleError(Error):
    """A schedule that is not a correct collective.

    Attributes
    ----------
    rank, round, chunk : int or None
        Where the fault shows, as far as it can be said.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        round: int | None = None,  # noqa: A002 - the field's word for it
        chunk: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.round = round
        self.chunk = chunk


class MismatchError(Error):
    """Ranks disagree about what they are doing; the message says who passed what."""


class StallError(Error, TimeoutError):
    """A wait passed its deadline; the message says what was waited for."""


class PlanError(Error):
    """A plan was used after it was freed, or started while it runs; or two threads use a communicator at once."""


class RankFailedError(Error):
    """Ranks have died, of whom others go on; the message names them.

    Attributes
    ----------
    ranks : tuple of int
        Those of the communicator that were known to have died.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class NonFiniteError(Error, FloatingPointError):
    """Gradients, or what they were aggregated to, have NaN or infinity in them; the message says where."""


class DeviceError(Error):
    """A device that was asked for cannot be used; the message says why, and what would help."""
