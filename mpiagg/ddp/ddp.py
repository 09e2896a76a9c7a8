"""DDP: every rank trains a copy of the module on its own data, with the gradients of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from weakref import WeakMethod, finalize, ref

from mpi4py import MPI

from mpiagg.aggregation import Aggregation, AllReduce
from mpiagg.aggregation.packing import TensorLayout, layout_of
from mpiagg.arrays import HOST, Array, device_of, settle
from mpiagg.collectives.moving_functions import broadcast
from mpiagg.common.arguments import check_flag, check_integer
from mpiagg.ddp.adapters import Adapter, ArrayParameter, adapt, check_gradient, kind_of
from mpiagg.ddp.finite import FiniteCheck, asked_for
from mpiagg.ddp.hooks import Hooks, end, under_way
from mpiagg.ddp.join import JoinState, check_join, joined
from mpiagg.ddp.steps import Copied, GradientList, Steps
from mpiagg.errors import PlanError
from mpiagg.transport import Channel, channel_of

BUCKET_BYTES: Final = 25 * 2**20
"""How long a bucket is at most."""


class DDP:
    """Distributed data-parallel training of a module.

    Gradients are aggregated in buckets, whose memory is laid out once. After each backward pass, call
    :meth:`sync_gradients`, then step the optimizer as usual; a module of torch's needs no such call (see below). What
    DDP does not have itself, it takes from the module. Free it, or use ``with``: it holds messages and memory, and
    hooks in a module of torch's, until then.

    Parameters
    ----------
    module : list of numpy.ndarray, torch.nn.Module, or object with ``parameters()``
        The parameters, of the same shapes and dtypes on all ranks; ``parameters()`` yields arrays, or items that have
        ``data`` and ``grad``. All are on the CPU, or some on one accelerator.
    comm : MPI.Intracomm, optional
        The ranks; by default those of the aggregation, or the world.
    aggregation : Aggregation, optional
        What is done to the gradients; the average by an all-reduce by default. It stays the caller's, to be freed.
    bucket_bytes : int
        How long a bucket is at most; the first has at most 1 MiB. 0 aggregates parameter by parameter.
    overlap : bool
        For a module of torch's: whether a bucket is sent as soon as a backward pass has filled it, for the same bits.
    **torch_keywords
        For a module of torch's, what torch's ``DistributedDataParallel`` takes: see
        :class:`mpiagg.ddp.torch_ddp.TorchDDP`, which this then is.
    check_finite : bool, optional
        Whether :meth:`sync_gradients` looks for NaN and infinity, in every rank's gradients and in the result. By
        default, if the environment variable ``MPIAGG_DEBUG`` is ``1``. After the error leave the step out.

    Raises
    ------
    TypeError
        If the module is none, or a parameter is not an array of numbers or a dense tensor on the CPU or a CUDA device,
        or not of a dtype that can be aggregated.
    ValueError
        For an aggregation of weights, or of another communicator, bucket_bytes below 0, several accelerators.
    MismatchError
        On all ranks, if their parameters, buffers, buckets or whether to check differ.

    Notes
    -----
    A gradient that is None on some ranks counts as zeros there, and they get the result; one that is None everywhere
    stays so. Memory: the gradients' bytes, and what the aggregation needs.

    A module of torch's is trained in place: parameters stay the same objects in the same memory, so that an optimizer
    may be made before or after. Parameters that require no gradient, and buffers, are only broadcast. A gradient is a
    view of its bucket, which the next step overwrites. A backward pass through what calling DDP has returned comes back
    with aggregated gradients. One through what the module itself has returned is followed by :meth:`sync_gradients`,
    and so is one that raised an error, if the program goes on (what it has not reached counts as missing): before that
    an optimizer of torch's raises a PlanError if it is to step; with ``overlap`` the parameters' gradients are None.

    Examples
    --------
    >>> weights = [np.zeros(3)]
    >>> with mpiagg.DDP(weights) as ddp:
    ...     for step in range(10):
    ...         gradients = [weights[0] - rank]
    ...         ddp.sync_gradients(gradients)
    ...         weights[0] -= 0.9 * gradients[0]
    >>> bool(np.allclose(weights[0], (size - 1) / 2))
    True
    """

    __call__: Callable[..., Any]

    def __new__(cls, module: Any = None, *_: Any, **__: Any) -> DDP:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Return a DDP of the module's kind."""
        return super().__new__(kind_of(module) if cls is DDP else cls)

    def __init__(
        self,
        module: Any,
        comm: MPI.Intracomm | None = None,
        aggregation: Aggregation | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        overlap: bool = True,
        check_finite: bool | None = None,
        **torch_keywords: Any,
    ) -> None:
        if torch_keywords:
            raise TypeError(f"only a module of torch's is trained with {', '.join(torch_keywords)}")
        self.module = module
        self.comm: MPI.Intracomm = getattr(aggregation, "comm", MPI.COMM_WORLD) if comm is None else comm
        self._cap, self._overlap = bucket_bytes, overlap
        self._given = aggregation, check_finite
        self._syncing, self._freed = True, False
        self._set_up()

    def _set_up(self) -> None:
        """Make what is shared; collective."""
        aggregation, check_finite = self._given
        self._channel = channel_of(self.comm)
        self._adapter: Adapter
        self._hooks: Hooks | None
        self._channel.agree_on(lambda: self._check(aggregation, check_finite))
        self.aggregation = AllReduce(self.comm) if aggregation is None else aggregation
        try:
            self._lay_out()
        except Exception:
            if aggregation is None:
                self.aggregation.free()
            raise

    def __getattr__(self, name: str) -> Any:
        """Return what the module has and DDP has not."""
        if name != "module" and not name.startswith("_"):
            return getattr(self.module, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _check(self, aggregation: Aggregation | None, check_finite: bool | None) -> str:
        """Validate the arguments, and describe them."""
        self._adapter = adapt(self.module)
        self._check_finite = asked_for(check_finite)
        check_integer("bucket_bytes", self._cap, 0)
        check_flag("overlap", self._overlap)
        kind = "AllReduce" if aggregation is None else type(aggregation).__name__
        if aggregation is not None:
            if not isinstance(aggregation, Aggregation):
                raise TypeError(f"aggregation must be an mpiagg.Aggregation, not {kind}")
            if aggregation.aggregates != "gradients":
                raise ValueError(f"{kind} is meant for {aggregation.aggregates}; DDP aggregates gradients")
            if MPI.Comm.Compare(aggregation.comm, self.comm) not in (MPI.IDENT, MPI.CONGRUENT):
                raise ValueError("the aggregation has another communicator than DDP")
        self._check_device(self._channel if aggregation is None else channel_of(aggregation.comm))
        how = f"buckets of {self._cap} bytes{', overlapped' if self._overlap else ''}"
        how += ", which are checked to be finite" if self._check_finite else ""
        return f"DDP by {kind} in {how}: {', '.join(self._adapter.words())}"

    def _check_device(self, channel: Channel) -> None:
        """Validate where the parameters lie, whose buckets are to be shared on a channel."""
        devices = {device_of(parameter.data) for parameter in self._adapter.parameters} - {HOST}
        if len(devices) > 1:
            names = " and ".join(sorted(device.name for device in devices))
            raise ValueError(f"the parameters of a rank are on one device, not on {names}")
        for device in devices:
            channel.memory.check(device)

    def _lay_out(self) -> None:
        """Make the buckets, and the plans that aggregate them."""
        with self._adapter.stream():
            hooked = self._adapter.hooked if self._overlap else ()
            check = self._finite_check() if self._check_finite else None
            self._steps = Steps(self.comm, self.aggregation, self._forms(), self._cap, hooked=bool(hooked), check=check)
            self._hooks = (
                Hooks(hooked, self._steps.views, self._steps.launcher, WeakMethod(self._begin)) if hooked else None
            )
            self._unsynced = self._adapter.unsynced(partial(under_way, ref(self)))
            # Who loses sight of a DDP may train its module by another.
            self._end_hooks = finalize(self, end, self._hooks, self._unsynced)
            for parameter, view in zip(self._adapter.parameters, self._steps.views, strict=True):
                if isinstance(parameter, ArrayParameter):
                    parameter.grad = view

    def _finite_check(self) -> FiniteCheck:
        tell = partial(self._channel.gather, purpose="tell what is not finite")
        kind, op = type(self.aggregation).__name__, getattr(self.aggregation, "op", None)
        return FiniteCheck(tell, self._adapter.names(), kind, op)

    def _forms(self) -> TensorLayout:
        return layout_of([parameter.data for parameter in self._adapter.parameters])

    # -- gradients

    def sync_gradients(self, gradients: GradientList | list[Array] | None = None) -> None:
        """Aggregate the gradients of all ranks, in place, bucket after bucket; collective.

        With a module of torch's and ``overlap``, send the buckets that are not on their way yet, and wait for all.

        Parameters
        ----------
        gradients : list, optional
            An array or None for each parameter; None in it is replaced where another rank has a gradient. Without the
            list, the parameters' ``grad`` is taken; for a list of arrays, what :meth:`gradient_views` returned. With a
            module of torch's and ``overlap`` there can be no list.

        Raises
        ------
        TypeError, ValueError
            On the ranks where a gradient is not of its parameter's dtype or shape, or read-only, or sparse.
        MismatchError
            On the other ranks then.
        PlanError
            If the DDP is freed. On the ranks where there have been several backward passes, too, with ``overlap``;
            gradients that were on their way are lost then, and None.
        NonFiniteError
            With ``check_finite``, the same on all ranks: if gradients of any rank are not finite, or if all were, but
            what they are aggregated to is not. The next step can begin then. In the first case nothing of the bad
            gradients was sent, so no aggregation remembers them. Gradients are as they were; with a module of torch's
            and ``overlap`` others were on their way: all are lost, and None. In the second case they are to be
            discarded: some may have been overwritten.
        StallError
            If a message does not complete within the timeout.
        """
        self._sync(gradients, overlapped=False)

    def overlapped_sync_gradients(self, gradients: GradientList | list[Array] | None = None) -> None:
        """Do as :meth:`sync_gradients`, with the same bits, but with all buckets on their way at the same time.

        Parameters
        ----------
        gradients : list, optional
            As for :meth:`sync_gradients`, which says what is raised, too.
        """
        self._sync(gradients, overlapped=True)

    def gradient_views(self) -> list[Array]:
        """Return views of the buckets, where gradients can be written without a copy.

        Returns
        -------
        list of array
            One for each parameter, for ``parameter.grad = view`` or, with a list of arrays, as it is. They stay the
            same as long as the DDP lives, and a module of torch's its dtype.
        """
        if not self._freed:
            self._require_open()
        return list(self._steps.views)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up in this block: :meth:`sync_gradients` does nothing there; the next pass sends all."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @contextmanager
    def join(self, *, divide_by_initial_size: bool = True) -> Iterator[None]:
        """Train on uneven numbers of batches inside this block; entering and leaving it is collective.

        A rank that leaves the block takes part in the steps of the others with zeros, until all have left it. Then the
        parameters and buffers of a rank that was active last are broadcast. Inside the block the ranks make no other
        collective calls than :meth:`sync_gradients`. Cost: a short all-reduce a step, before its first bucket.

        Parameters
        ----------
        divide_by_initial_size : bool
            Whether averages are over all ranks, those without batches counting as zeros, or over the active ones.

        Raises
        ------
        ValueError
            If the aggregation is of minima or maxima, in which zeros count; or of sums or with a denom of its own, and
            is to be divided.
        MismatchError
            If another rank has left the block by an error: at this rank's next step, or where it waits for the others.
        PlanError
            If there is a join already; after an error in a step; if a step has begun that has not ended.
        """
        self._require_open()
        self._channel.agree_on(lambda: check_join(self._steps, self.aggregation, divide_by_initial_size))
        join_state = JoinState(self.comm, divide_by_initial_size=divide_by_initial_size, sync=self._sync_buffers)
        with joined(self._steps, join_state, self._adapter.stream):
            yield
        self._broadcast(join_state.last)
        self._sync_buffers(join_state.last)

    # -- parameters

    def broadcast_parameters(self, root: int = 0) -> None:
        """Give the root's parameters, and a torch module's buffers, to all ranks, in place; collective.

        Parameters
        ----------
        root : int
            The rank whose values all get.

        Raises
        ------
        ValueError
            If the root is not a rank.
        PlanError
            If the DDP is freed.
        """
        self._require_open()
        self._broadcast(root)

    def _broadcast(self, root: int) -> None:
        with self._adapter.stream():
            for array in self._adapter.arrays():
                broadcast(array, root=root, out=array, comm=self.comm)

    def _sync_buffers(self, root: int) -> None:
        """Broadcast buffers, if there are some that are to be alike."""

    # -- giving back

    def free(self) -> None:
        """Give back what DDP holds; a second call does nothing. The gradient views stay good as arrays."""
        if self._freed:
            return
        self._freed = True
        self._end_steps()
        if self._given[0] is None:
            self.aggregation.free()

    def _end_steps(self) -> None:
        self._end_hooks()
        self._steps.free()

    def __enter__(self) -> DDP:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Return the DDP."""
        return self

    def __exit__(self, *error: object) -> None:
        """Free the DDP."""
        self.free()

    def _require_open(self) -> None:
        if self._freed:
            raise PlanError("DDP is freed")

    # -- the way of the gradients

    def _sync(self, given: GradientList | list[Array] | None, *, overlapped: bool) -> None:
        self._require_open()
        if not self._syncing:
            return
        with self._channel.one_thread, self._adapter.stream():
            self._sync_in_stream(given, overlapped=overlapped)

    def _sync_in_stream(self, given: GradientList | list[Array] | None, *, overlapped: bool) -> None:
        if self._unsynced is not None:
            self._unsynced.clear()
        gradients, present = self._steps.run(partial(self._take, given), overlapped=overlapped)
        if present is None:
            return
        present = present.tolist()
        for index, (gradient, view) in enumerate(zip(gradients, self._steps.views, strict=True)):
            if not present[index]:
                continue
            if given is None and self._adapter.hooked:
                self._adapter.parameters[index].grad = view
            elif gradient is None:
                received = view.copy()
                settle(received)
                if given is None:
                    self._adapter.parameters[index].grad = received
                else:
                    given[index] = received

    def _take(self, given: GradientList | list[Array] | None) -> tuple[GradientList, Copied]:
        """Return this rank's gradients, found good, and which are copied; a torch module's are brought in."""
        self._adapter.check()
        if self._steps.launcher.fault is not None:
            raise self._steps.launcher.fault
        parameters, views, placed = self._adapter.parameters, self._steps.views, self._steps.launcher.placed
        if given is None and len(placed) == len(parameters):
            return list(views), None
        if given is None:
            gradients = [views[i] if i in placed else parameter.grad for i, parameter in enumerate(parameters)]
        elif self._hooks is not None:
            raise ValueError("with overlap, gradients are taken from the parameters; make DDP with overlap=False")
        elif isinstance(given, list) and len(given) == len(parameters):
            gradients = list(given)
        else:
            raise ValueError(f"gradients must be a list with one for each of {len(parameters)} parameters")
        torch = given is None and bool(self._adapter.hooked)
        copied = None if torch else self._steps.settled.copied(gradients)
        if copied is not None:
            return gradients, copied
        for index, gradient in enumerate(gradients):
            if gradient is not None and gradient is not views[index]:
                check_gradient(index, gradient, views[index])
        return (self._steps.pack(gradients), None) if torch else (gradients, self._steps.settled.keep(gradients))

    def _begin(self) -> bool:
        """Begin a step, in a backward pass, unless gradients are only added up."""
        return self._syncing and self._steps.begin()
