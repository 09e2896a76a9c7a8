"""Local SGD beside a restatement of all ranks in NumPy."""

import time
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support import refused

import mpiagg
from mpiagg.plans import plan
from mpiagg.transport import channel_of, limited

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
WIRES = {None: 1e-12, "fp16": 2e-3, "bf16": 2e-2, "u8": 2e-2}


def noise(rank, step=0, length=300, dtype=np.float64):
    return np.random.default_rng([rank, step]).standard_normal(length).astype(dtype)


def split(vector):
    """Return a vector's values as tensors."""
    return [vector[:200].reshape(10, 20).copy(), vector[200:201].reshape(()).copy(), vector[201:].copy()]


def joined(tensors):
    return np.concatenate([x.ravel() for x in tensors])


def add(tensors, vector):
    for tensor, change in zip(tensors, split(vector), strict=True):
        np.add(tensor, change, out=tensor)


def same_on_all_ranks(array):
    return len(set(COMM.allgather(array.tobytes()))) == 1


class Everyone:
    """All ranks at once, each a vector, with the outer optimizer as PyTorch's SGD writes it."""

    def __init__(self, weights, period=8, *, warmup=0, rate=1.0, momentum=0.0, nesterov=True):
        self.weights, self.period, self.warmup = list(weights), period, warmup
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
        self.calls, self.anchor, self.velocity = 0, None, 0

    def aggregate(self):
        """Return whether the ranks have met."""
        self.calls += 1
        mean = sum(self.weights) / len(self.weights)
        local = self.calls - self.warmup
        if self.calls == 1 or local <= 0:
            self.anchor = mean
        elif local % self.period:
            return False
        else:
            difference = self.anchor - mean
            self.velocity = self.momentum * self.velocity + difference
            step = difference + self.momentum * self.velocity if self.nesterov else self.velocity
            self.anchor = self.anchor - self.rate * step
        self.weights = [self.anchor] * len(self.weights)
        return True

    def move(self, step):
        self.weights = [x + noise(rank, step) for rank, x in enumerate(self.weights)]


# -- results


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    "how",
    [
        {"period": 3, "rate": 1.0, "momentum": 0.0, "nesterov": True},
        {"period": 1, "warmup": 1, "rate": 1.0, "momentum": 0.0, "nesterov": False},
        {"period": 2, "warmup": 3, "rate": 0.7, "momentum": 0.9, "nesterov": True},
        {"period": 3, "rate": 0.7, "momentum": 0.9, "nesterov": False},
        {"period": 2, "warmup": 2, "rate": 0.5, "momentum": 0, "nesterov": True},
    ],
)
def test_it_is_its_restatement(how, wire):
    everyone = Everyone([noise(rank) for rank in range(SIZE)], **how)
    mine = split(everyone.weights[RANK])
    with mpiagg.LocalSGD(
        period=how["period"],
        warmup_steps=how.get("warmup", 0),
        outer_learning_rate=how["rate"],
        outer_momentum=how["momentum"],
        nesterov=how["nesterov"],
        wire=wire,
    ) as aggregation:
        for step in range(1, 9):
            before = joined(mine)
            met = everyone.aggregate()
            aggregation.aggregate(mine)
            error = np.abs(joined(mine) - everyone.weights[RANK]).max()
            assert error <= WIRES[wire] * np.abs(everyone.weights[RANK]).max() * step
            if met:
                assert same_on_all_ranks(joined(mine))
            else:
                assert joined(mine).tobytes() == before.tobytes()
            ((_, state),) = (each.values() for each in aggregation.state_dict()["memories"])
            assert same_on_all_ranks(np.concatenate(state["anchors"] + state["velocities"]))
            everyone.move(step)
            add(mine, noise(RANK, step))


@pytest.mark.parametrize(
    "wrong", [{"period": 4}, {"warmup": 1}, {"rate": 0.71}, {"momentum": 0.8}, {"nesterov": False}]
)
def test_the_restatement_would_find_a_fault(wrong):
    right = {"period": 3, "warmup": 2, "rate": 0.7, "momentum": 0.9, "nesterov": True}
    good, bad = (Everyone([noise(rank) for rank in range(3)], **how) for how in (right, {**right, **wrong}))
    for step in range(1, 9):
        good.aggregate()
        bad.aggregate()
        good.move(step)
        bad.move(step)
    assert np.abs(good.weights[0] - bad.weights[0]).max() > 1e-3


