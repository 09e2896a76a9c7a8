"""Train what is harder than digits with a perceptron, by every aggregator: loss against steps, bytes and seconds.

    python -m bench.learning --quick -o FILE          two ranks, a few steps: whether all of it works
    python -m bench.learning                          the curves, 4 and 8 ranks, both splits
    sudo python -m bench.learning --link 100mbit --link 1gbit   the time of a step on virtual links, 4 and 8 ranks
    python -m bench.learning --draw                   pictures and the goal, of what is saved

It runs at the top of the repository. A language model of characters and a CNN on handwritten digits
(``bench/learning_tasks.py``) are trained with equal settings in every way: by each aggregator of ``mpiagg demo``, by
torch's ``DistributedDataParallel`` on Gloo, and without communication. The learning rate is the best of those that were
tried with DDP; only the ways in ``LEARNING_RATES`` have another, the best of those that were tried with them.

Curves say where loss and accuracy on held-out data stand after so many steps and bytes; they depend on no clock. With
``--link`` ranks train on virtual nodes (``bench/cluster.py``), and the ways take turns: what a step takes. Seconds in
the pictures are steps times that.

Each record is saved as soon as it is there, and what is saved with the same settings is not done again: a run that was
stopped goes on. ``--task``, ``--split``, ``--ranks`` and ``--way`` take some. Which of two ways that are alike ends
with the lower loss may be chance: ``--seed 0 --seed 1 --seed 2`` trains with other weights and other batches, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import click

import mpiagg
from bench.cluster import Cluster
from bench.gpu import environment
from mpiagg.cli.aggregators import AGGREGATORS, Aggregator
from mpiagg.launch import start as launch
from mpiagg.launch.job import OutputFile

TOP: Final = Path(__file__).parents[1]
RESULTS: Final = Path(__file__).parent / "results"
TASKS: Final = ("characters", "digits")
STEPS: Final = {"characters": 1200, "characters-16": 1200, "characters-long": 2400, "digits": 400}
"""With four ranks; more ranks take as many examples in fewer steps."""

POINTS: Final = 20
TURN: Final = (64, 3)
"""Steps of a turn that is timed, which the periods of the aggregators divide; and turns."""

ALONE: Final = "none"
TORCH: Final = "torch-ddp"
REFERENCES: Final = (ALONE, TORCH)
"""Training without communication, and torch's ``DistributedDataParallel`` on Gloo."""

MORE: Final = {
    "uncorrected-randomk": Aggregator(
        lambda comm, _: mpiagg.Sparsified(comm, ratio=0.25, selection="randomk"),
        "what not to do: a quarter of each gradient, with momentum in the optimizer",
    ),
    "uncorrected-blockk": Aggregator(
        lambda comm, _: mpiagg.Sparsified(comm, ratio=0.25, selection="blockk"),
        "what not to do, likewise",
    ),
    "sparse-loco-fragments": Aggregator(
        lambda comm, _: mpiagg.SparseLoCo(comm, period=3, fragments=3, ratio=1 / 20),
        "weights, a third of them in turn, by the largest 5 % of what they have moved in 3 steps, in 2 bits",
    ),
    "sparse-loco-decay-0.9": Aggregator(
        lambda comm, _: mpiagg.SparseLoCo(comm, period=3, fragments=3, ratio=1 / 20, decay=0.9),
        "the same, and what is kept counts less at the next time",
    ),
}
"""Aggregators that the demo has not."""

MADE: Final = {**AGGREGATORS, **MORE}
LEARNING_RATES: Final = {
    ("characters", "sparse-loco-fragments"): 9e-3,
    ("characters-16", "sparse-loco-fragments"): 12e-3,
    ("characters-long", "sparse-loco-fragments"): 12e-3,
    ("characters-long", "sparse-loco-decay-0.9"): 12e-3,
}
"""Where it is not that of the task."""

WAYS: Final = (*REFERENCES, *MADE)
QUICK: Final = (*REFERENCES, "allreduce", "local-sgd", "sparsified-topk")
SPLITS: Final = ("iid", "skewed")

LINES: Final = 8
"""Curves in a picture, at most."""

