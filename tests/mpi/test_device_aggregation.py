"""Aggregations and DDP of arrays on a device, through the stand-in: what they do to arrays on the host."""

import gc

import ml_dtypes
import numpy as np
import pytest
import standin
from device_cases import SHAPES, Item, Module

import mpiagg
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi

AGGREGATIONS = {
    "AllReduce": mpiagg.AllReduce,
    "by layer": lambda comm: mpiagg.AllReduce(comm, by_layer=True),
    "divide before": lambda comm: mpiagg.AllReduce(comm, divide_before=True),
    "u8": lambda comm: mpiagg.AllReduce(comm, wire="u8"),
    "u4": lambda comm: mpiagg.AllReduce(comm, wire="u4"),
    "u2": lambda comm: mpiagg.ErrorFeedback(mpiagg.AllReduce(comm, wire="u2")),
    "ErrorFeedback": lambda comm: mpiagg.ErrorFeedback(mpiagg.AllReduce(comm, wire="u8")),
    "ParameterServer": mpiagg.ParameterServer,
    "topk": lambda comm: mpiagg.Sparsified(comm, ratio=0.1),
    "randomk": lambda comm: mpiagg.Sparsified(comm, ratio=0.1, selection="randomk"),
    "blockk": lambda comm: mpiagg.Sparsified(comm, ratio=0.1, selection="blockk"),
    "threshold": lambda comm: mpiagg.Sparsified(comm, selection="threshold", threshold=1.0),
    "blockk with momentum": lambda comm: mpiagg.Sparsified(comm, ratio=0.1, selection="blockk", momentum=0.9),
    "DeMo": lambda comm: mpiagg.DeMo(comm, k=5, chunk=8, sign=False, wire="u8"),
    "PowerSGD": lambda comm: mpiagg.PowerSGD(comm, rank=2, start_after=1),
    "PowerSGD, fresh": lambda comm: mpiagg.PowerSGD(comm, reuse_query=False, error_feedback="aggregated"),
    "Decentralized": mpiagg.Decentralized,
    "one peer": lambda comm: mpiagg.Decentralized(comm, peer_selection="one_peer_exponential"),
    "all": lambda comm: mpiagg.Decentralized(comm, peer_selection="all"),
    "hierarchical": lambda comm: mpiagg.Decentralized(comm, hierarchical=True),
    "LowPrecisionDecentralized": mpiagg.LowPrecisionDecentralized,
    "NeighborAverage": lambda comm: mpiagg.NeighborAverage(
        comm, neighbors=sorted({(comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size} - {comm.rank})
    ),
    "LocalSGD": lambda comm: mpiagg.LocalSGD(comm, period=2),
    "SparseLoCo": lambda comm: mpiagg.SparseLoCo(comm, period=1, ratio=0.1, chunk=100),
    "SparseLoCo, in parts": lambda comm: mpiagg.SparseLoCo(comm, period=3, chunk=7, fragments=2, delay=1, wire=None),
    "Streaming DiLoCo": lambda comm: mpiagg.LocalSGD(
        comm, period=3, fragments=2, delay=1, mixing=0.5, outer_momentum=0.9, wire="u4", error_feedback=True
    ),
}


@pytest.fixture(params=["aware", "staged"])
def device(request, comm):
    """A device whose memory messages reach, or do not."""
    channel_of(comm).aware = request.param == "aware"
    with standin.installed() as device, standin.watch(device_messages=channel_of(comm).aware):
        yield device
        channel_of(comm).free()


def tensors(rank, step=0):
    """Return the tensors of a rank: short ones and one that is long enough not to go by the host."""
    random = np.random.default_rng((rank, step))
    singles, others = [(130, 90), (3,), (20, 30), (), (0, 4)], [((2, 3), "f8"), ((50,), "f2")]
    forms = [*((shape, "f4") for shape in singles), *others]
    made = [random.standard_normal(shape).astype(dtype) for shape, dtype in forms]
    return [*made, made[2].astype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_every_aggregation_does_what_it_does_on_the_host(comm, rank, device, bits, name):
    with AGGREGATIONS[name](comm) as on_host, AGGREGATIONS[name](comm) as on_device:
        state = None
        for step in range(3):
            host = tensors(rank, step)
            here = [device.from_host(x) for x in host]
            on_host.aggregate(host)
            on_device.aggregate(here)
            for wanted, x in zip(host, here, strict=True):
                assert bits(standin.peek(x)) == bits(wanted), (step, wanted.shape, wanted.dtype)
            state = on_device.state_dict()
        on_device.load_state_dict(state)
        host = tensors(rank, 4)
        here = [device.from_host(x) for x in host]
        on_host.aggregate(host)
        with on_device.aggregate_init(here) as plan:
            plan()
        assert all(np.isfinite(standin.peek(x).astype(float)).all() for x in here)


def test_lists_of_arrays_on_both_devices_and_the_host(comm, rank, size, device):
    with mpiagg.AllReduce(comm) as aggregation:
        for kind in (np.float32, np.float16):
            on_host, here = np.full(9_000, rank, kind), device.from_host(np.full((9_000, 3), rank + 1, kind))
            aggregation.aggregate([on_host, here])
            assert on_host.tolist() == [(size - 1) / 2] * 9_000
            assert standin.peek(here).tolist() == [[(size + 1) / 2] * 3] * 9_000


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("bucket_bytes", [0, 2**25])
def test_gradients_of_parameters_on_a_device(comm, rank, device, overlapped, bucket_bytes):
    size = comm.size

    def gradients(step):
        random = np.random.default_rng((rank, step))
        return [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]

    items = [Item(device.from_host(np.full(shape, rank, np.float32))) for shape in SHAPES]
    on_host = [np.full(shape, rank, np.float32) for shape in SHAPES]
    with (
        mpiagg.DDP(Module(items), comm, bucket_bytes=bucket_bytes) as ddp,
        mpiagg.DDP(on_host, comm, bucket_bytes=bucket_bytes) as host_ddp,
    ):
        ddp.broadcast_parameters(size - 1)
        assert all((standin.peek(item.data) == size - 1).all() for item in items)
        sync = ddp.overlapped_sync_gradients if overlapped else ddp.sync_gradients
        for step in range(3):
            wanted = gradients(step)
            for item, gradient, view in zip(items, gradients(step), ddp.gradient_views(), strict=True):
                item.grad = device.from_host(gradient)
                if step == 1:  # in its place in the bucket already
                    np.copyto(view, item.grad)
                    item.grad = view
            if step == 2 and rank:
                items[1].grad, wanted[1] = None, None
            sync()
            host_ddp.sync_gradients(wanted)
            for item, expected in zip(items, wanted, strict=True):
                np.testing.assert_allclose(standin.peek(item.grad), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_buckets_lie_where_all_ranks_map_them(comm, rank, size, device, dtype):
    parameters = [device.from_host(np.zeros(20_000, dtype)) for _ in range(2)]
    with mpiagg.DDP(parameters, comm) as ddp:
        views = ddp.gradient_views()
        for view in views:
            np.copyto(view, device.from_host(np.full(20_000, rank, dtype)))
        standin.LOG.clear()
        ddp.sync_gradients()
        whats = [entry.what for entry in standin.LOG if entry.nbytes != 3]  # the flags of which gradients there are
        assert not {"out", "in", "on", "send"} & {entry.what for entry in standin.LOG if entry.memory != "host"}
        assert whats.count("fold") == (size > 1)
        assert size == 1 or not whats.count("kernel")
        assert all((standin.peek(view) == (size - 1) / 2).all() for view in views)


def test_a_gradient_on_another_device_is_refused_on_all_ranks(comm, rank, device):
    parameters = [Item(device.from_host(np.zeros(5)))]
    with mpiagg.DDP(Module(parameters), comm) as ddp:
        parameters[0].grad = np.zeros(5) if rank == 0 else device.from_host(np.zeros(5))
        error, words = (ValueError, "is on cpu") if rank == 0 else (mpiagg.MismatchError, "rank 0")
        with pytest.raises(error, match=words):
            ddp.sync_gradients()
    on_two = [device.from_host(np.zeros(5)), standin.device(1).from_host(np.zeros(5))]
    with pytest.raises(ValueError, match="one device, not on standin:0 and standin:1"):
        mpiagg.DDP(on_two, comm)


@pytest.mark.parametrize("selection", ["topk", "blockk", "threshold"])
def test_sparse_complex_numbers_lie_where_a_device_reads_them(comm, rank, device, bits, selection):
    arguments = {"threshold": 1.0} if selection == "threshold" else {"ratio": 0.03}
    with (
        mpiagg.Sparsified(comm, selection=selection, **arguments) as on_host,
        mpiagg.Sparsified(comm, selection=selection, **arguments) as on_device,
    ):
        random = np.random.default_rng(rank)
        host = [random.standard_normal(101) + 1j * random.standard_normal(101)]
        here = [device.from_host(host[0])]
        on_host.aggregate(host)
        on_device.aggregate(here)
        assert bits(standin.peek(here[0])) == bits(host[0])


@pytest.mark.parametrize("name", ["u8", "ErrorFeedback", "topk", "PowerSGD"])
def test_what_is_kept_is_there_before_the_first_step_in_another_stream(comm, rank, device, name):
    parameters = [Item(device.from_host(np.zeros((130, 90), np.float32)))]
    stream = device.stream()
    with AGGREGATIONS[name](comm) as aggregation, mpiagg.DDP(Module(parameters), comm, aggregation) as ddp:
        for _ in range(2):
            with stream:
                parameters[0].grad = device.from_host(np.full((130, 90), rank, np.float32))
                ddp.sync_gradients()


def test_gradients_that_were_missing_are_there_for_all_streams(comm, rank, size, device):
    parameters = [Item(device.from_host(np.zeros(10, np.float32)))]
    with mpiagg.DDP(Module(parameters), comm) as ddp:
        stream = device.stream()
        with stream:
            parameters[0].grad = None if rank else device.from_host(np.full(10, size, np.float32))
            ddp.sync_gradients()
        assert device.to_host(parameters[0].grad + 0).tolist() == [1.0] * 10


def test_backends_are_for_arrays_on_the_host(comm, device):
    with (
        mpiagg.AllReduce(comm, backend=print) as aggregation,
        pytest.raises(TypeError, match="a backend is for arrays of NumPy's"),
    ):
        aggregation.aggregate([device.from_host(np.ones(3))])


def test_a_list_is_on_one_device_beside_the_host(comm, device):
    with (
        mpiagg.AllReduce(comm) as aggregation,
        pytest.raises(ValueError, match="one device, and on the host, not on standin:0 and standin:1"),
    ):
        aggregation.aggregate([device.from_host(np.ones(3)), standin.device(1).from_host(np.ones(3))])


def test_ranks_without_batches_join_in_the_streams_of_the_others(comm, rank, size, device):
    parameters = [Item(device.from_host(np.zeros(10, np.float32)))]
    with mpiagg.DDP(Module(parameters), comm) as ddp, ddp.join():
        for _ in range(2 if rank == 0 else 1):
            parameters[0].grad = device.from_host(np.full(10, size, np.float32))
            ddp.sync_gradients()
    assert standin.peek(parameters[0].grad).tolist() == [1.0 if rank == 0 else size] * 10 or size == 1


@pytest.mark.usefixtures("device")
def test_a_plan_keeps_the_memory_that_it_works_on(comm):
    with mpiagg.AllReduce(comm) as aggregation:
        x = mpiagg.empty(20_000, comm=comm, device="standin")
        place = standin.device().address(x)
        with aggregation.aggregate_init([x]):
            del x
            gc.collect()
            for _ in range(3):
                assert standin.device().address(mpiagg.empty(20_000, comm=comm, device="standin")) != place