@pytest.mark.parametrize("algorithm", [*mpiagg.algorithms("allreduce"), "native", "auto"])
def test_without_an_outer_optimizer_it_is_the_mean(algorithm):
    mine = [noise(RANK, length=1001), noise(RANK, length=5, dtype=np.float32)]
    with mpiagg.LocalSGD(period=2, algorithm=algorithm) as aggregation:
        for step in range(4):
            means = [COMM.allreduce(x) / SIZE for x in mine]
            aggregation.aggregate(mine)
            if step != 2:
                for x, mean in zip(mine, means, strict=True):
                    assert np.allclose(x, mean, rtol=0, atol=8 * np.finfo(x.dtype).eps * np.abs(mean).max())
            for x in mine:
                np.add(x, noise(RANK, step, x.size, x.dtype), out=x)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_kept_in_float32(dtype):
    mine = [np.full(3, 256, dtype)]
    with mpiagg.LocalSGD(period=1) as aggregation:
        aggregation.aggregate(mine)
        for _ in range(4):
            np.add(mine[0], dtype(2), out=mine[0])
            aggregation.aggregate(mine)
        assert mine[0].dtype == dtype
        assert aggregation.state_dict()["memories"][0]["state"]["anchors"][0].dtype == np.float32
    assert mine[0].tolist() == [264] * 3
    many = [np.full(3, 60_000, np.float16)]
    with mpiagg.LocalSGD() as aggregation:
        aggregation.aggregate(many)
    assert many[0].tolist() == [60_000] * 3


def test_complex_weights_and_no_weights():
    with mpiagg.LocalSGD(period=1, outer_momentum=0.5) as aggregation:
        for tensors in ([], [np.empty((0, 3))], [np.full((2, 2), RANK + 1j)]):
            aggregation.aggregate(tensors)
            aggregation.aggregate(tensors)
        assert (tensors[0] == (SIZE - 1) / 2 + 1j).all()


def test_nothing_else_is_touched():
    base = np.full((6, 6), float(RANK))
    with mpiagg.LocalSGD() as aggregation:
        aggregation.aggregate([base[::2, 1::3]])
    outside = np.ones((6, 6), bool)
    outside[::2, 1::3] = False
    assert (base[outside] == RANK).all()
    assert (base[~outside] == (SIZE - 1) / 2).all()


# -- training


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.7, 0.6)])
def test_training_finds_the_optimum_of_all(rate, momentum, wire):
    target = noise(RANK, 99, 40)
    optimum = COMM.allreduce(target) / SIZE
    x = noise(RANK, 98, 40)
    outer = {"outer_learning_rate": rate, "outer_momentum": momentum}
    with mpiagg.LocalSGD(period=4, warmup_steps=3, wire=wire, **outer) as aggregation:
        for _ in range(51):
            x -= 0.2 * (x - target)
            aggregation.aggregate([x])
    assert same_on_all_ranks(x)
    assert np.abs(x - optimum).max() < (2e-2 if wire in {"bf16", "u8"} else 5e-3)


# -- when, and how much


def test_plans_have_anchors_of_their_own():
    lists = [[noise(RANK, number, 7)] for number in range(3)]
    wanted = [Everyone([noise(rank, number, 7) for rank in range(SIZE)], 2) for number in range(3)]
    with mpiagg.LocalSGD(period=2) as aggregation:
        plans = [aggregation.aggregate_init(tensors) for tensors in lists]
        for _ in range(4):
            for plan in plans:
                plan.start()
            for plan in reversed(plans):
                plan.wait()
            for tensors, everyone in zip(lists, wanted, strict=True):
                everyone.aggregate()
                assert np.allclose(tensors[0], everyone.weights[RANK], rtol=1e-12)
                tensors[0] += RANK
                everyone.weights = [x + rank for rank, x in enumerate(everyone.weights)]
        for plan in plans:
            plan.free()


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_are_counted_and_nothing_is_built(wire):
    before = set(channel_of(COMM).open)
    with (
        mpiagg.LocalSGD(period=2, wire=wire, algorithm="direct") as aggregation,
        mpiagg.AllReduce(algorithm="direct", wire=wire) as differences,
        mpiagg.AllReduce(algorithm="direct") as weights,
    ):
        differences.aggregate([np.zeros(1000)])
        weights.aggregate([np.zeros(1000)])
        expected = weights.bytes_sent
        opened = set()
        for call in range(1, 8):
            aggregation.aggregate([noise(RANK, length=1000)])
            expected += differences.bytes_sent * (call % 2 == 0)
            assert aggregation.bytes_sent == expected
            opened = opened or set(aggregation._channel.open)
            assert set(aggregation._channel.open) == opened
    if SIZE > 1 and wire:
        assert differences.bytes_sent < weights.bytes_sent / 3
    assert set(aggregation._channel.open) == before


