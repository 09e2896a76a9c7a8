"""Checkpoints of real ranks, and states of aggregations on another number of ranks."""

import numpy as np
import pytest
from mpi4py import MPI
from support import refused

import mpiagg
from mpiagg.aggregation import low_precision
from mpiagg.checkpoints import PerRank, together

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
OTHER = max(1, SIZE - 1)
FROM_TO = sorted({(SIZE, OTHER), (OTHER, SIZE)})


@pytest.fixture
def folder(tmp_path):
    return COMM.bcast(tmp_path) / "checkpoint"


def among(ranks, call):
    """Return what a call with a communicator of some ranks returns on each of them, to all."""
    comm = COMM.Split(0 if RANK in ranks else MPI.UNDEFINED, RANK)
    found = None
    if comm != MPI.COMM_NULL:
        found = call(comm)
        comm.Free()
    everyone = COMM.allgather(found)
    return [everyone[rank] for rank in ranks]


def noise(rank, step, shape=(6, 5)):
    return np.random.default_rng([rank, step]).standard_normal(shape)


# -- what comes back


def test_each_rank_gets_its_own(folder):
    state = {"rank": RANK, "own": [np.full((2, 3), RANK)], "shared": np.arange(5, dtype=np.float32), "x": {"y": None}}
    for step in range(2):
        mpiagg.save_checkpoint(folder, {**state, "step": step})
        COMM.Barrier()
        found = mpiagg.load_checkpoint(str(folder), COMM)
        assert repr(found) == repr({**state, "step": step})
        found["shared"] += 1  # it can be written to


@pytest.mark.parametrize(("old", "new"), FROM_TO)
def test_another_number_of_ranks_gets_what_was_the_same_and_all_the_rest(folder, old, new):
    def save(comm):
        mpiagg.save_checkpoint(folder, {"own": np.full(3, comm.rank), "shared": [np.ones(2)], "step": 4}, comm)

    def load(comm):
        state = mpiagg.load_checkpoint(folder, comm)
        own = state["own"]
        assert isinstance(own, PerRank) == (old != new and old > 1)
        values = list(own) if isinstance(own, PerRank) else [own]
        return repr(state["shared"]), state["step"], [value.tolist() for value in values]

    among(range(old), save)
    own = [[rank] * 3 for rank in range(old)]
    wanted = [(repr([np.ones(2)]), 4, own if old != new else [own[rank]]) for rank in range(new)]
    assert among(range(new), load) == wanted


# -- aggregations of gradients: what is late is not lost


def feedback(comm, **arguments):
    return mpiagg.ErrorFeedback(mpiagg.AllReduce(comm, wire="u8", **arguments))


KINDS = {
    "feedback": (feedback, {}, None),
    "feedback-sum": (feedback, {"op": "sum"}, 1),
    "feedback-denom": (feedback, {"denom": 7}, 7),
    "feedback-before": (feedback, {"divide_before": True}, None),
    "topk": (mpiagg.Sparsified, {"ratio": 0.2}, None),
    "topk-sum": (mpiagg.Sparsified, {"ratio": 0.2, "op": "sum"}, 1),
    "randomk": (mpiagg.Sparsified, {"ratio": 0.2, "selection": "randomk"}, None),
    "blockk": (mpiagg.Sparsified, {"ratio": 0.2, "selection": "blockk"}, None),
    "power": (mpiagg.PowerSGD, {"min_compression_rate": 0}, None),
    "power-aggregated": (mpiagg.PowerSGD, {"min_compression_rate": 0, "error_feedback": "aggregated"}, None),
}
"""How each is made, and what the sum over the ranks is divided by, where that is not their number."""


def divisor(comm, kind):
    return KINDS[kind][2] or comm.size


def left_of(comm, kind, aggregation):
    """What is late: all that the ranks have kept, in terms of the results."""
    memory = aggregation.state_dict()["memories"][0]["state"]
    (kept,) = next(memory[name] for name in ("residuals", "kept", "errors") if name in memory)
    total = comm.allreduce(kept.reshape(6, 5))
    return total if kind == "feedback-before" else total / divisor(comm, kind)


def some_steps(comm, kind, aggregation, steps):
    """Aggregate, and return what came in less what came out."""
    short = np.zeros((6, 5))
    for step in steps:
        mine = [noise(comm.rank, step)]
        short += comm.allreduce(mine[0]) / divisor(comm, kind)
        aggregation.aggregate(mine)
        short -= mine[0]
    return short


def make(kind, comm):
    create, arguments, _ = KINDS[kind]
    return create(comm, **arguments)


