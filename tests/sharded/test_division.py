"""Whose which part is: every element is one rank's, and its place is the one in the unit's vector."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.arrays import HOST, Form
from mpiagg.sharded.division import check_layers, units_of

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=8)


def forms_of(shapes, kinds="f"):
    dtypes = {"f": np.dtype(np.float32), "d": np.dtype(np.float64)}
    return [Form(dtypes[kinds[i % len(kinds)]], shape, HOST) for i, shape in enumerate(shapes)]


@given(
    SHAPES,
    st.integers(1, 6),
    st.sampled_from(["elements", "tensors"]),
    st.integers(0, 400),
    st.sampled_from(["f", "fd"]),
)
def test_every_element_is_one_ranks(shapes, size, split, cap, kinds):
    forms = forms_of(shapes, kinds)
    units, layers = units_of(forms, cap, size, split, None)
    assert sorted(index for unit in units for index in unit.members) == list(range(len(shapes)))
    assert layers == [[k] for k in range(len(units))]
    for unit in units:
        assert len({forms[index].dtype for index in unit.members}) == 1
        assert sum(unit.counts) == unit.length
        vector = np.full(unit.length, -1.0)
        for index, view in unit.views(vector).items():
            view[...] = np.arange(view.size).reshape(view.shape) + 1000 * index
        seen = {index: [] for index in unit.members}
        for rank in range(size):
            own = vector[unit.own(rank)]
            assert len(own) == unit.counts[rank]
            for part in unit.parts(rank):
                assert (own[part.within] == np.arange(part.start, part.stop) + 1000 * part.tensor).all()
                seen[part.tensor] += range(part.start, part.stop)
                assert split == "elements" or part.stop - part.start in (0, np.prod(shapes[part.tensor], dtype=int))
        for index in unit.members:
            assert sorted(seen[index]) == list(range(int(np.prod(shapes[index], dtype=int))))
        if split == "elements":
            assert max(unit.counts) - min(unit.counts) <= 1


@given(SHAPES, st.integers(1, 6), st.randoms(use_true_random=False))
def test_layers_are_units_of_their_own(shapes, size, random):
    order = list(range(len(shapes)))
    random.shuffle(order)
    asked = [sorted(order[start : start + 2]) for start in range(0, len(order), 2)]
    units, layers = units_of(forms_of(shapes, "fd"), 0, size, "elements", asked)
    assert [sorted(i for k in layer for i in units[k].members) for layer in layers] == asked
    assert sorted(k for layer in layers for k in layer) == list(range(len(units)))


def test_whole_tensors_are_shared_out_evenly():
    units, _ = units_of(forms_of([(100,), (60,), (50,), (10,)]), 2**20, 2, "tensors", None)
    assert [unit.counts for unit in units] == [(110, 110)]


@pytest.mark.parametrize("layers", [None, 3, [], [[]], [[0], [0, 1]], [[0]], [["0", 1]], [[0, 2]]])
def test_layers_that_do_not_name_each_tensor_once_are_refused(layers):
    with pytest.raises(ValueError, match="layers must be lists that name each tensor from 0 to 1 once"):
        check_layers(layers, 2)


def test_layers_that_do_are_taken():
    assert check_layers(((1,), [0]), 2) == [[1], [0]]
