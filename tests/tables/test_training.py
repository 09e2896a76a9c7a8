"""What aggregations cost in training, beside arithmetic by hand."""

import math

import pytest

from mpiagg.arrays import HOST, Coordinates, codec
from mpiagg.schedules import Cluster, Collective, Layout, price
from mpiagg.tables.rows import Choice, Origin, Row, Table
from mpiagg.tables.times import Measured, Modelled
from mpiagg.tables.training import Training, advised, plan_training

FOUR = Layout.by_name(range(4))
SLOW = Cluster(alpha=1e-3, beta=8 / 100e6, gamma=0, overhead=0)
SHAPES = [(1000, 500), (500,), (20, 25, 30)]
COUNT = 500_000 + 500 + 15_000


def found(training=None, times=None):
    training = training or Training(0.3, SHAPES)
    return {each.name: each for each in plan_training(training, times or Modelled(FOUR, SLOW))}


def only(planned, start):
    (each,) = (each for name, each in planned.items() if name.startswith(start))
    return each


def test_an_all_reduce_by_hand():
    plain = found()["AllReduce()"]
    assert plain.bytes_a_step == plain.most_bytes == 1.5 * 4 * COUNT
    seconds = min(price(name, "allreduce", 4, 4 * COUNT, SLOW) for name in ("ring", "halving_doubling"))
    assert seconds == pytest.approx(plain.seconds, rel=0.2)
    assert plain.seconds >= 1.5 * 4 * COUNT * SLOW.beta
    assert plain.exposed == pytest.approx(plain.seconds - 0.6 * 0.3)
    assert plain.share == pytest.approx(0.3 / (0.3 + plain.seconds))
    assert plain.share_overlapped == pytest.approx(0.3 / (0.3 + plain.exposed))
    assert plain.alike


def test_what_travels_by_a_codec_is_what_the_codec_says():
    planned = found()
    for wire in ("u8", "u4", "u2"):
        encoded = 4 * codec(wire).nbytes(math.ceil(COUNT / 4))
        each = planned[f'ErrorFeedback(AllReduce(wire="{wire}"))']
        assert each.bytes_a_step == 1.5 * encoded
        assert each.work == 2 * 4 * COUNT / 1e9


@pytest.mark.parametrize("layout", [FOUR, Layout.of([2, 2]), Layout.of([8, 8])])
def test_a_parameter_server_is_priced_as_its_schedule(layout):
    cluster = Cluster(alpha=1e-3, beta=8 / 100e6, gamma=1e-9, node_alpha=1e-6, node_beta=1e-10)
    planned = found(times=Modelled(layout, cluster))["ParameterServer()"]
    assert planned.seconds == pytest.approx(price("parameter_server", "allreduce", layout, 4 * COUNT, cluster))


def test_power_sgd_of_matrices_alone():
    compressed = 2 * (1000 + 500) + 2 * (20 + 750)
    assert found()["PowerSGD(rank=2)"].bytes_a_step == 1.5 * 4 * (compressed + 500)


def test_demo_by_chunks():
    """1000 x 500 is 15 x 7 whole squares of 64, and edges of 40 and 52; 20 x 750 has rows of 20."""
    chunks = 16 * 8 + 8 + 12
    coefficients = 32 * chunks
    coordinates = Coordinates(HOST, coefficients, COUNT).nbytes
    assert coordinates < 9 / 8 * coefficients
    assert found()["DeMo(k=32)"].bytes_a_step == 3 * (coordinates + 4 * coefficients)


def test_local_methods_are_paid_for_once_a_period():
    for period in (10, 40):
        planned = found(Training(0.3, SHAPES, period=period))
        every = planned["AllReduce()"]
        local = only(planned, f"LocalSGD(period={period})")
        assert local.seconds == pytest.approx(every.seconds / period)
        assert local.most_bytes == every.most_bytes == pytest.approx(local.bytes_a_step * period)
        assert local.exposed == local.seconds


