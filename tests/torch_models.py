"""Models of torch's that DDP is tested on."""

import copy

import torch
from mpi4py import MPI
from torch import nn

TOKENS = 6


class Net(nn.Module):
    """Everything that parameters can be: tied, frozen, used for some samples only, or never."""

    def __init__(self, seed=0, dtype=torch.float64):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(TOKENS, 4)
            self.hidden = nn.Linear(4, 5)
            self.norm = nn.BatchNorm1d(5)
            self.rare = nn.Linear(5, 5)
            self.never = nn.Linear(2, 2)
            self.out = nn.Linear(5, 4)
            self.scale = nn.Parameter(torch.rand(5) + 0.5, requires_grad=False)
            self.decoder = nn.Linear(4, TOKENS, bias=False)
            self.norm.running_mean.uniform_()
            self.norm.running_var.uniform_(1, 2)
        self.decoder.weight = self.embedding.weight
        self.to(dtype)
        self.norm.eval()  # what it would learn from a batch is not what it learns from its parts

    def forward(self, tokens, rare):
        x = self.norm(torch.tanh(self.hidden(self.embedding(tokens))))
        if rare.any():
            x = x + rare[:, None] * self.rare(x)
        return self.decoder(self.out(x * self.scale))

    def loss(self, batch):
        tokens, rare, wanted = batch
        return nn.functional.cross_entropy(self(tokens, rare), wanted)


def batch(seed, length=36):
    """Return a batch: tokens, which of them are rare (the first two), and what is wanted."""
    generator = torch.Generator().manual_seed(seed)
    tokens, wanted = torch.randint(TOKENS, (2, length), generator=generator)
    return tokens, torch.arange(length) < 2, wanted


def part(batch, index, count):
    """Return one of so many equal parts of a batch."""
    return tuple(x.chunk(count)[index] for x in batch)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)


def trained(model, losses):
    """Return a copy of the model, trained in one process on a list of functions from model to loss."""
    model = copy.deepcopy(model)
    optimizer = optimizer_of(model)
    for loss in losses:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return model


def assert_close(model, wanted, atol=1e-9):
    for (name, x), y in zip(model.state_dict().items(), wanted.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol, msg=lambda words, name=name: f"{name}: {words}")


RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
MEAN = (SIZE - 1) / 2
"""The gradient of :func:`one_pass`, averaged over the ranks."""


def model():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def one_pass(module, factor=RANK):
    module.zero_grad()
    sum((parameter * factor).sum() for parameter in module.parameters()).backward()


def good_step(ddp):
    one_pass(ddp.module)
    ddp.sync_gradients()
    assert all((parameter.grad == MEAN).all() for parameter in ddp.parameters())
