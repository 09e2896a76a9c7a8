"""What is tried with arrays on devices, through the stand-in and on GPUs."""

SHAPES = [(200, 60), (60,), (60, 70), (3,), ()]
"""Of parameters, of which some are long enough not to go by way of the host."""


class Item:
    """What has data and grad."""

    def __init__(self, data):
        self.data, self.grad = data, None


class Module:
    """What has parameters."""

    def __init__(self, items):
        self._items = items

    def parameters(self):
        return self._items


def assert_same(one, other, bits):
    """Show that two results have the same bits, or are both None."""
    assert (one is None) == (other is None)
    if one is not None:
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert bits(one) == bits(other)
