"""A training loop of Hugging Face Accelerate on MPI.

Run it with ``mpiexec -n 2 python docs/examples/torch/accelerate_loop.py``; it needs ``pip install accelerate``.
Accelerate takes the process group that mpiagg has started.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import mpiagg.torch


def main() -> None:
    """Train a small network to tell the quadrants of a plane apart."""
    mpiagg.torch.init_process_group()
    accelerator = Accelerator(cpu=True)
    assert dist.get_backend() == mpiagg.torch.BACKEND
    assert accelerator.num_processes == dist.get_world_size()
    torch.manual_seed(0)
    points = torch.rand(1024, 2) * 2 - 1
    quadrants = (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long()
    network = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    batches = DataLoader(TensorDataset(points, quadrants), batch_size=32, shuffle=True)
    model, optimizer, batches = accelerator.prepare(network, torch.optim.Adam(network.parameters(), lr=0.01), batches)
    for epoch in range(3):
        right = torch.zeros(2)
        for inputs, targets in batches:
            optimizer.zero_grad()
            outputs = model(inputs)
            accelerator.backward(torch.nn.functional.cross_entropy(outputs, targets))
            optimizer.step()
            right += torch.tensor([(outputs.argmax(1) == targets).sum(), len(targets)])
        total = accelerator.reduce(right, reduction="sum")
        accelerator.print(f"epoch {epoch}: {total[0] / total[1]:.1%} right")
    for parameter in model.parameters():
        assert (accelerator.gather(parameter.detach()[None]) == parameter).all()
    accelerator.end_training()  # which ends the process group, too


if __name__ == "__main__":
    main()
