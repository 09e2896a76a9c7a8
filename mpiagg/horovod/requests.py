"""What a rank asks for: a collective under a name, which all ranks must ask for alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import torch

from mpiagg.errors import DeviceError
from mpiagg.torch.streams import behind_present

SUM: Final = 1
"""The number of the op that adds up."""

OPS: Final = {0: "Average", SUM: "Sum", 2: "Adasum", 3: "Min", 4: "Max", 5: "Product"}
"""The ops by their numbers."""

_WITH_JOINED: Final = {"allreduce", "allgather", "broadcast", "barrier"}  # no rank has rows for one that is not there


class Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be the same on all ranks.

    Attributes
    ----------
    name, kind : str
        The name, and which collective it is.
    dtypes, shapes : tuple
        Those of each tensor; a first dimension in which ranks may differ is 0.
    device : str
        The kind of device that tensors are on.
    op, root : int
        The number of the op, and the rank that has the values.
    prescale, postscale : float
        What values are multiplied with before and after the reduction.
    words : str
        What else is asked for.
    spare : bool
        Whether the rank has no values: it goes with another kind that others ask for under this name.
    """

    name: str
    kind: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    device: str = "cpu"
    op: int = SUM
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    words: str = ""
    spare: bool = False

    def difference(self, other: Terms) -> str:
        """Return in which respects two differ, in words; nothing if in none, or if the other goes with this one."""
        if other.spare and self.kind != other.kind:
            return ""
        return ", ".join(
            f"{field} {getattr(self, field)!r} and {getattr(other, field)!r}"
            for field in self.__struct_fields__
            if field != "spare" and getattr(self, field) != getattr(other, field)
        )

    def refused_to_joined(self) -> str:
        """Return why a rank that has joined cannot take part, in words; nothing if it can."""
        reduces = self.kind in ("allreduce", "reducescatter")
        if self.kind in _WITH_JOINED and not (reduces and self.op not in (0, 1, 2)):
            return ""
        what = f"{self.kind} by {OPS[self.op]}" if reduces else self.kind
        return f"{what} does not go on with ranks that have called join()"

    def stand_ins(self, gpu: int) -> list[torch.Tensor]:
        """Return what a rank that has joined takes part with: zeros, or no rows; on its GPU if others are on one.

        Raises
        ------
        DeviceError
            If they cannot be made.
        """
        device = torch.device(self.device, gpu if self.device == "cuda" else None)
        try:
            return [
                torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
                for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
            ]
        except (RuntimeError, AssertionError) as error:  # the latter where torch has no CUDA
            raise DeviceError(f"a rank that has no tensor of {self.name!r} cannot take part: {error}") from error


class TensorRequest:
    """A collective that a rank has asked for.

    Parameters
    ----------
    terms : Terms
        What all ranks must ask for alike.
    tensors : sequence of torch.Tensor
        This rank's.
    in_place : bool
        Whether the results go there.
    splits : sequence of int, optional
        How many rows go to each rank.
    task : callable, optional
        What is done in place of a collective.
    """

    def __init__(
        self,
        terms: Terms,
        tensors: Sequence[torch.Tensor] = (),
        *,
        in_place: bool = False,
        splits: Sequence[int] = (),
        task: Callable[[], object] | None = None,
    ) -> None:
        self.terms, self.tensors, self.in_place = terms, list(tensors), in_place
        self.splits, self.task = splits, task
        self.in_order = behind_present(self.tensors)
        self.encoded = msgspec.msgpack.encode(terms)
        self.over = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def go_with(self, terms: Terms) -> None:
        """Take part in what others ask for, without values."""
        self.terms, self.in_place = terms, False
        self.tensors = terms.stand_ins(self.tensors[0].device.index or 0)
        self.in_order = behind_present(self.tensors)

    def end(self, result: object = None, error: BaseException | None = None) -> None:
        """Let those who wait have the result, or the error."""
        self.result, self.error = result, error
        self.over.set()
