"""Plans that go on by themselves: what goes wrong is raised by who waits."""

import pytest

from mpiagg.plans.background import InBackground


@pytest.fixture(autouse=True)
def without_thread(monkeypatch):
    monkeypatch.setattr("mpiagg.plans.background.threads_allowed", lambda: False)


class Plan:
    """One that is done when it is tested, or fails where it is told to."""

    label = "a plan"
    running = False

    def __init__(self, fails=""):
        self.fails, self.ran = fails, []

    def _do(self, what):
        self.ran.append(what)
        if what == self.fails:
            raise RuntimeError(f"no {what}")
        return True

    def start(self):
        self._do("start")

    def test(self):
        return self._do("test")

    def wait(self, meanwhile=()):
        del meanwhile
        self._do("wait")

    def __call__(self):
        self._do("call")


def test_a_start_that_fails_is_raised_by_the_wait_too():
    flight = InBackground(Plan("start"))
    for call in flight.start, flight.wait, flight.wait:
        with pytest.raises(RuntimeError, match="no start"):
            call()
    flight.plan.fails = ""
    flight.start()
    flight.wait()


def test_a_run_that_fails_is_raised_by_the_wait_too():
    flight = InBackground(Plan("call"))
    for call in flight, flight.wait:
        with pytest.raises(RuntimeError, match="no call"):
            call()


def test_a_plan_that_cannot_follow_another_says_so_itself():
    first, second = InBackground(Plan()), InBackground(Plan("start"))
    first.start()
    second.start_after(first)
    first.wait()
    with pytest.raises(RuntimeError, match="no start"):
        second.wait()


@pytest.mark.parametrize("how", ["wait", "test"])
def test_a_plan_does_not_follow_one_that_has_failed(how):
    first, second = InBackground(Plan(how)), InBackground(Plan())
    first.start()
    second.start_after(first)
    if how == "test":
        first.drive_if_free()
    with pytest.raises(RuntimeError, match=f"no {how}"):
        first.wait()
    with pytest.raises(Exception, match="what it comes after has failed"):
        second.wait()
    assert second.plan.ran == []
