"""Numbers of ranks, as scripts that start jobs of several sizes are told them."""

from __future__ import annotations

import click


def parse_ranks(text: str) -> list[int]:
    """Return numbers of ranks, written like ``2,4``.

    Raises
    ------
    click.BadParameter
        If they are not written so, or one is no number from 2 on.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 1 for word in words):
        raise click.BadParameter(f"{text!r} is no list of numbers of ranks from 2 on, such as 2,4")
    return sorted({int(word) for word in words})
