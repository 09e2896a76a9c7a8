"""What the room for CUDA does where a device has no memory left; it needs CuPy, and no GPU."""

import sys
import types
from collections import Counter

import pytest

cupy = pytest.importorskip("cupy")


@pytest.fixture
def freed(monkeypatch):
    """Return what was freed, by CuPy's pool and a torch that is made up, which has used its device."""
    freed = Counter()
    pool = types.SimpleNamespace(free_all_blocks=lambda: freed.update(["cupy"]))
    monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: pool)
    torch = types.SimpleNamespace(is_initialized=lambda: True, empty_cache=lambda: freed.update(["torch"]))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=torch))
    return freed


def taking(*errors):
    """Return a call that raises these errors, one each time, and then returns its number."""
    left = [*errors]

    def take():
        if left:
            raise left.pop(0)
        return "memory"

    return take


def out_of_memory():
    return [cupy.cuda.memory.OutOfMemoryError(1, 2, 3), cupy.cuda.runtime.CUDARuntimeError(2)]


def test_what_is_kept_for_later_is_freed_once_and_tried_again(freed):
    from mpiagg.cuda.device import _or_again

    assert _or_again(taking()) == "memory"
    assert not freed
    for number, error in enumerate(out_of_memory(), 1):
        assert _or_again(taking(error)) == "memory"
        assert freed == {"cupy": number, "torch": number}


def test_a_device_that_has_no_memory_then_says_so(freed):
    from mpiagg.cuda.device import _or_again

    for error in out_of_memory():
        with pytest.raises(type(error)):
            _or_again(taking(error, error))
    assert freed == {"cupy": 2, "torch": 2}


def test_another_error_frees_nothing(freed):
    from mpiagg.cuda.device import _or_again

    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
        _or_again(taking(cupy.cuda.runtime.CUDARuntimeError(1)))
    assert not freed
