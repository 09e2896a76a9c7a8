"""Save checkpoints and die at every step of it, or fail; show what is left to load.

``python crashes.py FOLDER [no-sync|early]`` prints as JSON how many steps there were, and what was found wrong. The
disk is one that loses, in a crash, whatever it may: files that were not synced, and names in folders that were not.
With a second argument, saving is done wrongly on purpose, up to the first fault.
"""

import json
import os
import shutil
import sys
import threading
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace

import crew
import numpy as np
from crew import load, save

from mpiagg.checkpoints import folders, together

RANKS = 2
DIED = 9


def states(number):
    """What the ranks have: something they share, and something of their own."""
    return [
        {"step": number, "shared": np.full(30, number, np.float32), "own": np.full((2, 3), 10 * number + rank)}
        for rank in range(RANKS)
    ]


def no_sync(handle):
    """Be quick: no real disk is asked."""


class Disk:
    """Counts the steps of a rank, and dies or fails at one of them; knows what is not safe on the disk yet."""

    def __init__(self, rank, step, fail):
        self.rank, self.step, self.fail, self.steps = rank, step, fail, 0
        self.dirty, self.unnamed, self.lock = set(), set(), threading.RLock()
        self.mine = threading.local()
        self.real = {name: getattr(Path, name) for name in ("open", "mkdir", "replace", "unlink", "rmdir")}

    def install(self):
        for name in self.real:
            setattr(Path, name, getattr(self, name)())
        os.fsync = self.sync

    def remove(self):
        for name, call in self.real.items():
            setattr(Path, name, call)
        os.fsync = no_sync

    def point(self, half=None):
        """Be where a rank may die; then half of a write may have been done."""
        with self.lock:
            if getattr(self.mine, "rank", None) != self.rank:
                return
            self.steps += 1
            if self.steps - 1 != self.step:
                return
            if self.fail:
                raise OSError(28, "No space left on device")
            if half:
                half()
            self.crash()

    def crash(self):
        for path in self.dirty:
            if path.exists():
                os.truncate(path, 0)
        for path in self.unnamed:
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                self.real["unlink"](path)
        os._exit(DIED)

    def sync(self, handle):
        self.point()
        with self.lock:
            where = Path(f"/proc/self/fd/{handle}").readlink()
            self.dirty.discard(where)
            self.unnamed = {path for path in self.unnamed if path.parent != where}

    def open(self):
        def call(path, mode="r", *more, **keywords):
            if mode[0] == "r":
                return self.real["open"](path, mode, *more, **keywords)
            self.point()
            with self.lock:
                if not path.exists():
                    self.unnamed.add(path)
                self.dirty.add(path)
                return Writer(self, self.real["open"](path, mode, *more, **keywords))

        return call

    def mkdir(self):
        def call(path, *more, **keywords):
            self.point()
            with self.lock:
                if not path.exists():
                    self.unnamed.add(path)
                self.real["mkdir"](path, *more, **keywords)

        return call

    def replace(self):
        def call(path, target):
            self.point()
            with self.lock:
                self.real["replace"](path, target)
                self.unnamed.discard(path)
                if path in self.dirty:
                    self.dirty = self.dirty - {path} | {target}

        return call

    def unlink(self):
        return self._plain("unlink")

    def rmdir(self):
        return self._plain("rmdir")

    def _plain(self, name):
        def call(path, *more, **keywords):
            self.point()
            with self.lock:
                self.real[name](path, *more, **keywords)

        return call


class Writer:
    """A file to write to."""

    def __init__(self, disk, file):
        self.disk, self.file = disk, file

    def write(self, data):
        def half():
            self.file.write(data[: len(data) // 2])
            self.file.flush()

        self.disk.point(half)
        return self.file.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


def attempt(folder, rank, step, fail, number):
    """Save with a disk that dies or fails; return how that ended for the ranks, and whether the step was reached."""
    disk = Disk(rank, step, fail)
    real = together.save_checkpoint

    def call(one):
        disk.mine.rank = one.rank
        return real(folder, states(number)[one.rank], one)

    disk.install()
    try:
        ended = crew.Crew(RANKS).run(call)
    finally:
        disk.remove()
    return ended, disk.steps > step


def same(found, number):
    wanted = states(number)
    return all(
        isinstance(mine, dict) and repr(mine) == repr(theirs) for mine, theirs in zip(found, wanted, strict=True)
    )


def die(folder, rank, step):
    """Save in a process that dies, and return whether it did."""
    child = os.fork()
    if not child:
        status = 1
        try:
            ended, _ = attempt(folder, rank, step, fail=False, number=2)
            status = 0 if ended == [None] * RANKS else 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, DIED), f"a crash at step {step} of rank {rank} ended with {status}"
    return status == DIED


def check(folder, before, what, *, ended=None):
    """Return what is wrong with a folder after a crash, or a failure."""
    found = load(folder, RANKS)
    there = [number for number in (1, 2) if same(found, number)]
    if not there and (before or not all(isinstance(each, FileNotFoundError) for each in found)):
        return [f"{what}: {found}"]
    if ended is not None:
        kinds = sorted(type(each).__name__ for each in ended)
        if kinds not in (["MismatchError", "OSError"], ["NoneType", "NoneType"]):
            return [f"{what}: ended with {ended}"]
        if kinds[0] == "NoneType" and there != [2]:
            return [f"{what}: {found} without an error"]
    after = save(folder, states(3))
    if after != [None] * RANKS or not same(load(folder, RANKS), 3):
        return [f"{what}: saving after that: {after}"]
    left = sorted(path.name for path in folder.iterdir())
    return [] if len(left) == 2 else [f"{what}: {left} are left"]


def main(top, wrong=""):
    os.fsync = no_sync
    if wrong == "no-sync":
        folders.os = SimpleNamespace(**{**vars(os), "fsync": no_sync})
    if wrong == "early":
        write = together.write_file

        def early(generation, rank, tree, arrays):
            if rank == 0:
                (generation.parent / folders.MANIFEST).unlink(missing_ok=True)
            return write(generation, rank, tree, arrays)

        together.write_file = early
    faults, steps = [], 0
    for number, (before, rank, fail) in enumerate(product((True, False), range(RANKS), (False, True))):
        for step in count():
            folder, what = top / f"{number}-{step}", f"{rank=}, {step=}, {fail=}, {before=}"
            if before:
                assert save(folder, states(1)) == [None] * RANKS
            ended, reached = attempt(folder, rank, step, True, 2) if fail else (None, die(folder, rank, step))
            faults += check(folder, before, what, ended=ended)
            steps += reached
            if not reached or (wrong and faults):
                break
        if wrong and faults:
            break
    print(json.dumps({"steps": steps, "faults": faults}))  # noqa: T201 - for the test


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
