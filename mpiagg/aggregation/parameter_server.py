"""Aggregation through one rank that owns the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.elementwise import Elementwise
from mpiagg.arrays import Array, Reduction, is_array, reduction, working_dtype
from mpiagg.common.arguments import check_root
from mpiagg.plans.choices import Choice
from mpiagg.plans.program import Program
from mpiagg.schedules import Collective
from mpiagg.transport import SHARED_TAG

_CENTRAL: Final = Choice("parameter_server")


class ParameterServer(Elementwise):
    """Average on one rank, the root: every rank sends to it, and it sends the mean back.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The ranks; the world by default.
    root : int
        The rank that averages.

    Raises
    ------
    ValueError
        If the root is not a rank.
    MismatchError
        On all ranks, if they disagree on the root.

    Notes
    -----
    The mean is the left fold x_root + x_(root+1) + ..., ranks modulo n, and one division by n; all ranks end with its
    bits. Values of float16 and bfloat16 are combined in float32. With n ranks and B bytes, the root receives and
    sends (n-1) B, and every other rank B.

    Examples
    --------
    >>> with mpiagg.ParameterServer(root=0) as server:
    ...     (weights,) = server.broadcast_params([np.full(2, 7.0 + rank)])
    ...     (gradient,) = server.reduce_gradients([np.full(2, 2.0 * rank)])
    >>> print(weights)
    [7. 7.]
    >>> bool(np.allclose(gradient, size - 1))
    True
    """

    def __init__(self, comm: MPI.Intracomm | None = None, root: int = 0) -> None:
        super().__init__(comm)
        self.root = root

        def check() -> str:
            self.root = check_root(root, self._channel.size)
            return f"ParameterServer with root {root}"

        self._channel.agree_on(check)

    def broadcast_params(self, params: Sequence[Array]) -> list[Array]:
        """Return new arrays with the root's values; collective.

        Parameters
        ----------
        params : sequence of numpy.ndarray
            On the root the arrays to give; elsewhere any arrays of the same shapes and dtypes.

        Returns
        -------
        list of array
            Of the shapes and dtypes of ``params``.

        Raises
        ------
        TypeError, ValueError, MismatchError, PlanError, StallError
            As :meth:`aggregate`; but arrays of all numbers can be given, also read-only ones.
        """
        given = _copies(params)
        bind = partial(self._bind, collective=Collective.BROADCAST)
        self._run(given, bind, variant=Collective.BROADCAST, check_dtype=working_dtype)
        return given

    def reduce_gradients(self, grads: Sequence[Array]) -> list[Array]:
        """Return new arrays with the mean of all ranks' arrays; collective.

        Parameters
        ----------
        grads : sequence of numpy.ndarray
            This rank's arrays, the same number, shapes and dtypes on all ranks.

        Returns
        -------
        list of array
            Of the shapes and dtypes of ``grads``.

        Raises
        ------
        TypeError, ValueError, MismatchError, PlanError, StallError
            As :meth:`aggregate`; but read-only arrays are good, too.
        """
        means = _copies(grads)
        self.aggregate(means)
        return means

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        reduction("avg", dtype, self._channel.size)

    def _bind(self, vector: Array, tag: int = SHARED_TAG, *, collective: Collective = Collective.ALLREDUCE) -> Program:
        reduces = collective.reduces
        how = reduction("avg", vector.dtype, self._channel.size) if reduces else Reduction(np.add, vector.dtype, "sum")
        return self._collective(vector, collective, how, _CENTRAL, root=self.root, tag=tag)


def _copies(tensors: Sequence[Array]) -> list[Array]:
    """Return new arrays; what is no array stays, to be refused on all ranks together."""
    if not isinstance(tensors, Sequence):
        return tensors
    return [x.copy() if is_array(x) else x for x in tensors]
