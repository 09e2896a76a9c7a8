"""FSDP2 of torch on MPI: each rank has a part of the parameters, of their gradients and of the optimizer's state.

Run it with ``mpiexec -n 4 python docs/examples/torch/sharded.py``. The parts come together in memory that the ranks of
a node share, which torch asks the process group for. At the end the parameters are written in parts, by
torch.distributed.checkpoint, and read again.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule, fully_shard

import mpiagg.torch


def main() -> None:
    """Train a network on numbers that another has made, and keep it."""
    mpiagg.torch.init_process_group()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)]
    model = torch.nn.Sequential(*layers)
    teacher = torch.nn.Linear(64, 8)
    for module in (layers[0], layers[2], model):
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)
        module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())  # other inputs on each rank
    for step in range(100):
        inputs = torch.randn(32, 64)
        loss = torch.nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 33 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    state = model.state_dict()
    dcp.save(state, checkpoint_id=folder[0])
    dcp.load(state, checkpoint_id=folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