@pytest.mark.parametrize(("old", "new"), FROM_TO)
def test_another_number_of_ranks_goes_on_with_all_that_is_late(folder, old, new):
    def save(comm):
        state = {}
        for kind in KINDS:
            with make(kind, comm) as aggregation:
                short = some_steps(comm, kind, aggregation, range(4))
                assert np.allclose(short, left_of(comm, kind, aggregation), atol=1e-12), kind
                state[kind] = {"aggregation": aggregation.state_dict(), "short": short}
        mpiagg.save_checkpoint(folder, state, comm)

    def load(comm):
        state, pending = mpiagg.load_checkpoint(folder, comm), {}
        for number, kind in enumerate(KINDS):
            with make(kind, comm) as aggregation:
                if number % 2:
                    some_steps(comm, kind, aggregation, range(1))
                aggregation.load_state_dict(state[kind]["aggregation"])
                pending[kind] = aggregation.state_dict()
                short = state[kind]["short"] + some_steps(comm, kind, aggregation, range(4, 8))
                assert np.allclose(short, left_of(comm, kind, aggregation), atol=1e-12), kind
        # Also before the tensors are known, what was loaded can be saved.
        mpiagg.save_checkpoint(folder, pending, comm)
        return True

    among(range(old), save)
    assert all(among(range(new), load))


def test_survivors_go_on_with_what_they_have():
    def before(comm):
        states = {}
        for kind in KINDS:
            with make(kind, comm) as aggregation:
                some_steps(comm, kind, aggregation, range(4))
                states[kind] = aggregation.state_dict()
        return states

    def after(comm):
        for kind, state in states[RANK].items():
            # What all had that were there is taken to be as much, for each, as the survivors have.
            memory = state["memories"][0]["state"]
            (kept,) = next(memory[name] for name in ("residuals", "kept", "errors") if name in memory)
            share = 1 if kind == "feedback-before" else KINDS[kind][2] or SIZE
            late = comm.allreduce(kept.reshape(6, 5)) / comm.size * SIZE / share
            with make(kind, comm) as aggregation:
                aggregation.load_state_dict(state)
                short = late + some_steps(comm, kind, aggregation, range(4, 8))
                assert np.allclose(short, left_of(comm, kind, aggregation), atol=1e-12), kind
        return True

    states = among(range(SIZE), before)
    if SIZE > 1:
        assert all(among(range(1, SIZE), after))


# -- aggregations of weights


LOCAL = {
    "sparse": lambda comm: mpiagg.SparseLoCo(comm, period=2, ratio=0.2, fragments=2, delay=1),
    "streaming": lambda comm: mpiagg.LocalSGD(
        comm, period=2, outer_momentum=0.9, wire="u2", error_feedback=True, delay=1, mixing=0.5
    ),
}


@pytest.mark.parametrize(("old", "new"), FROM_TO)
@pytest.mark.parametrize("kind", LOCAL)
def test_what_local_methods_have_not_sent_goes_on_as_its_mean(folder, kind, old, new):
    def shared(state):
        memory = state["memories"][0]["state"]
        return [x.tobytes() for name in ("anchors", "velocities", "arrived") for x in memory[name]], memory["calls"]

    def save(comm):
        weights = [noise(comm.rank, 0), noise(comm.rank, 1)]
        with LOCAL[kind](comm) as aggregation:
            for step in range(4):  # an average is under way then
                for x in weights:
                    np.add(x, noise(comm.rank, step), out=x)
                aggregation.aggregate(weights)
            state = aggregation.state_dict()
        mpiagg.save_checkpoint(folder, state, comm)
        return state

    def load(comm):
        with LOCAL[kind](comm) as aggregation:
            aggregation.load_state_dict(mpiagg.load_checkpoint(folder, comm))
            weights = [noise(comm.rank, 0), noise(comm.rank, 1)]
            state = aggregation.state_dict()
            for _ in range(3):
                aggregation.aggregate(weights)
            return state, [np.isfinite(x).all() for x in weights]

    before = among(range(old), save)
    assert before[0]["memories"][0]["state"]["arrived"]
    means = [
        sum(each) / old for each in zip(*(state["memories"][0]["state"]["residuals"] for state in before), strict=True)
    ]
    assert max(np.abs(x).max() for x in means) > 0
    after = among(range(new), load)
    for number, (state, finite) in enumerate(after):
        assert all(finite)
        assert shared(state) == shared(before[0])
        kept = state["memories"][0]["state"]["residuals"]
        wanted = before[number]["memories"][0]["state"]["residuals"] if old == new else means
        assert all(np.allclose(x, mean, atol=1e-12) for x, mean in zip(kept, wanted, strict=True))


