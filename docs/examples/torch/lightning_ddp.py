"""A training by Lightning on MPI.

Run it with ``mpiexec -n 2 python docs/examples/torch/lightning_ddp.py``; it needs ``pip install lightning``. mpiagg
starts the process group, and sets the environment that torchrun sets; Lightning's ``TorchElasticEnvironment`` reads it.
"""

from __future__ import annotations

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import mpiagg.torch


class Quadrants(lightning.LightningModule):
    """A small network that tells the quadrants of a plane apart."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch, and log how many are right on all ranks."""
        inputs, targets = batch
        outputs = self.network(inputs)
        right = (outputs.argmax(1) == targets).float().mean()
        self.log("right", right, on_epoch=True, on_step=False, sync_dist=True)
        return torch.nn.functional.cross_entropy(outputs, targets)

    def on_train_epoch_end(self) -> None:
        """Tell how many were right."""
        self.print(f"epoch {self.current_epoch}: {self.trainer.callback_metrics['right']:.1%} right")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    """Train it."""
    mpiagg.torch.init_process_group()
    torch.manual_seed(0)
    points = torch.rand(1024, 2) * 2 - 1
    quadrants = (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long()
    ranks = dist.get_world_size()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,  # of this node
        strategy=DDPStrategy(process_group_backend="mpiagg"),
        plugins=[TorchElasticEnvironment()],
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Quadrants()
    trainer.fit(model, DataLoader(TensorDataset(points, quadrants), batch_size=32))
    assert trainer.world_size == ranks
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
