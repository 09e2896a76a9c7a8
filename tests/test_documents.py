"""JSON from anywhere: what is right comes back, and of what is wrong the error says where."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.common import documents

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_what_was_written_is_read(value):
    assert documents.parsed(json.dumps(value).encode()) == value


@given(st.binary(max_size=40))
def test_of_anything_else_comes_a_value_error(data):
    try:
        found = documents.parsed(data)
    except ValueError:
        return
    # As said by the parser that all trust; NaN is not equal to itself.
    assert json.dumps(found) == json.dumps(json.loads(data))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is not JSON, or cut short"),
        (b'{"a": 1', "it is not JSON, or cut short"),
        (b"\xff\x00\xff", "it is not JSON"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'[{"a": 1, "a": 1}]', "a field is there twice"),
    ],
    ids=lambda value: value[:10] if isinstance(value, bytes) else None,
)
def test_what_is_no_json_is_told(data, words):
    with pytest.raises(ValueError, match=words):
        documents.parsed(data)


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("[1, 2]")
    assert documents.load(path, 6) == [1, 2]
    with pytest.raises(ValueError, match="it has more than 5 bytes"):
        documents.load(path, 5)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, words in (
        ("pipe", "it is no file"),
        (".", "it is no file"),
        ("absent", "it cannot be read: .*No such file"),
    ):
        with pytest.raises(ValueError, match=words):
            documents.load(tmp_path / name, 10)
    with pytest.raises(FileNotFoundError):
        documents.read(Path(tmp_path / "absent"), 10)


def test_fields_items_and_words_are_checked():
    value = {"a": 1, "b": 2}
    assert documents.fields("it", value, ("a",), ("a", "b")) is value
    assert documents.items("rows", [1, 2], 2) == [1, 2]
    assert documents.word("kind", "b", ("a", "b")) == "b"
    assert documents.named("row 2", int, "7") == 7
    for call, words in (
        (lambda: documents.fields("it", [], ("a",)), "it must be an object, not []"),
        (lambda: documents.fields("it", value, ("a", "c")), "'c' is missing"),
        (lambda: documents.fields("it", value, ("a",)), "unknown field 'b'; known: a"),
        (lambda: documents.items("rows", [1, 2], 1), "rows must be a list of at most 1, not [1, 2]"),
        (lambda: documents.items("rows", {}, 1), "rows must be a list of at most 1, not {}"),
        (lambda: documents.word("kind", "c", ("a", "b")), "kind must be one of a, b; not 'c'"),
        (lambda: documents.word("kind", ["a"], ("a", "b")), "kind must be one of a, b; not ['a']"),
        (lambda: documents.named("row 2", int, "x"), "row 2: invalid literal"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert words in str(caught.value)


def test_values_are_shown_in_short():
    assert documents.short("x" * 78) == repr("x" * 78)
    assert documents.short("x" * 79) == f"'{'x' * 76}..."
