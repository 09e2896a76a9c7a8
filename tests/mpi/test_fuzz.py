"""Whatever users pass, errors are those meant for them, the same on all ranks, with nobody left waiting.

Odd values come to all ranks, or to one alone where the ranks compare what they are about to do. What needs no ranks is
in tests/test_fuzz.py.
"""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from odd import ALLOWED, kept, odd

import mpiagg

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
NOBODY = -1

COLLECTIVES = {
    "allreduce": ("x", "op", "out", "algorithm", "lanes", "wire", "timeout", "comm"),
    "reduce": ("x", "op", "out", "algorithm", "lanes", "root", "timeout", "comm"),
    "broadcast": ("x", "out", "algorithm", "lanes", "root", "timeout", "comm"),
    "allgather": ("x", "out", "algorithm", "lanes", "timeout", "comm"),
    "reduce_scatter": ("x", "op", "out", "algorithm", "lanes", "timeout", "comm"),
}
NEIGHBORS = ("x", "neighbors", "sources", "destinations", "out", "timeout")
OF_NEIGHBORS = {
    "neighbor_allgather": NEIGHBORS,
    "neighbor_allgatherv": (*NEIGHBORS, "recvcounts"),
    "neighbor_alltoall": NEIGHBORS,
    "neighbor_alltoallv": (*NEIGHBORS, "sendcounts", "recvcounts"),
}
AGGREGATIONS = {
    "AllReduce": ("comm", "op", "denom", "divide_before", "algorithm", "wire", "by_layer", "backend"),
    "ParameterServer": ("comm", "root"),
    "Sparsified": ("comm", "ratio", "selection", "threshold", "seed", "op", "momentum"),
    "PowerSGD": ("comm", "rank", "seed"),
    "Decentralized": ("comm", "peer_selection", "hierarchical", "communication_interval"),
    "NeighborAverage": ("comm", "neighbors", "weights", "communication_interval"),
    "LowPrecisionDecentralized": ("comm", "communication_interval"),
    "LocalSGD": (
        "comm",
        "period",
        "warmup_steps",
        "outer_learning_rate",
        "outer_momentum",
        "wire",
        "algorithm",
        "error_feedback",
        "fragments",
        "delay",
        "mixing",
    ),
    "SparseLoCo": ("comm", "period", "ratio", "chunk", "decay", "outer_learning_rate", "wire", "fragments", "delay"),
    "DeMo": ("comm", "k", "chunk", "decay", "sign", "wire"),
    "ErrorFeedback": ("reduction",),
}


def together(examples):
    """Have all ranks draw the same examples: nothing of it may depend on what the others, or the clock, do."""
    return settings(
        max_examples=examples,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )


def some_of(names, most=2):
    return st.dictionaries(st.sampled_from(names), odd, min_size=1, max_size=most)


ranks = st.integers(NOBODY, SIZE - 1)
"""Who alone passes what is odd; all do, if nobody."""


@pytest.fixture(scope="module")
def comm():
    comm = mpiagg.Comm(WORLD)
    yield comm
    comm.Free()


def outcome(call, *arguments, also=(), **keywords):
    """Make a call; return the error that it raises, which is an allowed one, if it raises one."""
    before = kept([*arguments, *keywords.values()])
    try:
        call(*arguments, **keywords)
    except (*ALLOWED, *also) as error:
        assert kept([*arguments, *keywords.values()]) == before
        return error
    return None


DRAWN = [""]
"""What this rank has drawn last, in words."""


def same(*drawn):
    """Note what is drawn, before anything can change it."""
    words = repr(drawn)
    DRAWN[0] = "" if " at 0x" in words else words


def agreed(error, alone=NOBODY):
    """Show that all ranks have drawn the same, and have errors of one kind; of one rank's the others hear."""
    told = WORLD.allgather((DRAWN[0], f"{type(error).__name__}: {error}"))
    assert len({drawn for drawn, _ in told}) == 1, told
    kinds = [words.partition(":")[0] for _, words in told]
    if alone == NOBODY:
        # What each rank alone finds wrong with its own, others hear of as a MismatchError.
        assert len(set(kinds) - {"MismatchError"}) <= 1, told
        assert len(set(kinds)) == 1 or "MismatchError" in kinds, told
    else:
        others = {kind for rank, kind in enumerate(kinds) if rank != alone}
        assert others <= {"MismatchError"} or set(kinds) == {"NoneType"}, told