COLOURS: Final = ("#000000", "#999999", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Of the curves of a picture: Okabe's and Ito's, which people tell apart who see fewer colours."""

PACE, LOSS, PEAK = 0.9, 1.01, 100.0
"""The goal, on links of 100 Mbit/s: the tokens a second over those without communication; DDP's loss; less its peak."""


class Part(NamedTuple):
    """What one job does.

    Attributes
    ----------
    task, split : str
        What is trained, on which shares of the data.
    ranks : int
    link : str or None
        The rate of the links. With None the loss is followed; with a rate the time is taken.
    seed : int
        Of the weights, and of how data are dealt.
    steps : int
        Of a training; or, if time is taken, of a turn.
    points : int
        How often the model is tested in a training; or how many turns are timed.
    ways : sequence of str
        How it is trained: aggregators of ``mpiagg demo``, and the references.
    """

    task: str
    split: str
    ranks: int
    link: str | None
    seed: int
    steps: int
    points: int
    ways: Sequence[str]

    @property
    def settings(self) -> dict[str, Any]:
        """What all records of it have in common."""
        settings = self._asdict()
        del settings["ways"]
        return settings

    def missing(self, saved: Sequence[dict[str, Any]]) -> list[str]:
        """Return the ways of which no record is saved."""
        done = {each["way"] for each in saved if self.settings.items() <= each.items()}
        return [way for way in self.ways if way not in done]


def parts(
    saved: Sequence[dict[str, Any]],
    *,
    tasks: Sequence[str],
    splits: Sequence[str],
    ranks: Sequence[int],
    links: Sequence[str],
    seeds: Sequence[int] = (0,),
    ways: Sequence[str],
    lengths: Callable[[str, int], tuple[int, int]],
) -> Iterator[Part]:
    """Yield what is not saved yet; ``lengths`` gives the steps and points of a task on so many ranks.

    Time is taken of one split and seed alone: it does not depend on data.
    """
    wanted: Sequence[str | None] = links or [None]
    for size, task, split, seed, link in product(ranks, tasks, ["iid"] if links else splits, seeds, wanted):
        steps, points = lengths(task, size)
        part = Part(task, split, size, link, seed, steps, points, ways)
        if missing := part.missing(saved):
            # Turns are taken by all of them, or times could not be compared.
            yield part if link is not None else part._replace(ways=missing)


def records(path: Path) -> list[dict[str, Any]]:
    """Return what is saved."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["records"] if path.exists() else []
    return found


def run(part: Part, output: Path) -> int:
    """Run a job, and return its exit status."""
    arguments = ["-m", "mpi4py", "-m", "bench.learning_rank", json.dumps(part._asdict()), str(output.absolute())]
    env = environment()
    if part.link is None:
        return subprocess.call(launch.command(part.ranks, arguments), env=env, cwd=TOP)  # noqa: S603 - our own Python
    with Cluster(nodes=part.ranks, rate=part.link) as cluster:
        own = [f"{name}={env[name]}" for name in ("PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")]
        return cluster.run(["env", *own, sys.executable, *arguments])


def goal(saved: Sequence[dict[str, Any]], task: str = "characters") -> list[dict[str, Any]]:
    """Return for each way how it stands to the goal: 4 ranks, a language model, links of 100 Mbit/s; best first.

    Pace is its tokens a second over those without communication; loss and peak are over those of torch's DDP, loss with
    the same seed. That is the mean over the seeds with which both were trained; ``losses`` has each.
    """
    about = [each for each in saved if (each["task"], each["split"], each["ranks"]) == (task, "iid", 4)]
    curves = {(each["way"], each["seed"]): each for each in about if each["link"] is None}
    times = {each["way"]: each for each in about if each["link"] == "100mbit"}
    if not {*REFERENCES} <= times.keys() or (TORCH, 0) not in curves:
        return []
    rows = []
    for way in times.keys() - {ALONE}:
        own = {seed: each["curve"][-1]["loss"] for (name, seed), each in curves.items() if name == way}
        losses = {
            seed: x and x / curves[TORCH, seed]["curve"][-1]["loss"]
            for seed, x in own.items()
            if (TORCH, seed) in curves
        }
        if 0 not in losses or None in losses.values():
            continue
        row = {
            "way": way,
            "pace": times[way]["tokens_a_second"] / times[ALONE]["tokens_a_second"],
            "loss": fmean(losses.values()),
            "losses": losses,
            "peak": curves[TORCH, 0]["peak_bytes"] / max(1, curves[way, 0]["peak_bytes"]),
        }
        rows.append({**row, "met": row["pace"] >= PACE and row["loss"] <= LOSS and row["peak"] >= PEAK})
    return sorted(rows, key=lambda row: (-row["met"], row["loss"]))


# -- pictures


def pages(ways: Sequence[str]) -> list[list[str]]:
    """Return which ways are drawn together: the references, and as many others as there is room for."""
    others = [way for way in ways if way not in REFERENCES]
    room = LINES - len(REFERENCES)
    rows = max(1, -(-len(others) // room))
    each = -(-len(others) // rows)
    return [[*REFERENCES, *others[row * each : (row + 1) * each]] for row in range(rows)]


def draw(saved: Sequence[dict[str, Any]], task: str, split: str, ranks: int, path: Path) -> None:
    """Draw the loss of a training against steps, bytes, and seconds on each link that was timed."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    from bench.plot import save_small  # noqa: PLC0415 - so too

    curves = {
        each["way"]: each
        for each in saved
        if (each["task"], each["split"], each["ranks"], each["link"], each["seed"]) == (task, split, ranks, None, 0)
    }
    timed: dict[str, dict[str, float]] = {}
    for each in saved:
        if each["link"] is not None and (each["task"], each["ranks"]) == (task, ranks):
            timed.setdefault(each["link"], {})[each["way"]] = each["step_s"]
    shown = pages([way for way in WAYS if way in curves])
    columns = ["steps", "bytes that a rank has sent", *(f"seconds, links of {link}" for link in sorted(timed))]
    figure = Figure(figsize=(3 + 4.2 * len(columns), 3.6 * len(shown)), layout="constrained")
    grid = figure.subplots(len(shown), len(columns), squeeze=False, sharey=True)
    for row, ways in zip(grid, shown, strict=True):
        for place, way in enumerate(way for way in ways if way in curves):
            points = [point for point in curves[way]["curve"] if point["loss"] is not None]
            steps = [point["step"] for point in points]
            along = [steps, [point["bytes"] for point in points]]
            along += [[timed[link].get(way, float("nan")) * step for step in steps] for link in sorted(timed)]
            look = {"color": COLOURS[place], "linestyle": "--" if way in REFERENCES else "-", "linewidth": 1.8}
            for axes, x in zip(row, along, strict=True):
                axes.plot(x, [point["loss"] for point in points], label=way, marker="osD^vPX*"[place], ms=3.5, **look)
        for axes, name in zip(row, columns, strict=True):
            axes.set(xlabel=name, yscale="log")
            axes.grid(alpha=0.3, which="both")
        row[0].set_ylabel("loss on held-out data")
        row[1].set_xscale("symlog", linthresh=1e5)
        row[1].set_xlim(left=-3e4)
        row[0].yaxis.set_major_formatter("{x:g}")
        row[0].yaxis.set_minor_formatter("{x:g}")
        row[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize="small")
    figure.suptitle(f"{task}, {'each rank with other data' if split == 'skewed' else 'iid'}, {ranks} ranks")
    save_small(figure, path)


def report(output: Path) -> None:
    """Draw what is saved, and print how it stands to the goal."""
    saved = records(output)
    kinds = {(each["task"], each["split"], each["ranks"]) for each in saved if not each["link"] and not each["seed"]}
    for task, split, ranks in sorted(kinds):
        path = output.with_name(f"{output.stem}-{task}-{split}-{ranks}.png")
        draw(saved, task, split, ranks, path)
        print(f"drew {path}")
    for task in STEPS:
        for row in goal(saved, task):
            each = ", ".join(f"{x:.3f}" for _, x in sorted(row["losses"].items()))
            numbers = f"pace {row['pace']:.2f}, loss {row['loss']:.3f} ({each}), peak 1/{row['peak']:.0f}"
            print(f"{task:14} {row['way']:24} {numbers}: {'met' if row['met'] else 'not met'}")


@click.command()
@click.option(
    "--task",
    "tasks",
    multiple=True,
    type=click.Choice(list(STEPS)),
    help="What is trained; by default characters and digits.",
)
@click.option("--split", "splits", multiple=True, type=click.Choice(SPLITS), help="Whose data; by default both.")
@click.option("--ranks", multiple=True, type=click.IntRange(min=2), default=(4, 8), show_default=True)
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS), help="How; by default in all ways.")
@click.option("--link", "links", multiple=True, help="Take the time on virtual links of this rate; takes root.")
@click.option("--seed", "seeds", multiple=True, type=click.IntRange(min=0), default=(0,), show_default=True)
@click.option("--steps", type=click.IntRange(min=1), help="Of a training, or of a turn that is timed.")
@click.option("--quick", is_flag=True, help="Two ranks, a few steps and ways: whether it works.")
@click.option("--draw", "drawing", is_flag=True, help="Only draw what is saved.")
@click.option("-o", "--output", type=OutputFile(), help="bench/results/learning-LIBRARY.json by default.")
def main(
    *,
    tasks: tuple[str, ...],
    splits: tuple[str, ...],
    ranks: tuple[int, ...],
    ways: tuple[str, ...],
    links: tuple[str, ...],
    seeds: tuple[int, ...],
    steps: int | None,
    quick: bool,
    drawing: bool,
    output: Path | None,
) -> None:
    """Train in all ways, follow the loss or take the time, and draw what came out."""
    if output is None:
        output = RESULTS / f"learning-{launch.mpi_vendor().replace(' ', '').lower()}.json"
    if quick:
        ranks, ways = (2,), ways or QUICK

    def lengths(task: str, size: int) -> tuple[int, int]:
        number, points = (4, 2) if quick else TURN if links else (STEPS[task] * 4 // size, POINTS)
        return steps or number, points

    failed = []
    asked = parts(
        records(output),
        tasks=tasks or TASKS,
        splits=splits or SPLITS,
        ranks=ranks,
        links=links,
        seeds=(0,) if links else seeds,
        ways=ways or WAYS,
        lengths=lengths,
    )
    for part in [] if drawing else asked:
        began, left = time.monotonic(), list(part.ways)
        while left and run(part._replace(ways=left), output):
            # The first way of which there is no record is the one that went wrong; the others are still worth it.
            wrong, *left = part._replace(ways=left).missing(records(output)) or [""]
            failed.append(f"{part.task} {part.split} {part.ranks} {part.link or wrong}")
            left = left if part.link is None else []
        took = time.monotonic() - began
        print(f"{part.task} {part.split} {part.ranks} {part.link or ''}: {took:.0f} s", flush=True)
    report(output)
    if failed:
        raise click.ClickException("these went wrong: " + "; ".join(failed))


if __name__ == "__main__":
    main()