@pytest.mark.parametrize(("old", "new"), FROM_TO)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_sgd_goes_on_from_its_anchor(folder, momentum, old, new):
    def make(comm):
        return mpiagg.LocalSGD(comm, period=2, outer_momentum=momentum)

    def save(comm):
        weights = [noise(comm.rank, 0)]
        with make(comm) as aggregation:
            for step in range(5):
                weights[0] += noise(comm.rank, step)
                aggregation.aggregate(weights)
            mpiagg.save_checkpoint(folder, {"aggregation": aggregation.state_dict(), "weights": weights}, comm)
            return aggregation.state_dict()

    def load(comm):
        state = mpiagg.load_checkpoint(folder, comm)
        (weights,) = state["weights"]
        before = weights if isinstance(weights, PerRank) else comm.allgather(weights)
        mean = sum(before) / len(before)
        mine = [mean + comm.rank - (comm.size - 1) / 2]
        with make(comm) as aggregation:
            aggregation.load_state_dict(state["aggregation"])
            aggregation.aggregate(mine)
        anchor, velocities = kept["anchors"][0].reshape(6, 5), kept["velocities"]
        step = anchor - mean
        if momentum:
            velocity = momentum * velocities[0].reshape(6, 5) + step
            step = step + momentum * velocity
        return np.allclose(mine[0], anchor - step, atol=1e-12)

    states = among(range(old), save)
    kept = states[0]["memories"][0]["state"]
    assert all(repr(state) == repr(states[0]) for state in states)
    assert all(among(range(new), load))


@pytest.mark.parametrize(("old", "new"), FROM_TO)
@pytest.mark.parametrize("kind", ["Decentralized", "NeighborAverage"])
def test_gossip_goes_on_among_the_ranks_there_are(folder, kind, old, new):
    def make(comm):
        if kind == "Decentralized":
            return mpiagg.Decentralized(comm)
        return mpiagg.NeighborAverage(comm, {(comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size})

    def save(comm):
        with make(comm) as gossip:
            for _ in range(3):
                gossip.aggregate([noise(comm.rank, 0)])
            mpiagg.save_checkpoint(folder, {"gossip": gossip.state_dict()}, comm)

    def load(comm):
        mine = [noise(comm.rank, 1)]
        mean = comm.allreduce(mine[0]) / comm.size
        with make(comm) as gossip:
            gossip.load_state_dict(mpiagg.load_checkpoint(folder, comm)["gossip"])
            for _ in range(16):
                gossip.aggregate(mine)
            assert gossip.state_dict() == {"calls": 19, "communications": 19}
        return np.allclose(mine[0], mean, atol=0.1)

    among(range(old), save)
    assert all(among(range(new), load))


def apart(comm, *, paired):
    """Nodes: each rank by itself, or in pairs."""
    return tuple(tuple(range(rank, min(rank + 1 + paired, comm.size))) for rank in range(0, comm.size, 1 + paired))


@pytest.mark.parametrize(("hierarchical", "in_memory"), [(False, False), (True, False), (True, True)])
def test_low_precision_averages_go_on_among_the_ranks_there_are(folder, hierarchical, in_memory, monkeypatch):
    paired = {"now": hierarchical}
    monkeypatch.setattr(low_precision, "nodes_of", lambda comm: apart(comm, paired=paired["now"]))

    def step(comm, aggregation, mine, number):
        mine[0] += 0.1 * noise(comm.rank, number)
        mean = comm.allreduce(mine[0]) / comm.size
        aggregation.aggregate(mine)
        # The mean is kept, up to what a byte a value rounds.
        assert np.allclose(comm.allreduce(mine[0]) / comm.size, mean, atol=0.05)

    def save(comm):
        mine = [noise(comm.rank, 0)]
        with mpiagg.LowPrecisionDecentralized(comm, hierarchical) as aggregation:
            for number in range(5):
                step(comm, aggregation, mine, number)
            mpiagg.save_checkpoint(folder, {"aggregation": aggregation.state_dict()}, comm)
            return mine, aggregation.state_dict()

    def load(comm):
        mine, state = ends[RANK if in_memory else comm.rank % len(ends)]
        state = state if in_memory else mpiagg.load_checkpoint(folder, comm)["aggregation"]
        mine = [mine[0].copy()]
        with mpiagg.LowPrecisionDecentralized(comm, hierarchical) as aggregation:
            aggregation.load_state_dict(state)
            mpiagg.save_checkpoint(folder / "again", {"aggregation": aggregation.state_dict()}, comm)
            for number in range(5, 12):
                step(comm, aggregation, mine, number)
            assert aggregation.state_dict()["memories"][0]["state"]["calls"] == 12
        return comm.allreduce(np.abs(mine[0] - comm.bcast(mine[0])).max(), MPI.MAX) < 3

    ends = among(range(SIZE), save)
    for ranks in [range(1, SIZE), range(1)] if SIZE > 1 else []:
        assert all(among(ranks, load))
    # Nodes may have changed with as many ranks.
    paired["now"] = False
    assert all(among(range(SIZE), load))


# -- refusals


@pytest.mark.parametrize(
    ("name", "place", "words"),
    [
        ("LocalSGD", "anchors", "LocalSGD: anchors was not the same on the 2 ranks that saved it, but must be"),
        ("LocalSGD", "calls", "LocalSGD: calls was not the same on the 2 ranks"),
        ("LowPrecisionDecentralized", "calls", "LowPrecisionDecentralized: calls was not the same"),
        ("PowerSGD", "queries", "PowerSGD: queries was not the same on the 2 ranks"),
        ("Sparsified", "step", "Sparsified: step was not the same on the 2 ranks"),
        ("Sparsified", "worth", "Sparsified: worth was not the same on the 2 ranks"),
    ],
)
def test_what_must_be_the_same_is_refused_if_it_was_not(name, place, words):
    with getattr(mpiagg, name)() as aggregation:
        aggregation.aggregate([noise(0, 0)])
        before = repr(aggregation.state_dict())
        state = aggregation.state_dict()
        memory = state["memories"][0]["state"]
        if isinstance(memory[place], list):
            memory[place][0] = PerRank([memory[place][0]] * 2)
        else:
            memory[place] = PerRank([memory[place]] * 2)
        refused(ValueError, words, aggregation.load_state_dict, state)
        assert repr(aggregation.state_dict()) == before


def test_counts_that_were_not_the_same_are_refused():
    with mpiagg.Decentralized() as gossip:
        state = {"calls": PerRank([1, 2]), "communications": 1}
        refused(ValueError, "calls must be an integer", gossip.load_state_dict, state)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([np.zeros(30), np.zeros(31)], r"kept must be 1 tensors: float64 \(3[01],\) of all ranks|ranks disagree"),
        ([np.zeros(30), np.zeros(30, np.float32)], "of all ranks|ranks disagree"),
        ([np.zeros(30), None], "kept must be|of all ranks"),
        ([np.zeros(30, int)] * 2, "kept must be arrays of floating-point numbers"),
        ([np.zeros(31)] * 2, "kept must be 1 tensors"),
    ],
)
def test_means_of_something_else_are_refused(values, words):
    with mpiagg.Sparsified() as aggregation:
        aggregation.aggregate([noise(0, 0)])
        before = repr(aggregation.state_dict())
        state = aggregation.state_dict()
        state["memories"][0]["state"]["kept"] = [PerRank(values)]
        refused((ValueError, mpiagg.MismatchError), words, aggregation.load_state_dict, state)
        assert repr(aggregation.state_dict()) == before


