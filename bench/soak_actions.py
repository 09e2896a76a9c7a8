"""What the ranks of ``bench/soak.py`` do, again and again: all that the package has, with results held against NumPy.

Every rank draws the same, from the same seed, and knows the data of all ranks. Values are small whole numbers, so that
sums in any order are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiagg
from mpiagg.cli.aggregators import AGGREGATORS

DTYPES = ("f2", "f4", "f8", "i4", "i8", "u1", "c16")
LENGTHS = (0, 1, 3, 17, 64, 257, 1024, 5000, 30_000, 100_000)
OPS: dict[str, Callable[..., Any]] = {
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "max": lambda rows: rows.max(0),
    "min": lambda rows: rows.min(0),
    "prod": lambda rows: rows.prod(0, dtype=rows.dtype),
}
MPI_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter")
LOSSY = ("error-feedback", "error-feedback-u4", "sparsified-topk", "power-sgd")
MIXING = ("decentralized", "decentralized-all", "decentralized-exponential", "neighbor-average", "local-sgd")
SHAPES = ((12, 9), (40,), (3, 4, 5))


class Scene:
    """What actions need.

    Parameters
    ----------
    world : MPI.Intracomm
        The ranks.
    seed : int
        Of all that is drawn.
    folder : Path
        For checkpoints; the same on all ranks.
    """

    def __init__(self, world: MPI.Intracomm, seed: int, folder: Path) -> None:
        self.world, self.rank, self.size, self.folder = world, world.rank, world.size, folder
        self.rng = np.random.default_rng(seed)
        self.comm = mpiagg.Comm(world)
        self.kept = mpiagg.DDP([np.zeros(shape, np.float32) for shape in SHAPES], self.comm, bucket_bytes=256)
        self.gossip = mpiagg.LocalSGD(self.comm, period=1)

    def free(self) -> None:
        """Give back what is kept throughout."""
        self.kept.free()
        self.gossip.free()
        self.comm.Free()

    def pick(self, *choices: Any) -> Any:
        """Return one of the choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def rows(self, dtype: str, shape: int | tuple[int, ...], most: int = 5) -> np.ndarray:
        """Return the arrays of all ranks, one below the other."""
        lengths = shape if isinstance(shape, tuple) else (shape,)
        return self.rng.integers(0, most, (self.size, *lengths)).astype(dtype)

    def case(self) -> tuple[np.ndarray, str]:
        """Return the vectors of all ranks, and an op that is for them."""
        dtype, length = self.pick(*DTYPES), self.pick(*LENGTHS)
        rows = self.rows(dtype, length, 3)
        return rows, self.pick("sum", "prod") if dtype == "c16" else self.pick(*OPS)

    @contextmanager
    def other_comm(self) -> Iterator[MPI.Intracomm]:
        """Yield a communicator of these ranks that is made and freed."""
        comm = self.pick(
            lambda: mpiagg.Comm(self.world), self.comm.Dup, lambda: self.comm.Split(0, self.rank), self.world.Dup
        )()
        yield comm
        comm.Free()


def same(found: object, wanted: np.ndarray) -> None:
    """Raise AssertionError unless an array is what it must be, to the last bit."""
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), (found.dtype, found.shape)
    assert np.array_equal(found, wanted), (found, wanted)


def outcome(name: str, rows: np.ndarray, op: str, root: int, rank: int) -> np.ndarray | None:
    """Return what a rank must get."""
    if name == "broadcast":
        return rows[root]
    if name == "allgather":
        return rows
    reduced = np.asarray(OPS[op](rows), rows.dtype)
    if name == "reduce_scatter":
        return np.array_split(reduced, len(rows))[rank]
    return reduced if name == "allreduce" or rank == root else None


