"""PowerSGD's linear algebra: all ranks in one process."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import resnet18

from mpiagg.aggregation.low_rank import LowRank, factor_rank, refresh

RANKS = 3


def made(shapes, rank=2, dtype=np.float64, rate=0, *, local=True):
    return LowRank(dict(enumerate(shapes)), np.dtype(dtype), rank, rate, local=local)


def average(parts, name):
    """Do what an all-reduce would do."""
    mean = np.mean([getattr(part, name) for part in parts], axis=0)
    for part in parts:
        getattr(part, name)[...] = mean


def step(parts, gradients, seed=0):
    """Return every rank's result of a step; gradients has a list of tensors for each rank."""
    results = [[np.array(x) for x in own] for own in gradients]
    for part, own in zip(parts, results, strict=True):
        part.load(own)
        part.project(np.random.default_rng(seed))
    average(parts, "first")
    for part in parts:
        part.project_back()
    average(parts, "second")
    for part, own in zip(parts, results, strict=True):
        part.reconstruct(own)
    return results


def noise(seed, *shapes, dtype=np.float64):
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def product(seed, n, m, rank, dtype=np.float64):
    left, right = noise(seed, (n, rank), (rank, m), dtype=dtype)
    return left @ right


def distance(x, y):
    return np.linalg.norm(np.ravel(x - y)) / np.linalg.norm(np.ravel(y))


# -- what is compressed


@pytest.mark.parametrize(
    ("shape", "rank", "rate", "expected"),
    [
        ((), 2, 0, 0),
        ((5,), 2, 0, 0),
        ((5, 4), 2, 0, 2),
        ((5, 1), 2, 0, 1),
        ((1, 7), 2, 0, 1),
        ((5, 4), 9, 0, 4),
        ((0, 4), 2, 0, 0),
        ((4, 0), 2, 0, 0),
        ((4, 3, 0), 2, 0, 0),
        ((8, 2, 2, 2), 1, 4, 1),  # 64 / 16 is just enough
        ((8, 2, 2, 2), 1, 4.01, 0),
        ((8, 8), 2, 2, 2),
        ((8, 8), 3, 2, 0),
        ((1, 7), 1, 1, 0),
    ],
)
def test_what_saves_too_little_goes_as_it_is(shape, rank, rate, expected):
    assert factor_rank(shape, rank, rate) == expected


@pytest.mark.parametrize(("rank", "factor"), [(1, 243.3), (2, 135.8), (4, 72.1)])
def test_resnet18_is_compressed_as_in_the_paper(rank, factor):
    shapes = resnet18()
    numbers = sum(map(math.prod, shapes))
    assert numbers == 11_173_962
    for rate in (0, 2):
        part = made(shapes, rank, np.float32, rate)
        assert sum(len(stack.members) for stack in part.stacks) == sum(len(shape) > 1 for shape in shapes)
        assert part.whole.nbytes == 4 * numbers
        assert round(part.whole.nbytes / (part.first.nbytes + part.second.nbytes), 1) == factor


def test_matrices_of_one_shape_are_one_stack():
    part = made([(4, 6), (6,), (4, 2, 3), (6, 4), (4, 6), ()], rank=3)
    assert [stack.members for stack in part.stacks] == [(0, 2, 4), (3,)]
    assert [stack.errors.shape for stack in part.stacks] == [(3, 4, 6), (1, 6, 4)]
    assert part.first.size == 7 + 3 * 4 * 3 + 6 * 3
    assert part.second.size == 3 * 6 * 3 + 4 * 3
    assert np.shares_memory(part.first, part.whole)


def test_a_stack_is_computed_as_its_matrices_one_by_one():
    shapes = [(5, 7), (5, 7), (5, 7)]
    gradients = [noise(rank, *shapes) for rank in range(RANKS)]
    together = [made(shapes) for _ in range(RANKS)]
    results = step(together, gradients)
    drawn = np.random.default_rng(0).standard_normal((3, 2, 7))
    for index in range(3):
        alone = [made(shapes[:1]) for _ in range(RANKS)]
        for part in alone:
            part.stacks[0].q[0] = drawn[index].T
        own = step(alone, [each[index : index + 1] for each in gradients])
        assert distance(own[0][0], results[0][index]) < 1e-14


# -- exactness


@pytest.mark.parametrize(("n", "m", "rank"), [(9, 12, 3), (12, 9, 3), (3, 12, 5), (12, 3, 3), (1, 8, 2), (8, 1, 2)])
@pytest.mark.parametrize("local", [True, False])
def test_a_mean_of_low_rank_is_exact_whatever_the_ranks_have(n, m, rank, local):
    mean = product(7, n, m, min(n, m, rank))
    noises = noise(8, *[(n, m)] * RANKS)
    gradients = [[mean + x - sum(noises) / RANKS] for x in noises]
    results = step([made([(n, m)], rank, local=local) for _ in range(RANKS)], gradients)
    assert all(distance(own[0], mean) < 1e-12 for own in results)


def test_a_mean_of_higher_rank_is_not_exact():
    gradient = product(7, 9, 12, 4)
    (result,) = step([made([(9, 12)], 3)], [[gradient]])
    assert 1e-3 < distance(result[0], gradient) < 1
    assert np.linalg.matrix_rank(result[0]) == 3


def test_a_reused_query_is_exact_while_the_rows_span_the_same():
    parts, left = [made([(9, 12)], 3)], noise(3, *[(9, 3)] * 5)
    right = product(4, 3, 12, 3)
    for number, each in enumerate(left):
        (result,) = step(parts, [[each @ right]], seed=number)
        assert distance(result[0], each @ right) < 1e-12


