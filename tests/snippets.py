"""The snippets of README and docs, and what stands around the Python ones that show a part of a program."""

import re
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).parents[1]
PAGES = [
    TOP / "README.md",
    TOP / "CONTRIBUTING.md",
    TOP / "SECURITY.md",
    TOP / "slurm" / "README.md",
    TOP / "bench" / "README.md",
    *sorted(TOP.glob("docs/*.md")),
]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>[\w{}-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)


class Snippet(NamedTuple):
    """A block of code: where it begins, and its text as a reader would paste it."""

    page: str
    line: int
    text: str


def of(page, kinds, text=None):
    """Return the blocks of a page that are of some kinds."""
    text = page.read_text() if text is None else text
    return [
        Snippet(str(page.relative_to(TOP)), text.count("\n", 0, match.start()) + 2, match["text"])
        for match in FENCE.finditer(text)
        if match["kind"] in kinds
    ]


NEEDS_A_GPU = ("import cupy", 'module.to("cuda")')
"""What is written in snippets that only a machine with a GPU can run; elsewhere they are compiled."""

ARRAYS = """
import numpy as np
import mpiagg
from mpi4py import MPI
comm = mpiagg.Comm(MPI.COMM_WORLD)
weights = [np.full((4, 3), float(comm.rank)), np.zeros(3)]
parameters = [w.copy() for w in weights]
gradient, field = np.ones(10), np.arange(12.0).reshape(4, 3)
batches = [1.0, 2.0]
def compute(weights, batch=None):
    return [np.full_like(w, 0.1) for w in weights] if isinstance(weights, list) else np.full(10, weights)
def step(weights, gradients):
    for w, g in zip(weights, gradients):
        w -= 0.1 * g
"""

TORCH = """
import torch
import mpiagg
torch.manual_seed(0)
module = model = torch.nn.Linear(5, 2)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
loss = torch.nn.functional.mse_loss
batches = [(torch.ones(3, 5), torch.zeros(3, 2))] * 2
"""

CHECKPOINTS = """
import os, tempfile
momentum, aggregation = [np.zeros_like(w) for w in weights], mpiagg.PowerSGD(comm)
step, smaller = 3, comm
os.chdir(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
if comm.rank == 0:
    os.mkdir("run7")
comm.Barrier()
path = "checkpoint"
mpiagg.save_checkpoint(path, {"weights": weights})
my_last_state = aggregation.state_dict()
"""

LOOP = """
import os, tempfile
os.chdir(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
train = lambda comm: None
first_weights = lambda: [np.ones((4, 3))]
batch = lambda step, rank, size: 1.0
gradients_of = lambda weights, batch: [0.1 * w for w in weights]
loop_run, mpiagg.Loop.run = mpiagg.Loop.run, lambda loop, steps: loop_run(loop, 20)  # of 100,000
class Training:
    def __init__(self, comm):
        self.taken = 0
    def step(self, step):
        self.taken += 1
    def state_dict(self):
        return {"taken": self.taken}
    def load_state_dict(self, state):
        self.taken = state["taken"]
    def free(self):
        pass
"""

SHARDED = """
import os, tempfile
weights, x = [np.ones((3, 4)), np.zeros(4), np.ones((4, 2)), np.zeros(2)], np.ones((5, 3))
batches = [(x, np.zeros((5, 2)))] * 2
gradients_of = lambda weights, x, y: [0.1 * w for w in weights]
forward = lambda layer, x, matrix, bias: x @ matrix + bias
backward = lambda layer, x, matrix, bias: ([0.1 * matrix, 0.1 * bias], x @ matrix.T)
optimizer, step = mpiagg.optimizers.SGD(lr=0.1), 3
sharded = mpiagg.Sharded([w.copy() for w in weights], mpiagg.optimizers.SGD(lr=0.1))
os.chdir(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
"""

AROUND = {
    "docs/aggregations.md": ARRAYS,
    "docs/checkpoints.md": ARRAYS + CHECKPOINTS,
    "docs/failures.md": ARRAYS + LOOP,
    "docs/guide.md": ARRAYS,
    "docs/sharded.md": ARRAYS + SHARDED,
    "docs/torch.md": TORCH,
    "docs/from-torch-ddp.md": TORCH,
}
"""What stands around the snippets of a page that show a part of a program."""


def program(snippet):
    """Return the program that a snippet is a part of, and its own text in it unchanged."""
    around = AROUND.get(snippet.page, "")
    if around == ARRAYS and re.search(r"\b(module|torch)\b", snippet.text):
        around = TORCH
    return around + snippet.text
