"""The buffers of modules of torch, which go from rank to rank in copies."""

from __future__ import annotations

import torch
from mpi4py import MPI

from mpiagg.collectives.moving_functions import broadcast
from mpiagg.ddp.torch_modules import TorchAdapter, stored_array


def broadcast_buffers(adapter: TorchAdapter, comm: MPI.Intracomm, root: int) -> None:
    """Give the root's buffers of a module to all, those of a dtype in one message.

    They stay tensors that torch can resize: of a tensor of which there was an array, it resizes the memory no more.
    """
    of_dtype: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for buffer in adapter.buffers():
        of_dtype.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad(), adapter.stream():
        for alike in of_dtype.values():
            whole = torch.cat([x.reshape(-1) for x in alike])
            array = stored_array(whole, "the buffers")
            broadcast(array, root=root, out=array, comm=comm)
            if comm.rank != root:
                for buffer, part in zip(alike, whole.split([x.numel() for x in alike]), strict=True):
                    # A graph that remembers the buffer goes on with what is there, as with torch's DDP.
                    buffer.data.copy_(part.view(buffer.shape))
