"""NaN and infinity in gradients, which all ranks learn of by the same error."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import standin
from device_cases import Item, Module
from mpi4py import MPI
from support import refused

import mpiagg
from mpiagg.ddp.finite import MOST_NAMED
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
MEAN = (SIZE - 1) / 2
ODD = SIZE // 2
"""A rank where something is wrong."""

SHAPES = [(4, 8), (8,), (), (5,)]
METHODS = ["sync_gradients", "overlapped_sync_gradients"]


def gradients(value=RANK, dtype=np.float32):
    return [np.full(shape, value, dtype) for shape in SHAPES]


def arrays(dtype=np.float32):
    return gradients(0, dtype)


def message_of(call, *arguments):
    """Return the message of the error that the call raises on all ranks, the same on all of them."""
    with pytest.raises(mpiagg.NonFiniteError) as raised:
        call(*arguments)
    messages = COMM.allgather(str(raised.value))
    assert messages == [messages[0]] * SIZE
    return messages[0]


def good_step(ddp, method="sync_gradients", dtype=np.float32):
    mine = gradients(dtype=dtype)
    getattr(ddp, method)(mine)
    assert all((x == MEAN).all() for x in mine)


# -- gradients


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cap", [0, 2**20])
def test_all_ranks_learn_of_every_parameter_that_is_bad_on_any(cap, method):
    with mpiagg.DDP(arrays(), bucket_bytes=cap, check_finite=True) as ddp:
        for _ in range(2):
            mine = gradients()
            if RANK in {ODD, SIZE - 1}:
                mine[0][1, :3] = np.nan, np.inf, np.nan
                mine[2][...] = -np.inf
            before = [x.tobytes() for x in mine]
            told = "parameter 0 (float32 (4, 8)): 2 NaN, 1 Inf of 32, parameter 2 (float32 ()): 0 NaN, 1 Inf of 1"
            ranks = "; ".join(f"rank {rank}: {told}" for rank in sorted({ODD, SIZE - 1}))
            assert message_of(getattr(ddp, method), mine) == f"gradients are not finite: {ranks}"
            assert [x.tobytes() for x in mine] == before
            assert not any(view.any() for view in ddp.gradient_views())
        good_step(ddp, method)


def test_parameters_are_named_where_they_have_names_and_missing_gradients_are_good():
    named = [("first", Item(np.zeros(3))), ("second", Item(np.zeros(2)))]
    module = SimpleNamespace(parameters=lambda: [x for _, x in named], named_parameters=lambda: named)
    with mpiagg.DDP(module, check_finite=True) as ddp:
        if RANK == 0:
            named[1][1].grad = np.array([np.nan, RANK])
        told = message_of(ddp.sync_gradients)
        assert told == "gradients are not finite: rank 0: parameter 1 ('second', float64 (2,)): 1 NaN, 0 Inf of 2"
        assert named[0][1].grad is None
        assert (named[1][1].grad is None) == (RANK != 0)
        named[1][1].grad = None
        ddp.sync_gradients()
        assert named[1][1].grad is None


def test_of_very_many_parameters_the_first_are_named():
    count = MOST_NAMED + 5
    with mpiagg.DDP([np.zeros(1) for _ in range(count)], check_finite=True) as ddp:
        told = message_of(ddp.sync_gradients, [np.full(1, np.nan) for _ in range(count)])
        assert told.count("parameter ") == SIZE * MOST_NAMED
        assert told.count("and 5 more parameters") == SIZE


@pytest.mark.parametrize("dtype", ["e", "f", "d", "g", "F", "D", "bfloat16"])
def test_every_dtype_is_checked(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    with mpiagg.DDP([np.zeros(3, dtype)], check_finite=True) as ddp:
        for bad in (np.nan, np.inf, -np.inf):
            mine = [np.array([1, bad if RANK == ODD else 2, 3]).astype(dtype)]
            counts = "1 NaN, 0 Inf" if np.isnan(bad) else "0 NaN, 1 Inf"
            assert message_of(ddp.sync_gradients, mine).endswith(f"{counts} of 3")
        ddp.sync_gradients(mine := [np.full(3, RANK, dtype)])
        assert (mine[0] == np.full(3, MEAN, dtype)).all()


def test_another_fault_goes_first():
    with mpiagg.DDP(arrays(), check_finite=True) as ddp:
        mine = gradients(np.nan)
        if RANK == ODD:
            mine[3] = np.zeros(6, np.float32)
        error = ValueError if RANK == ODD else mpiagg.MismatchError
        refused(error, "gradient 3 has shape", ddp.sync_gradients, mine)
        good_step(ddp)


def test_it_ends_a_join_on_all_ranks():
    def train(ddp):
        with ddp.join():
            for _ in range(0 if RANK == 0 != ODD else 2):
                ddp.sync_gradients(gradients(np.nan if RANK == ODD else 1))

    with mpiagg.DDP(arrays(), check_finite=True) as ddp:
        assert f"rank {ODD}: parameter 0" in message_of(train, ddp)
        good_step(ddp)


@pytest.mark.parametrize(
    "make",
    [
        lambda: mpiagg.ErrorFeedback(mpiagg.AllReduce(wire="u8")),
        lambda: mpiagg.PowerSGD(min_compression_rate=0),
        *(lambda how=how: mpiagg.Sparsified(ratio=0.5, selection=how) for how in ("topk", "randomk", "blockk")),
        mpiagg.ParameterServer,
    ],
    ids=["feedback", "powersgd", "topk", "randomk", "blockk", "server"],
)
def test_no_aggregation_remembers_what_is_bad(make):
    def states(*, with_a_bad_step):
        with make() as aggregation, mpiagg.DDP(arrays(), aggregation=aggregation, check_finite=True) as ddp:
            for step in range(3):
                mine = gradients(RANK + step + 0.3)
                ddp.sync_gradients(mine)
                if step == 1 and with_a_bad_step:
                    message_of(ddp.sync_gradients, gradients(np.nan if RANK == ODD else 1))
            return repr(aggregation.state_dict()), [x.tobytes() for x in mine]

    assert states(with_a_bad_step=True) == states(with_a_bad_step=False)


# -- what is made of them


@pytest.mark.parametrize("method", METHODS)
def test_a_sum_that_overflows_is_told_from_gradients_that_were_bad(method):
    with (
        mpiagg.AllReduce(op="sum") as total,
        mpiagg.DDP(arrays(np.float16), aggregation=total, bucket_bytes=0, check_finite=True) as ddp,
    ):
        mine = gradients(1, np.float16)
        mine[1][3], mine[3][:] = 60_000, -60_000
        if SIZE == 1:
            getattr(ddp, method)(mine)
            assert mine[1][3] == 60_000
            return
        told = message_of(getattr(ddp, method), mine)  # NumPy's warning would be an error here
        assert told == (
            "overflow: the gradients of all ranks were finite, but their sum by AllReduce is not: "
            "parameter 1 (float16 (8,)): 0 NaN, 1 Inf of 8, parameter 3 (float16 (5,)): 0 NaN, 5 Inf of 5"
        )
        mine = gradients(1, np.float16)
        getattr(ddp, method)(mine)
        assert all((x == SIZE).all() for x in mine)


@pytest.mark.parametrize("algorithm", ["auto", "native", *mpiagg.algorithms("allreduce")])
def test_averages_of_half_precision_do_not_overflow(algorithm):
    for length in (7, 9_000):
        with (
            mpiagg.AllReduce(algorithm=algorithm) as average,
            mpiagg.DDP([np.zeros(length, np.float16)], aggregation=average, check_finite=True) as ddp,
        ):
            mine = [np.full(length, 60_000, np.float16)]
            ddp.sync_gradients(mine)
            assert (mine[0] == 60_000).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("algorithm", ["auto", *mpiagg.algorithms("allreduce")])
def test_partial_sums_that_overflow_on_the_wire_are_told_or_avoided(algorithm, dtype):
    adds_before_it_sends = algorithm not in {"parameter_server", "direct", "one_shot", "shared", "hierarchical"}
    for before in (True, False):
        with (
            mpiagg.AllReduce(algorithm=algorithm, wire="fp16", divide_before=before) as average,
            mpiagg.DDP([np.zeros(50, dtype)], aggregation=average, check_finite=True) as ddp,
        ):
            mine = [np.full(50, 60_000, dtype)]
            try:
                ddp.sync_gradients(mine)
            except mpiagg.NonFiniteError as error:
                assert not before
                assert adds_before_it_sends or algorithm == "auto"
                assert re.search("overflow.* their average by AllReduce is not", str(error))  # noqa: PT017 - or none is raised
            else:
                np.testing.assert_allclose(mine[0], 60_000, rtol=1e-3)


@pytest.mark.parametrize("wire", ["bf16", "u8"])
def test_other_wires_have_the_range_of_float32(wire):
    with (
        mpiagg.AllReduce(wire=wire) as average,
        mpiagg.DDP([np.zeros(50, np.float16)], aggregation=average, check_finite=True) as ddp,
    ):
        mine = [np.full(50, 60_000, np.float16)]
        ddp.sync_gradients(mine)
        np.testing.assert_allclose(mine[0].astype(float), 60_000, rtol=1e-2)


class Uneven(mpiagg.AllReduce):
    """Leaves something else on one rank, which no rank may be kept waiting by."""

    def aggregate_init(self, tensors):
        def spoil():
            if RANK == ODD:
                tensors[0].fill(np.inf)

        plan = super().aggregate_init(tensors)
        return Spoiled(plan, spoil)


class Spoiled:
    def __init__(self, plan, spoil):
        self._plan, self._spoil = plan, spoil
        self.free = plan.free

    def __call__(self):
        self._plan()
        self._spoil()


def test_a_result_that_is_bad_on_one_rank_is_an_error_on_all():
    with Uneven() as aggregation, mpiagg.DDP([np.zeros(3)], aggregation=aggregation, check_finite=True) as ddp:
        told = message_of(ddp.sync_gradients, [np.ones(3)])
        assert ("average by Uneven is not: " + f"rank {ODD}: " * (SIZE > 1) + "parameter 0 (float64 (3,))") in told


# -- whether to check


@pytest.mark.parametrize(
    ("said", "asked", "checked"),
    [
        (None, None, False),
        ("", None, False),
        ("0", None, False),
        ("1", None, True),
        ("1", False, False),
        ("0", True, True),
    ],
)
def test_the_environment_decides_where_the_program_does_not(monkeypatch, said, asked, checked):
    monkeypatch.delenv("MPIAGG_DEBUG", raising=False)
    if said is not None:
        monkeypatch.setenv("MPIAGG_DEBUG", said)
    with mpiagg.DDP(arrays(), check_finite=asked) as ddp:
        monkeypatch.delenv("MPIAGG_DEBUG", raising=False)  # it is read once
        with pytest.raises(mpiagg.NonFiniteError) if checked else nullcontext():
            ddp.sync_gradients(gradients(np.nan))


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_all_ranks_check_or_none(monkeypatch, by):
    monkeypatch.setenv("MPIAGG_DEBUG", "1" if by == "environment" and RANK == ODD else "0")
    keywords = {"check_finite": RANK == ODD} if by == "argument" else {}
    if SIZE > 1:
        refused(
            mpiagg.MismatchError, "ranks disagree: .*checked to be finite", lambda: mpiagg.DDP(arrays(), **keywords)
        )
    else:
        mpiagg.DDP(arrays(), **keywords).free()


def test_bad_words_are_refused(monkeypatch):
    refused(TypeError, "check_finite must be True, False or None, not 'no'", mpiagg.DDP, arrays(), check_finite="no")
    monkeypatch.setenv("MPIAGG_DEBUG", "maybe")
    refused(ValueError, "MPIAGG_DEBUG must be 1 or 0, not 'maybe'", mpiagg.DDP, arrays())
    mpiagg.DDP(arrays(), check_finite=False).free()


# -- on devices


@pytest.mark.parametrize("method", METHODS)
def test_gradients_on_a_device(comm, method):
    with standin.installed() as device, standin.watch(device_messages=channel_of(comm).aware):
        items = [Item(device.from_host(np.zeros(shape, np.float16))) for shape in SHAPES]
        with (
            mpiagg.AllReduce(comm, op="sum") as total,
            mpiagg.DDP(Module(items), comm, total, check_finite=True) as ddp,
        ):
            for value, words in ((np.nan, "gradients are not finite: rank"), (60_000, "overflow"), (1, None)):
                for item, gradient in zip(items, gradients(1, np.float16), strict=True):
                    item.grad = device.from_host(np.full_like(gradient, value if RANK == ODD or value == 60_000 else 1))
                if words and (SIZE > 1 or np.isnan(value)):
                    assert words in message_of(getattr(ddp, method))
                else:
                    getattr(ddp, method)()
                    assert all((standin.peek(item.grad) == SIZE * value).all() for item in items)
        channel_of(comm).free()


@pytest.mark.parametrize("method", METHODS)
def test_a_device_is_not_waited_for_once_a_gradient(comm, method):
    def waits(count):
        """Return how often a good step waits for the device, with so many gradients in one bucket."""
        items = [Item(device.from_host(np.zeros(5, np.float32))) for _ in range(count)]
        with mpiagg.DDP(Module(items), comm, check_finite=True) as ddp:
            for _ in range(2):
                for item in items:
                    item.grad = device.from_host(np.full(5, RANK, np.float32))
                standin.LOG.clear()
                getattr(ddp, method)()
                assert all((standin.peek(item.grad) == MEAN).all() for item in items)
        return len(standin.LOG.of("out", "synchronise"))

    with standin.installed() as device, standin.watch(device_messages=channel_of(comm).aware):
        assert waits(3) == waits(40) > 0
        channel_of(comm).free()
