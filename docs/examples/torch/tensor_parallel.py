"""Tensor parallel with DTensor: each rank has a part of each matrix, and the result is that of a single process.

Run it with ``mpiexec -n 2 python docs/examples/torch/tensor_parallel.py``. The first layer is cut by columns, the
second by rows, so that one all-reduce brings the parts together.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mpiagg.torch


def main() -> None:
    """Train a network in parts and whole, and compare."""
    mpiagg.torch.init_process_group()
    ranks = dist.get_world_size()
    torch.manual_seed(0)  # the same on all ranks
    whole = torch.nn.Sequential(torch.nn.Linear(16, 8 * ranks), torch.nn.GELU(), torch.nn.Linear(8 * ranks, 4))
    whole = whole.to(torch.float64)
    mesh = dist.init_device_mesh("cpu", (ranks,))
    parts = parallelize_module(copy.deepcopy(whole), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs, targets = torch.randn(32, 16, dtype=torch.float64), torch.randn(32, 4, dtype=torch.float64)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, parts)]
    for step in range(5):
        losses = []
        for model, optimizer in zip((whole, parts), optimizers, strict=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-9, losses
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[1]:.6f}, in a single process {losses[0]:.6f}")
    for mine, other in zip(parts.parameters(), whole.parameters(), strict=True):
        gathered = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(gathered, other, rtol=0, atol=1e-9)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
