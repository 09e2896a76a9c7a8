"""Ranks that are threads of one process: what saves and loads checkpoints, without MPI."""

import threading

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpiagg import MismatchError  # noqa: E402 - MPI must not start
from mpiagg.checkpoints import load_checkpoint, save_checkpoint, together  # noqa: E402 - so too

SECONDS = 30


class Crew:
    """Some ranks, each a thread."""

    def __init__(self, size):
        self.size, self.words, self.barrier = size, [None] * size, threading.Barrier(size)

    def run(self, call):
        """Return what a call with each rank returns, or the exception that it raises."""
        ended = [None] * self.size

        def one(rank):
            try:
                ended[rank] = call(Rank(self, rank))
            except Exception as error:  # noqa: BLE001 - the outcome
                ended[rank] = error

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a rank hangs"
        return ended


class Rank:
    """A rank, its channel, and its communicator."""

    def __init__(self, crew, rank):
        self.crew, self.rank, self.size, self.comm, self.log = crew, rank, crew.size, self, None

    def exchange(self, word):
        self.crew.words[self.rank] = word
        self.crew.barrier.wait(SECONDS)
        words = list(self.crew.words)
        self.crew.barrier.wait(SECONDS)
        return words

    def gather(self, data, purpose):
        del purpose
        return self.exchange(data)

    def agree_on(self, say):
        word = error = None
        try:
            word = say()
        except Exception as raised:  # noqa: BLE001 - as the channel does
            error = raised
        words = self.exchange((word, repr(error) if error else None))
        if error:
            raise error
        if any(fault for _, fault in words) or len(set(words)) > 1:
            raise MismatchError(str(words))


together.channel_of = lambda comm: comm


def save(folder, states):
    """Save a state of each rank, and return how that ends for each."""
    return Crew(len(states)).run(lambda rank: save_checkpoint(folder, states[rank.rank], rank))


def load(folder, size):
    """Return what each rank loads, or the exception that it raises."""
    return Crew(size).run(lambda rank: load_checkpoint(folder, rank))