def call(scene: Scene, name: str) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return the arguments of an array function, and what it must return."""
    rows, op = scene.case()
    known: dict[str, Any] = {"x": rows[scene.rank].copy()}
    if name in ("reduce", "broadcast"):
        known["root"] = scene.pick(*range(scene.size))
    if name in ("allreduce", "reduce", "reduce_scatter"):
        known["op"] = op
    known["algorithm"] = scene.pick("auto", "auto", "native", "ring" if name != "reduce" else "tree", "direct")
    known["comm"] = scene.pick(scene.world, scene.comm)
    if name in ("allreduce", "broadcast") and scene.pick(True, False):
        known["out"] = known["x"]
    return known, outcome(name, rows, op, known.get("root", 0), scene.rank)


def held(found: object, wanted: np.ndarray | None) -> None:
    """Hold what a rank got against what it must get."""
    if wanted is None:
        assert found is None
    else:
        same(found, wanted)


def function(scene: Scene) -> None:
    """Call an array function."""
    name = scene.pick(*COLLECTIVES)
    arguments, wanted = call(scene, name)
    held(getattr(mpiagg, name)(**arguments, check=scene.pick(None, True)), wanted)


def average(scene: Scene) -> None:
    """Average, also in fewer bytes on the way."""
    rows = scene.rows("f4", scene.pick(*LENGTHS))
    wire = scene.pick(None, "fp16")
    found = mpiagg.allreduce(rows[scene.rank], "avg", wire=wire, comm=scene.comm)
    np.testing.assert_allclose(found, rows.mean(0), rtol=1e-6 if wire is None else 2e-3)


def plan(scene: Scene) -> None:
    """Make a plan, run it in all ways, and free it."""
    name = scene.pick(*COLLECTIVES)
    arguments, wanted = call(scene, name)
    x, kept = arguments["x"], arguments["x"].copy()
    with getattr(mpiagg, f"{name}_init")(**arguments) as made:
        held(made(), wanted)
        x[...] = kept
        made.start()
        while not made.test():
            pass
        held(made.wait(), wanted)


def methods(scene: Scene) -> None:
    """Call the communicator's methods: blocking, nonblocking and persistent ones."""
    rows, op = scene.case()
    x, root, how = rows[scene.rank].copy(), scene.pick(*range(scene.size)), MPI_OPS[op]
    reduced = OPS[op](rows).astype(rows.dtype)
    gathered, alone = np.empty_like(rows), np.empty_like(x)
    part = len(x) // scene.size
    scattered = np.empty(part, rows.dtype)
    given = rows[root].copy() if scene.rank == root else np.zeros_like(x)
    cases: tuple[tuple[str, tuple[Any, ...], np.ndarray, np.ndarray | None], ...] = (
        ("llreduce", (x, alone, how), alone, reduced),
        ("educe", (x, alone, how, root), alone, reduced if scene.rank == root else None),
        ("cast", (given, root), given, rows[root]),
        ("llgather", (x, gathered), gathered, rows),
        (
            "educe_scatter_block",
            (x[: part * scene.size], scattered, how),
            scattered,
            reduced[: part * scene.size].reshape(scene.size, part)[scene.rank],
        ),
        ("arrier", (), alone, None),
    )
    name, arguments, result, wanted = scene.pick(*cases)
    first = {"llreduce": "A", "educe": "R", "cast": "B", "llgather": "A", "educe_scatter_block": "R", "arrier": "B"}
    form = scene.pick("", "I", "_init")
    if form == "":
        getattr(scene.comm, first[name] + name)(*arguments)
    elif form == "I":
        getattr(scene.comm, f"I{first[name].lower()}{name}")(*arguments).Wait()
    else:
        request = getattr(scene.comm, f"{first[name]}{name}_init")(*arguments)
        request.Start()
        request.Wait()
        request.Free()
    if wanted is not None:
        same(result, wanted)


def tensors(scene: Scene) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return arrays of this rank, and the mean of those of all ranks."""
    rows = [scene.rows("f4", shape) for shape in SHAPES]
    return [each[scene.rank].copy() for each in rows], [each.mean(0, dtype=np.float64) for each in rows]


def near(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray], atol: float = 1e-5) -> None:
    """Raise AssertionError unless arrays are what they must be, but for rounding."""
    for each, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(each, right, rtol=1e-5, atol=atol)


def exactly(scene: Scene) -> None:
    """Average a list of arrays."""
    mine, mean = tensors(scene)
    kinds = (mpiagg.AllReduce, mpiagg.ParameterServer, lambda comm: mpiagg.Decentralized(comm, "all"))
    with scene.pick(*kinds)(scene.comm) as aggregation:
        aggregation.aggregate(mine)
    near(mine, mean)


def mean_of(scene: Scene, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the mean over the ranks, by the MPI library."""
    found = [np.array(each, np.float64) for each in arrays]
    for each in found:
        scene.world.Allreduce(MPI.IN_PLACE, each)
    return [each / scene.size for each in found]


def residual(aggregation: mpiagg.Aggregation) -> np.ndarray | float:
    """Return what a rank has kept back of the only tensor, as a vector."""
    (memory,) = aggregation.state_dict().get("memories", [{"state": {}}])
    kept = next((memory["state"][key] for key in ("errors", "kept", "residuals") if key in memory["state"]), [])
    return np.concatenate([np.ravel(each) for each in kept]).astype(float) if len(kept) else 0.0