def gram_schmidt(p):
    """As in the paper's code: what is left of a dependent column is rounding, blown up to length 1."""
    for column in range(p.shape[1]):
        p[:, column] /= np.linalg.norm(p[:, column]) + 1e-16
        p[:, column + 1 :] -= np.outer(p[:, column], p[:, column] @ p[:, column + 1 :])
    return p


@pytest.mark.parametrize("rank", [2, 4])
def test_gradients_of_lower_rank_than_asked_for_are_exact(rank):
    wrong = 0
    for trial in range(200):
        gradient = product(trial, 16, 24, 1, np.float32)
        (result,) = step([made([(16, 24)], rank, np.float32)], [[gradient]], seed=trial)
        assert distance(result[0], gradient) < 1e-6
        p = gram_schmidt(gradient @ np.random.default_rng(trial).standard_normal((24, rank), np.float32))
        wrong += distance(p @ (gradient.T @ p).T, gradient) > 0.01
    assert wrong > 150  # the mistake that this is about would show


@pytest.mark.parametrize("scale", [1e-36, 1e-25, 1e25, 1e36])
def test_very_small_and_large_gradients_are_exact(scale):
    part = made([(9, 12)], 2, np.float32)
    for seed in range(3):
        gradient = np.float32(scale) * product(5, 9, 12, 2, np.float32)
        (result,) = step([part], [[gradient]], seed)
        assert distance(result[0] / np.float32(scale), gradient / np.float32(scale)) < 1e-5


# -- errors


@pytest.mark.parametrize("shape", [(6, 8), (8, 3, 2)])
def test_both_kinds_of_errors_have_one_mean_and_lose_nothing(shape):
    kinds = [[made([shape], local=local) for _ in range(RANKS)] for local in (True, False)]
    received, given = np.zeros((2, *shape)), np.zeros(shape)
    for seed in range(6):
        gradients = [noise(10 * seed + rank, shape) for rank in range(RANKS)]
        given += np.mean([own[0] for own in gradients], axis=0)
        for kind, parts in enumerate(kinds):
            received[kind] += step(parts, gradients, seed)[0][0]
        local, aggregated = (np.array([part.stacks[0].errors[0] for part in parts]) for parts in kinds)
        assert distance(local.mean(axis=0), aggregated.mean(axis=0)) < 1e-13
        assert distance(local, aggregated) > 0.1
        for kind, errors in enumerate((local, aggregated)):
            assert distance(received[kind] + errors.mean(axis=0).reshape(shape), given) < 1e-13


def test_a_plain_step_leaves_no_errors():
    part = made([(4, 6), (5,), (0, 2)])
    tensors = noise(1, (4, 6), (5,), (0, 2))
    own = [x.copy() for x in tensors]
    part.load(own)
    part.whole[...] *= 2
    part.unload(own)
    assert all((x == 2 * y).all() for x, y in zip(own, tensors, strict=True))
    assert not part.stacks[0].errors.any()


# -- what must not last


def test_zero_gradients_do_not_last():
    # With its first rows zero: QR of a zero P gives the first unit vectors, and other rows would bring Q back.
    gradient = np.vstack([np.zeros((2, 12)), product(3, 7, 12, 2)])
    part, zero = made([(9, 12)], 2), np.zeros((9, 12))
    for seed in range(3):
        assert not step([part], [[zero]], seed)[0][0].any()
        assert not part.second.any()
    assert distance(step([part], [[gradient]])[0][0], gradient) < 1e-12
    # Now errors of rounding are left, and what a query finds in them is not a start for much.
    for seed in range(3):
        assert np.linalg.norm(step([part], [[zero]], seed)[0][0]) < 1e-13
    for seed in range(4):
        (result,) = step([part], [[gradient]], seed)
    assert distance(result[0], gradient) < 1e-12


def test_a_query_of_zeros_would_last():
    gradient = np.vstack([np.zeros((2, 12)), product(3, 7, 12, 2)])
    unit = np.linalg.qr(gradient @ np.zeros((12, 2)))[0]
    assert not (gradient.T @ unit).any()


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_everywhere_and_does_not_last(poison, local):
    shapes = [(5, 6), (5, 6), (6, 5)]
    parts = [made(shapes, local=local) for _ in range(RANKS)]
    gradients = [noise(rank, *shapes) for rank in range(RANKS)]
    step(parts, gradients)
    gradients[1][0][2, 3] = poison
    for own in step(parts, gradients):
        assert not np.isfinite(own[0]).all()
        assert np.isfinite(own[1]).all()
        assert np.isfinite(own[2]).all()
    assert not any(part.stacks[0].errors[0].any() for part in parts)
    assert all(part.stacks[0].errors[1].any() for part in parts)
    mean = product(3, 5, 6, 2)
    for own in step(parts, [[mean, mean, mean.T]] * RANKS):
        assert distance(own[0], mean) < 1e-12


@given(st.lists(st.sampled_from(["good", "zero", "nan", "inf"]), min_size=1, max_size=6), st.integers(0, 99))
def test_lost_columns_are_drawn_and_the_others_keep_their_directions(kinds, seed):
    columns = noise(seed, (len(kinds), 5), dtype=np.float32)[0]
    for column, kind in zip(columns, kinds, strict=True):
        if kind != "good":
            column[:] = 0
            column[1] = {"zero": 0, "nan": np.nan, "inf": -np.inf}[kind]
    q = columns.T[np.newaxis].copy()
    refresh(q, np.random.default_rng(seed))
    drawn = iter(np.random.default_rng(seed).standard_normal((len(kinds), 5), np.float32))
    for before, after, kind in zip(columns, q[0].T, kinds, strict=True):
        if kind == "good":
            assert np.abs(after).max() == 1
            assert np.allclose(after * np.abs(before).max(), before, rtol=1e-6)
        else:
            assert (after == next(drawn)).all()
