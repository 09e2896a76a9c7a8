"""Optimizers for arrays, beside torch's and beside restatements of their papers."""

import numpy as np
import pytest

from mpiagg.optimizers import LAMB, SGD, Adam, AdamW, Muon
from mpiagg.optimizers.base import BLOCK
from mpiagg.optimizers.muon import COEFFICIENTS, orthogonal

SHAPES = [(4, 3), (5,), (), (2, 3, 2), (BLOCK + 7,)]
STEPS = 6


def start():
    random = np.random.default_rng(1)
    return [random.standard_normal(shape) for shape in SHAPES]


def gradients(step):
    random = np.random.default_rng([2, step])
    return [np.asarray(random.standard_normal(shape)) for shape in SHAPES]


def trained(optimizer, dtype=np.float64):
    weights = [x.astype(dtype) for x in start()]
    weights = [np.asarray(x) for x in weights]
    for step in range(STEPS):
        optimizer.step(weights, [g.astype(dtype) for g in gradients(step)])
    return weights


CASES = {
    "sgd": (lambda: SGD(0.1), "SGD", {"lr": 0.1}),
    "momentum": (lambda: SGD(0.1, 0.9, weight_decay=0.1), "SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "dampened": (lambda: SGD(0.1, 0.9, dampening=0.3), "SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "nesterov": (lambda: SGD(0.1, 0.9, nesterov=True), "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (lambda: Adam(0.01, weight_decay=0.1), "Adam", {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (lambda: AdamW(0.01, (0.8, 0.99)), "AdamW", {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.01}),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_torch(case):
    torch = pytest.importorskip("torch")
    make, name, keywords = CASES[case]
    theirs = [torch.tensor(x) for x in start()]
    optimizer = getattr(torch.optim, name)(theirs, **keywords)
    for step in range(STEPS):
        for x, g in zip(theirs, gradients(step), strict=True):
            x.grad = torch.tensor(g)
        optimizer.step()
    for x, y in zip(trained(make()), theirs, strict=True):
        np.testing.assert_allclose(x, y.numpy(), rtol=1e-12, atol=1e-12)


def test_a_wrong_step_would_be_seen():
    """A control: the comparison tells optimizers apart that differ in one term."""
    one, other = trained(Adam(0.01, weight_decay=0.1)), trained(AdamW(0.01, weight_decay=0.1))
    assert not np.allclose(one[0], other[0], rtol=1e-12, atol=1e-12)


def test_muon_steps_are_those_of_torch():
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    random = np.random.default_rng(4)
    weights = [random.standard_normal((6, 4)), random.standard_normal((3, 5))]
    theirs = [torch.tensor(x) for x in weights]
    optimizer = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1)
    ours = Muon(0.02, weight_decay=0.1)
    for _ in range(STEPS):
        given = [random.standard_normal(x.shape) for x in weights]
        for x, g in zip(theirs, given, strict=True):
            x.grad = torch.tensor(g)
        optimizer.step()
        ours.step(weights, given)
    for x, y in zip(weights, theirs, strict=True):  # torch iterates in bfloat16
        np.testing.assert_allclose(x, y.numpy(), atol=0.02)


@pytest.mark.parametrize(("adjust", "nesterov"), [("original", True), ("match_rms_adamw", False)])
def test_muon_steps_are_those_of_its_paper(adjust, nesterov):
    lr, momentum, decay = 0.05, 0.9, 0.1
    random = np.random.default_rng(5)
    weights = random.standard_normal((6, 2, 2))
    ours = Muon(lr, momentum, nesterov=nesterov, weight_decay=decay, adjust=adjust)
    theirs, b = weights.reshape(6, 4).copy(), np.zeros((6, 4))
    for _ in range(3):
        g = random.standard_normal((6, 2, 2))
        ours.step([weights], [g])
        g = g.reshape(6, 4)
        b = momentum * b + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * b if nesterov else b
        x = u.T / np.linalg.norm(u)
        for _ in range(5):
            a_, b_, c_ = COEFFICIENTS
            gram = x @ x.T
            x = a_ * x + b_ * gram @ x + c_ * gram @ gram @ x
        factor = max(1, 6 / 4) ** 0.5 if adjust == "original" else 0.2 * 6**0.5
        theirs = theirs * (1 - lr * decay) - lr * factor * x.T
    np.testing.assert_allclose(weights.reshape(6, 4), theirs, rtol=1e-12, atol=1e-12)


def test_what_is_made_orthogonal_has_singular_values_near_one():
    random = np.random.default_rng(6)
    for shape in ((7, 3), (3, 7), (5, 5)):
        values = np.linalg.svd(orthogonal(random.standard_normal(shape), 5), compute_uv=False)
        assert (values > 0.3).all()
        assert (values < 1.3).all()
    assert np.linalg.svd(random.standard_normal((7, 3)), compute_uv=False).max() > 1.3  # a control


def test_muon_leaves_what_is_no_matrix_to_another():
    given = [np.ones((2, 2)), np.ones(3)]
    weights, alone = [np.ones((2, 2)), np.ones(3)], [np.ones(3)]
    Muon(0.1, others=SGD(0.5)).step(weights, given)
    SGD(0.5).step(alone, given[1:])
    assert (weights[1] == alone[0]).all()


def test_lamb_steps_are_those_of_its_paper():
    lr, (b1, b2), eps, decay = 0.02, (0.9, 0.999), 1e-6, 0.01
    theirs = [x.copy() for x in start()]
    theirs[1][:] = 0  # where the norm is 0 the step is not scaled
    ours = [x.copy() for x in theirs]
    moments = [(np.zeros(x.shape), np.zeros(x.shape)) for x in theirs]
    optimizer = LAMB(lr)
    for step in range(STEPS):
        optimizer.step(ours, gradients(step))
        for i, g in enumerate(gradients(step)):
            m, v = moments[i]
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            moments[i] = m, v
            r = m / (1 - b1 ** (step + 1)) / (np.sqrt(v / (1 - b2 ** (step + 1))) + eps) + decay * theirs[i]
            size, length = np.linalg.norm(theirs[i]), np.linalg.norm(r)
            theirs[i] = theirs[i] - lr * (size / length if size > 0 else 1) * r
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", [SGD(0.1, 0.9), Adam(), AdamW(), LAMB(), Muon()], ids=lambda x: type(x).__name__)
def test_dtypes_stay_and_missing_gradients_leave_tensors_alone(optimizer):
    weights = trained(optimizer, np.float32)
    assert all(x.dtype == np.float32 for x in weights)
    before = [x.copy() for x in weights]
    optimizer.step(weights, [None, *(g.astype(np.float32) for g in gradients(9)[1:])])
    assert (weights[0] == before[0]).all()
    assert (weights[1] != before[1]).any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGD(-1), "lr must be"),
        (lambda: SGD(0.1, 1.0), "momentum must be"),
        (lambda: SGD(0.1, nesterov=True), "nesterov wants"),
        (lambda: SGD(0.1, nesterov=1), "nesterov must be"),
        (lambda: Adam(betas=0.9), "betas must be"),
        (lambda: Adam(betas=(0.9, 1.5)), r"betas\[1\] must be"),
        (lambda: AdamW(eps=-1), "eps must be"),
        (lambda: Muon(adjust="none"), "unknown adjust"),
        (lambda: Muon(ns_steps=0), "ns_steps must be"),
    ],
)
def test_numbers_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_muon_wants_an_optimizer_for_the_others():
    with pytest.raises(TypeError, match="others must be an optimizer"):
        Muon(others="adam")


