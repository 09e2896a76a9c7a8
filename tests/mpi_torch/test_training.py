"""DDP trains a model on all ranks as one process does on the whole batch."""

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch_models import Net, assert_close, batch, optimizer_of, part, trained

import mpiagg

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
STEPS = 3
CAPS = [0, 300, 25 * 2**20]


def whole(model):
    return trained(model, [lambda copy, step=step: copy.loss(batch(step)) for step in range(STEPS)])


def same_everywhere(model):
    states = COMM.allgather([x.numpy().tobytes() for x in model.state_dict().values()])
    assert states == [states[0]] * SIZE


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(
    ("overlap", "method"),
    [(True, "sync_gradients"), (False, "sync_gradients"), (False, "overlapped_sync_gradients")],
    ids=["hooks", "serial", "overlapped"],
)
def test_ranks_together_train_like_one_on_the_whole_batch(overlap, method, to_none, cap):
    model = Net(seed=RANK)
    optimizer = optimizer_of(model)  # before DDP: the parameters stay the same objects
    before = dict(model.named_parameters())
    with mpiagg.DDP(model, bucket_bytes=cap, overlap=overlap) as ddp:
        ddp.broadcast_parameters()
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=to_none)
            model.loss(part(batch(step), RANK, SIZE)).backward()
            getattr(ddp, method)()
            optimizer.step()
    assert_close(model, whole(Net(seed=0)))
    same_everywhere(model)
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert parameter.requires_grad == (name != "scale")
    assert model.never.weight.grad is None
    assert model.scale.grad is None
    assert model.decoder.weight is model.embedding.weight


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_add_up_inside_no_sync(overlap, to_none):
    model = Net()
    optimizer = optimizer_of(model)
    with mpiagg.DDP(model, bucket_bytes=300, overlap=overlap) as ddp:
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=to_none)
            parts = [part(part(batch(step), RANK, SIZE), index, 3) for index in range(3)]
            sent = ddp.aggregation.bytes_sent
            with ddp.no_sync():
                for micro in parts[:-1]:
                    (model.loss(micro) / 3).backward()
                    ddp.sync_gradients()
            assert ddp.aggregation.bytes_sent == sent
            (model.loss(parts[-1]) / 3).backward()
            ddp.sync_gradients()
            optimizer.step()
    assert_close(model, whole(Net()))
    same_everywhere(model)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("divide_by_initial_size", [True, False])
@pytest.mark.parametrize("batches", [[2, 0, 3, 1], [1, 3, 2, 3], [0, 0, 0, 0], [2, 2, 2, 2]], ids=str)
def test_ranks_with_fewer_batches_join(batches, divide_by_initial_size, overlap):
    model = Net()
    optimizer = optimizer_of(model)
    with mpiagg.DDP(model, bucket_bytes=300, overlap=overlap) as ddp:
        with ddp.join(divide_by_initial_size=divide_by_initial_size):
            for step in range(batches[RANK]):
                optimizer.zero_grad()
                model.loss(batch(10 * RANK + step)).backward()
                ddp.sync_gradients()
                optimizer.step()

        def loss(copy, step):
            active = [rank for rank in range(SIZE) if batches[rank] > step]
            each = [copy.loss(batch(10 * rank + step)) for rank in active]
            return sum(each) / (SIZE if divide_by_initial_size else len(active))

        steps = max(batches[:SIZE])
        assert_close(model, trained(Net(), [lambda copy, step=step: loss(copy, step) for step in range(steps)]))
        same_everywhere(model)
        # Afterwards all ranks train together again.
        model.loss(part(batch(0), RANK, SIZE)).backward()
        ddp.sync_gradients()


AGGREGATIONS = {
    "ring": lambda: mpiagg.AllReduce(algorithm="ring"),
    "native": lambda: mpiagg.AllReduce(algorithm="native"),
    "divide before": lambda: mpiagg.AllReduce(algorithm="tree", divide_before=True),
    "server": lambda: mpiagg.ParameterServer(root=SIZE - 1),
}


@pytest.mark.parametrize("make", AGGREGATIONS.values(), ids=AGGREGATIONS)
def test_any_averaging_aggregation_gives_the_same_training(make):
    model = Net()
    optimizer = optimizer_of(model)
    with make() as aggregation, mpiagg.DDP(model, aggregation=aggregation, bucket_bytes=300) as ddp:
        for step in range(STEPS):
            optimizer.zero_grad()
            model.loss(part(batch(step), RANK, SIZE)).backward()
            ddp.sync_gradients()
            optimizer.step()
    assert_close(model, whole(Net()))
    same_everywhere(model)


class Slow(mpiagg.Aggregation):
    """Aggregates when a bucket is launched, and waits there for the other ranks."""

    def aggregate(self, tensors):
        for x in tensors:
            mpiagg.allreduce(x, "avg", out=x, comm=self.comm)


@pytest.mark.parametrize(
    "make",
    [
        mpiagg.AllReduce,
        Slow,
        lambda: mpiagg.AllReduce(wire="bf16"),
        lambda: mpiagg.PowerSGD(rank=1),
        lambda: mpiagg.Sparsified(ratio=0.3),
    ],
    ids=["AllReduce", "without plans", "wire", "PowerSGD", "Sparsified"],
)
def test_overlapped_has_the_bits_of_serial(make):
    results = []
    for overlap in (True, False):
        model = Net(dtype=torch.float32)
        optimizer = optimizer_of(model)
        with (
            make() as aggregation,
            mpiagg.DDP(model, aggregation=aggregation, bucket_bytes=100, overlap=overlap) as ddp,
        ):
            for step in range(STEPS):
                optimizer.zero_grad()
                model.loss(part(batch(step), RANK, SIZE)).backward()
                ddp.sync_gradients()
                optimizer.step()
        same_everywhere(model)
        results.append([x.numpy().tobytes() for x in model.state_dict().values()])
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_dtypes(dtype):
    model = torch.nn.ParameterList([torch.ones(3, 2, dtype=dtype), torch.ones((), dtype=dtype)])
    with mpiagg.DDP(model) as ddp:
        for _ in range(2):
            ddp.module.zero_grad()
            sum((parameter * (RANK + 1)).sum().abs() for parameter in model).backward()
            ddp.sync_gradients()
            for parameter in model:
                assert parameter.grad.dtype == dtype
                expected = torch.tensor((SIZE + 1) / 2, dtype=dtype).expand(parameter.shape)
                torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=0)


def test_a_model_of_several_dtypes():
    model = torch.nn.ParameterList([torch.ones(3, dtype=dtype) for dtype in (torch.float32, torch.float64)] * 2)
    with mpiagg.DDP(model, bucket_bytes=24) as ddp:
        sum((parameter * RANK).sum() for parameter in model).backward()
        ddp.sync_gradients()
        assert all((parameter.grad == (SIZE - 1) / 2).all() for parameter in model)


def test_parameters_of_other_layouts():
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    assert not model.weight.is_contiguous()
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((4, 3, 5, 5), np.float32))
    with torch.no_grad():
        model.weight.fill_(RANK)
    with mpiagg.DDP(model, init_sync=False) as ddp:
        ddp.broadcast_parameters(SIZE - 1)
        assert (model.weight == SIZE - 1).all()
        for _ in range(2):
            model.zero_grad()
            ddp(x * RANK).sum().backward()
            ddp.sync_gradients()
        torch.testing.assert_close(
            model.weight.grad[2], (x * (SIZE - 1) / 2).unfold(2, 3, 1).unfold(3, 3, 1).sum((0, 2, 3))
        )
