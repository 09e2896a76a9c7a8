"""States as text: what is saved comes back, and what was never saved is refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as some

from mpiagg.checkpoints.per_rank import PerRank
from mpiagg.checkpoints.trees import DTYPES, MOST_DEPTH, Stored, decode, digest_of, encode, fill, merge, text_of

KNOWN = [name for name in DTYPES if name == "bfloat16" or hasattr(np, name) or name == "bool"]
dtypes = st.sampled_from([np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in KNOWN])


@st.composite
def arrays(draw):
    dtype, shape = draw(dtypes), draw(some.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    array = np.frombuffer(draw(st.binary(min_size=0, max_size=1)) * 4096, np.uint8)[: dtype.itemsize * 27]
    array = np.resize(array.view(dtype) if array.size else np.zeros(1, dtype), shape)
    if dtype.kind == "b":
        array = array.view(np.uint8).astype(bool)
    array = array.T if draw(st.booleans()) else array
    return array[()] if draw(st.booleans()) and not shape else array


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | arrays()
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
states = st.dictionaries(st.text(), trees, max_size=4)


def same(one, other):
    """Whether two states are of the same types and bits."""
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray | np.generic):
        alike = type(one) is type(other) and (one.dtype, one.shape) == (other.dtype, other.shape)
        # Long doubles have bytes that say nothing.
        return alike and (repr(one) == repr(other) if one.dtype.char in "gG" else one.tobytes() == other.tobytes())
    return type(one) is type(other) and repr(one) == repr(other)


def stored(arrays):
    places, end = [], 0
    for array, scalar in arrays:
        places.append(Stored(array.dtype, array.shape, scalar, 0, end, digest_of(array.tobytes())))
        end += array.nbytes
    return places, {0: end}


@given(states)
def test_a_state_comes_back(state):
    tree, arrays = encode(state)
    places, lengths = stored(arrays)
    found, again = decode(text_of(tree, places), lengths)
    assert again == places
    left = iter(arrays)

    def read(place):
        array, scalar = next(left)
        assert (place.dtype, place.shape, place.scalar) == (array.dtype, array.shape, scalar)
        return array[()] if scalar else array

    assert same(state, fill(found, read))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((1, 2), r"state\['a'\]\[1\] is of type tuple: .* make a tuple a list"),
        ({1: 2}, r"state\['a'\]\[1\] has the key 1: keys must be str"),
        (1j, "is of type complex"),
        (b"x", "is of type bytes"),
        (PerRank([1, 2]), "is of type PerRank: .* decide of a PerRank"),
        (np.ma.masked_array([1, 2], [True, False]), r"\[1\] is a masked array: save its data and its mask"),
        (np.array([None]), "has dtype object: arrays of numbers"),
        (np.array(["x"]), "has dtype <U1"),
        (np.zeros(2, ">f8"), "has dtype >f8: .* native byte order"),
        (np.zeros(2, "f4,i4"), "arrays of numbers"),
        (np.datetime64(1, "s"), "arrays of numbers"),
        (np.void(b"xx"), "arrays of numbers"),
    ],
)
def test_what_cannot_be_saved_is_refused(value, words):
    with pytest.raises(TypeError, match=words):
        encode({"a": [0, value]})


def test_nesting_has_an_end():
    def nested(depth):
        state = {"x": 1}
        for level in range(depth - 1):
            state = {"x": state if level % 2 else [state]}
        return state

    encode(nested(MOST_DEPTH // 2))
    loop = []
    loop.append(loop)
    for state in (nested(MOST_DEPTH), {"x": loop}):
        with pytest.raises(ValueError, match="may be nested"):
            encode(state)
    with pytest.raises(ValueError, match="digits"):
        encode({"a": 10**5000})


ARRAY = ["float32", [2, 3], False, 0, 8, "0" * 64]


def text(arrays=(ARRAY,), state=None):
    return json.dumps({"arrays": list(arrays), "state": {"dict": {"a": {"array": 0}}} if state is None else state})


def other(place, value):
    return text([[value if index == place else each for index, each in enumerate(ARRAY)]])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "not JSON"),
        ("[]", "Expected `object`, got `array`"),
        ('{"arrays": [], "state": {"dict": {}}, "more": 1}', "unknown field `more`"),
        ('{"arrays": []}', "missing required field `state`"),
        ('{"arrays": {}, "state": {"dict": {}}}', r"Expected `array`, got `object` - at `\$.arrays`"),
        ("[" * 10**5, "nested too deeply"),
        (text([], {"dict": {"a": json.loads("[" * 200 + "]" * 200)}}), "nested too deeply"),
        (text([], [1]), "state must be a dict"),
        (text([], 1), "state must be a dict"),
        (text([], {"a": 1}), "must be a dict, or the array"),
        (text([], {"dict": 1}), "must be a dict, or the array"),
        (text([], {"dict": {}, "array": 0}), "must be a dict, or the array"),
        (text([]), "must be a dict, or the array"),
        (text(state={"dict": {"a": {"array": True}}}), "must be a dict, or the array"),
        (text(state={"dict": {"a": {"array": 1}}}), "must be a dict, or the array"),
        (text(state={"dict": {"a": {"array": 0}, "b": {"array": 0}}}), "must be a dict, or the array"),
        (text(state={"dict": {}}), "arrays that the state has not"),
        (text([1]), r"Expected `array`, got `int` - at `\$.arrays\[0\]`"),
        (text([ARRAY[:5]]), "Expected `array` of length 6, got 5"),
        (other(0, "object"), "no dtype"),
        (other(0, ["float32"]), "Expected `str`, got `array`"),
        (other(0, "void64"), "no dtype"),
        (other(1, 6), r"Expected `array`, got `int` - at `\$.arrays\[0\]\[1\]`"),
        (other(1, [-2, -3]), r"Expected `int` >= 0 - at `\$.arrays\[0\]\[1\]\[0\]`"),
        (other(1, [1.0]), "Expected `int`, got `float`"),
        (other(1, [True]), "Expected `int`, got `bool`"),
        (other(1, [2**63]), "Expected `int` <= "),
        (other(1, [2**61] * 60), "not within its file"),
        (other(1, [7]), "not within its file"),
        (other(2, 1), "Expected `bool`, got `int`"),
        (other(2, True), "a number has no shape"),
        (other(3, 1), "one of the files"),
        (other(3, [0]), "Expected `int`, got `array`"),
        (other(3, 0.0), "Expected `int`, got `float`"),
        (other(3, True), "Expected `int`, got `bool`"),
        (other(4, -1), r"Expected `int` >= 0 - at `\$.arrays\[0\]\[4\]`"),
        (other(4, 33), "not within its file"),
        (text([["float32", [0], False, 0, 33, ""]]), "not within its file"),
        (other(4, 9), "not within its file"),
        (other(5, 0), "Expected `str`, got `int`"),
        (text([ARRAY, ARRAY], {"dict": {"a": [{"array": 0}, {"array": 1}]}}), "overlap"),
    ],
)
def test_a_text_that_says_something_else_is_refused(given, words):
    decode(text().encode(), {0: 32})
    with pytest.raises(ValueError, match=words):
        decode(given.encode(), {0: 32})


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["float32", "bool"]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(["dict", "array", "x"]), inner),
)


@given(st.builds(text, st.lists(json_values), json_values) | st.builds(other, st.integers(0, 5), json_values))
def test_only_value_errors_come_of_texts(given):
    try:
        tree, arrays = decode(given.encode(), {0: 32})
    except ValueError:
        return
    assert isinstance(tree, dict)
    assert sum(stored.nbytes for stored in arrays) <= 32


@given(st.binary(max_size=50))
def test_only_value_errors_come_of_bytes(data):
    with pytest.raises(ValueError, match=r"it is|Expected"):
        decode(data, {0: 32})


# -- the states of several ranks


def test_what_is_the_same_is_one_and_what_is_not_is_all():
    place = Stored(np.dtype("f4"), (2,), False, 0, 0, "a")
    elsewhere = place._replace(file=1, offset=8)
    another = place._replace(digest="b")
    merged = merge(
        [
            {"same": [place, 1, "x", float("nan"), None], "other": [place, 1, 1, 0.0, {"a": 1}, [1]]},
            {"same": [elsewhere, 1, "x", float("nan"), None], "other": [another, 1.0, True, -0.0, {"b": 1}, [1, 2]]},
        ],
        lambda stored: stored.digest,
    )
    assert repr(merged["same"]) == repr([place, 1, "x", float("nan"), None])
    found = [list(each) for each in merged["other"]]
    assert repr(found) == repr([["a", "b"], [1, 1.0], [1, True], [0.0, -0.0], [{"a": 1}, {"b": 1}], [[1], [1, 2]]])
    assert all(isinstance(each, PerRank) and len(each) == 2 for each in merged["other"])


@settings(max_examples=25)
@given(states, st.integers(1, 4))
def test_merging_the_same_changes_nothing(state, ranks):
    tree, arrays = encode(state)
    places, lengths = stored(arrays)
    found, _ = decode(text_of(tree, places), lengths)
    assert repr(merge([found] * ranks, None)) == repr(found)


def test_values_of_ranks_are_read_when_asked_for():
    asked = []
    values = PerRank([1, 2, 3], lambda x: asked.append(x) or 10 * x)
    assert (len(values), asked, repr(values)) == (3, [], "<PerRank: what 3 ranks had>")
    assert (values[1], asked) == (20, [2])
    assert list(values) == [10, 20, 30]
    assert list(values[1:]) == [20, 30]
    with pytest.raises(IndexError):
        values[3]
