"""Sharded: training in which each rank keeps, and updates, its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpiagg.aggregation.packing import describe_layout
from mpiagg.arrays import Array, Form, reduction, working_dtype
from mpiagg.common.arguments import check_flag, check_integer, check_number
from mpiagg.ddp.adapters import is_torch
from mpiagg.ddp.ddp import BUCKET_BYTES
from mpiagg.errors import PlanError, RankFailedError
from mpiagg.plans.choices import pick
from mpiagg.schedules import Collective
from mpiagg.sharded.division import units_of
from mpiagg.sharded.states import Shard, arrays_in, checked_buffers, checked_state, shard_state, write_shards
from mpiagg.sharded.storage import copy_out
from mpiagg.sharded.traffic import Traffic
from mpiagg.sharded.training import ShardedTraining
from mpiagg.transport import channel_of

Self = TypeVar("Self", bound="Sharded")
OPS: Final = ("avg", "sum")


class Sharded(ShardedTraining):
    """Training in which optimizer states, gradients and parameters are divided over the ranks.

    That is ZeRO (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020),
    whose stages divide more and more. After a backward pass :meth:`step` reduces the gradients so that each rank has
    its part of them, updates that part of the parameters, and gathers the parts. A rank has of every unit an even part,
    whatever the tensors in it.

    Parameters
    ----------
    module : list of numpy.ndarray, or torch.nn.Module
        The parameters: arrays of real numbers, the same shapes and dtypes on all ranks; no two share memory. Those of
        rank 0 are given to all. A module of torch's is trained as :class:`mpiagg.sharded.torch_sharded.TorchSharded`
        says, which this then is.
    optimizer : mpiagg.optimizers.Optimizer, or callable
        For arrays an optimizer, as ``mpiagg.optimizers.AdamW(lr=1e-3)``; this then uses it alone. For a module
        ``lambda params: torch.optim.AdamW(params, lr=1e-3)``.
    stage : {1, 2, 3}
        What is divided: the optimizer's state; the gradients, too; the parameters, too.
    comm : MPI.Intracomm, optional
        The ranks; the world by default.
    bucket_bytes : int
        How many bytes of parameters a unit has at most; one with a longer tensor has it alone.
    op : {"avg", "sum"}
        How gradients are combined.
    denom : number, optional
        With ``op="avg"`` what the sum is divided by in place of the number of ranks.
    clip_norm : float, optional
        The gradients are scaled so that the norm of all of them is at most this; with infinity it is only computed.
    master_dtype : data-type, optional
        In which dtype parts of the parameters are kept and updated, and gradients reduced; float32 for parameters of
        half precision, as a rule. By default in the parameters' own. What others write into the parameters is lost
        at the next step then.
    split : {"elements", "tensors"}, optional
        Whether tensors are cut among the ranks, or each is one rank's: for optimizers that need whole ones. By default
        as an optimizer for arrays needs it, and ``"elements"``.
    layers : list of lists of int, optional
        Which parameters of a list are used together, and gathered by :meth:`gathered`; by default what ``bucket_bytes``
        puts into a unit.
    prefetch : int
        How many units may be on their way, or gathered, beside the one that is in use.
    share : bool
        Whether parameters of stage 3 lie in memory that the ranks map, if all are on one node.
    algorithm : str
        By which algorithm gradients and parameters travel: a name from :func:`mpiagg.algorithms` that serves both
        collectives, or ``"auto"``.

    Raises
    ------
    TypeError
        For a module or an optimizer that is none, or parameters that are not arrays of real numbers.
    ValueError
        For an argument out of range, or arrays that share memory, or are read-only.
    MismatchError
        On all ranks, if their arguments or parameters differ.

    Notes
    -----
    Memory of n ranks, for parameters of B bytes and an optimizer that keeps S: at stage 1 a rank has B, the gradients
    (B) and S/n; at stage 2 B, B/n of gradients, S/n, and 1 + ``prefetch`` units; at stage 3 (B + B + S)/n and those
    units twice, or, where all ranks are on one node, B once for all of them. ``master_dtype`` adds its copy, divided.
    :meth:`memory` counts.

    Steps and bytes: a reduce-scatter and an all-gather a unit, which are together an all-reduce of it; at stage 3 the
    all-gather comes twice, before the forward and before the backward pass, and on one node not at all. Between nodes
    units are gathered at stages 1 and 2 while others are updated; with ``step(wait=False)`` also in the forward pass.

    The result is that of :class:`mpiagg.DDP` and the same optimizer: to the bit, where gradients are added up in the
    same order, as with ``algorithm="direct"`` in both; else, and with ``clip_norm``, LAMB or ``master_dtype``, but for
    rounding.

    Examples
    --------
    >>> weights = [np.zeros((4, 3)), np.zeros(3)]
    >>> with mpiagg.Sharded(weights, mpiagg.optimizers.SGD(lr=0.9), stage=2) as sharded:
    ...     for step in range(10):
    ...         sharded.step([x - rank for x in weights])
    >>> bool(np.allclose(weights[0], (size - 1) / 2))
    True
    """

    __call__: Callable[..., Any]
    if TYPE_CHECKING:  # what only arrays, or only modules, have

        def __getattr__(self, name: str) -> Any:
            """Return the attribute of the kind."""

    def __new__(cls, module: Any = None, *_: Any, **__: Any) -> Sharded:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Return one of the module's kind."""
        return super().__new__(_kind(module) if cls is Sharded else cls)

    def __init__(
        self,
        module: Any,
        optimizer: Any,
        *,
        stage: int = 1,
        comm: MPI.Intracomm | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        op: str = "avg",
        denom: float | None = None,
        clip_norm: float | None = None,
        master_dtype: npt.DTypeLike | None = None,
        split: str | None = None,
        layers: Any = None,
        prefetch: int = 1,
        share: bool = True,
        algorithm: str = "auto",
    ) -> None:
        self.module, self.stage, self.clip_norm = module, stage, clip_norm
        self.comm: MPI.Intracomm = MPI.COMM_WORLD if comm is None else comm
        self._channel = channel_of(self.comm)
        self._freed = False
        self._open = []
        self._cap, self._turns, self._share = bucket_bytes, prefetch, share

        def check() -> str:
            check_integer("stage", stage, 1, 3)
            check_integer("bucket_bytes", bucket_bytes, 0)
            self._turns = 1 + check_integer("prefetch", prefetch, 0)
            if clip_norm not in (None, inf):
                check_number("clip_norm", clip_norm, "a number above 0, or infinity", lambda x: x > 0)
            check_flag("share", share)
            divisor = _check_op(op, denom, self._channel.size)
            for collective in (Collective.REDUCE_SCATTER, Collective.ALLGATHER):
                pick(algorithm, None, self._channel.case(collective, 0))
            forms = self._check(module, optimizer, layers)
            how = self._split_for(split)
            self._traffic = Traffic(self._channel, op, divisor, algorithm)
            self._units, self._layers = units_of(forms, bucket_bytes, self._channel.size, how, self._layers_asked)
            self._work = [_work_dtype(unit.form, master_dtype) for unit in self._units]
            for dtype in self._work:
                reduction(op, dtype, divisor)
            units = [unit.members for unit in self._units]
            return (
                f"Sharded by {self._describe_optimizer()}: stage {stage}, {op} by {divisor} by {algorithm}, clipped to "
                f"{clip_norm}, kept in {master_dtype}, split by {how}, {self._turns} at a time, shared {share}, "
                f"units {units} of {describe_layout(tuple(forms))}"
            )

        self._layers_asked: list[list[int]] | None = None
        self._channel.agree_on(check)
        try:
            with self._stream():
                self._lay_out()
        except Exception:
            self._close()
            raise

    # -- parameters

    def wait(self) -> None:
        """Wait for the parameters that :meth:`step` has not waited for.

        Raises
        ------
        PlanError
            If it is freed.
        StallError
            If a message does not complete within the timeout.
        """
        self._require_open()
        with self._at_work():
            self._await_parameters()

    def weights(self) -> dict[str, Array]:
        """Return copies of all parameters, whole, as NumPy arrays, under their names; collective.

        Those in a list are named "0", "1", and so on.

        Returns
        -------
        dict of str to array
            Whole parameters by name.
        """
        self._require_open()
        with self._at_work():
            whole = copy_out(self._storage, range(len(self._units)))
        return {self._names[index]: whole[index] for index in sorted(whole)}

    # -- states

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's parts of the parameters and of the optimizer's state, as copies.

        :func:`mpiagg.save_checkpoint` saves it; what :func:`mpiagg.load_checkpoint` returns of it, on any number of
        ranks, is for :meth:`load_state_dict`.

        Returns
        -------
        dict
            ``"ranks"``, ``"optimizer"`` (how it steps), and ``"tensors"``: for each the shape, from which of its
            elements to which the rank has it, its values there, and what the optimizer keeps for them; ``"buffers"``,
            those of a module of torch's, as this rank has them.
        """
        self._require_open()
        tensors = {}
        with self._at_work():
            self._await_parameters()
            for k, unit in enumerate(self._units):
                trained, values = k in self._gradients.own, self._values(k)
                for part in unit.parts(self._channel.rank):
                    kept = self._kept(part.tensor, k) if trained and part.start < part.stop else {}
                    tensors[self._names[part.tensor]] = shard_state(part, unit, values, kept)
            buffers = self._buffers()
        return {
            "ranks": self._channel.size,
            "optimizer": self._hyperparameters(),
            "tensors": tensors,
            "buffers": buffers,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` has returned, on any number of ranks, of any stage or split; collective.

        Parameters
        ----------
        state : dict
            What :meth:`state_dict` has returned on this rank; or what :func:`mpiagg.load_checkpoint` has loaded of
            it, also on another number of ranks.

        Raises
        ------
        ValueError
            If it is not a state of such parameters and such an optimizer, or lacks parts that this rank needs: what
            one rank has saved is enough only where ranks, ``bucket_bytes``, ``layers`` and ``split`` are the same;
            nothing is changed then.
        MismatchError
            On the other ranks then.
        """
        self._require_open()
        shards: list[Any] = []
        parts = {self._names[index]: (part, k) for k, own in enumerate(self._parts) for index, part in own.items()}
        shapes = {name: self._units[k].shapes[part.tensor] for name, (part, k) in parts.items()}

        def check() -> str:
            before = deepcopy(self._hyperparameters())
            shards.append(checked_state(state, {name: part for name, (part, _) in parts.items()}, shapes))
            shards.append(checked_buffers(state["buffers"], self._buffers()))
            try:
                self._load_hyperparameters(state["optimizer"])
                for name, (part, k) in parts.items():
                    if k in self._gradients.own and part.start < part.stop:
                        self._check_kept(part.tensor, shards[0][name].kept())
                return f"Sharded.load_state_dict of {self._hyperparameters()}"
            finally:
                self._load_hyperparameters(before)

        self._channel.agree_on(check)
        with self._at_work():
            self._await_parameters()
            self._load_hyperparameters(state["optimizer"])
            for k, unit in enumerate(self._units):
                self._load(k, {index: shards[0][self._names[index]] for index in unit.members})
            self._load_buffers(shards[1])
            self._flags.share(lambda: [False] * len(self._flag))

    def _load(self, k: int, shards: Mapping[int, Shard]) -> None:
        """Load this rank's parts of a unit, and let all have them."""
        values = self._values(k)
        for index, shard in shards.items():
            part = self._parts[k][index]
            if part.start < part.stop:
                write_shards(values[part.within], shard.values)
                if k in self._gradients.own:
                    self._keep(index, k, shard.kept())
        self._publish(k)

    def memory(self) -> dict[str, int]:
        """Return how many bytes this rank holds.

        Returns
        -------
        dict of str to int
            Of the optimizer's ``state``; its parts of ``gradients`` and of ``masters``; the ``buckets`` that gradients
            travel in; and ``parameters``, with what they are gathered in, but for the caller's own arrays.
        """
        self._require_open()
        kept = [self._kept(index, k) for k in self._trained for index in self._units[k].members]
        return {
            "state": sum(x.nbytes for each in kept for x in arrays_in(each)),
            "gradients": self._gradients.nbytes,
            "masters": sum(master.nbytes for master in self._masters.values()),
            "buckets": self._gradients.vectors.nbytes,
            "parameters": self._storage.nbytes,
        }

    # -- giving back

    def free(self) -> None:
        """Give back what it holds; a second call does nothing. Collective with stage 3, whose parameters go with it.

        Save :meth:`weights` first, or :meth:`state_dict`.
        """
        if self._freed:
            return
        with suppress(RankFailedError):  # a Loop, which frees it, survives that
            try:
                self._await_parameters()
            finally:
                self._close()
            if self.stage == 3:
                self._channel.memory.host.collect()

    def _close(self) -> None:
        self._freed = True
        while self._open:
            self._open.pop()()

    def __enter__(self: Self) -> Self:  # noqa: PYI019 - typing.Self needs Python 3.11
        """Return it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free it; after an error other ranks may not come, and memory that a node has once stays then."""
        if error is None:
            self.free()
        elif not self._freed:
            self._close()

    def _require_open(self) -> None:
        if self._freed:
            raise PlanError("Sharded is freed")


