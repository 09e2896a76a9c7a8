"""Lists of arrays as vectors."""

import ml_dtypes
import numpy as np
import pytest

from mpiagg.aggregation.packing import KEPT_PLANS, Packing, check_tensors, describe_layout, layout_of
from mpiagg.errors import PlanError
from mpiagg.plans.bound import STAGED_BYTES

LONG = STAGED_BYTES // 4 + 1


class FakePlan:
    def __init__(self, vector):
        self.vector, self.freed = vector, False

    def free(self):
        self.freed = True


def pack(tensors):
    groups = Packing(layout_of(tensors)).groups
    return groups, [group.pack(tensors) for group in groups]


def test_tensors_are_grouped_by_dtype_in_their_order():
    tensors = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(2.0),
        np.array(7, np.float32),
        np.empty((0, 4), np.float32),
        np.arange(8, 12, dtype=np.float32)[::-1],
    ]
    groups, vectors = pack(tensors)
    assert [group.dtype for group in groups] == [np.float32, np.float64]
    assert [vector.tolist() for vector in vectors] == [[0, 1, 2, 3, 4, 5, 7, 11, 10, 9, 8], [0, 1]]


def test_vectors_are_brought_back_where_they_came_from():
    base = np.arange(24.0).reshape(4, 6)
    tensors = [base[::2, ::3], np.asfortranarray(np.ones((2, 3))), np.array(5.0)]
    before = base.copy()
    (group,), (vector,) = pack(tensors)
    vector *= 10
    group.unpack(vector, tensors)
    expected = before.copy()
    expected[::2, ::3] *= 10
    assert base.tolist() == expected.tolist()
    assert tensors[1].tolist() == [[10.0] * 3] * 2
    assert tensors[2] == 50


def test_the_layout_is_kept_and_no_tensor_is_aliased():
    tensors = [np.ones(3), np.ones(4)]
    (group,), (vector,) = pack(tensors)
    assert group.pack(tensors) is vector
    assert not any(np.shares_memory(vector, x) for x in tensors)


def test_a_long_tensor_alone_is_not_packed():
    tensors = [np.zeros((1, LONG), np.float32), np.zeros((2, LONG))]
    _, vectors = pack(tensors)
    for vector, x in zip(vectors, tensors, strict=True):
        assert np.shares_memory(vector, x)
        assert vector.shape == (x.size,)


def test_a_long_tensor_alone_is_packed_where_its_own_memory_will_not_do():
    (group,) = Packing(layout_of([np.zeros(LONG)]), in_place=False).groups
    x = np.arange(float(LONG))
    vector = group.pack([x])
    assert not np.shares_memory(vector, x)
    assert np.array_equal(vector, x)


@pytest.mark.parametrize(
    "tensors",
    [
        [np.zeros(3, np.float32)],
        [np.zeros(2 * LONG, np.float32)[::2]],
        [np.zeros(LONG, np.float32), np.zeros(1, np.float32)],
        [np.zeros(2 * LONG, np.float16)],
    ],
    ids=["short", "strided", "two", "half"],
)
def test_others_are(tensors):
    _, (vector,) = pack(tensors)
    assert not any(np.shares_memory(vector, x) for x in tensors)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_packed_as_float32_and_rounded_once(dtype):
    tensors = [np.ones(2, dtype), np.full(1, 3, dtype)]
    (group,), (vector,) = pack(tensors)
    assert vector.dtype == np.float32
    vector /= 3
    group.unpack(vector, tensors)
    assert tensors[0].dtype == dtype
    assert tensors[0][0] == np.asarray(np.float32(1) / np.float32(3)).astype(dtype)


def test_an_empty_list_has_no_groups():
    assert pack([]) == ([], [])


def test_plans_are_found_again_and_the_longest_unused_one_goes():
    packing = Packing(())
    vector = np.zeros(4)
    first, second = packing.plan(vector, 1, FakePlan), packing.plan(vector, 2, FakePlan)
    assert np.shares_memory(first.vector, vector)
    assert second is not first
    for variant in range(3, KEPT_PLANS + 1):
        packing.plan(vector, variant, FakePlan)
    assert packing.plan(vector, 1, FakePlan) is first
    assert packing.plan(vector[1:], 1, FakePlan) is not first
    assert (first.freed, second.freed) == (False, True)
    packing.free()
    assert first.freed


def test_the_longest_unused_plan_goes_also_if_an_error_has_left_it_in_the_middle():
    def running():
        raise PlanError("the plan is running")

    packing = Packing(())
    vectors = np.zeros(KEPT_PLANS + 1)
    packing.plan(vectors, 0, FakePlan).free = running
    plans = [packing.plan(vectors, variant, FakePlan) for variant in range(1, KEPT_PLANS + 1)]
    packing.free()
    assert all(plan.freed for plan in plans)


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        (np.zeros(3), TypeError, "a list of arrays"),
        (np.array(1.0), TypeError, "a list of arrays"),
        (None, TypeError, "not NoneType"),
        ([1.0], TypeError, "tensor 0 must be a NumPy array, not float"),
        ([np.ma.zeros(1)], TypeError, "tensor 0 must be a NumPy array, not MaskedArray"),
        ("abc", TypeError, "not str"),
        ([np.zeros(1), [1.0]], TypeError, "tensor 1"),
        ([np.array([None])], TypeError, "object"),
        ([np.zeros(1, "f4").astype(">f4")], TypeError, "byte order"),
        ([np.broadcast_to(1.0, 3)], ValueError, "tensor 0 is read-only"),
    ],
)
def test_what_cannot_be_aggregated_is_refused(tensors, error, words):
    layout_of(tensors)
    with pytest.raises(error, match=words):
        check_tensors(tensors)


def test_layouts_in_words():
    assert describe_layout(layout_of([np.zeros((2, 3), "f4"), 5])) == "2 tensors: float32 (2, 3), int ()"
    assert describe_layout(()) == "no tensors"