def still_works(comm):
    assert mpiagg.allreduce(np.ones(3), comm=comm)[0] == SIZE


# -- arrays


@st.composite
def calls(draw, functions, most=2):
    """Draw a function, and odd values for some of its arguments."""
    name = draw(st.sampled_from(list(functions)))
    return name, draw(some_of(functions[name], most))


def test_array_functions(comm):
    @together(60)
    @given(calls(COLLECTIVES))
    def check(drawn):
        same(drawn)
        name, changed = drawn
        agreed(outcome(getattr(mpiagg, name), **{"x": np.arange(6.0), "comm": comm, **changed}))

    check()
    still_works(comm)


@pytest.mark.parametrize("form", ["", "_init"])
def test_one_rank_alone(comm, form):
    known = {"comm": comm} if form else {"comm": comm, "check": True}

    def call(name, **arguments):
        made = getattr(mpiagg, f"{name}{form}")(**arguments)
        if form:
            with made:
                made()

    @together(80)
    @given(ranks, calls({name: arguments[:-1] for name, arguments in COLLECTIVES.items()} | OF_NEIGHBORS))
    def check(alone, drawn):
        same(alone, drawn)
        name, changed = drawn
        here = changed if alone in (RANK, NOBODY) else {}
        usual = {"x": np.ones((1, 6)), "neighbors": [RANK]} if name in OF_NEIGHBORS else {"x": np.arange(6.0)}
        if name == "neighbor_alltoallv":
            usual["sendcounts"] = [1]
        agreed(outcome(call, name, **{**usual, **known, **here}), alone)

    check()
    still_works(comm)


def test_empty(comm):
    @together(20)
    @given(some_of(["shape", "dtype", "comm", "device"]))
    def check(changed):
        same(changed)
        agreed(outcome(mpiagg.empty, **{"shape": 3, "comm": comm, **changed}, also=(MemoryError,)))

    check()
    still_works(comm)


# -- lists of arrays


def test_aggregations(comm):
    wired = mpiagg.AllReduce(comm, wire="u8")
    needed = {"NeighborAverage": {"neighbors": range(SIZE)}, "ErrorFeedback": {"reduction": wired}}

    def call(name, **arguments):
        with getattr(mpiagg, name)(**arguments) as made:
            made.aggregate([np.ones(4, np.float32), np.ones((3, 2), np.float32)])

    @together(70)
    @given(ranks, calls(AGGREGATIONS))
    def check(alone, drawn):
        same(alone, drawn)
        name, changed = drawn
        # Who has another communicator cannot be compared with the others.
        alone = alone if "comm" not in changed and name != "ErrorFeedback" else NOBODY
        known = {} if name == "ErrorFeedback" else {"comm": comm}
        here = changed if alone in (RANK, NOBODY) else {}
        agreed(outcome(call, name, **{**needed.get(name, {}), **known, **here}), alone)

    check()
    wired.free()
    still_works(comm)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_what_is_aggregated(comm, name):
    make = {
        "NeighborAverage": lambda: mpiagg.NeighborAverage(comm, range(SIZE)),
        "ErrorFeedback": lambda: mpiagg.ErrorFeedback(mpiagg.AllReduce(comm, wire="u8")),
    }.get(name, lambda: getattr(mpiagg, name)(comm))

    with make() as made:

        @together(8)
        @given(ranks, odd | st.lists(odd, min_size=1, max_size=3))
        def check(alone, tensors):
            same(alone, tensors)
            here = tensors if alone in (RANK, NOBODY) else [np.ones(4)]
            with np.errstate(all="ignore"):
                agreed(outcome(made.aggregate, here), alone)

        check()

        @together(5)
        @given(odd | st.fixed_dictionaries({"memories": odd}))
        def states(state):
            same(state)
            agreed(outcome(made.load_state_dict, state))

        states()
    still_works(comm)


# -- training


def parameters():
    return [np.ones((2, 3)), np.ones(4)]


def test_ddp(comm):
    def call(**arguments):
        with mpiagg.DDP(**arguments) as ddp:
            ddp.sync_gradients([np.ones_like(x) for x in arguments["module"]])

    @together(25)
    @given(ranks, some_of(["module", "comm", "aggregation", "bucket_bytes", "overlap", "check_finite"]))
    def check(alone, changed):
        same(alone, changed)
        alone = alone if "comm" not in changed else NOBODY
        here = changed if alone in (RANK, NOBODY) else {}
        agreed(outcome(call, **{"module": parameters(), "comm": comm, **here}), alone)

    check()
    still_works(comm)