def test_lists_of_other_lengths_and_arrays_that_cannot_be_stepped_in_place_are_refused():
    with pytest.raises(ValueError, match="2 parameters, 1 gradients"):
        SGD(0.1).step([np.ones(1), np.ones(1)], [np.ones(1)])
    with pytest.raises(ValueError, match="contiguous"):
        SGD(0.1).step([np.ones((4, 4))[:, :2]], [np.ones((4, 2))])


def test_what_is_refused_in_the_first_step_is_not_remembered():
    optimizer, weights = SGD(0.5), [np.ones(1), np.ones(2)]
    with pytest.raises(ValueError, match="1 parameters, 2 gradients"):
        optimizer.step(weights[:1], weights)
    with pytest.raises(ValueError, match="a parameter has shape"):
        optimizer.step(weights[:1], weights[1:])
    optimizer.step(weights, [np.ones(1), np.ones(2)])
    assert [x.tolist() for x in weights] == [[0.5], [0.5, 0.5]]


@pytest.mark.parametrize("make", [lambda: SGD(0.1, 0.9), Adam, LAMB, Muon])
def test_what_cannot_be_stepped_is_refused_before_anything_is_changed(make):
    read_only = np.ones((2, 2))
    read_only.flags.writeable = False
    integers, booleans = np.ones((2, 2), np.int64), np.ones((2, 2), np.bool_)
    for wrong, kind, words in (
        (read_only, ValueError, "read-only"),
        (integers, TypeError, "dtype int64, which cannot be stepped"),
        (booleans, TypeError, "dtype bool, which cannot be stepped"),
        (np.ones((2, 2), complex), TypeError, "dtype complex128, which cannot be stepped"),
    ):
        optimizer, weights = make(), [np.ones((2, 2)), np.ones(3), wrong]
        for _ in range(2):
            with pytest.raises(kind, match=words):
                optimizer.step(weights, [np.ones((2, 2)), np.ones(3), np.ones((2, 2), wrong.dtype)])
        assert all((x == 1).all() for x in weights)
        optimizer.step(weights, [np.ones((2, 2)), np.ones(3), None])  # without a gradient it is left alone
        assert all((x != 1).any() for x in weights[:2])
        assert (wrong == 1).all()


