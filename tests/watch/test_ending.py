"""How a process ends before its time: what it prints, once, and with which status."""

import os
import signal
import subprocess
import sys

import pytest

START = """
import os, signal, sys, threading, time
from mpiagg.watch import Ending, Recorder

def abort(status):
    print("aborts", flush=True)
    os._exit(status)

ending = Ending(Recorder(), 2, 4, abort)
def fail():
    raise ValueError("on purpose")
"""


def run(body, tmp_path, *, installed=True, **environment):
    environment = {
        "MPIAGG_RECORD_DIR": str(tmp_path / "recordings"),
        "PATH": "",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        **environment,
    }
    path = tmp_path / "script.py"
    path.write_text(START + ("ending.install()\n" if installed else "") + body)
    return subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("body", "reason", "place"),
    [
        ("fail()", "raised ValueError: on purpose", "in fail"),
        ("threading.Thread(target=fail, name='w').start(); time.sleep(60)", "in w, ValueError: on purpose", "in fail"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt", "in <module>"),
        ("raise MemoryError", "raised MemoryError", "in <module>"),
        ("ending.give_up('waited in vain')", "waited in vain", "in <module>"),
    ],
)
def test_the_rank_and_the_traceback_are_printed_once_and_the_job_ends(tmp_path, body, reason, place):
    ended = run(body, tmp_path)
    assert ended.returncode == 1
    assert ended.stdout == "aborts\n"
    assert ended.stderr.startswith("mpiagg: rank 2 of 4, on ")
    assert ended.stderr.count(reason) in {1, 2}  # the traceback may say it, too
    assert ended.stderr.count("mpiagg: rank 2") == 1
    assert place in ended.stderr
    assert f"its last operations are in {tmp_path / 'recordings' / 'rank-2.json'}" in ended.stderr


@pytest.mark.parametrize(("kind", "inside"), [("mpiagg.StallError", False), ("KeyError", True)])
def test_the_traceback_of_an_error_of_ours_has_the_lines_of_the_program(tmp_path, kind, inside):
    body = f"""
import mpiagg
from mpiagg.watch import OperationLog
log = OperationLog("", 0, 1)
def alarm():
    raise {kind}("on purpose")
log.alarm = alarm
log.check()
"""
    printed = run(body, tmp_path).stderr
    assert printed.count("on purpose") == (3 if inside else 2)  # one is the line that raises it
    lines = [line for line in printed.splitlines() if line.startswith("  File ")]
    files = ["script.py", *(["recorder.py"] if inside else []), "script.py"]
    assert [line.split('"')[1].rsplit("/", 1)[1] for line in lines] == files


@pytest.mark.parametrize(
    "wait",
    [
        "time.sleep(60)",
        # As a call of the MPI library's does: Python sees no signal before it is over.
        "import ctypes; ctypes.CDLL(None).poll(None, 0, 0) or [ctypes.CDLL(None).sleep(30) for _ in range(99)]",
    ],
)
def test_a_termination_ends_it_at_once_wherever_it_is(tmp_path, wait):
    ended = run(f"threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\n{wait}\n", tmp_path)
    assert ended.returncode == 128 + signal.SIGTERM
    assert ended.stderr.count("received SIGTERM") == 1
    assert ended.stdout == "aborts\n"


