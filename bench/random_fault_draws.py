"""What ``bench/random_faults.py`` draws, what is trained, and how what came of it is judged; without MPI."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

STEPS: Final = 24
COMMIT_EVERY: Final = 6
SHAPES: Final = ((5, 4), (6,), (3, 3))
PLACES: Final = ("first", "before", "in", "after")
"""Of a step: before the gradients; before they are aggregated; while they are, or a moment later; after that."""

AGGREGATIONS: Final = (
    *("allreduce", "parameter-server", "error-feedback", "sparsified-topk", "power-sgd"),
    *("local-sgd", "decentralized"),
)
OF_WEIGHTS: Final = ("local-sgd", "decentralized")
OWN_SHM: Final = "own /dev/shm"
"""What a job needs that fills its own."""

NEAR: Final = 1e-8
"""How far from what is right weights may be after ranks have died: what ``mpiagg demo`` allows."""


class Fault(NamedTuple):
    """A fault that can be drawn.

    Attributes
    ----------
    weight : float
        How often, beside the others.
    words : str
        A regular expression for the words that blame a rank, or several, for it: ``{}`` stands where they are told.
    places : tuple of str
        Where in a step it can be.
    needs : {"", "gradients", "ULFM", "own /dev/shm"}
        What the training must be, or the job must have.
    said_by_all : bool
        Whether it befalls all ranks, each of which is to say so of itself.
    """

    weight: float
    words: tuple[str, ...]
    places: tuple[str, ...] = PLACES
    needs: str = ""
    said_by_all: bool = False


_RANK: Final = r"\b[Rr]anks? (\d+)"
_RAISED: Final = rf"{_RANK} of \d+, on \S+, raised (?:OnPurposeError|ValueError|TypeError)"
_TOLD: Final = rf"{_RANK} raised (?:OnPurposeError|ValueError|TypeError)"
_GONE: Final = (
    rf"{_RANK}:? (?:is gone|has left)",
    r"process rank (\d+) with PID \d+ on node \S+ exited on\s+signal",  # what Open MPI's launcher says
)
_SILENT: Final = (rf"{_RANK}:? does not answer",)
_DISAGREE: Final = (r"(\branks? \d+[\d, ]*: [^;\n]+(?:; ranks? \d+[\d, ]*: [^;\n]+)+)",)

FAULTS: Final[Mapping[str, Fault]] = {
    "exception": Fault(6, (_RAISED, _TOLD)),
    "sys.exit": Fault(2, _GONE, ("first", "before", "after")),
    "NaN": Fault(3, (rf"not finite: {_RANK}:",), ("before",), "gradients"),
    "shape": Fault(2, (_RAISED, _TOLD), ("before",), "gradients"),
    "dtype": Fault(2, (_RAISED, _TOLD), ("before",), "gradients"),
    "op": Fault(2, _DISAGREE, ("after",)),
    "length": Fault(2, _DISAGREE, ("after",)),
    "order": Fault(2, _DISAGREE, ("after",)),
    "extra": Fault(2, _DISAGREE, ("after",)),
    "purpose": Fault(2, _DISAGREE, ("after",)),
    # Where the two threads are not there at the same time, one of them is in a call too many.
    "thread": Fault(2, (rf"{_RANK} of \d+, on \S+, raised[^:]* PlanError", *_DISAGREE), ("after",)),
    "SIGKILL of the launcher": Fault(2, (rf"{_RANK} of \d+, on \S+, lost its launcher",), said_by_all=True),
    "unauthenticated connections": Fault(2, (), ("first", "before", "after")),
    "full /dev/shm": Fault(2, (), ("first", "before", "after"), needs=OWN_SHM),
    "delay": Fault(3, (), ("first", "before", "after")),
    "SIGSTOP, SIGCONT": Fault(3, ()),
    "SIGSTOP": Fault(2, _SILENT),
    "SIGKILL": Fault(4, _GONE),
    "SIGTERM": Fault(3, (rf"{_RANK} of \d+, on \S+, received SIGTERM",)),
    "SIGKILL, survived": Fault(4, (), needs="ULFM"),
}


class Draw(NamedTuple):
    """A fault that is to be brought about.

    Attributes
    ----------
    fault, place : str
    rank, step : int
    moment : float
        Seconds after the place "in", at which it happens.
    seconds : float
        How long a rank is late or stopped.
    """

    fault: str
    rank: int
    step: int
    place: str
    moment: float
    seconds: float


class Job(NamedTuple):
    """A training, and what is to befall it.

    Attributes
    ----------
    aggregation : str
    ranks : int
    draw : Draw or None
    again : bool
        Whether, if it does not come to its end, it is started again, to go on from its checkpoint.
    """

    aggregation: str
    ranks: int
    draw: Draw | None = None
    again: bool = False


class Outcome(NamedTuple):
    """What became of a job.

    Attributes
    ----------
    status : int or None
        Its exit status; None if it had to be ended.
    seconds : float
        That it took.
    ends : dict
        What each rank has written at its end.
    printed : str
    left : int
        How many processes were left.
    """

    status: int | None
    seconds: float
    ends: Mapping[int, Mapping[str, Any]]
    printed: str = ""
    left: int = 0


def draws(seed: int, most_ranks: int, *, without: Collection[str] = (), patience: float = 1.0) -> Iterator[Job]:
    """Yield jobs without end, each from a seed and its number alone, of no fault that needs what there is not."""
    number = 0
    names = [name for name, fault in FAULTS.items() if fault.needs not in without]
    weights = np.array([FAULTS[name].weight for name in names])
    while True:
        rng = np.random.default_rng([seed, number])
        name = names[int(rng.choice(len(names), p=weights / weights.sum()))]
        fault, ranks = FAULTS[name], int(rng.integers(3, most_ranks + 1))
        kinds = [each for each in AGGREGATIONS if not (fault.needs == "gradients" and each in OF_WEIGHTS)]
        aggregation = "allreduce" if fault.needs == "ULFM" else kinds[int(rng.integers(len(kinds)))]
        draw = Draw(
            name,
            int(rng.integers(ranks)),
            int(rng.integers(STEPS - 2)),
            fault.places[int(rng.integers(len(fault.places)))],
            round(float(rng.exponential(0.002)), 6),
            round(patience * float(rng.uniform(0.1, 2.0)), 3),
        )
        yield Job(aggregation, ranks, draw, bool(rng.random() < 0.25))
        number += 1


# -- the training


def start() -> list[np.ndarray]:
    """Return the weights that it starts from."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape) for shape in SHAPES]


