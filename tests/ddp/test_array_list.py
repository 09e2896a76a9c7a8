"""The interface that a list of arrays gets."""

import numpy as np
import pytest

from mpiagg.ddp.array_list import ArrayList


def arrays():
    return [np.arange(4.0).reshape(2, 2).T, np.array(7, np.float32)]


def test_a_state_is_a_copy_and_loads_in_place():
    mine = arrays()
    module = ArrayList(mine)
    state = module.state_dict()
    for x in mine:
        x[...] = 0
    assert [x.tolist() for x in state.values()] == [x.tolist() for x in arrays()]
    assert module.load_state_dict(state) == ([], [])
    assert [x.tolist() for x in mine] == [x.tolist() for x in arrays()]


def test_without_strictness_only_what_is_there_is_loaded():
    mine = arrays()
    unmatched = ArrayList(mine).load_state_dict({"0": np.ones((2, 2), np.float32), "x": np.ones(1)}, strict=False)
    assert unmatched.missing_keys == ["1"]
    assert unmatched.unexpected_keys == ["x"]
    assert mine[0].tolist() == [[1, 1], [1, 1]]
    assert mine[1] == 7


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"1": None}, TypeError, "1 must be a NumPy array, not NoneType"),
        ({"1": np.zeros(1)}, ValueError, r"1 has shape \(\), its saved state \(1,\)"),
        ({"1": np.array(1j)}, TypeError, "1 has dtype float32, its saved state complex128"),
        ({"2": np.zeros(1)}, KeyError, r"missing: \[\], unexpected: \['2'\]"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(change, error, words):
    mine = arrays()
    state = {"0": np.ones((2, 2)), "1": np.array(1.0), **change}
    with pytest.raises(error, match=words):
        ArrayList(mine).load_state_dict(state)
    assert [x.tolist() for x in mine] == [x.tolist() for x in arrays()]


def test_a_missing_name_is_refused():
    with pytest.raises(KeyError, match=r"missing: \['1'\]"):
        ArrayList(arrays()).load_state_dict({"0": np.ones((2, 2))})
