"""Modules as DDP sees them."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpiagg.ddp.adapters import check_gradient, parameters_of


def test_a_list_of_arrays_is_a_module():
    arrays = [np.zeros(2), np.zeros((1, 1), np.float32)]
    for module in (arrays, tuple(arrays)):
        parameters = parameters_of(module)
        assert all(parameter.data is x for parameter, x in zip(parameters, arrays, strict=True))
        assert [parameter.grad for parameter in parameters] == [None, None]


def test_items_with_data_and_grad_are_taken_as_they_are():
    items = [SimpleNamespace(data=np.zeros(2), grad=None), SimpleNamespace(data=np.ones(1), grad=np.ones(1))]
    found = parameters_of(SimpleNamespace(parameters=lambda: iter(items)))
    assert all(parameter is item for parameter, item in zip(found, items, strict=True))


def test_parameters_may_be_arrays():
    x = np.zeros(2)
    assert parameters_of(SimpleNamespace(parameters=lambda: [x]))[0].data is x


@pytest.mark.parametrize(
    ("module", "error", "words"),
    [
        (np.zeros(3), TypeError, "ndarray"),
        (None, TypeError, "NoneType"),
        ([1.0], TypeError, "parameter 0, a float"),
        ([np.array(["a"])], TypeError, "cannot be aggregated"),
        ([SimpleNamespace(data=np.zeros(1))], TypeError, "data and grad"),
        ([SimpleNamespace(data=[0.0], grad=None)], TypeError, "not list"),
        ([np.broadcast_to(1.0, 3)], ValueError, "read-only"),
    ],
)
def test_what_is_no_module_is_refused(module, error, words):
    with pytest.raises(error, match=words):
        parameters_of(module)


@pytest.mark.parametrize(
    ("gradient", "error", "words"),
    [
        ([0.0, 0.0], TypeError, "not list"),
        (np.zeros(2, np.float32), TypeError, "float32"),
        (np.zeros((2, 1)), ValueError, "shape"),
        (np.broadcast_to(1.0, 2), ValueError, "read-only"),
    ],
)
def test_gradients_must_fit_their_parameter(gradient, error, words):
    with pytest.raises(error, match=words):
        check_gradient(0, gradient, np.zeros(2))
