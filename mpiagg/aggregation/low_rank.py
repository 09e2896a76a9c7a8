"""The linear algebra of PowerSGD, and where its numbers lie; what is reduced in between, others reduce."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiagg.arrays import HOST, Array, Device, convert, cuts_of, device_of, ranges


def factor_rank(shape: tuple[int, ...], rank: int, min_compression_rate: float) -> int:
    """Return the rank to which a tensor is approximated; 0 if it goes as it is.

    A tensor is a matrix of ``shape[0]`` rows. One of n rows and m columns goes as k (n + m) numbers in place of n m,
    with k = min(n, m, rank).
    """
    if len(shape) < 2 or 0 in shape:
        return 0
    rows, columns = shape[0], math.prod(shape[1:])
    k = min(rows, columns, rank)
    return k if rows * columns >= min_compression_rate * k * (rows + columns) else 0


def refresh(q: Array, random: np.random.Generator) -> None:
    """Make matrices fit to multiply by, in place; ``q`` is a stack of them.

    Columns that are zero or not finite are drawn anew: they would stay so for ever. The others are scaled, so that
    a product with them neither overflows nor underflows; only their directions matter.
    """
    largest = np.abs(q).max(axis=-2)
    lost = ~((largest > 0) & np.isfinite(largest))
    largest[lost] = 1
    q /= largest[:, np.newaxis]
    drawn = random.standard_normal((int(lost.sum().item()), q.shape[-2]), q.dtype.type)
    if drawn.size:
        q.swapaxes(-1, -2)[lost] = device_of(q).from_host(drawn)


class Stack(NamedTuple):
    """Matrices of one shape, one upon the other.

    Attributes
    ----------
    members : tuple of int
        Their places in the list of tensors.
    errors : numpy.ndarray
        What has not been sent so far; during a step the gradients are added. Shape (count, n, m).
    p, q : numpy.ndarray
        The factors. Shapes (count, n, k) and (count, m, k).
    product : numpy.ndarray
        Scratch of the errors' shape.
    """

    members: tuple[int, ...]
    errors: Array
    p: Array
    q: Array
    product: Array

    def multiply(self) -> Array:
        """Return P Qᵀ."""
        return np.matmul(self.p, self.q.swapaxes(-1, -2), out=self.product)


class LowRank:
    """One rank's part in approximating the tensors of one dtype by the products of thin matrices.

    A step is :meth:`load`, :meth:`project`, the mean of :attr:`first` over the ranks, :meth:`project_back`, the mean of
    :attr:`second`, and :meth:`reconstruct`. A step without approximation is :meth:`load`, the mean of :attr:`whole`,
    and :meth:`unload`.

    Parameters
    ----------
    shapes : dict of int to tuple of int
        The tensors' places in their list, and their shapes.
    dtype : numpy.dtype
        In which all is computed and travels: float32 or float64.
    rank : int
        The rank to approximate to.
    min_compression_rate : float
        A tensor for which less would be saved goes as it is.
    local : bool
        Whether a rank's error is what is missing in its own approximation, or in that of the mean.
    device : Device
        Where the tensors lie, and all is computed.

    Attributes
    ----------
    stacks : list of Stack
        The matrices, those of one shape together.
    first : numpy.ndarray
        The tensors that go as they are, and all P.
    second : numpy.ndarray
        All Q; zeros at first, which :func:`refresh` replaces.
    whole : numpy.ndarray
        All tensors.
    """

    def __init__(
        self,
        shapes: Mapping[int, tuple[int, ...]],
        dtype: np.dtype[Any],
        rank: int,
        min_compression_rate: float,
        *,
        local: bool,
        device: Device = HOST,
    ) -> None:
        self._local, self._device = local, device
        stacked: dict[tuple[int, int, int], list[int]] = {}
        plain: list[int] = []
        for index, shape in shapes.items():
            if k := factor_rank(shape, rank, min_compression_rate):
                stacked.setdefault((shape[0], math.prod(shape[1:]), k), []).append(index)
            else:
                plain.append(index)
        errors = [(len(members), n, m) for (n, m, _), members in stacked.items()]
        ps = [(len(members), n, k) for (n, _, k), members in stacked.items()]
        qs = [(len(members), m, k) for (_, m, k), members in stacked.items()]
        # Errors, plain tensors, all P: what is reduced together lies together.
        vector, views = _lay_out([*errors, *(shapes[index] for index in plain), *ps], dtype, device)
        self.first, self.whole = vector[_elements(errors) :], vector[: vector.size - _elements(ps)]
        self.second, q_views = _lay_out(qs, dtype, device)
        product = device.empty(max(map(math.prod, errors), default=0), dtype)
        self.stacks = [
            Stack(tuple(members), error, p, q, product[: error.size].reshape(error.shape))
            for members, error, p, q in zip(
                stacked.values(), views[: len(errors)], views[len(errors) + len(plain) :], q_views, strict=True
            )
        ]
        self._plain = dict(zip(plain, views[len(errors) :], strict=False))
        self._errors = {
            index: error.reshape(shapes[index])
            for stack in self.stacks
            for index, error in zip(stack.members, stack.errors, strict=True)
        }

    def load(self, tensors: Sequence[Array]) -> None:
        """Take the tensors of the list in, adding to the errors."""
        for index, error in self._errors.items():
            np.add(error, tensors[index], out=error)
        for index, plain in self._plain.items():
            convert(plain, tensors[index])

    @np.errstate(invalid="ignore", over="ignore")  # what is not finite shows in the result
    def project(self, random: np.random.Generator) -> None:
        """Compute the P of this rank."""
        for stack in self.stacks:
            refresh(stack.q, random)
            np.matmul(stack.errors, stack.q, out=stack.p)

    @np.errstate(invalid="ignore", over="ignore")
    def project_back(self) -> None:
        """Orthonormalise the mean P, and compute the Q of this rank."""
        for stack in self.stacks:
            # Householder's QR gives orthonormal columns for whatever comes: of lower rank, or zero.
            stack.p[...] = np.linalg.qr(stack.p)[0]
            np.matmul(stack.errors.swapaxes(-1, -2), stack.p, out=stack.q)
            if self._local:
                np.subtract(stack.errors, stack.multiply(), out=stack.errors)

    @np.errstate(invalid="ignore", over="ignore")
    def reconstruct(self, tensors: Sequence[Array]) -> None:
        """Give the tensors of the list the approximation of their mean, from the mean Q.

        Where that is not finite, errors are forgotten: they are not finite either, and would stay so for ever.
        """
        for stack in self.stacks:
            product = stack.multiply()
            if not self._local:
                np.subtract(stack.errors, product, out=stack.errors)
            stack.errors[~np.isfinite(stack.q).all(axis=(-2, -1))] = 0
            for index, approximation in zip(stack.members, product, strict=True):
                convert(tensors[index], approximation.reshape(tensors[index].shape))
        _unload(self._plain, tensors)

    def unload(self, tensors: Sequence[Array]) -> None:
        """Give the tensors of the list their mean; no error is left."""
        _unload(self._errors, tensors)
        _unload(self._plain, tensors)
        for stack in self.stacks:
            stack.errors.fill(0)


def _unload(views: Mapping[int, Array], tensors: Sequence[Array]) -> None:
    for index, view in views.items():
        convert(tensors[index], view)


def _lay_out(shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any], device: Device) -> tuple[Array, list[Array]]:
    """Return a vector of zeros, and it cut into arrays of these shapes."""
    cuts = cuts_of([math.prod(shape) for shape in shapes])
    vector = device.empty(cuts[-1], dtype)
    vector.fill(0)
    return vector, [
        vector[start:stop].reshape(shape) for shape, (start, stop) in zip(shapes, ranges(cuts), strict=True)
    ]


def _elements(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))
