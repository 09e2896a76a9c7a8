"""States of parts of tensors."""

import numpy as np
import pytest

from mpiagg.sharded.division import Part
from mpiagg.sharded.states import checked_state


def test_what_is_of_a_whole_tensor_is_not_for_a_part_of_it():
    saved = {
        "shape": [2, 3],
        "start": 0,
        "stop": 6,
        "values": np.arange(6.0),
        "kept": {"row_var": {"whole": np.ones((2, 1))}},
    }
    state = {"ranks": 1, "optimizer": {}, "tensors": {"x": saved}, "buffers": {}}
    whole = checked_state(state, {"x": Part(0, 0, 6, 0)}, {"x": (2, 3)})["x"]
    np.testing.assert_array_equal(whole.kept()["row_var"], np.ones((2, 1)))
    half = checked_state(state, {"x": Part(0, 0, 3, 0)}, {"x": (2, 3)})["x"]
    with pytest.raises(ValueError, match="row_var of x is of the whole tensor"):
        half.kept()


@pytest.mark.parametrize("row", [np.ones((2, 1)), np.ones(2), {"whole": 3.0}, {"other": np.ones(2)}, {}])
def test_what_is_said_otherwise_is_refused(row):
    saved = {"shape": [2, 3], "start": 0, "stop": 6, "values": np.arange(6.0), "kept": {"row_var": row}}
    state = {"ranks": 1, "optimizer": {}, "tensors": {"x": saved}, "buffers": {}}
    shard = checked_state(state, {"x": Part(0, 0, 6, 0)}, {"x": (2, 3)})["x"]
    with pytest.raises(ValueError, match="row_var of x"):
        shard.kept()