def _kind(module: Any) -> type[Sharded]:
    """Return the class for a module."""
    if is_torch(module):
        from mpiagg.sharded.torch_sharded import TorchSharded  # noqa: PLC0415 - torch is an extra

        return TorchSharded
    from mpiagg.sharded.array_sharded import ArraySharded  # noqa: PLC0415 - it is a Sharded

    return ArraySharded


def _check_op(op: str, denom: float | None, size: int) -> float:
    """Return what sums are divided by; raise ValueError for what cannot be."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; known: {', '.join(OPS)}")
    if denom is None:
        return size
    if op != "avg":
        raise ValueError(f"denom is for op 'avg', not for {op!r}")
    return check_number("denom", denom, "a finite number other than zero", lambda x: x != 0)


def _work_dtype(form: Form, master: npt.DTypeLike | None) -> np.dtype[Any]:
    """Return the dtype in which parameters of a form are updated; raise TypeError if that cannot be."""
    own: np.dtype[Any] = form.dtype
    if own.kind != "f" and working_dtype(own) == own:
        raise TypeError(f"parameters are real numbers, not {own}")
    if master is None:
        return own
    name = str(master)  # dtypes of torch's are not known to NumPy, but their names are
    wanted = np.dtype(name.removeprefix("torch.") if name.startswith("torch.") else master)
    if wanted.kind != "f" or wanted.itemsize < 4:
        raise TypeError(f"master_dtype must be float32 or wider, not {wanted}")
    return wanted if wanted.itemsize > own.itemsize else own