def test_gradients(comm):
    with mpiagg.DDP(parameters(), comm, check_finite=True) as ddp:

        @together(25)
        @given(ranks, odd | st.lists(odd, min_size=1, max_size=3) | st.tuples(odd, odd).map(list))
        def check(alone, gradients):
            same(alone, gradients)
            here = gradients if alone in (RANK, NOBODY) else parameters()
            agreed(outcome(ddp.sync_gradients, here), alone)

        check()

        @together(8)
        @given(odd)
        def others(value):
            same(value)
            agreed(outcome(ddp.broadcast_parameters, value))
            agreed(outcome(ddp.to, value))

        others()
        gradients = parameters()
        ddp.sync_gradients(gradients)
        assert all((x == 1).all() for x in gradients)


class Trained:
    def __init__(self, comm):
        self.comm = comm

    def step(self, _):
        mpiagg.allreduce(np.ones(2), comm=self.comm)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_loop(comm):
    def call(steps, **arguments):
        with mpiagg.Loop(**arguments) as loop:
            loop.run(steps)

    @together(20)
    @given(ranks, some_of(["make", "steps", "comm", "commit_every", "checkpoint_every"]))
    def check(alone, changed):
        same(alone, changed)
        if isinstance(changed.get("steps"), int):
            changed["steps"] = min(changed["steps"], 3)
        alone = alone if not {"comm", "make"} & set(changed) else NOBODY
        here = changed if alone in (RANK, NOBODY) else {}
        agreed(outcome(call, **{"make": Trained, "steps": 2, "comm": comm, **here}), alone)

    check()
    still_works(comm)


# -- checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return WORLD.bcast(str(tmp_path_factory.mktemp("fuzz")) if RANK == 0 else None)


def test_checkpoints(comm, folder, monkeypatch):
    monkeypatch.chdir(folder)

    @together(20)
    @given(ranks, st.sampled_from(["path", "state", "value"]), odd)
    def check(alone, what, value):
        same(alone, what, value)
        here = value if alone in (RANK, NOBODY) else {"path": "there", "state": {"a": 1}, "value": 5}[what]
        path, state = (here, {"a": 1}) if what == "path" else ("there", here if what == "state" else {"a": here})
        also = (OSError,) if what == "path" else ()
        agreed(outcome(mpiagg.save_checkpoint, path, state, comm, also=also), alone)
        if what == "path":
            agreed(outcome(mpiagg.load_checkpoint, path, comm, also=also), alone)

    check()
    mpiagg.save_checkpoint("last", {"a": 3}, comm)
    assert mpiagg.load_checkpoint("last", comm) == {"a": 3}


# -- the communicator

BUFFERS = (None, 5, "x", [], [None], [np.ones(3), "zz"], [np.ones(3), 1, 2, 3, 4], np.array([None]))
METHODS = {
    "Bcast": (("buf", BUFFERS), ("root", (-1, SIZE, None, "x", 1.5))),
    "Allreduce": (("sendbuf", BUFFERS), ("recvbuf", BUFFERS), ("op", (None, "sum", 3, MPI.OP_NULL))),
    "Allgather": (("sendbuf", BUFFERS), ("recvbuf", BUFFERS)),
    "Reduce_scatter_block": (("sendbuf", BUFFERS), ("recvbuf", BUFFERS), ("op", (None, "sum", MPI.OP_NULL))),
}
GOOD = {"buf": np.ones(3), "root": 0, "sendbuf": np.ones(SIZE), "recvbuf": np.ones(SIZE), "op": MPI.SUM}


@pytest.mark.parametrize("name", METHODS)
def test_methods_raise_what_mpi4py_raises(comm, name):
    plain = WORLD.Dup()
    for argument, values in METHODS[name]:
        for value in values:
            known = {each: GOOD[each] for each, _ in METHODS[name]}
            kinds = []
            for each in (plain, comm):
                kind = None
                try:
                    getattr(each, name)(**{**known, argument: value})
                except Exception as error:  # noqa: BLE001 - it is mpi4py's to say
                    kind = type(error)
                kinds.append(kind)
            assert kinds[0] is kinds[1], (argument, value, kinds)
            agreed(None)
    plain.Free()
    still_works(comm)


@together(20)
@given(value=odd)
def test_communicators_of_anything(value):
    same(value)
    error = outcome(mpiagg.Comm, value)
    agreed(error)
    with suppress(AttributeError):
        assert error is not None or value is None