# -- saving


@pytest.mark.parametrize("stop", [0, 1, 4, 6])
@pytest.mark.parametrize("wire", [None, "u8"])
def test_a_saved_state_goes_on_with_the_same_bits(stop, wire):
    def some_steps(aggregation, mine, steps):
        for step in steps:
            add(mine, noise(RANK, step))
            aggregation.aggregate(mine)

    arguments = {"period": 3, "warmup_steps": 2, "outer_learning_rate": 0.7, "outer_momentum": 0.9, "wire": wire}
    straight, resumed = split(noise(RANK)), split(noise(RANK))
    with mpiagg.LocalSGD(**arguments) as aggregation:
        some_steps(aggregation, straight, range(10))
    with mpiagg.LocalSGD(**arguments) as aggregation:
        some_steps(aggregation, resumed, range(stop))
        state = aggregation.state_dict()
        some_steps(aggregation, [x.copy() for x in resumed], range(3))
    with mpiagg.LocalSGD(**arguments) as aggregation:
        aggregation.load_state_dict(state)
        some_steps(aggregation, resumed, range(stop, 10))
    assert joined(resumed).tobytes() == joined(straight).tobytes()


def state_with(**changes):
    good = {"calls": 2, "anchors": [np.zeros(3)], "velocities": [np.zeros(3)], "residuals": [], "arrived": []}
    return {"memories": [{"layout": "1 tensors: float64 (3,)", "state": {**good, **changes}}]}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "keys"),
        (state_with(more=1), "keys"),
        (state_with(calls=1.5), "calls must be"),
        (state_with(anchors=[]), "anchors must be 1 tensors: float64"),
        (state_with(anchors=[np.zeros(3, np.float32)]), "anchors must be .* not 1 tensors: float32"),
        (state_with(velocities=[np.zeros((1, 3))]), "velocities must be"),
    ],
)
def test_a_state_of_something_else_is_refused(state, words):
    with mpiagg.LocalSGD(outer_momentum=0.9) as aggregation:
        aggregation.aggregate([np.full(3, float(RANK))])
        refused(ValueError, words, aggregation.load_state_dict, state)
        kept = aggregation.state_dict()["memories"][0]["state"]
        assert kept["calls"] == 1
        assert kept["anchors"][0].tolist() == [(SIZE - 1) / 2] * 3


@pytest.mark.parametrize("changes", [{"calls": 5 + RANK}, {"anchors": [np.full(3, float(RANK))]}])
@pytest.mark.parametrize("known", [True, False])
def test_ranks_must_load_the_same_state(changes, known):
    if SIZE > 1:
        with mpiagg.LocalSGD(outer_momentum=0.9) as aggregation:
            mine = [np.zeros(3)]
            if known:
                aggregation.aggregate(mine)
                refused(mpiagg.MismatchError, "CRC", aggregation.load_state_dict, state_with(**changes))
            else:  # What the state must be is known when the tensors are.
                aggregation.load_state_dict(state_with(**changes))
                refused(mpiagg.MismatchError, "CRC", aggregation.aggregate, mine)