def gradients_of(weights: Sequence[np.ndarray], rank: int, step: int) -> list[np.ndarray]:
    """Return the gradients of a rank in a step."""
    rng = np.random.default_rng([rank, step])
    return [0.3 * np.tanh(weight) + rng.normal(size=weight.shape) for weight in weights]


def survived(parts: Sequence[tuple[int, Sequence[int]]]) -> list[np.ndarray]:
    """Return the weights that averaged gradients lead to, where ranks die.

    Parameters
    ----------
    parts : sequence of tuples
        From which step on which ranks of the world take part.
    """
    weights, velocity = start(), [np.zeros(shape) for shape in SHAPES]
    for step in range(STEPS):
        ranks = next(ranks for first, ranks in reversed(parts) if first <= step)
        gradients = [gradients_of(weights, rank, step) for rank in ranks]
        for weight, speed, *each in zip(weights, velocity, *gradients, strict=True):
            speed[...] = 0.5 * speed + sum(each) / len(each)
            weight[...] -= 0.1 * speed
        weights[1][0] += 1e-3 * (1e-3 * step + np.abs(weights[0]).max())
    return weights


# -- judging


def blamed(fault: str, outcome: Outcome) -> set[int]:
    """Return the ranks that what was printed blames."""
    found: set[int] = set()
    for words in FAULTS[fault].words:
        for told in re.findall(words, outcome.printed):
            if words in _DISAGREE:
                # Those who say something else than most; all of them, where no side is larger.
                sides = _sides(told)
                most = max(map(len, sides))
                large = [side for side in sides if len(side) == most]
                found.update(rank for side in sides if len(large) > 1 or side not in large for rank in side)
            else:
                found.add(int(told))
    return found


def _sides(told: str) -> list[list[int]]:
    """Return the ranks of each side of a disagreement."""
    return [[int(rank) for rank in re.findall(r"\d+", part.split(":")[0])] for part in told.split("; ")]


