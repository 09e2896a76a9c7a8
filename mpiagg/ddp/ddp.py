"""DDP: every rank trains a copy of the module on its own data, with the gradients of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Final

from mpi4py import MPI

from mpiagg.aggregation import Aggregation, AllReduce
from mpiagg.aggregation.flags import Flags
from mpiagg.arguments import check_integer
from mpiagg.arrays import Array
from mpiagg.collectives import broadcast
from mpiagg.ddp.adapters import ArrayParameter, Parameter, check_gradient, parameters_of
from mpiagg.ddp.buckets import Bucket, fill_buckets
from mpiagg.errors import PlanError
from mpiagg.plan import Plan
from mpiagg.transport import channel_of

BUCKET_BYTES: Final = 25 * 2**20
"""How long a bucket is at most: long enough for the network's full pace, short enough to overlap."""


class DDP:
    """Distributed data-parallel training of a module.

    Gradients are aggregated in buckets, whose memory is laid out once. After each backward pass, call
    :meth:`sync_gradients`, then step the optimizer as usual. What DDP does not have itself, it takes from the module.

    Parameters
    ----------
    module : list of numpy.ndarray, or object with ``parameters()``
        The parameters, with the same shapes and dtypes on all ranks; ``parameters()`` yields arrays, or items that
        have ``data`` and ``grad``.
    comm : MPI.Intracomm, optional
        The ranks; by default those of the aggregation, or the world.
    aggregation : Aggregation, optional
        What is done to the gradients; the average by an all-reduce by default. It stays the caller's, to be freed.
    bucket_bytes : int
        How long a bucket is at most. 0 aggregates parameter by parameter.

    Raises
    ------
    TypeError
        If the module is none, or a parameter is not an array of numbers, or not of a dtype that can be aggregated.
    ValueError
        For an aggregation that is meant for weights, or has another communicator; for bucket_bytes below 0.
    MismatchError
        On all ranks, if their parameters or buckets differ.

    Notes
    -----
    A gradient that is missing (``grad`` is None) on some ranks counts as zeros there, and they get the result; one that
    is missing everywhere stays missing. Memory: the gradients' bytes, and what the aggregation needs.
    """

    def __init__(
        self,
        module: Any,
        comm: MPI.Intracomm | None = None,
        aggregation: Aggregation | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.module = module
        self.comm: MPI.Intracomm = getattr(aggregation, "comm", MPI.COMM_WORLD) if comm is None else comm
        self._channel = channel_of(self.comm)
        self._parameters: list[Parameter] = []
        self._syncing = True
        self._freed = False
        self._channel.agree_on(lambda: self._check(aggregation, bucket_bytes))
        forms = [(parameter.data.dtype, parameter.data.shape) for parameter in self._parameters]
        self._buckets = [Bucket(members, forms) for members in fill_buckets(forms, bucket_bytes)]
        self._own_aggregation = aggregation is None
        self.aggregation = AllReduce(self.comm) if aggregation is None else aggregation
        self._flags = Flags(self.comm, len(forms))
        self._plans: list[Plan[None]] = []
        try:
            for bucket in self._buckets:
                self._plans.append(self.aggregation.aggregate_init(list(bucket.views.values())))
        except Exception:
            self.free()
            raise
        views = {index: view for bucket in self._buckets for index, view in bucket.views.items()}
        self._views = [views[index] for index in range(len(forms))]
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if isinstance(parameter, ArrayParameter):
                parameter.grad = view

    def _check(self, aggregation: Aggregation | None, bucket_bytes: int) -> str:
        """Find fault with the arguments, or say in words what they are."""
        self._parameters = parameters_of(self.module)
        check_integer("bucket_bytes", bucket_bytes, 0)
        kind = "AllReduce" if aggregation is None else type(aggregation).__name__
        if aggregation is not None:
            if not isinstance(aggregation, Aggregation):
                raise TypeError(f"aggregation must be an mpiagg.Aggregation, not {kind}")
            if aggregation.aggregates != "gradients":
                raise ValueError(f"{kind} is meant for {aggregation.aggregates}; DDP aggregates gradients")
            if MPI.Comm.Compare(aggregation.comm, self.comm) not in (MPI.IDENT, MPI.CONGRUENT):
                raise ValueError("the aggregation has another communicator than DDP")
        names = [name for name, _ in self.module.named_parameters()] if hasattr(self.module, "named_parameters") else []
        forms = [f"{parameter.data.dtype} {parameter.data.shape}" for parameter in self._parameters]
        named = [f"{name} {form}" for name, form in zip(names, forms, strict=True)] if names else forms
        return f"DDP by {kind} in buckets of {bucket_bytes} bytes, {len(forms)} parameters: {', '.join(named)}"

    # -- gradients

    def sync_gradients(self, gradients: list[Array | None] | None = None) -> None:
        """Aggregate the gradients of all ranks, in place, bucket after bucket; collective.

        Parameters
        ----------
        gradients : list, optional
            An array or None for each parameter; None in it is replaced where another rank has a gradient. Without the
            list, the parameters' ``grad`` is taken; for a list of arrays, what :meth:`gradient_views` returned.

        Raises
        ------
        TypeError, ValueError
            On the ranks where a gradient is not of its parameter's dtype or shape, or read-only.
        MismatchError
            On the other ranks then.
        PlanError
            If the DDP is freed.
        StallError
            If a message does not complete within the timeout.
        """
        self._sync(gradients, self._one_by_one)

    def overlapped_sync_gradients(self, gradients: list[Array | None] | None = None) -> None:
        """Do as :meth:`sync_gradients`, with the same bits, but with all buckets on their way at the same time."""
        self._sync(gradients, self._all_at_once)

    def gradient_views(self) -> list[Array]:
        """Return an array for each parameter's gradient that is a view of its bucket.

        Gradients that are written there need no copy: with ``parameter.grad = view`` for items, and for a list of
        arrays as they are. The arrays stay the same as long as the DDP lives.
        """
        return list(self._views)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing in :meth:`sync_gradients` inside this block: gradients of several passes can add up first."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def _sync(self, given: list[Array | None] | None, aggregate: Callable[[Sequence[Array | None]], None]) -> None:
        self._require_open()
        if not self._syncing:
            return
        gradients: list[Array | None] = []

        def which() -> list[bool]:
            gradients[:] = self._checked_gradients(given)
            return [gradient is not None for gradient in gradients]

        present = self._flags.share(which)
        self.aggregation.bytes_sent += self._flags.sent_bytes
        aggregate(gradients)
        for index, gradient in enumerate(gradients):
            if gradient is None and present[index]:
                aggregated = self._views[index].copy()
                if given is None:
                    self._parameters[index].grad = aggregated
                else:
                    given[index] = aggregated

    def _checked_gradients(self, given: list[Array | None] | None) -> list[Array | None]:
        if given is None:
            gradients = [parameter.grad for parameter in self._parameters]
        elif isinstance(given, list) and len(given) == len(self._parameters):
            gradients = list(given)
        else:
            raise ValueError(f"gradients must be a list with one for each of {len(self._parameters)} parameters")
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                check_gradient(index, gradient, self._views[index])
        return gradients

    # -- parameters

    def broadcast_parameters(self, root: int = 0) -> None:
        """Give the root's parameters to all ranks, in place; collective.

        Raises
        ------
        ValueError
            If the root is not a rank.
        PlanError
            If the DDP is freed.
        """
        self._require_open()
        for parameter in self._parameters:
            broadcast(parameter.data, root=root, out=parameter.data, comm=self.comm)

    def parameters(self) -> Iterator[Any]:
        """Return the parameters, as the module has them."""
        return iter(self.module.parameters() if hasattr(self.module, "parameters") else self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the module has and DDP has not."""
        if name == "module" or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.module, name)

    # -- giving back

    def free(self) -> None:
        """Give back what DDP holds; a second call does nothing. The gradient views stay good as arrays."""
        if self._freed:
            return
        self._freed = True
        self._flags.free()
        for plan in self._plans:
            with suppress(PlanError):  # an error has left it in the middle: freeing it could hang
                plan.free()
        if self._own_aggregation:
            self.aggregation.free()

    def __enter__(self) -> DDP:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Return the DDP."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the DDP."""
        self.free()

    # -- one synchronisation

    def _one_by_one(self, gradients: Sequence[Array | None]) -> None:
        for bucket, plan in zip(self._buckets, self._plans, strict=True):
            bucket.pack(gradients)
            plan()
            self.aggregation.bytes_sent += plan.sent_bytes
            bucket.unpack(gradients)

    def _all_at_once(self, gradients: Sequence[Array | None]) -> None:
        for bucket, plan in zip(self._buckets, self._plans, strict=True):
            bucket.pack(gradients)
            plan.start()
        for number, bucket in enumerate(self._buckets):
            self._plans[number].wait(meanwhile=self._plans[number + 1 :])
            self.aggregation.bytes_sent += self._plans[number].sent_bytes
            bucket.unpack(gradients)

    def _require_open(self) -> None:
        if self._freed:
            raise PlanError("DDP is freed")
