"""The runner of examples in docstrings finds what it is to find."""

import doctests
import pytest


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (">>> 1 + one\n2", ""),
        (">>> 1 + one\n3", "Got:\n    2"),
        (">>> two", "NameError"),
        (">>> one  # doctest: +SKIP", "skipped"),
        (">>> one\n1\n>>> one = 2\n>>> one\n2", ""),
        ("Nothing to run.", "has no example"),
    ],
)
def test_examples_that_fail_are_found(text, words):
    def function():
        pass

    function.__doc__ = f"Do something.\n\nExamples\n--------\n{text}\n"
    variables = {"one": 1}
    found = doctests.examples_that_fail("function", function, variables)
    assert words in found
    assert bool(found) == bool(words)
    assert variables == {"one": 1}