# -- errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"period": 0}, "period must be"),
        ({"period": 1.5}, "period must be"),
        ({"warmup_steps": -1}, "warmup_steps must be"),
        *(
            ({"outer_learning_rate": bad}, "outer_learning_rate must be")
            for bad in (0, -1, np.nan, np.inf, "1", None, True)
        ),
        *(({"outer_momentum": bad}, "outer_momentum must be") for bad in (1, -0.1, np.nan, "0", None, False)),
        ({"wire": "u1"}, "unknown wire 'u1'"),
        ({"algorithm": "star"}, "unknown algorithm 'star'"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    refused(ValueError, words, mpiagg.LocalSGD, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"period": 2 + RANK}, {"outer_momentum": RANK / 16}, {"nesterov": RANK == 0}, {"wire": "u8" if RANK else None}],
)
def test_ranks_must_agree_on_the_arguments(arguments):
    if SIZE > 1:
        refused(mpiagg.MismatchError, "ranks disagree", mpiagg.LocalSGD, **arguments)


@pytest.mark.parametrize(
    ("wire", "dtype"), [(None, np.int64), ("u8", np.int64), ("fp16", np.complex64), (None, np.bool_)]
)
def test_other_numbers_are_refused(wire, dtype):
    mine = [np.full(3, 1.0 * RANK), np.full(3, RANK, dtype)]
    with mpiagg.LocalSGD(wire=wire) as aggregation:
        refused(TypeError, "not for", aggregation.aggregate, mine)
    assert mine[0].tolist() == [RANK] * 3


def test_layouts_must_be_the_same_on_all_ranks():
    if SIZE > 1:
        with mpiagg.LocalSGD() as aggregation:
            refused(mpiagg.MismatchError, r"rank 0: .*\(4,\)", aggregation.aggregate, [np.zeros(3 + (RANK == 0))])


def test_it_is_for_weights_and_not_used_when_freed():
    aggregation = mpiagg.LocalSGD()
    refused(ValueError, "meant for weights", mpiagg.DDP, [np.zeros(2)], aggregation=aggregation)
    aggregation.free()
    refused(mpiagg.PlanError, "LocalSGD is freed", aggregation.aggregate, [np.zeros(1)])


def test_patience_has_no_plans():
    with mpiagg.LocalSGD(patience=1.0) as aggregation:
        refused(mpiagg.PlanError, "patience goes without", aggregation.aggregate_init, [np.zeros(1)])


@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.7, 0.5)])
def test_a_rank_that_misses_an_average_joins_a_later_one(tmp_path, rate, momentum):
    flag = Path(COMM.bcast(str(tmp_path))) / "on"
    weights, taken = split(noise(RANK)), []
    with mpiagg.LocalSGD(
        COMM, period=2, patience=0.01, outer_learning_rate=rate, outer_momentum=momentum
    ) as aggregation:
        average = aggregation._average

        def seen(memory, members):
            before = joined(weights)
            average(memory, members)
            assert aggregation.present == members.ranks
            taken.append((members.ranks, before, joined(weights)))

        aggregation._average = seen
        aggregation.aggregate(weights)
        first = joined(weights)
        for step in range(1, 13):
            add(weights, noise(RANK, step))
            if RANK == SIZE - 1 > 0 and step == 2:
                while not flag.exists():  # the others have gone on without this one
                    time.sleep(0.01)
            aggregation.aggregate(weights)
            if RANK == 0 and step == 3:
                flag.touch()
        aggregation.finish(weights)
        missed = aggregation.missed
    everyone = COMM.allgather(taken)
    if RANK == SIZE - 1 > 0:
        assert missed >= 1
    assert same_on_all_ranks(joined(weights))
    # Each average is restated from what its ranks had: how far each is from where it last was with others.
    left, last = [list(each) for each in everyone], [first] * SIZE
    at, velocity = first, 0.0
    for present, *_ in everyone[0]:
        mine = [left[rank].pop(0) for rank in present]
        assert {each[0] for each in mine} == {present}
        difference = np.mean([last[rank] - before for rank, (_, before, _) in zip(present, mine, strict=True)], axis=0)
        velocity = momentum * velocity + difference
        at = at - rate * (difference + momentum * velocity)
        for rank, (_, _, after) in zip(present, mine, strict=True):
            assert after.tobytes() == mine[0][2].tobytes()
            np.testing.assert_allclose(after, at, atol=1e-12)
            last[rank] = after
    assert everyone[0][-1][0] == tuple(range(SIZE))
    assert not any(left)