@pytest.mark.parametrize("gradient", [np.ones(1), np.ones(9), np.ones((2, 2)), np.ones(4, np.float32)])
def test_a_gradient_of_another_form_is_refused_and_changes_nothing(gradient):
    optimizer, weights = Adam(0.1), [np.zeros(2), np.zeros(4)]
    with pytest.raises((TypeError, ValueError), match="a parameter has"):
        optimizer.step(weights, [np.ones(2), gradient])
    assert not any(x.any() for x in weights)
    optimizer.step(weights, [np.ones(2), np.ones(4)])
    with pytest.raises(ValueError, match="its gradient and state"):
        optimizer.step([np.zeros(2), np.zeros(6)], [np.ones(2), np.ones(6)])


def test_muon_refuses_what_it_cannot_step_in_place():
    with pytest.raises(ValueError, match="contiguous"):
        Muon().step([np.zeros((2, 3, 4)).T], [np.ones((4, 3, 2))])


@pytest.mark.parametrize("lr", [1, np.float32(0.5), np.float64(0.5)])
def test_any_number_is_a_learning_rate(lr):
    optimizer, other = AdamW(), AdamW()
    optimizer.lr = lr
    other.load_hyperparameters(optimizer.hyperparameters())
    assert type(other.lr) is float
    assert other.lr == lr
    with pytest.raises(ValueError, match="lr must be"):
        optimizer.lr = -1.0
    assert optimizer.lr == lr


def test_how_it_steps_is_saved_and_loaded():
    one = Muon(0.3, 0.5, others=Adam(0.7))
    other = Muon(others=Adam())
    other.load_hyperparameters(one.hyperparameters())
    assert other.hyperparameters() == one.hyperparameters()
    before = other.hyperparameters()
    for wrong in (SGD(0.1).hyperparameters(), {**before, "lr": "0.1"}, None, {**before, "others": {}}):
        with pytest.raises(ValueError, match=r"the state is not one of|must be like"):
            other.load_hyperparameters(wrong)
    assert other.hyperparameters() == before


@pytest.mark.parametrize(
    ("make", "wrong", "words"),
    [
        (Adam, {"lr": 0.5, "beta2": 1.0}, "must be a number from 0 up to 1"),
        (LAMB, {"eps": -1.0}, "eps must be"),
        (AdamW, {"weight_decay": float("nan")}, "weight_decay must be"),
        (lambda: SGD(0.1), {"momentum": 5.0}, "momentum must be"),
        (lambda: SGD(0.1), {"momentum": 0.5, "lr": -1.0}, "lr must be"),
        (lambda: SGD(0.1), {"lr": 0.5, "nesterov": True}, "nesterov wants"),
        (Muon, {"adjust": "foo"}, "unknown adjust 'foo'"),
        (Muon, {"ns_steps": 0}, "ns_steps must be"),
        (Muon, {"momentum": 0.5, "others": {**AdamW().hyperparameters(), "beta1": 1.5}}, "must be a number from 0"),
        (Muon, {"momentum": 0.5, "others": Adam().hyperparameters()}, "the state is not one of AdamW"),
        (Muon, {"momentum": 0.5, "others": None}, "others of Muon must be like"),
    ],
)
def test_settings_out_of_range_are_not_loaded(make, wrong, words):
    optimizer = make()
    before, kept = optimizer.hyperparameters(), optimizer.kept
    with pytest.raises(ValueError, match=words):
        optimizer.load_hyperparameters({**before, **wrong})
    assert (optimizer.hyperparameters(), optimizer.kept) == (before, kept)


def test_settings_of_muon_without_the_others_are_not_loaded():
    optimizer, given = Muon(), Muon(0.5, 0.5).hyperparameters()
    before = optimizer.hyperparameters()
    del given["others"]
    with pytest.raises(ValueError, match="the state is not one of Muon"):
        optimizer.load_hyperparameters(given)
    assert optimizer.hyperparameters() == before


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: Muon(others=x)])
def test_settings_that_need_other_arrays_can_be_loaded(wrap):
    optimizer, other = wrap(SGD(0.1)), wrap(SGD(0.1, 0.9))
    first, second = [np.ones(3)], [np.ones(3)]
    optimizer.step(first, [np.ones(3)])
    optimizer.load_hyperparameters(other.hyperparameters())
    second[0] -= 0.1
    for _ in range(2):
        optimizer.step(first, [np.ones(3)])
        other.step(second, [np.ones(3)])
    assert first[0].tobytes() == second[0].tobytes()


def test_muon_has_the_others_step_where_a_matrix_is_not():
    asked = []

    class Totals(SGD):
        def update(self, items, _=None):
            asked.append(len(items))

    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        Muon(others=Totals(0.1)).step([np.ones((2, 2)), np.ones(3)], [np.full((2, 2), 1e200), np.ones(3)])
    assert asked == [1]
