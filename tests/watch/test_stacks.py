"""Where threads are."""

import subprocess
import sys
import threading

from mpiagg.watch.stacks import call_site, stack


def test_where_another_thread_is():
    arrived, go = threading.Event(), threading.Event()

    def somewhere():
        arrived.set()
        go.wait()

    thread = threading.Thread(target=somewhere)
    thread.start()
    arrived.wait()
    places = stack(thread.ident, most=50)
    go.set()
    thread.join()
    assert any("test_stacks.py" in place and "in somewhere" in place for place in places)
    assert call_site(threading.get_ident()).endswith("in test_where_another_thread_is")
    assert stack(0) == []


def test_asking_where_a_thread_is_does_not_meet_the_garbage_collection():
    # Before 3.11.9 Python keeps a lock meanwhile that giving back a thread's own values takes: it would hang for ever.
    script = """
import faulthandler, gc, threading
from mpiagg.watch.stacks import stack
faulthandler.dump_traceback_later(60, exit=True)
class Cycle:
    def __init__(self):
        self.itself, self.own = self, threading.local()
        self.own.value = 1
kept = []
for number in range(3000):
    gc.set_threshold(1 + number % 40)
    Cycle()
    kept.append(lambda: 0)
    assert stack()
assert gc.isenabled()
gc.disable()
stack()
assert not gc.isenabled()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
