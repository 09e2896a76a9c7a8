"""DDP of a module of torch's: a module itself, which takes the place of torch's ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakMethod

import torch
from mpi4py import MPI

from mpiagg.aggregation import Aggregation, AllReduce
from mpiagg.arrays import Array
from mpiagg.common.compiling import not_compiled
from mpiagg.ddp.comm_hooks import CommHook, GradBucket, HookFlight
from mpiagg.ddp.ddp import BUCKET_BYTES, DDP
from mpiagg.ddp.sparse import average_sparse
from mpiagg.ddp.steps import GradientList
from mpiagg.ddp.torch_buffers import broadcast_buffers
from mpiagg.ddp.torch_copies import SavedModule
from mpiagg.ddp.torch_keywords import NAMES, TorchKeywords
from mpiagg.ddp.torch_modules import TorchAdapter, UnsyncedParameters, not_hooked
from mpiagg.ddp.torch_outputs import watched
from mpiagg.ddp.torch_streams import require_threads
from mpiagg.errors import PlanError
from mpiagg.transport import channel_of


class TorchDDP(SavedModule, DDP):
    """Distributed data-parallel training of a ``torch.nn.Module``; ``mpiagg.DDP(module)`` is one.

    A training loop that was written for torch's ``DistributedDataParallel`` runs with it as it is: ``backward()``
    returns with aggregated gradients, parameters and buffers are broadcast when it is made, and buffers before
    a forward that follows one with gradients. :meth:`DDP.sync_gradients` after that does nothing.

    Parameters
    ----------
    module, comm, aggregation, bucket_bytes, overlap, check_finite
        As for :class:`DDP`.
    device_ids : list of one device, optional
        The device on which the module is, and to which inputs are brought; None for a module on the CPU.
    output_device, dim
        Unneeded with one device; ignored, as by torch.
    broadcast_buffers : bool, optional
        Whether rank 0's buffers are broadcast before a forward, if the one before it was with gradients and outside
        :meth:`no_sync`. So all ranks call the first forward after a step, as with torch; one alone calls
        ``ddp.module``.
    forward_sync_buffers : bool, optional
        The same by its newer name; buffers are broadcast when DDP is made, too, whatever it says.
    init_sync : bool
        Whether rank 0's parameters are broadcast when DDP is made, and buffers but with ``broadcast_buffers=False``.
    process_group : torch.distributed.ProcessGroup, optional
        The ranks, in place of ``comm``: a group of the backend ``"mpiagg"``.
    device_mesh : torch.distributed.DeviceMesh, optional
        A mesh of one dimension, whose group is taken.
    bucket_cap_mb : float, optional
        ``bucket_bytes`` in MiB.
    static_graph : bool
        Whether a parameter may get its gradient several times in a backward pass (reentrant checkpoints of tied
        weights). Nothing is sent before the pass is over, as with ``overlap=False``.
    find_unused_parameters : bool
        Whether a rank takes part also if its backward pass reaches no parameter at all; others may lack any gradients.
    skip_all_reduce_unused_params, gradient_as_bucket_view, batched_grad_copy, check_reduction
        Unneeded: gradients are views of buckets.
    mixed_precision, delay_all_reduce_named_params, param_to_hook_all_reduce, bucket_cap_mb_list
        Not there; anything but None is a ValueError.

    Raises
    ------
    TypeError, ValueError, MismatchError
        As :class:`DDP`, and for torch's keywords that it does not have, on all ranks.

    Notes
    -----
    Errors of a step are raised by ``backward()``. Gradients that a parameter has already are aggregated again with what
    is added to them, as by torch: the average of averages is the same, a sum of sums is not.

    Gradients of ``nn.Embedding(sparse=True)`` are shared as coordinates and values, and stay sparse.

    Examples
    --------
    >>> import torch
    >>> model = mpiagg.DDP(torch.nn.Linear(3, 1))  # in place of torch.nn.parallel.DistributedDataParallel
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for step in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 3)).square().mean().backward()
    ...     optimizer.step()
    >>> weight = model.weight.detach().numpy()
    >>> bool((mpiagg.broadcast(weight) == weight).all())
    True
    >>> model.free()
    """

    _adapter: TorchAdapter
    _unsynced: UnsyncedParameters

    def __init__(
        self,
        module: torch.nn.Module,
        comm: MPI.Intracomm | None = None,
        aggregation: Aggregation | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        overlap: bool = True,
        check_finite: bool | None = None,
        **torch_keywords: Any,
    ) -> None:
        self._begin_life()
        if isinstance(comm, list | tuple):  # torch's arguments in their places: device_ids, output_device, dim
            torch_keywords = {**torch_keywords, "device_ids": comm}
            comm, bucket_bytes = None, bucket_bytes or BUCKET_BYTES
            aggregation = aggregation if isinstance(aggregation, Aggregation) else None
        unknown = torch_keywords.keys() - NAMES
        if unknown:
            raise TypeError(f"mpiagg.DDP has no keyword {', '.join(sorted(unknown))}")
        asked = self._asked = TorchKeywords(**torch_keywords)
        if asked.bucket_cap_mb is not None:
            bucket_bytes = int(asked.bucket_cap_mb * 2**20)
        comm = asked.comm(comm)
        overlap = overlap and not asked.static_graph if isinstance(overlap, bool) else overlap
        DDP.__init__(self, module, comm, aggregation, bucket_bytes, overlap=overlap, check_finite=check_finite)
        if asked.init_sync:
            self._broadcast(0)
            if asked.init_buffers:
                broadcast_buffers(self._adapter.buffers(), self.comm, 0)

    def _check(self, aggregation: Aggregation | None, check_finite: bool | None) -> str:
        words = super()._check(aggregation, check_finite)
        require_threads(self.module.parameters())
        sums = aggregation is None or (isinstance(aggregation, AllReduce) and aggregation.op in ("avg", "sum"))
        if self._adapter.sparse and not sums:
            raise ValueError("sparse gradients are summed or averaged; give another aggregation no sparse embedding")
        return f"{words}; {self._asked.check(self.module)}"

    def _lay_out(self) -> None:
        synced = self._laid_out and self._unsynced.synced
        self._laid_out = False
        super()._lay_out()
        self._laid_out = True
        self._unsynced.synced = synced
        if not self._overlap:
            self._unsynced.tell(WeakMethod(self._on_gradient))
        if self._comm_hook is not None:
            self._take_hook()

    def _require_open(self) -> None:
        """Make what a copy has not made yet; collective."""
        super()._require_open()
        if not self._laid_out:
            self._set_up()

    # -- a module

    def __getattr__(self, name: str) -> Any:
        """Return what the module has and DDP has not."""
        try:
            return torch.nn.Module.__getattr__(self, name)
        except AttributeError:
            if name == "module" or name.startswith("_"):
                raise
        return getattr(self._asked if name in NAMES else self.module, name)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the module, so that backward passes through what it returns aggregate gradients.

        Collective where buffers are broadcast (see above), where parameters have come to require a gradient or to
        require none any more, and for a copy of a DDP, the first time.
        """
        inputs, keywords = self._before_forward(inputs, keywords)
        return self._after_forward(self.module(*inputs, **keywords))

    @not_compiled
    def _before_forward(self, inputs: Any, keywords: Any) -> Any:
        """Do what is collective, and return the inputs where the module is."""
        if self._freed:
            return inputs, keywords
        trains = torch.is_grad_enabled() and self._syncing
        if trains:
            self._require_open()
            if self._adapter.is_changed():
                self._lay_out_again()
        if self._laid_out and self._asked.broadcast_buffers:
            if trains and self._steps.attend is not None:
                self._steps.begin()  # with those that have no batch, too
            elif self._buffers_due and self._steps.attend is None:
                self._sync_buffers(0)
        self._buffers_due = trains
        return self._asked.on_device((inputs, keywords))

    @not_compiled
    def _after_forward(self, found: Any) -> Any:
        if self._laid_out and not self._freed and torch.is_grad_enabled():
            found = watched(found, self._queue, self._unsynced.found if self._asked.find_unused_parameters else None)
            # One of several forwards before a backward is enough.
            self._pass_syncs = self._syncing or (self._expected and self._pass_syncs)
            # A pass that goes by none of its tensors is told of by the first gradient of a parameter.
            self._expected, self._queued = True, False
        return found

    def _queue(self, _: object = None) -> None:
        """Have gradients aggregated when the backward pass that is under way is over."""
        if not self._queued:
            self._queued = True
            # Checkpoints run backward passes within this one: it is the outermost that has come here first.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)  # noqa: SLF001 - torch's only name

    def _end_pass(self) -> None:
        came = bool(self._unsynced.found)
        comes = self._expected and not came  # after torch.autograd.grad, which brings parameters no gradients
        if comes and self._pass_syncs:
            self._adapter.check()
        self._queued = False
        if self._pass_syncs and not self._freed and came:
            with self._channel.one_thread, self._adapter.stream():
                self._sync_in_stream(None, overlapped=False)
            self._unsynced.synced = True
        elif not self._pass_syncs:
            self._unsynced.excuse()
        self._expected = comes

    def _begin(self) -> bool:
        if not (self._expected or self._queued):
            return super()._begin()
        if not (self._pass_syncs and self._steps.begin()):
            return False
        if not self._queued:  # which is asked for each gradient
            self._queue()
        return True

    def _on_gradient(self, _: object) -> None:
        """Hear of a gradient where no hooks take them."""
        if self._expected:
            self._queue()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of forwards in this block add up: what has a gradient then may be stepped with as it is."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes of forwards from now on aggregate gradients; :meth:`no_sync` sets it, as you may."""
        return self._syncing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        """Have backward passes of forwards from now on aggregate gradients, or not."""
        self._syncing = wanted
        if wanted and self._laid_out:
            self._unsynced.excuse()

    # -- gradients

    def _sync(self, given: GradientList | list[Array] | None, *, overlapped: bool) -> None:
        self._require_open()
        done, self._unsynced.synced = self._unsynced.synced, False
        if not (done and self._syncing and given is None and not self._unsynced.found):
            super()._sync(given, overlapped=overlapped)

    def _sync_in_stream(self, given: GradientList | list[Array] | None, *, overlapped: bool) -> None:
        self._queued = self._expected = False
        super()._sync_in_stream(given, overlapped=overlapped)
        if self._adapter.sparse:
            assert isinstance(self.aggregation, AllReduce)
            divisor = self.aggregation.denom if self.aggregation.op == "avg" else 1.0
            average_sparse(self._adapter.sparse, self.comm, divisor)

    def join(  # type: ignore[override]  # torch's keywords, too
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        divide_by_initial_size: bool = True,
    ) -> AbstractContextManager[None]:
        """Train on uneven numbers of batches, as :meth:`DDP.join`, whose keyword is taken by both names.

        Buffers are those of the highest rank with a batch, from the first forward of a step on, and at the end.

        Parameters
        ----------
        divide_by_initial_world_size, divide_by_initial_size : bool
            See :meth:`DDP.join`.
        enable, throw_on_early_termination : bool
            Whether there is to be a join at all; the other one must be False.

        Raises
        ------
        ValueError
            See :meth:`DDP.join`; for embeddings with sparse gradients, too.
        """
        if not enable:
            return nullcontext()
        self._require_open()
        if throw_on_early_termination or self._adapter.sparse:
            what = "throw_on_early_termination" if throw_on_early_termination else "sparse gradients"
            raise ValueError(f"DDP.join does not have {what}")
        return super().join(divide_by_initial_size=divide_by_initial_world_size and divide_by_initial_size)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let a function aggregate the buckets, in place of the aggregation, as torch's DDP does.

        Parameters
        ----------
        state : object
            What the hook is given first; of torch's own hooks a process group or their state.
        hook : callable
            ``hook(state, bucket) -> torch.futures.Future[torch.Tensor]``. The bucket has what
            ``torch.distributed.GradBucket`` has; the future is of its buffer, aggregated and divided.

        Raises
        ------
        TypeError
            If the hook cannot be called.
        PlanError
            If there is a hook already, or a backward pass is not followed by :meth:`sync_gradients`.
        """
        self._require_open()
        if not callable(hook):
            raise TypeError(f"a communication hook is a function, not a {type(hook).__name__}")
        if self._comm_hook is not None:
            raise PlanError("there is a communication hook already")
        self._steps.require_end()
        self._comm_hook = hook, state
        self._take_hook()

    def _take_hook(self) -> None:
        assert self._comm_hook is not None
        hook, state = self._comm_hook
        tensors = [parameter.tensor for parameter in self._adapter.parameters]
        self._steps.replace(
            lambda number, bucket, last: HookFlight(hook, state, GradBucket(number, bucket, tensors, last=last))
        )

    # -- parameters and buffers

    def _sync_buffers(self, root: int) -> None:
        if self._asked.broadcast_buffers:
            broadcast_buffers(self._adapter.buffers(), self.comm, root)

    def broadcast_parameters(self, root: int = 0) -> None:
        """See :meth:`DDP.broadcast_parameters`."""
        super().broadcast_parameters(root)
        broadcast_buffers(self._adapter.buffers(), self.comm, root)

    def to(self, *args: Any, **kwargs: Any) -> TorchDDP:
        """Call the ``to`` of a module of torch's, and lay the buckets out again if that changes anything; collective.

        Gradients are converted with the parameters. Views that :meth:`gradient_views` returned are of the old buckets.

        Raises
        ------
        TypeError
            For another device than the CPU or CUDA's.
        MismatchError
            On all ranks, if their arguments differ; on the others, if a rank's module cannot be moved.
        PlanError
            If the last backward pass was not followed by :meth:`sync_gradients`.
        """
        self._require_open()

        def check() -> str:
            self._steps.require_end()
            return f"DDP.to {self._adapter.destination(*args, **kwargs)}"

        def move() -> str:
            self.module.to(*args, **kwargs)
            self._check_device(channel_of(self.aggregation.comm))
            return "DDP.to"

        before = self._forms()
        for act in check, move:
            self._channel.agree_on(act)
        # On some ranks nothing may have changed: those that were on their device before.
        if any(map(any, self._channel.gather(bytes([self._forms() != before]), "tell whether modules have moved"))):
            self._lay_out_again()
        return self

    def _lay_out_again(self) -> None:
        """Make the buckets of the parameters as they are now; collective. What is refused leaves those there are."""
        before = self._adapter
        try:
            self._channel.agree_on(self._check_again)
        except Exception:
            self._adapter = before
            raise
        self._end_steps()
        self._lay_out()

    def _check_again(self) -> str:
        self._steps.require_end()
        with not_hooked([parameter.tensor for parameter in self._adapter.hooked if self._hooks is not None]):
            return self._check(*self._given)
