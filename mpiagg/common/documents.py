"""JSON that comes from anywhere: read within a limit, and checked before it is used.

msgspec checks fields, types, ranges and lengths, and says where in the document something is wrong, as in
``$.rows[2].lanes``. Every fault is a ValueError, also a wrong type: that is a file's fault, not a caller's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

MOST_SHOWN: Final = 300
"""Characters of an error that are shown."""

_Made = TypeVar("_Made")


def read(path: Path, most: int) -> bytes:
    """Return the bytes of a file, which has no more than that; OSError if it cannot be read."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError("it is no file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


def load(path: Path, most: int) -> Any:
    """Return what a file of JSON says, which has no more bytes than that."""
    try:
        data = read(path, most)
    except OSError as error:
        raise ValueError(f"it cannot be read: {error}") from None
    return parsed(data)


def parsed(data: bytes) -> Any:
    """Return what JSON says."""
    # Not msgspec's own parser: of a field that is there twice it takes the last one.
    try:
        return json.loads(data, object_pairs_hook=_once_each)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON, or cut short: {error}") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object if no field is there twice, for then it is not clear what is meant."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is there twice")
    return found


def body(content: object, **head: object) -> dict[str, Any]:
    """Return an object without the fields of its head, which must say what is given here."""
    if not isinstance(content, dict):
        raise ValueError(f"it must be an object with {', '.join(head)}")  # noqa: TRY004 - a file's fault
    for name, value in head.items():
        found = content.get(name)
        if type(found) is not type(value) or found != value:
            raise ValueError(f"{name} must be {value!r}, not {repr(found)[:80]}")
    return {name: value for name, value in content.items() if name not in head}


def made(value: object, kind: type[_Made]) -> _Made:
    """Return a value of JSON as an instance of a type, as :func:`msgspec.convert` does."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(printable(str(error))[:MOST_SHOWN]) from None


def printable(text: str) -> str:
    """Return a text in which everything can be shown: a terminal might obey the rest."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


@contextmanager
def about(what: str) -> Iterator[None]:
    """Say in a ValueError what it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
