"""A training loop of torch.distributed as under torchrun, started by ``mpiexec`` or ``srun``.

Run it with ``mpiexec -n 4 python docs/examples/torch/training.py``. Two lines are of mpiagg: the import, and the call
that starts torch.distributed from MPI. Each rank has its part of the data; torch's DistributedDataParallel averages the
gradients, and rank 0 prints how well all ranks do.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mpiagg.torch


def main() -> None:
    """Train a small network to tell the quadrants of a plane apart."""
    mpiagg.torch.init_process_group()
    torch.manual_seed(0)
    points = torch.rand(4096, 2) * 2 - 1
    quadrants = (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long()
    data = TensorDataset(points, quadrants)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    batches = DataLoader(data, batch_size=64, sampler=sampler)
    network = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        right = torch.zeros(2)
        for inputs, targets in batches:
            optimizer.zero_grad()
            outputs = model(inputs)
            torch.nn.functional.cross_entropy(outputs, targets).backward()
            optimizer.step()
            right += torch.tensor([(outputs.argmax(1) == targets).sum(), len(targets)])
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {right[0] / right[1]:.1%} right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
