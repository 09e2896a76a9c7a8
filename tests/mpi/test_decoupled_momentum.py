"""DeMo beside a restatement of all ranks in NumPy."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from restated import through
from support import refused

import mpiagg

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
SHAPES = [(13, 9), (4, 3, 2), (11,), (), (0, 3), (8, 8)]


def noise(rank, step, dtype=np.float64):
    random = np.random.default_rng([rank, step])
    return [np.asarray(random.standard_normal(shape)).astype(dtype) for shape in SHAPES]


def wave(length):
    """The cosine transform of so many values, as it is written in books."""
    rows = [
        [np.cos(np.pi / length * (place + 0.5) * number) * np.sqrt((1 if number == 0 else 2) / length)
         for place in range(length)]
        for number in range(length)
    ]  # fmt: skip
    return np.array(rows)


def squares(matrix, side):
    """Yield the chunks of a matrix as views: whole ones first in each direction, then what is left."""

    def edges(length):
        whole = length // side * side
        runs = [range(0, whole, side)] if whole else []
        return runs + ([range(whole, length, side)] if whole < length else [])

    for rows in edges(matrix.shape[0]):
        for columns in edges(matrix.shape[1]):
            for row in rows:
                for column in columns:
                    yield matrix[row : row + side, column : column + side]


class Everyone:
    """DeMo as its paper has it (algorithm 1), of all ranks at once, chunk by chunk."""

    def __init__(self, k, chunk, decay, sign, wire=None):
        self.k, self.chunk, self.decay, self.sign, self.wire = k, chunk, decay, sign, wire
        self.momentum = [[np.zeros(shape) for shape in SHAPES] for _ in range(SIZE)]

    def aggregate(self, everyone):
        result = [np.zeros(shape) for shape in SHAPES]
        for momentum, gradients in zip(self.momentum, everyone, strict=True):
            fields, totals = [], []
            for m, gradient, total in zip(momentum, gradients, result, strict=True):
                np.copyto(m, self.decay * m + gradient)
                rows = m.shape[0] if m.ndim > 1 else 1
                if m.size:
                    fields += squares(m.reshape(rows, -1), self.chunk)
                    totals += squares(total.reshape(rows, -1), self.chunk)
            chosen, values = [], []
            for field in fields:
                found = wave(field.shape[0]) @ field @ wave(field.shape[1]).T
                places = np.sort(np.argsort(-np.abs(found).ravel(), kind="stable")[: self.k])
                chosen.append(places)
                values.append(found.ravel()[places])
            sent = np.concatenate(values)
            sent = sent if self.wire is None else through(self.wire, sent)
            for field, total, places in zip(fields, totals, chosen, strict=True):
                spectrum = np.zeros(field.size)
                spectrum[places], sent = sent[: len(places)], sent[len(places) :]
                part = wave(field.shape[0]).T @ spectrum.reshape(field.shape) @ wave(field.shape[1])
                np.subtract(field, part, out=field)
                np.add(total, part / SIZE, out=total)
        return [np.sign(x) if self.sign else x for x in result]


HOW = {"k": 3, "chunk": 4, "decay": 0.9, "sign": False}
CASES = [HOW, {**HOW, "chunk": 64}, {**HOW, "k": 100}, {**HOW, "wire": "u8"}, {**HOW, "chunk": 1, "k": 1}]


@pytest.mark.parametrize("how", CASES)
def test_it_is_its_restatement(how):
    everyone = Everyone(**how)
    with mpiagg.DeMo(**how) as aggregation:
        for step in range(6):
            mine = noise(RANK, step)
            wanted = everyone.aggregate([noise(rank, step) for rank in range(SIZE)])
            aggregation.aggregate(mine)
            for x, expected in zip(mine, wanted, strict=True):
                assert x.shape == expected.shape
                assert np.allclose(x, expected, rtol=0, atol=1e-12)
            bits = b"".join(x.tobytes() for x in mine)
            assert set(COMM.allgather(bits)) == {bits}
        (kept,) = aggregation.state_dict()["memories"][0]["state"]["kept"]
        left = np.concatenate([x.ravel() for x in everyone.momentum[RANK]])
        assert np.allclose(kept, left, rtol=0, atol=1e-12)


@pytest.mark.parametrize("wrong", [{"k": 4}, {"chunk": 5}, {"decay": 0.8}, {"sign": True}, {"wire": "u4"}])
def test_the_restatement_would_find_a_fault(wrong):
    good, bad = Everyone(**HOW), Everyone(**{**HOW, **wrong})
    for step in range(3):
        gradients = [noise(rank, step) for rank in range(SIZE)]
        found, other = good.aggregate(gradients), bad.aggregate(gradients)
    assert max(np.abs(x - y).max(initial=0) for x, y in zip(found, other, strict=True)) > 1e-3


def test_signs():
    everyone = Everyone(**{**HOW, "sign": True})
    with mpiagg.DeMo(**{**HOW, "sign": True}) as aggregation:
        for step in range(3):
            mine = noise(RANK, step)
            wanted = everyone.aggregate([noise(rank, step) for rank in range(SIZE)])
            aggregation.aggregate(mine)
            for x, expected in zip(mine, wanted, strict=True):
                assert np.mean(x == expected) > 0.99 if x.size > 1 else x.tolist() == expected.tolist()
                assert set(np.unique(x)) <= {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_other_dtypes_are_near(dtype):
    everyone, mine = Everyone(**HOW), noise(RANK, 0, dtype)
    wanted = everyone.aggregate([[x.astype(np.float64) for x in noise(rank, 0, dtype)] for rank in range(SIZE)])
    with mpiagg.DeMo(**HOW) as aggregation:
        aggregation.aggregate(mine)
        (kept,) = aggregation.state_dict()["memories"][0]["state"]["kept"]
        assert kept.dtype == np.float32
    for x, expected in zip(mine, wanted, strict=True):
        assert x.dtype == dtype
        assert np.allclose(x.astype(float), expected, atol=1e-6 if dtype == np.float32 else 0.03)


def test_what_it_sends():
    x = np.zeros((128, 640), np.float32)
    with mpiagg.DeMo(k=32) as aggregation:
        aggregation.aggregate([x])
        assert aggregation.bytes_sent == (SIZE - 1) * 20 * 32 * (9 / 8 + 4)


def test_a_smooth_gradient_is_sent_whole_by_few_waves():
    rows, columns = np.arange(64)[:, None], np.arange(64)[None, :]
    mine = [np.cos(np.pi * (2 * rows + 1) * 3 / 128) * np.cos(np.pi * (2 * columns + 1) * 5 / 128) * (RANK + 1)]
    wanted = mine[0] * (SIZE + 1) / 2 / (RANK + 1)
    with mpiagg.DeMo(k=1, sign=False) as aggregation:
        aggregation.aggregate(mine)
        assert np.allclose(mine[0], wanted, atol=1e-12)
        assert np.abs(aggregation.state_dict()["memories"][0]["state"]["kept"][0]).max() < 1e-12


def test_training_finds_the_optimum_of_all():
    target = [x + 1 for x in noise(RANK, 99)]
    optimum = [COMM.allreduce(x) / SIZE for x in target]
    mine = [np.zeros(shape) for shape in SHAPES]
    with mpiagg.DeMo(k=4, chunk=8, decay=0.9) as aggregation:
        for step in range(600):
            slopes = [np.asarray(x - each) for x, each in zip(mine, target, strict=True)]
            aggregation.aggregate(slopes)
            for x, slope in zip(mine, slopes, strict=True):
                np.subtract(x, 0.05 * (1 - step / 600) * slope, out=x)
    for x, wanted in zip(mine, optimum, strict=True):
        assert not x.size or np.abs(x - wanted).mean() < 0.25


def test_a_saved_state_goes_on_with_the_same_bits():
    def steps(aggregation, numbers):
        for number in numbers:
            mine = noise(RANK, number)
            aggregation.aggregate(mine)
        return b"".join(x.tobytes() for x in mine)

    with mpiagg.DeMo(**HOW) as straight:
        wanted = steps(straight, range(6))
    with mpiagg.DeMo(**HOW) as before:
        steps(before, range(4))
        state = before.state_dict()
    with mpiagg.DeMo(**HOW) as after:
        after.load_state_dict(state)
        assert steps(after, range(4, 6)) == wanted
        state["memories"][0]["state"]["kept"] = [np.zeros(1)]
        refused(ValueError, "kept must be", after.load_state_dict, state)


def test_in_ddp_and_what_is_not_finite_is_not_remembered():
    weights = [np.zeros((8, 8)), np.zeros(8)]
    with mpiagg.DeMo(k=2, chunk=4) as aggregation, mpiagg.DDP(weights, aggregation=aggregation) as ddp:
        gradients = [np.ones((8, 8)), np.ones(8)]
        gradients[0][0, 0] = np.nan if RANK == 0 else 1
        ddp.sync_gradients(gradients)
        assert np.isnan(gradients[0][:4, :4]).all()
        assert (gradients[0][4:] == 1).all()
        for x in gradients:
            x[...] = 1
        ddp.sync_gradients(gradients)
        assert all((x == 1).all() for x in gradients)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"k": 0}, "k must be"),
        ({"chunk": 0}, "chunk must be"),
        ({"decay": -1}, "decay must be"),
        ({"sign": 1}, "sign must be"),
        ({"wire": "exact"}, "for sums, not for single values"),
        ({"wire": "u3"}, "unknown wire"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    refused((ValueError, TypeError), words, mpiagg.DeMo, **arguments)


@pytest.mark.parametrize("arguments", [{"k": 1 + RANK}, {"decay": 1 - RANK / 8}, {"sign": RANK == 0}])
def test_ranks_must_agree_on_the_arguments(arguments):
    if SIZE > 1:
        refused(mpiagg.MismatchError, "ranks disagree", mpiagg.DeMo, **arguments)


@pytest.mark.parametrize("dtype", [np.int32, np.complex64])
def test_other_numbers_are_refused(dtype):
    with mpiagg.DeMo() as aggregation:
        refused(TypeError, "not for", aggregation.aggregate, [np.ones(3, dtype)])
