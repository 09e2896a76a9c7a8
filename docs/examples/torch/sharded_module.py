"""Train a module of torch's whose parameters, gradients and optimizer's state are divided over the ranks.

Run it with ``mpiexec -n 2 python docs/examples/torch/sharded_module.py``. The blocks of the module are gathered as a
whole, one while the one before it computes; on one node they lie in memory that the ranks share, and nothing is
gathered. Then the training is saved, and goes on in a new module from what was saved.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from mpi4py import MPI

import mpiagg

COMM = MPI.COMM_WORLD
WIDTH, STEPS = 32, 60


class Model(torch.nn.Module):
    """Some blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, WIDTH), torch.nn.Linear(WIDTH, 1)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number for each row."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def sharded() -> Any:
    """Return a training of a new module; rank 0's parameters are given to all."""
    model = Model()
    return mpiagg.Sharded(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        stage=3,
        layers=list(model.blocks),
        clip_norm=1.0,
    )


def train(training: Any, name: str) -> None:
    """Take steps, each rank on data of its own."""
    torch.manual_seed(1 + COMM.rank)
    for step in range(STEPS):
        x = torch.randn(64, 4)
        loss = torch.nn.functional.mse_loss(training(x), x[:, :1] * x[:, 1:2])
        loss.backward()
        norm = training.step()
        if COMM.rank == 0 and step % (STEPS // 2) == 0:
            print(f"{name}, step {step}: loss {loss.item():.3f}, norm of the gradients {norm:.3f}")


def main() -> None:
    """Train, save, and go on."""
    with sharded() as training:
        train(training, "at first")
        folder = COMM.bcast(tempfile.mkdtemp() if COMM.rank == 0 else None)
        mpiagg.save_checkpoint(folder, training.state_dict())
    with sharded() as training:
        training.load_state_dict(mpiagg.load_checkpoint(folder))
        train(training, "from the checkpoint")
        held = training.memory()
    if COMM.rank == 0:
        print(
            f"this rank keeps {held['state']} B of the optimizer's state, and {held['parameters']} B of the parameters"
        )


if __name__ == "__main__":
    main()
