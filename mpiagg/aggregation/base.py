"""What an aggregation is: a list of arrays in, the same arrays aggregated in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Literal, TypeVar

from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.errors import PlanError
from mpiagg.plan import Plan
from mpiagg.transport import channel_of

Self = TypeVar("Self", bound="Aggregation")


class Aggregation(ABC):
    """A way to aggregate lists of arrays across the ranks of a communicator.

    Subclasses say in :meth:`aggregate` what that means. Making one is collective, and so is every call that
    aggregates: all ranks make it in the same order. An aggregation is freed explicitly, or by leaving its
    ``with`` block.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The ranks; the world by default.

    Attributes
    ----------
    aggregates : {"gradients", "weights"}
        What it is meant for.
    comm : MPI.Intracomm
        The ranks.
    bytes_sent : int
        What this rank has sent so far to aggregate. Messages of the MPI library's own collectives
        (``algorithm="native"``) are not known and not counted.
    """

    aggregates: ClassVar[Literal["gradients", "weights"]] = "gradients"

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        self.comm = MPI.COMM_WORLD if comm is None else comm
        self.bytes_sent = 0
        self._channel = channel_of(self.comm)
        self._freed = False

    @abstractmethod
    def aggregate(self, tensors: Sequence[Array]) -> None:
        """Aggregate the arrays of all ranks; every array of the list is left aggregated, in place.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray
            Arrays of any shapes and layouts, the same number, shapes and dtypes on all ranks.
        """

    def aggregate_init(self, vector: Array) -> Plan[Any] | None:
        """Plan the aggregation of one array, in place, each time the plan runs; collective.

        Parameters
        ----------
        vector : numpy.ndarray
            Any array that stays where it is; of the same shape and dtype on all ranks.

        Returns
        -------
        Plan or None
            A plan, to be freed by the caller; None if this aggregation cannot be started and waited for
            separately, or must see the tensors that a vector is made of.
        """
        del vector
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved to go on later exactly as if nothing had happened."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned; collective.

        Raises
        ------
        ValueError
            If ``state`` is not of this aggregation.
        MismatchError
            On all ranks, if their states differ where they must not.
        """

        def check() -> str:
            expect_keys(state, ())
            return "no state"

        self._channel.agree_on(check)

    def free(self) -> None:
        """Give back what the aggregation holds; a second call does nothing."""
        self._freed = True

    def __enter__(self: Self) -> Self:  # noqa: PYI019 - typing.Self needs Python 3.11
        """Return the aggregation."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the aggregation."""
        self.free()

    def _require_open(self) -> None:
        if self._freed:
            raise PlanError(f"{type(self).__name__} is freed")


def expect_keys(state: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise ValueError if ``state`` has other keys than these."""
    if not isinstance(state, Mapping) or set(state) != set(keys):
        raise ValueError(f"state must have the keys {sorted(keys)}; this is {state!r}")
