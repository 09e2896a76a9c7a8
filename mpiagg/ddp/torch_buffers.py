"""The buffers of modules of torch, which go from rank to rank in copies."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from mpi4py import MPI

from mpiagg.collectives.moving_functions import broadcast
from mpiagg.ddp.torch_modules import stored_array
from mpiagg.ddp.torch_streams import stream_of


def broadcast_buffers(buffers: Iterable[torch.Tensor], comm: MPI.Intracomm, root: int) -> None:
    """Give the root's buffers of a module to all, those of a dtype in one message."""
    of_dtype: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for buffer in buffers:
        of_dtype.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for alike in of_dtype.values():
        with torch.no_grad(), stream_of(alike[0]):
            whole = torch.cat([x.reshape(-1) for x in alike])
            array = stored_array(whole, "the buffers")
            broadcast(array, root=root, out=array, comm=comm)
            if comm.rank != root:
                for buffer, part in zip(alike, whole.split([x.numel() for x in alike]), strict=True):
                    # A graph that remembers the buffer goes on with what is there, as with torch's DDP.
                    buffer.data.copy_(part.view(buffer.shape))
