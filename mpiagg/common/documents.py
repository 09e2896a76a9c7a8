"""JSON that comes from anywhere: read within a limit, and checked field by field before it is used.

Every check raises ValueError, also where the type is wrong: that is a file's fault, not a caller's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

MOST_SHOWN: Final = 80
"""Characters of a value that are shown."""

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


def named(what: str, make: Callable[[Any], _Made], value: object) -> _Made:
    """Return what is made of a value; an error says of which."""
    try:
        return make(value)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def fields(what: str, value: object, needed: tuple[str, ...], known: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return an object that has the fields that are needed, and no others than those and the ones known."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object, not {short(value)}")  # noqa: TRY004 - a file's fault
    known = known or needed
    for name in needed:
        if name not in value:
            raise ValueError(f"{name!r} is missing")
    for name in value:
        if name not in known:
            raise ValueError(f"unknown field {short(name)}; known: {', '.join(known)}")
    return value


def items(what: str, value: object, most: int) -> list[Any]:
    """Return a list, which has no more items than that."""
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{what} must be a list of at most {most:,}, not {short(value)}")
    return value


def word(what: str, value: object, known: tuple[str, ...]) -> str:
    """Return a word that is one of those known."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}; not {short(value)}")
    return value


def short(value: object) -> str:
    """Return a value as it is shown in an error."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