def test_a_record_is_written_when_it_is_asked_for(tmp_path):
    path = tmp_path / "recordings" / "rank-2.json"
    ended = run(f"os.kill(os.getpid(), signal.SIGUSR2)\nwhile not os.path.exists({str(path)!r}): pass", tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_handler_of_the_programs_own_is_left_alone(tmp_path):
    body = "signal.signal(signal.SIGTERM, lambda *_: print('mine')); os.kill(os.getpid(), signal.SIGTERM)"
    ended = run(f"{body}; time.sleep(0.1)", tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "mine\n", "")


def test_a_program_may_handle_its_errors_itself(tmp_path):
    ended = run("fail()", tmp_path, MPIAGG_ABORT="0")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("Traceback")


def test_an_abort_that_hangs_is_not_waited_for(tmp_path):
    soon = "from mpiagg.watch import ending as module\nmodule.LAST_RESORT, module.LAST_WORDS = 0.1, 0\n"
    # A call of C's that keeps Python's lock, as the MPI library's own abort does.
    hang = "import ctypes\nending._abort = lambda _: ctypes.PyDLL(None).sleep(60)\n"
    assert run(f"{soon}{hang}fail()", tmp_path).returncode == 1


def test_the_launcher_has_time_to_read_the_last_words(tmp_path):
    pause = "from mpiagg.watch import ending as module\nmodule.time.sleep = lambda _: os.write(2, b'pauses')\n"
    ended = run(f"{pause}fail()", tmp_path)
    assert ended.stderr.endswith("ValueError: on purpose\npauses")
    assert ended.stdout == "aborts\n"


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", "fail()"])
def test_a_child_that_was_forked_is_no_rank(tmp_path, end):
    body = f"""
child = os.fork()
if not child:
    {end}
status = os.waitpid(child, 0)[1]
time.sleep(0.2)
print("the parent goes on")
"""
    ended = run(body, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "the parent goes on\n")
    assert "mpiagg: rank" not in ended.stderr


def test_a_signal_that_comes_right_after_a_fork_is_the_childs(tmp_path):
    body = """
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))  # it comes before ours
ending.install()
child = os.fork()
if not child:
    time.sleep(60)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM)
time.sleep(1)
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    ended = run(body, tmp_path, installed=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\nset()\n", "")


def test_a_hook_that_was_there_prints(tmp_path):
    body = "sys.excepthook = lambda *_: print('mine')\nending.install()\nfail()"
    assert run(body, tmp_path, installed=False).stdout == "mine\naborts\n"


def test_who_hears_signals_already_goes_on_hearing_them(tmp_path):
    early = "import socket\na, b = socket.socketpair()\nb.setblocking(False)\nsignal.set_wakeup_fd(b.fileno())\n"
    body = f"{early}ending.install()\nos.kill(os.getpid(), signal.SIGUSR2)\nprint(a.recv(1) == bytes([signal.SIGUSR2]))"
    assert run(body, tmp_path, installed=False).stdout == "True\n"


def test_a_good_end_is_left_alone(tmp_path):
    ended = run("sys.exit(3)", tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "", "")


LAUNCHED = """
import subprocess
launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
ending = Ending(Recorder(), 2, 4, abort, launcher.pid)
ending.install()
launcher.communicate(b"\\n")
"""


def test_a_process_ends_when_its_launcher_has_ended(tmp_path):
    ended = run(LAUNCHED + "time.sleep(60)", tmp_path, installed=False)
    assert ended.returncode == 1
    assert "mpiagg: rank 2 of 4, on " in ended.stderr
    assert "lost its launcher: process " in ended.stderr
    assert not ended.stdout  # there is nobody whom an abort could tell
    assert (tmp_path / "recordings" / "rank-2.json").exists()


def test_a_process_outlives_its_launcher_where_it_is_to_look_after_itself(tmp_path):
    ended = run(LAUNCHED + "time.sleep(0.5); print('there')", tmp_path, installed=False, MPIAGG_ABORT="0")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "there\n", "")


ASYNCIO = """
import asyncio

async def serve():
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, heard.append, "asyncio")
    os.kill(os.getpid(), signal.SIGTERM)
    while not heard:
        await asyncio.sleep(0.01)

heard = []
asyncio.run(serve())
print(heard, flush=True)
while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # which asyncio has left behind
    time.sleep(0.01)
"""


@pytest.mark.parametrize("wait", ["time.sleep(60)", "import ctypes; ctypes.CDLL(None).poll(None, 0, 60000)"])
def test_signals_are_heard_of_again_when_asyncio_has_handled_some(tmp_path, wait):
    later = "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
    ended = run(ASYNCIO + later + wait, tmp_path)
    assert ended.stdout == "['asyncio']\naborts\n"
    assert "received SIGTERM" in ended.stderr


def test_signals_are_looked_at_while_asyncio_is_being_imported(tmp_path):
    body = """
import types
sys.modules["asyncio"] = types.ModuleType("asyncio")  # as far as it has come
time.sleep(1.5)  # long enough to be looked at
"""
    ended = run(body, tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_handler_of_the_programs_own_is_left_alone_when_it_is_looked_at(tmp_path):
    body = """
signal.signal(signal.SIGTERM, lambda *_: print("own", flush=True))
time.sleep(1.5)  # long enough to be looked at
os.kill(os.getpid(), signal.SIGTERM)
"""
    ended = run(body, tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "own\n", "")
