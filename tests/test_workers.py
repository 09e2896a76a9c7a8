"""Processes that multiprocessing starts within ranks, such as data loaders' workers: they import, and are no ranks."""

import subprocess

import pytest

from mpiagg.launch.start import command, environment
from mpiagg.launch.workers import in_worker

PROGRAM = """
import multiprocessing
import sys

import mpiagg
from mpiagg import Comm, DDP, Sharded  # which import MPI

def work(queue):
    from mpi4py import MPI

    try:
        Comm(MPI.COMM_WORLD).Barrier()
    except mpiagg.PlanError as error:
        queue.put((MPI.Is_initialized(), str(error)))

if __name__ == "__main__":
    from mpi4py import MPI

    comm = Comm(MPI.COMM_WORLD)
    comm.Barrier()
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    worker = context.Process(target=work, args=(queue,))
    worker.start()
    started, words = queue.get(timeout=60)
    worker.join()
    comm.Barrier()
    assert not started and "is no rank" in words, words
    sys.stdout.write(f"rank {comm.rank} is done, its worker ended with {worker.exitcode}\\n")
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_program_with_workers_runs_and_a_worker_is_no_rank(tmp_path, method):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        command(2, ["-m", "mpi4py", str(program), method]),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} is done, its worker ended with 0" for rank in range(2)]


def test_this_process_is_no_worker():
    assert not in_worker()
