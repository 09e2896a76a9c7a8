"""JSON from anywhere: what is right comes back, and of what is wrong the error says where."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

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


class Thing(Struct, forbid_unknown_fields=True):
    a: int
    lengths: dict[int, float] = {}

    def __post_init__(self):
        if self.a < 0:
            raise ValueError("a must not be negative")


def test_values_become_what_they_should_be():
    assert documents.made({"a": 1, "lengths": {"8": 2}}, Thing) == Thing(1, {8: 2.0})
    for value, words in (
        ([], "Expected `object`, got `array`"),
        ({}, "missing required field `a`"),
        ({"a": 1, "b": 2}, "unknown field `b`"),
        ({"a": True}, "Expected `int`, got `bool` - at `$.a`"),
        ({"a": 1.0}, "Expected `int`, got `float` - at `$.a`"),
        ({"a": "1"}, "Expected `int`, got `str` - at `$.a`"),
        ({"a": -1}, "a must not be negative"),
        ({"a": 1, "lengths": {"8": "2"}}, "Expected `float`, got `str` - at `$.lengths[...]`"),
        ({"a": 1, "\x1b[31m": 2}, "unknown field `\N{REPLACEMENT CHARACTER}[31m`"),
        ({"a": 1, "\ud800": 2}, ""),
    ):
        with pytest.raises(ValueError) as caught:
            documents.made(value, Thing)
        assert words in str(caught.value)
    with pytest.raises(ValueError) as caught:
        documents.made({"a": 1, "b" * 10**5: 2}, Thing)
    assert len(str(caught.value)) == documents.MOST_SHOWN


@pytest.mark.parametrize("kind", [Any, dict[str, Any], Thing])
def test_nothing_that_could_be_parsed_is_nested_too_deeply_to_be_looked_at(kind):
    value = {"a": 1}
    for _ in range(sys.getrecursionlimit() * 20):
        value = {"a": value}
    with suppress(ValueError):
        documents.made(value, kind)


def test_a_head_is_checked_and_taken_off():
    content = {"format": "x", "version": 1, "a": 2}
    assert documents.body(content, format="x", version=1) == {"a": 2}
    for other, words in (
        ([], "it must be an object with format, version"),
        ({**content, "format": "y"}, "format must be 'x', not 'y'"),
        ({"format": "x"}, "version must be 1, not None"),
        *(({**content, "version": version}, "version must be 1, not ") for version in (True, 1.0, "1", [1], 2)),
        ({**content, "version": "x" * 1000}, f"version must be 1, not '{'x' * 79}"),
    ):
        with pytest.raises(ValueError) as caught:
            documents.body(other, format="x", version=1)
        assert words in str(caught.value)


def test_an_error_says_what_it_is_about():
    with pytest.raises(ValueError, match=r"^row 2: wrong$"), documents.about("row 2"):
        raise ValueError("wrong")
    with pytest.raises(TypeError, match=r"^wrong$"), documents.about("row 2"):
        raise TypeError("wrong")
