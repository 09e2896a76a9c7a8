"""A device for a block, by a driver that is made up: it makes a context wherever a thread goes, as CUDA 12's does."""

import importlib
import re
import sys
import threading
import types
from pathlib import Path

import pytest


class Driver:
    """What threads have as their device, and the devices that have contexts."""

    def __init__(self):
        self.thread, self.contexts = threading.local(), set()

    def get(self):
        return getattr(self.thread, "device", 0)

    def use(self, number):
        self.thread.device = number
        self.contexts.add(number)


def cupy_of(driver):
    class Device:
        def __init__(self, number):
            self.id = number

        def use(self):
            driver.use(self.id)

        def __enter__(self):
            self.before = driver.get()
            if self.before != self.id:
                driver.use(self.id)
            return self

        def __exit__(self, *_):
            driver.use(self.before)

    known = types.SimpleNamespace(ctxGetCurrent=lambda: int(hasattr(driver.thread, "device")))
    return types.SimpleNamespace(cuda=types.SimpleNamespace(Device=Device, driver=known))


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def module(driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy_of(driver))
    name = "mpiagg.cuda.present"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name)


def in_a_new_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_new_thread_makes_no_context_elsewhere(driver, module):
    def work():
        for _ in range(2):
            with module.Present(1):
                assert driver.get() == 1
        with module.Present(1), module.Present(1):
            pass

    in_a_new_thread(work)
    assert driver.contexts == {1}


def test_cupy_s_own_makes_one(driver, module):
    def work():
        with module.cupy.cuda.Device(1):
            pass

    in_a_new_thread(work)
    assert driver.contexts == {0, 1}


def test_a_thread_that_uses_a_device_goes_back_to_it(driver, module):
    driver.use(2)
    with module.Present(1):
        assert driver.get() == 1
    assert driver.get() == 2
    assert driver.contexts == {1, 2}


def test_nobody_uses_cupy_s_own_for_a_block():
    package = Path(__file__).parents[2] / "mpiagg"
    blocks = re.compile(r"with [^\n]*\bcuda\.Device\(")
    assert blocks.search("    with cupy.cuda.Device(0), stream:")
    assert not [path for path in package.rglob("*.py") if blocks.search(path.read_text())]
