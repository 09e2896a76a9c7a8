"""Sparse gradients of torch's: all ranks gather the coordinates and values of all."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import torch
from mpi4py import MPI

from mpiagg.collectives import block_functions, moving_functions
from mpiagg.ddp.torch_modules import array_of, tensor_of
from mpiagg.errors import MismatchError


def sum_of_sparse(tensor: torch.Tensor, comm: MPI.Intracomm, timeout: float | None = None) -> torch.Tensor:
    """Return the sum of the sparse tensors of all ranks, which have one shape; collective.

    Raises
    ------
    MismatchError
        On all ranks, if they have different ones.
    """
    own = tensor.coalesce()
    coordinates, values = own.indices().t().contiguous(), own.values().contiguous()
    form = f"{tuple(own.shape)} with {own.sparse_dim()} sparse dimensions"
    mine = np.array([len(values), crc32(form.encode())])
    counts, forms = moving_functions.allgather(mine, comm=comm, timeout=timeout).T.tolist()
    if len(set(forms)) > 1:
        raise MismatchError(f"ranks have sparse tensors of different shapes; this one has {form}")
    indices, summands = (
        tensor_of(block_functions.allgatherv(array_of(part, "a sparse tensor"), counts, comm=comm, timeout=timeout))
        for part in (coordinates, values)
    )
    return torch.sparse_coo_tensor(indices.t(), summands, tensor.shape, check_invariants=True).coalesce()


def average_sparse(parameters: list[torch.nn.Parameter], comm: MPI.Intracomm, divisor: float) -> None:
    """Give each parameter the sum of its sparse gradients of all ranks, divided; collective.

    Where some ranks have no gradient, they get the result; one that is missing everywhere stays missing.
    """
    has = np.array([each.grad is not None for each in parameters])
    anywhere: list[bool] = np.any(moving_functions.allgather(has, comm=comm), axis=0).tolist()
    for parameter, wanted in zip(parameters, anywhere, strict=True):
        if wanted:
            own = _without_rows(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = sum_of_sparse(own, comm).div_(divisor)


def _without_rows(parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient of an embedding's in which no row has come up."""
    rows, values = torch.empty((1, 0), dtype=torch.int64), parameter.new_empty((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(rows, values, parameter.shape, device=parameter.device, check_invariants=True)
