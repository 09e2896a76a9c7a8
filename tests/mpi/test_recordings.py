"""What a rank writes down can be read, and one timeline be made of it."""

import json

import numpy as np
import pytest

import mpiagg
from mpiagg.transport import process
from mpiagg.watch import dumps
from mpiagg.watch.recordings import recording_of
from mpiagg.watch.timeline import Timeline

pytestmark = pytest.mark.mpi


def test_all_that_a_rank_has_done_can_be_read(world, comm, rank, size):
    for algorithm in ("shared", "ring"):
        mpiagg.allreduce(np.ones(1000), algorithm=algorithm, comm=comm)
    written = json.dumps(dumps.recording(process().recorder, rank, size, "a test"))
    found = [recording_of(json.loads(each)) for each in world.allgather(written)]
    last = found[rank].operations[-1]
    assert last.what == "allreduce by ring of float64 (1000,), op sum"
    assert last.channel is not None
    # What ranks of a node set up together is of no communicator's order.
    assert size == 1 or None in {each.channel for each in found[rank].operations}
    timeline = Timeline(found)
    assert timeline.stuck() == []
    assert size == 1 or (last.channel, last.order) in timeline.last
