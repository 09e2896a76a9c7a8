"""What ``bench/learning.py`` trains: a language model of characters, and a small CNN on handwritten digits.

All data are made of what packages bring: the documentation strings and the licence of Python's standard library, and
scikit-learn's digits. The examples are shared out over the ranks once: dealt in turn (``iid``), or so that each rank
has others (``skewed``): other modules' text, or other classes.
"""

from __future__ import annotations

import ast
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

VOCABULARY: Final = "\n" + "".join(map(chr, range(32, 127)))
"""The characters that a text keeps; others are left out."""

CONTEXT, WIDTH, LAYERS, HEADS = 64, 128, 2, 4
WINDOWS: Final = 8
"""Windows of text in the share that a rank has of a batch."""

BLOCK: Final = 1024
"""Characters that stay together when a text is shared out."""

HELD_OUT: Final = 10
"""One of so many blocks of text is for testing."""

TESTED: Final = 64
"""Windows of the held-out text on which a model is tested."""

IMAGES: Final = 16
"""Images in the share that a rank has of a batch."""


class Task(NamedTuple):
    """What a rank trains.

    Attributes
    ----------
    module : torch.nn.Module
        With the same weights on all ranks.
    optimizer : torch.optim.Optimizer
        The same for all ways to train.
    schedule : torch.optim.lr_scheduler.LRScheduler
        Of its learning rate, to step after it.
    inputs, targets : torch.Tensor
        The examples of this rank.
    test_inputs, test_targets : torch.Tensor
        The same on all ranks.
    batch : int
        Examples in this rank's share of a batch.
    tokens : int
        What of an example is predicted: characters, or an image's class.
    digest : int
        CRC-32 of the data of all ranks.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    inputs: torch.Tensor
    targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor
    batch: int
    tokens: int
    digest: int

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy, in nats a token."""
        return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def examples(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's share of the batch of a step: drawn anew from its examples, alike in every training."""
        chosen = np.random.default_rng([step, rank]).integers(len(self.inputs), size=self.batch)
        return self.inputs[chosen], self.targets[chosen]

    def test(self) -> tuple[float, float]:
        """Return the loss and the accuracy on what was held out."""
        self.module.eval()
        with torch.no_grad():
            outputs = self.module(self.test_inputs)
            found = float(self.loss(outputs, self.test_targets))
            right = float((outputs.argmax(-1) == self.test_targets).float().mean())
        self.module.train()
        return found, right


# -- characters


def documentation(files: Iterable[Path]) -> Iterator[str]:
    """Yield the documentation strings of modules, classes and functions, in the order of files and lines."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in files:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield text


@cache
def text() -> str:
    """Return the documentation strings of the standard library's top modules, and its licence, if it is there."""
    library = Path(sysconfig.get_path("stdlib"))
    licences = [path.read_text(errors="ignore") for path in (library / "LICENSE.txt",) if path.exists()]
    whole = "\n\n".join([*documentation(sorted(library.glob("*.py"))), *licences])
    return "".join(filter(set(VOCABULARY).__contains__, whole))


def windows(encoded: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the windows of blocks, each starting half a window after the one before, and what follows each character.

    ``encoded`` has a block a row.
    """
    starts = range(0, encoded.shape[1] - CONTEXT, CONTEXT // 2)
    cut = np.stack([encoded[:, start : start + CONTEXT + 1] for start in starts], axis=1).reshape(-1, CONTEXT + 1)
    whole = torch.from_numpy(np.ascontiguousarray(cut))
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


class CharacterModel(nn.Module):
    """A transformer of two layers that predicts the next character."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)  # with torch's 1 it learns far slower
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) / WIDTH**0.5)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(VOCABULARY))
        mask = torch.triu(torch.full((CONTEXT, CONTEXT), -torch.inf), diagonal=1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return the logits of what follows each character."""
        found = self.embedding(characters) + self.places
        for layer in self.layers:
            found = layer(found, src_mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(found))
        return logits


def characters(
    split: str,
    rank: int,
    size: int,
    seed: int,
    steps: int,
    *,
    momentum: float = 0.9,
    learning_rate: float = 4e-3,
    batch: int = WINDOWS,
    tested: int = TESTED,
) -> Task:
    """Return the language model, with a rank's part of the text and so many windows of it in its share of a batch.

    It is tested on so many others.

    The learning rate grows for a twentieth of the steps, and falls to zero until the last.
    """
    known = np.zeros(128, np.int64)
    known[[ord(character) for character in VOCABULARY]] = np.arange(len(VOCABULARY))
    encoded = known[np.frombuffer(text().encode("ascii"), np.uint8)]
    blocks = encoded[: len(encoded) // BLOCK * BLOCK].reshape(-1, BLOCK)
    held_out = np.arange(len(blocks)) % HELD_OUT == 0
    own = _share(blocks[~held_out], np.zeros(int((~held_out).sum())), split, rank, size)
    test_inputs, test_targets = windows(blocks[held_out])
    chosen = np.random.default_rng(seed).permutation(len(test_inputs))[:tested]
    torch.manual_seed(seed)
    module = CharacterModel()
    betas = float(momentum), 0.999
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, betas=betas, weight_decay=0.01)
    rising = steps // 20
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / (rising + 1), (steps - step) / (steps - rising)))
    data = (*windows(own), test_inputs[chosen], test_targets[chosen])
    return Task(module, optimizer, schedule, *data, batch, CONTEXT, zlib.crc32(blocks.tobytes()))


# -- digits


class DigitsModel(nn.Module):
    """A small CNN."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of the classes, as of one token."""
        logits: torch.Tensor = self.convolutions(images)
        return logits[:, None]


def digits(
    split: str, rank: int, size: int, seed: int, _: int, *, momentum: float = 0.9, learning_rate: float = 0.05
) -> Task:
    """Return the CNN, with a rank's part of the images; the learning rate stays."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels[order]
    held_out = len(labels) // 4
    rows = _share(np.arange(held_out, len(labels)), labels[held_out:], split, rank, size)
    torch.manual_seed(seed)
    module = DigitsModel()
    optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate, momentum=momentum)
    schedule = LambdaLR(optimizer, lambda _: 1.0)
    chosen = (images[rows], labels[rows][:, None], images[:held_out], labels[:held_out][:, None])
    data = [torch.from_numpy(np.ascontiguousarray(each)) for each in chosen]
    digest = zlib.crc32(images.tobytes() + labels.tobytes())
    return Task(module, optimizer, schedule, data[0], data[1], data[2], data[3], batch=IMAGES, tokens=1, digest=digest)


def _share(examples: npt.NDArray[Any], kinds: npt.NDArray[Any], split: str, rank: int, size: int) -> npt.NDArray[Any]:
    """Return a rank's part of the examples: every size-th, or, skewed, a part of what is sorted by kind."""
    if split == "iid":
        return examples[rank::size]
    return np.array_split(examples[np.argsort(kinds, kind="stable")], size)[rank]


TASKS: Final = {
    "characters": characters,
    "characters-16": partial(characters, batch=16, learning_rate=6e-3),
    "characters-long": partial(characters, batch=16, learning_rate=6e-3, tested=512),
    "digits": digits,
}