def test_a_fragment_hides_behind_its_delay_but_not_behind_more_than_there_is():
    def streaming(step, delay, fragments=3):
        how = Training(step, SHAPES, period=6, fragments=fragments, delay=delay)
        return only(found(how), "LocalSGD(period=6, fragments")

    alone = streaming(0.3, 0)
    assert alone.exposed == alone.seconds > 0
    one = alone.seconds * 2  # an exchange: there are 3 in 6 steps
    assert streaming(0.3, 5).exposed == 0
    assert streaming(one / 4, 2).exposed == pytest.approx(alone.seconds / 2)
    # A link that is always busy bounds the pace, however long the delay is.
    assert streaming(alone.seconds / 10, 5).exposed == pytest.approx(alone.seconds * 0.9)
    assert alone.most_bytes == pytest.approx(streaming(0.3, 0, 1).most_bytes / 3, rel=0.01)
    # Of 12 fragments in 6 steps, two go together.
    assert streaming(0.3, 0, 12).most_bytes == streaming(0.3, 0, 12).bytes_a_step
    assert streaming(0.3, 0, 12).most_bytes == pytest.approx(streaming(0.3, 0, 6).most_bytes, rel=0.01)


def test_one_rank_has_nothing_to_send():
    for each in found(times=Modelled(Layout.by_name([0]), SLOW)).values():
        assert (each.bytes_a_step, each.seconds, each.share_overlapped > 0.9) == (0, 0, True), each.name


def test_nodes_share_their_links():
    cluster = Cluster(alpha=1e-3, beta=1e-8, node_alpha=1e-6, node_beta=1e-10)
    apart, shared = (found(times=Modelled(layout, cluster)) for layout in (Layout.of([1, 1, 1, 1]), Layout.of([2, 2])))
    assert shared["Decentralized()"].seconds == pytest.approx(2 * apart["Decentralized()"].seconds, rel=0.1)
    on_node = found(times=Modelled(Layout.of([4]), cluster))
    assert on_node["Decentralized()"].seconds < apart["Decentralized()"].seconds / 50


def test_the_advised_one_is_the_first_that_is_busy_enough():
    fast = list(found(times=Modelled(FOUR, Cluster())).values())
    assert advised(fast, 0.9).name == "AllReduce()"
    slow = list(found().values())
    best = advised(slow, 0.9)
    assert best.share_overlapped >= 0.9
    assert all(each.share_overlapped < 0.9 for each in slow[: slow.index(best)])
    hopeless = list(found(Training(1e-6, SHAPES)).values())
    assert advised(hopeless, 0.9).share_overlapped == max(each.share_overlapped for each in hopeless)


def measured(*rows, layout=FOUR):
    return Table("tuning.json", rows, Origin(layout, "MPICH", {}))


def row(collective, times):
    return Row(Collective(collective), Choice("ring"), times=times)


def test_measured_times_are_interpolated_and_extended():
    table = measured(
        row("allreduce", {1000: {"ring": 2e-3, "direct": 1e-3}, 2000: {"ring": 3e-3}}),
        row("allgather", {1000: {"ring": 1e-3}, 3000: {"ring": 2e-3}}),
    )
    times = Measured(table)
    assert times.seconds(Collective.ALLREDUCE, 1000) == pytest.approx(1e-3)
    assert times.seconds(Collective.ALLREDUCE, 1500) == pytest.approx(2e-3)
    assert times.seconds(Collective.ALLREDUCE, 4000) == pytest.approx(7e-3)
    assert times.seconds(Collective.ALLGATHER, 2000) == pytest.approx(1.5e-3)
    assert times.exchange(1500, 1) == times.seconds(Collective.ALLREDUCE, 1000)
    assert found(times=times)["AllReduce()"].seconds == pytest.approx(1e-3 + 2e-6 * (4 * COUNT - 1000))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (Table("default", ()), "default was not measured"),
        (measured(row("allreduce", {1: {"ring": 1.0}, 2: {"ring": 1.0}})), "no times of allgather"),
        (measured(row("allgather", {1: {"ring": 1.0}, 2: {"ring": 1.0}})), "no times of allreduce"),
    ],
)
def test_tables_without_times_are_refused(table, words):
    with pytest.raises(ValueError, match=words):
        Measured(table)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step": 0}, "more than 0 seconds"),
        ({"step": math.nan}, "more than 0 seconds"),
        ({"shapes": []}, "no parameters"),
        ({"shapes": [(0, 3)]}, "no parameters"),
        ({"period": 0}, "period and fragments"),
        ({"delay": 30}, "less than the period"),
        ({"backward": 1.1}, "from 0 to 1"),
        ({"codec_rate": 0}, "a codec has a rate"),
    ],
)
def test_what_is_out_of_range_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Training(**{"step": 0.1, "shapes": SHAPES, **arguments})