@pytest.mark.parametrize("worth", [0, None, np.nan, "x", True])
def test_a_worth_that_is_none_is_refused(worth):
    with mpiagg.Sparsified() as aggregation:
        aggregation.aggregate([noise(0, 0)])
        state = aggregation.state_dict()
        state["memories"][0]["state"]["worth"] = worth
        refused(ValueError, "worth must be", aggregation.load_state_dict, state)


@pytest.mark.parametrize("culprit", [0, SIZE - 1])
def test_all_ranks_raise_together(folder, culprit, monkeypatch):
    def fails(error, words, call, *arguments):
        mine = culprit == RANK
        refused(error if mine else mpiagg.MismatchError, words if mine else f"rank {culprit} raised", call, *arguments)

    def full(*_):
        raise OSError("the disk is full")

    def damaged(*_):
        raise ValueError("it is damaged")

    mpiagg.save_checkpoint(folder, {"a": RANK})
    fails(TypeError, "of type set", mpiagg.save_checkpoint, folder, {"a": {1} if culprit == RANK else 1})
    fails(TypeError, "state must be a dict", mpiagg.save_checkpoint, folder, None if culprit == RANK else {"a": 1})
    with monkeypatch.context() as patch:
        if culprit == RANK:
            patch.setattr(together, "write_file", full)
            patch.setattr(together.Reader, "tree", damaged)
        fails(OSError, "the disk is full", mpiagg.save_checkpoint, folder, {"a": -1})
        fails(ValueError, "it is damaged", mpiagg.load_checkpoint, folder)
    assert mpiagg.load_checkpoint(folder) == {"a": RANK}
    refused(FileNotFoundError, "there is no checkpoint", mpiagg.load_checkpoint, folder / "nowhere")
    if SIZE > 1:
        refused(mpiagg.MismatchError, "ranks disagree", mpiagg.save_checkpoint, f"{folder}{RANK}", {"a": 1})
        refused(mpiagg.MismatchError, "ranks disagree", mpiagg.save_checkpoint, folder, {f"a{RANK}": 1})
        refused(mpiagg.MismatchError, "ranks disagree", mpiagg.load_checkpoint, f"{folder}{RANK}")
    COMM.Barrier()
    assert len(list(folder.parent.iterdir())) == 1 or RANK
