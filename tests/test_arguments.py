import math
from fractions import Fraction

import numpy as np
import pytest

from mpiagg.common.arguments import check_flag, check_integer, check_number, check_root


@pytest.mark.parametrize("value", [0, 3, np.int64(2), np.uint8(1)])
def test_integers_in_range(value):
    assert check_integer("count", value, 0, 3) == value
    assert type(check_integer("count", value, 0)) is int


@pytest.mark.parametrize("value", [-1, 4, 1.0, True, None, "1", np.ones(1), 10**400])
def test_what_is_none_or_out_of_range(value):
    with pytest.raises(ValueError, match="count must be an integer from 0 to 3, not "):
        check_integer("count", value, 0, 3)
    with pytest.raises(ValueError, match="root must be a rank from 0 to 3, not "):
        check_root(value, 4)


def test_no_upper_end():
    assert check_integer("count", 10**400, 1) == 10**400
    with pytest.raises(ValueError, match="count must be an integer of at least 1, not 0"):
        check_integer("count", 0, 1)


@pytest.mark.parametrize("value", [0.5, 1, np.float32(0.25), np.int8(1), Fraction(1, 3)])
def test_numbers_that_are_accepted(value):
    number = check_number("ratio", value, "above 0", lambda x: x > 0)
    assert type(number) is float
    assert number == float(value)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, None, "1", 1j, np.ones(1), 10**400])
def test_numbers_that_are_not(value):
    with pytest.raises(ValueError, match="ratio must be above 0, not "):
        check_number("ratio", value, "above 0", lambda x: x > 0)


@pytest.mark.parametrize("value", [True, False, np.True_])
def test_flags(value):
    assert check_flag("loud", value) is bool(value)


@pytest.mark.parametrize("value", [None, 0, 1, "yes", np.ones(2), []])
def test_what_is_no_flag(value):
    with pytest.raises(ValueError, match="loud must be True or False, not "):
        check_flag("loud", value)
