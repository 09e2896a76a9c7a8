"""What CI runs beyond the tests that show that an installation works."""

import pytest


def thorough(*values):
    """Return values of a parameter that only thorough tests take."""
    return [pytest.param(value, marks=pytest.mark.thorough) for value in values]


def slow(*values):
    """Return values of a parameter that only slow tests take, which CI leaves out as well."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