def test_a_rank_that_is_some_averages_late_takes_all_its_steps_before_the_end():
    weights = [np.zeros(3)]
    with mpiagg.LocalSGD(COMM, period=2, patience=0.0) as aggregation:
        for step in range(12):
            if step == 1 and RANK == SIZE - 1 > 0:  # before it puts itself down for an average
                COMM.recv(source=0)  # until rank 0 is at its end
            weights[0] += 1
            aggregation.aggregate(weights)
        if RANK == 0 < SIZE - 1:
            COMM.send(None, dest=SIZE - 1)
        aggregation.finish(weights)
        assert aggregation.present == tuple(range(SIZE))
    assert same_on_all_ranks(weights[0])


def test_with_patience_and_nobody_late_it_is_as_without():
    results = []
    for patience in (None, 60):
        weights = split(noise(RANK))
        with mpiagg.LocalSGD(COMM, period=3, warmup_steps=2, outer_momentum=0.5, patience=patience) as aggregation:
            for step in range(12):
                add(weights, noise(RANK, step + 1))
                aggregation.aggregate(weights)
            if patience:
                assert (aggregation.present, aggregation.missed) == (tuple(range(SIZE)), 0)
                joined_all = [x.copy() for x in weights]
                aggregation.finish(joined_all)
                assert same_on_all_ranks(joined(joined_all))
            else:
                with pytest.raises(mpiagg.PlanError, match="finish is for patience"):
                    aggregation.finish(weights)
        results.append(joined(weights).tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("options", [{"delay": 1}, {"fragments": 2}, {"mixing": 0.5}])
def test_patience_goes_without_what_is_under_way_elsewhere(options):
    refused(ValueError, "patience goes without", mpiagg.LocalSGD, COMM, period=4, patience=1.0, **options)
    refused(ValueError, "patience must be a number of at least 0", mpiagg.LocalSGD, COMM, patience=-1.0)


@pytest.fixture
def in_vain(monkeypatch):
    """Return what shows that all ranks but 0, which begins only afterwards, wait for it in vain in a call."""
    wait = plan.wait_patiently

    def in_vain(call):
        if RANK > 0:
            with monkeypatch.context() as patch, limited(0.1):
                patch.setattr(plan, "wait_patiently", lambda test, what, _, **more: wait(test, what, 0.1, **more))
                with pytest.raises(mpiagg.StallError):
                    call()
        COMM.Barrier()

    return in_vain


@pytest.mark.parametrize(("fragments", "delay"), [(1, 2), (2, 2), (1, 0)])
def test_a_call_that_has_waited_in_vain_comes_again(fragments, delay, in_vain):
    results, at = [], 3 + delay  # what begins in the fourth call is applied so many calls later
    for late in (False, True):
        tensors = [np.full(7, float(RANK)), np.full(2, RANK - 1.0)]
        options = {"period": 4, "fragments": fragments, "delay": delay, "outer_momentum": 0.5}
        with mpiagg.LocalSGD(COMM, **options) as aggregation:
            for step in range(12):
                for x in tensors:
                    np.add(x, step * RANK, out=x)
                if late and step == at:
                    in_vain(partial(aggregation.aggregate, tensors))
                    for _ in range(1 + delay if RANK == 0 else 1):
                        aggregation.aggregate(tensors)
                elif not (late and RANK == 0 and 3 <= step < at):
                    aggregation.aggregate(tensors)
        results.append(joined(tensors))
    assert (results[0] == results[1]).all()


@pytest.mark.parametrize("period", [1, 2])
def test_who_takes_part_is_heard_by_those_who_have_waited_in_vain(period, in_vain):
    tensors = [np.full(3, float(RANK))]
    with mpiagg.LocalSGD(COMM, period=period, patience=60.0) as aggregation:
        aggregation.aggregate(tensors)
        tensors[0] += RANK
        in_vain(partial(aggregation.aggregate, tensors))
        aggregation.aggregate(tensors)
        assert aggregation.present == tuple(range(SIZE))
        for _ in range(2 * period):
            aggregation.aggregate(tensors)
        assert aggregation.present == tuple(range(SIZE))
        for _ in range(3):
            aggregation.finish(tensors)
        assert aggregation.present == tuple(range(SIZE))
        assert same_on_all_ranks(tensors[0])
