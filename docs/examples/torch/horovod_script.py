"""A script of Horovod's for torch, of which one line is changed: the import.

Run it with ``mpiexec -n 4 python docs/examples/torch/horovod_script.py``.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mpiagg.horovod.torch as hvd


def main() -> None:
    """Train a small network to tell the quadrants of a plane apart."""
    hvd.init()
    torch.manual_seed(0)
    points = torch.rand(2048, 2) * 2 - 1
    quadrants = (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long()
    data = TensorDataset(points, quadrants)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=64, sampler=sampler):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f}")


if __name__ == "__main__":
    main()