def lossy(scene: Scene) -> None:
    """Aggregate with what loses and remembers: what came in has gone out, or is kept."""
    with AGGREGATORS[scene.pick(*LOSSY)].make(scene.comm, "auto") as aggregation:
        before: np.ndarray | float = 0.0
        for _ in range(2):
            rows = scene.rows("f4", SHAPES[0])
            mine = rows[scene.rank].copy()
            aggregation.aggregate([mine])
            (after,) = mean_of(scene, [np.zeros(mine.size) + residual(aggregation)])
            near([mine.ravel() + after], [rows.mean(0).ravel() + before], 1e-4)
            before = after


def mixing(scene: Scene) -> None:
    """Average with peers: the mean stays what it was."""
    mine, mean = tensors(scene)
    with AGGREGATORS[scene.pick(*MIXING)].make(scene.comm, "auto") as aggregation:
        for _ in range(3):
            aggregation.aggregate(mine)
    near(mean_of(scene, mine), mean)


def training(scene: Scene) -> None:
    """Take steps with a DDP that is made and freed, and with one that is kept."""
    parameters = [np.full(shape, scene.rank, np.float32) for shape in SHAPES]
    with mpiagg.DDP(parameters, scene.comm, bucket_bytes=scene.pick(0, 200, 10_000), check_finite=True) as ddp:
        ddp.broadcast_parameters(root=scene.size - 1)
        near(parameters, [np.full(shape, scene.size - 1) for shape in SHAPES])
        for each in (ddp, scene.kept):
            for sync in (each.sync_gradients, each.overlapped_sync_gradients):
                mine, mean = tensors(scene)
                sync(mine)
                near(mine, mean)
    mine, mean = tensors(scene)
    scene.gossip.aggregate(mine)
    near(mine, mean)


def communicators(scene: Scene) -> None:
    """Make communicators, work on them, and free them."""
    with scene.other_comm() as comm:
        rows = scene.rows("f8", scene.pick(*LENGTHS))
        same(mpiagg.allreduce(rows[scene.rank], comm=comm), rows.sum(0))
        comm.Allreduce(MPI.IN_PLACE, mine := rows[scene.rank].copy())
        same(mine, rows.sum(0))


def leases(scene: Scene) -> None:
    """Take memory that the ranks share, reduce in place there, and let it go."""
    rows = scene.rows("f4", scene.pick(*LENGTHS))
    x, y = (mpiagg.empty(rows.shape[1:], comm=scene.comm) for _ in range(2))
    x[...] = rows[scene.rank]
    same(mpiagg.allreduce(x, out=y, comm=scene.comm), rows.sum(0))
    with mpiagg.allreduce_init(x, out=x, comm=scene.comm) as made:
        same(made(), rows.sum(0))


def checkpoints(scene: Scene) -> None:
    """Save and load."""
    rows = scene.rows("f8", 50)
    mpiagg.save_checkpoint(scene.folder, {"all": rows, "mine": rows[scene.rank]}, scene.comm)
    found = mpiagg.load_checkpoint(scene.folder, scene.comm)
    same(found["all"], rows)
    same(found["mine"], rows[scene.rank])


def mistakes(scene: Scene) -> None:
    """Pass what is wrong: errors leave nothing behind."""
    odd, what = scene.pick(*range(scene.size)), scene.pick("op", "shape", "check")
    x, op = np.ones(5 if what == "shape" and scene.rank == odd else 4), "sum"
    try:
        if what == "op":
            mpiagg.allreduce(x, "mean", comm=scene.comm)
        elif what == "shape":
            mpiagg.allreduce_init(x, comm=scene.comm)
        else:
            mpiagg.allreduce(x, "max" if scene.rank == odd else op, comm=scene.comm, check=True)
    except (mpiagg.MismatchError, ValueError):
        return
    raise AssertionError(f"no error of a wrong {what}")


ACTIONS: dict[Callable[[Scene], None], float] = {
    function: 30,
    average: 8,
    plan: 15,
    methods: 25,
    exactly: 5,
    lossy: 3,
    mixing: 4,
    training: 4,
    communicators: 2,
    leases: 4,
    mistakes: 4,
    checkpoints: 0.5,
}
"""What is done, and how often beside the others."""


def draw(rng: np.random.Generator) -> Callable[[Scene], None]:
    """Return an action."""
    weights = np.array(list(ACTIONS.values()))
    return list(ACTIONS)[int(rng.choice(len(ACTIONS), p=weights / weights.sum()))]
