"""What a step of sharded training is: gradients are reduced, parts updated, and all have what has become of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Array, Form
from mpiagg.collectives.flags import Flags
from mpiagg.collectives.functions import allreduce
from mpiagg.optimizers.base import square_of
from mpiagg.plans.background import threads_allowed
from mpiagg.sharded.division import Part, Unit
from mpiagg.sharded.gradients import Gradients
from mpiagg.sharded.storage import Storage
from mpiagg.sharded.traffic import Traffic
from mpiagg.transport import Channel


class ShardedTraining:
    """What sharded training of any kind of module has in common; see :class:`Sharded`."""

    comm: MPI.Intracomm
    stage: int
    clip_norm: float | None
    _channel: Channel
    _traffic: Traffic
    _units: list[Unit]
    _work: list[np.dtype[Any]]
    _turns: int
    _open: list[Callable[[], object]]
    _fault: Exception | None

    # -- what the kinds of modules do

    def _check(self, module: Any, optimizer: Any, layers: Any) -> list[Form]:
        """Validate the module and the optimizer; return the forms of the parameters."""
        raise NotImplementedError

    def _split_for(self, split: str | None) -> str:
        """Return how tensors are divided, if that can be."""
        raise NotImplementedError

    def _describe_optimizer(self) -> str:
        """Return what all ranks must agree on of the optimizer."""
        raise NotImplementedError

    def _lay_out(self) -> None:
        """Make what is shared; collective."""
        raise NotImplementedError

    def _update(self, present: Sequence[bool], *, wait: bool) -> None:
        """Update this rank's parts of the parameters that have a gradient on any rank, and publish all.

        Unless it is to ``wait``, parameters are published in the background.
        """
        raise NotImplementedError

    def _kept(self, index: int, k: int) -> dict[str, Any]:
        """Return what the optimizer keeps for this rank's part of a tensor."""
        raise NotImplementedError

    def _check_kept(self, index: int, kept: Mapping[str, Any]) -> None:
        """Raise ValueError if the optimizer cannot keep this for a part of a tensor."""
        raise NotImplementedError

    def _keep(self, index: int, k: int, kept: Mapping[str, Any]) -> None:
        """Let the optimizer keep this for this rank's part of a tensor."""
        raise NotImplementedError

    def _hyperparameters(self) -> Any:
        """Return how the optimizer steps."""
        raise NotImplementedError

    def _load_hyperparameters(self, given: Any) -> None:
        """Let the optimizer step as this says; ValueError if it cannot."""
        raise NotImplementedError

    def _buffers(self) -> dict[str, Array]:
        """Return what is saved beside the parameters: copies, on the host."""
        return {}

    def _load_buffers(self, given: Mapping[str, Array]) -> None:
        """Write NumPy arrays like these copies to what they are of."""

    def _stream(self) -> AbstractContextManager[object]:
        """Return a block in which devices are asked in the streams in which the module is computed."""
        return nullcontext()

    # -- making

    def _take_up(self, storage: Storage, trained: Sequence[int], names: Sequence[str]) -> None:
        """Make what all kinds have, once there is a storage; collective."""
        rank, units = self._channel.rank, self._units
        self._storage, self._names, self._trained = storage, list(names), list(trained)
        self._open.append(storage.free)
        self._masters: dict[int, Array] = {}
        for k in trained:
            if self._work[k] != units[k].form.dtype:
                device, own = units[k].form.device, storage.own(k)
                self._masters[k] = device.empty(own.shape, self._work[k])
                device.convert(self._masters[k], own)
        turns = len(units) if self.stage == 1 else self._turns
        self._gradients = Gradients(self._traffic, units, trained, self._work, turns)
        self._open.append(self._gradients.free)
        members = [index for k in trained for index in units[k].members]
        self._flag = {index: place for place, index in enumerate(sorted(members))}
        self._unit_of = {index: k for k, unit in enumerate(units) for index in unit.members}
        self._flags = Flags(self.comm, len(members))
        self._open.append(self._flags.free)
        self._present: dict[int, bool] = {}
        self._fault = None
        self._parts: list[dict[int, Part]] = [{part.tensor: part for part in unit.parts(rank)} for unit in units]
        self._flags.share(lambda: [False] * len(members))  # all have written their parts

    # -- steps

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Return a block of calls that only one thread makes at a time, after what the module's stream has to do."""
        with self._channel.one_thread, self._stream():
            yield

    def _note(self, fault: Exception) -> None:
        """Keep the first fault of a step, which is raised when all ranks can learn of it."""
        self._fault = self._fault or fault

    def _send(self, k: int, gradients: Mapping[int, Any], *, background: bool) -> None:
        """Send the gradients of the next unit; what is wrong with them is raised when all ranks can learn of it."""
        self._gradients.make_room(k)
        given: dict[int, Array | None] = {}
        for index in self._units[k].members:
            gradient = gradients.get(index)
            try:
                if gradient is not None:
                    gradient = self._checked_gradient(index, gradient)
                self._present[index] = gradient is not None
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
                self._note(error)
                gradient = None
            given[index] = gradient
        with self._when_copied():
            self._gradients.bring_in(k, given)
            self._gradients.start(background=background)

    def _when_copied(self) -> AbstractContextManager[object]:
        """Return a block in which a device waits for the gradients that are copied otherwise."""
        return nullcontext()

    def _checked_gradient(self, index: int, gradient: Any) -> Array:
        """Return a parameter's gradient as an array; raise TypeError or ValueError if it is none."""
        raise NotImplementedError

    def _finish(self, *, wait: bool) -> float | None:
        """Update the parts with the gradients that have been sent; return their norm, if they are clipped.

        Unless it is to ``wait``, parameters may be on their way afterwards, where a thread brings them forward.
        """
        wait = wait or not threads_allowed()
        self._await_parameters()
        there, fault = self._present, self._fault
        self._discard()

        def which() -> list[bool]:
            if fault is not None:
                raise fault
            return [there.get(index, False) for index in self._flag]

        present: list[bool] = self._flags.share(which).astype(bool).tolist()
        norm = self._clip()

        def update() -> list[bool]:
            try:
                self._update(present, wait=wait)
            finally:
                if wait:
                    self._await_parameters()
            return present

        self._flags.share(update)
        return norm

    def _discard(self) -> None:
        """Forget the gradients of a step, all of which have been sent."""
        self._gradients.come_back()
        self._gradients.begin()
        self._present, self._fault = {}, None

    def _clip(self) -> float | None:
        """Scale this rank's parts of the gradients so that all have the norm that is wanted at most; return theirs."""
        if self.clip_norm is None:
            return None
        squares = np.zeros(1)
        with np.errstate(over="ignore", invalid="ignore"):  # a warning may be an error, on this rank alone
            for own in self._gradients.own.values():
                squares += square_of(own)
        norm = math.sqrt(float(allreduce(squares, comm=self.comm)[0]))
        factor = self.clip_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
        if not factor >= 1:  # of NaN all become NaN
            for own in self._gradients.own.values():
                np.multiply(own, factor, out=own)
        return norm

    def _values(self, k: int) -> Array:
        """Return this rank's part of a unit in the dtype in which it is updated."""
        return self._masters[k] if k in self._masters else self._storage.own(k)

    def _await_parameters(self) -> None:
        """Wait for all parameters that are on their way."""
        for k in self._trained:
            self._storage.wait(k)

    def _publish(self, k: int, *, background: bool = False) -> None:
        """Let all ranks have what this one's part has become; in the ``background`` until the storage waits."""
        if k in self._masters:
            own = self._storage.own(k, read=False)
            self._units[k].form.device.convert(own, self._masters[k])
        self._storage.publish(k, background=background)