def _undecided(job: Job, outcome: Outcome) -> bool:
    """Whether the ranks that disagreed were as many on each side, since others had not come yet."""
    assert job.draw is not None
    told = [
        told
        for words in FAULTS[job.draw.fault].words
        if words in _DISAGREE
        for told in re.findall(words, outcome.printed)
    ]
    return any(
        len({len(side) for side in sides}) == 1 and sum(map(len, sides)) < job.ranks for sides in map(_sides, told)
    )


def complaints(job: Job, outcome: Outcome, right: Outcome) -> list[str]:
    """Return in words what is wrong with how a job has ended; nothing, if it is well.

    Parameters
    ----------
    job : Job
        What was to happen.
    outcome : Outcome
        What has happened.
    right : Outcome
        The same without a fault.
    """
    found = []
    if outcome.status is None:
        found.append(f"it hung, and was ended after {outcome.seconds:.1f} s")
    if outcome.left:
        found.append(f"{outcome.left} processes were left")
    if finished(job, outcome):
        return found + _differences(job, outcome, right)
    if stopped(job, outcome):
        return found if job.draw and job.draw.fault == "SIGTERM" else [*found, "it has stopped, and nobody asked it to"]
    if outcome.status == 0:
        found.append("not all ranks came to their end, and yet its exit status is 0")
    if job.draw is None or not FAULTS[job.draw.fault].words:
        return [*found, "it has not come to its end, as it should have"]
    named = blamed(job.draw.fault, outcome)
    if unnamed(job, outcome) and not named:
        return found
    everybody = FAULTS[job.draw.fault].said_by_all
    if job.draw.rank in named and _undecided(job, outcome):
        return found
    if named != (set(range(job.ranks)) if everybody else {job.draw.rank}):
        wanted = "all ranks were to say so" if everybody else f"rank {job.draw.rank} was to blame"
        found.append(f"{wanted}, and blamed were: {sorted(named) or 'none'}")
    return found


def unnamed(job: Job, outcome: Outcome) -> bool:
    """Whether a rank was killed, and MPICH's launcher has killed the others at once, before anybody could name it.

    That launcher says a process number, but it may be that of a rank which it has killed itself.
    """
    killed = job.draw is not None and job.draw.fault == "SIGKILL"
    return killed and outcome.status == signal.SIGKILL and "EXIT STRING: Killed (signal 9)" in outcome.printed


def finished(job: Job, outcome: Outcome) -> bool:
    """Whether all ranks that can have trained to the end."""
    lost = {job.draw.rank} if job.draw is not None and job.draw.fault == "SIGKILL, survived" else set()
    return set(range(job.ranks)) - lost <= set(outcome.ends) and all(
        end["step"] == STEPS and not end["stopped"] for end in outcome.ends.values()
    )


def stopped(job: Job, outcome: Outcome) -> bool:
    """Whether all ranks have stopped at the same step, for a restart."""
    steps = {end["step"] for end in outcome.ends.values()}
    asked = all(end["stopped"] for end in outcome.ends.values())
    return outcome.status == 0 and len(outcome.ends) == job.ranks and asked and len(steps) == 1


def _differences(job: Job, outcome: Outcome, right: Outcome) -> list[str]:
    """Return on which ranks the weights are not what they must be."""
    found = []
    for rank, end in outcome.ends.items():
        if end["size"] == job.ranks:
            if end["digest"] != right.ends[rank]["digest"]:
                found.append(f"rank {rank} has other weights than without the fault")
            continue
        assert job.draw is not None
        left = [each for each in range(job.ranks) if each != job.draw.rank]
        wanted = survived([(0, range(job.ranks)), (end["first"][-1], left)])
        worst = max(float(np.abs(np.array(a) - b).max()) for a, b in zip(end["weights"], wanted, strict=True))
        if end["lost"] != [[job.draw.rank]]:
            found.append(f"rank {rank} went on without {end['lost']}, and not without rank {job.draw.rank}")
        if not worst <= NEAR:
            found.append(f"rank {rank} went on to weights that are {worst:.1e} from what they must be")
        if job.draw.step - end["first"][-1] > COMMIT_EVERY + 1:
            found.append(f"rank {rank} went back to step {end['first'][-1]}, further than to the last commit")
    return found
