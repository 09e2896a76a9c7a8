"""What becomes of a DDP of torch's that is copied, saved, loaded or converted."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import torch
from mpi4py import MPI

from mpiagg.ddp.comm_hooks import CommHook

PREFIX: Final = "module."
"""What stands before the names in the state of a DDP, as in that of torch's."""


class SavedModule(torch.nn.Module):  # type: ignore[misc]  # mypy sees no classes of torch's where torch is not installed
    """A module that can be copied and saved, and then sets up what ranks share at its first step."""

    module: torch.nn.Module

    def _begin_life(self) -> None:
        torch.nn.Module.__init__(self)
        self._laid_out = self._queued = self._expected = False
        self._pass_syncs = True
        self._buffers_due = True
        self._comm_hook: tuple[CommHook, Any] | None = None

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state of a DDP, whose names begin with ``module.``, or of the module itself; see torch's.

        It is loaded on this rank alone: load it on all, or call :meth:`DDP.broadcast_parameters` afterwards.
        """
        prefixed = {PREFIX + name: value for name, value in state_dict.items()}
        own = self.state_dict().keys()
        if not own & state_dict.keys() and own & prefixed.keys():
            state_dict = prefixed
        return torch.nn.Module.load_state_dict(self, state_dict, strict, assign)

    def free(self) -> None:
        """See :meth:`DDP.free`; a copy that has not trained holds nothing."""
        if self._laid_out:
            super().free()
        self._freed = True

    # -- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> SavedModule:
        """Return a DDP of a copy of the module, on the same ranks, which sets up its buckets at its first step.

        An aggregation that was given is shared by both.
        """
        made = type(self).__new__(type(self))
        own = {"comm": self.comm, "_given": self._given, "_comm_hook": self._comm_hook}
        made.__setstate__({**self._state(), **own, "module": copy.deepcopy(self.module, memo)})
        return made

    def __copy__(self) -> SavedModule:
        """Refuse: the copy would train the same module."""
        raise TypeError("DDP can be copied with its module, by copy.deepcopy, and not without")

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a saved one is made of: on the ranks of the world, with the default aggregation."""
        of_world = MPI.Comm.Compare(self.comm, MPI.COMM_WORLD) in (MPI.IDENT, MPI.CONGRUENT)
        own = (self._given[0], self._comm_hook, self._asked.process_group, self._asked.device_mesh)
        if not of_world or any(each is not None for each in own):
            raise TypeError("a DDP with an aggregation, a hook or ranks of its own cannot be saved; its module can")
        return type(self).__new__, (type(self),), self._state()

    def _state(self) -> dict[str, Any]:
        kept = ("module", "_asked", "_cap", "_overlap", "_buffers_due", "training")
        return {"_given": (None, self._given[1]), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a saved one was; it sets itself up at its first step."""
        self._begin_life()
        self.comm, self._syncing, self._freed = MPI.COMM_WORLD, True, False
        for name, value in state.items():
            setattr(self, name, value)

    # -- devices and dtypes

    @property
    def device(self) -> torch.device:
        """The device of the module's first parameter."""
        return next(iter(self.module.parameters())).device

    def half(self) -> SavedModule:
        """Call :meth:`to` with float16."""
        self.to(torch.float16)
        return self

    def bfloat16(self) -> SavedModule:
        """Call :meth:`to` with bfloat16."""
        self.to(torch.bfloat16)
        return self

    def float(self) -> SavedModule:
        """Call :meth:`to` with float32."""
        self.to(torch.float32)
        return self

    def double(self) -> SavedModule:
        """Call :meth:`to` with float64."""
        self.to(torch.float64)
        return self
