"""Elastic training of Horovod's interface: all ranks start again from what was kept, whoever has failed."""

from functools import partial

import pytest
import torch
from mpi4py import MPI

import mpiagg
import mpiagg.horovod.torch as hvd

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size


def several(test):
    """Leave a test out where there is one rank, which is together with itself."""
    return test if SIZE > 1 else None


@pytest.fixture(autouse=True)
def horovod():
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


def train(state, fail):
    tries = []

    @hvd.elastic.run
    def steps(state):
        tries.append(state.step)
        while state.step < 5:
            if state.step == 2 and len(tries) == 1:
                fail()
            found = hvd.allreduce(torch.full((1,), float(RANK))).item()
            assert found == (SIZE - 1) / 2
            state.step += 1
            state.commit()
        return state.step

    return steps(state), tries


def alone():
    if RANK == 0:
        raise hvd.HorovodInternalError("of this rank alone")


def with_one_pending():
    if RANK == 0:
        hvd.allreduce_async(torch.full((1,), 100.0))  # which others have not asked for
    hvd.allreduce(torch.ones(1 + RANK), name="has different shapes")


@several
@pytest.mark.parametrize("fail", [alone, with_one_pending])
def test_all_ranks_start_again(fail):
    last = hvd.add_process_set([SIZE - 1])
    state = hvd.elastic.ObjectState(step=0)
    steps, tries = train(state, fail)
    assert (steps, tries) == (5, [0, 2])
    assert last.process_set_id is not None
    if last.included():
        assert hvd.allreduce(torch.ones(1), process_set=last).item() == 1
    hvd.remove_process_set(last)


def use():
    with pytest.raises(hvd.HorovodInternalError, match="shut down"):
        hvd.allreduce(torch.ones(1))


@several
@pytest.mark.parametrize("after", [lambda: None, use])
def test_a_rank_does_not_start_again_without_those_that_have_shut_down(after):
    steps, _ = train(hvd.elastic.ObjectState(step=0), lambda: None)
    assert steps == 5

    @hvd.elastic.run
    def fails_late(state):
        state.commit()
        if RANK == 0:
            raise hvd.HorovodInternalError("of this rank alone")

    if RANK == 0:
        with pytest.raises(RuntimeError, match=r"ranks \[1.*\] have shut it down"):
            fails_late(hvd.elastic.ObjectState(step=0))
    else:
        fails_late(hvd.elastic.ObjectState(step=0))
        after()
        hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE


@several
def test_ranks_that_do_not_all_begin_hear_of_it():
    hvd.shutdown()
    make = hvd.init if RANK == 0 else partial(mpiagg.Comm, COMM)
    with pytest.raises(mpiagg.MismatchError, match=r"make a communicator by hvd\.init"):
        make()
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE


@several
def test_a_state_that_is_not_brought_together_is_tried_again():
    class Failing(hvd.elastic.ObjectState):
        syncs = 0

        def sync(self):
            self.syncs += 1
            if self.syncs == 1:
                hvd.allreduce(torch.ones(1 + RANK), name="has different shapes")
            super().sync()

    state = Failing(step=0)
    steps, tries = train(state, lambda: None)
    assert (steps, tries, state.syncs) == (5, [0], 2)


def test_resets_are_limited(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC_RESET_LIMIT", "2")
    state, tries = hvd.elastic.ObjectState(step=0), []

    @hvd.elastic.run
    def fails(_):
        tries.append(0)
        raise hvd.HorovodInternalError("always")

    with pytest.raises(RuntimeError, match="more than 2 times"):
        fails(state)
    assert len(tries) == 3


def test_attributes_may_be_none():
    state = hvd.elastic.TorchState(model=torch.nn.Linear(1, 1), best=None, epoch=0)
    assert state.best is None
    assert state.optimizer is None
    state.best = 3
    state.commit()
    state.best = 4
    state.restore()
    state.sync()
    assert state.best == 3


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sampler_goes_on_where_all_ranks_are(shuffle):
    data = range(8 * SIZE + 1)
    first, second = (hvd.elastic.ElasticSampler(data, shuffle=shuffle, seed=3) for _ in range(2))
    taken = list(first)[:4]
    assert len(first) == 9
    first.record_batch(0, 2)
    first.record_batch(1, 2)
    assert first.state_dict() == {"epoch": 0, "processed_num": 4 * SIZE}
    second.load_state_dict(hvd.broadcast_object(first.state_dict()))
    assert len(second.remaining_indices) == 4 * SIZE + 1
    everyone = [i for part in COMM.allgather([*taken, *second]) for i in part]
    assert set(everyone) == set(data)
    assert len(everyone) == 9 * SIZE
    second.set_epoch(1)
    assert len(second.remaining_indices) == len(data)
    assert len(set(second)) == 9
