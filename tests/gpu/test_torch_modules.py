"""DDP of torch modules on one GPU that all ranks share: what one process learns on the host.

test_gpu_ranks.py starts the ranks, where torch knows the GPU.
"""

import warnings

import kernel_checks as checks
import pytest

import mpiagg

checks.gpu()
with warnings.catch_warnings():
    warnings.simplefilter("default")  # what torch has to say about its surroundings is no failure
    torch = pytest.importorskip("torch")
    able = torch.cuda.is_available()
if not able:
    pytest.skip("torch knows no GPU", allow_module_level=True)

pytestmark = [pytest.mark.mpi, pytest.mark.gpu, pytest.mark.filterwarnings("default")]

STEPS = 3


@pytest.fixture
def comm():
    from mpi4py import MPI

    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    duplicate.Free()


@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cap", [0, 300, 25 * 2**20])
def test_ranks_together_train_like_one_on_the_host(comm, side_stream, overlap, cap):
    from torch_models import Net, batch, optimizer_of, part, trained

    model = Net(seed=comm.rank).to("cuda")
    optimizer = optimizer_of(model)
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), mpiagg.DDP(model, comm, bucket_bytes=cap, overlap=overlap) as ddp:
        ddp.broadcast_parameters()
        for step in range(STEPS):
            optimizer.zero_grad()
            model.loss(tuple(x.to("cuda") for x in part(batch(step), comm.rank, comm.size))).backward()
            ddp.sync_gradients()
            optimizer.step()
    torch.cuda.synchronize()
    wanted = trained(Net(seed=0), [lambda copy, step=step: copy.loss(batch(step)) for step in range(STEPS)])
    for (name, x), y in zip(model.state_dict().items(), wanted.state_dict().values(), strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=0, atol=1e-9, msg=lambda words, name=name: f"{name}: {words}")
    states = comm.allgather([x.cpu().numpy().tobytes() for x in model.state_dict().values()])
    assert states == [states[0]] * comm.size


@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_ranks_train_like_one_on_the_host(comm, stage, fused, side_stream):
    from torch_models import Net, batch, part

    def losses(model, index, count, device):
        for step in range(2 * STEPS):
            tokens, rare, wanted = part(batch(step), index, count)
            yield model.loss([x.to(device) for x in (tokens, torch.ones_like(rare), wanted)])

    alone = Net(seed=0)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for loss in losses(alone, 0, 1, "cpu"):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model = Net(seed=comm.rank).to("cuda")
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with (
        torch.cuda.stream(stream),
        mpiagg.Sharded(
            model,
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=fused),
            stage=stage,
            comm=comm,
            bucket_bytes=300,
        ) as sharded,
    ):
        for step, loss in enumerate(losses(model, comm.rank, comm.size, "cuda")):
            loss.backward()
            sharded.step(wait=step % 2 == 0)
            if step == STEPS:
                sharded.load_state_dict(sharded.state_dict())
        found = sharded.weights()
    wanted = dict(alone.named_parameters())
    for name, x in found.items():
        y = wanted[name].detach()
        torch.testing.assert_close(
            torch.from_numpy(x), y, rtol=0, atol=1e-9, msg=lambda words, name=name: f"{name}: {words}"
        )


@pytest.mark.parametrize("cap", [0, 25 * 2**20])
def test_gradients_that_come_in_several_streams(comm, cap):
    layers = torch.nn.ModuleList(torch.nn.Linear(700, 300, dtype=torch.float64) for _ in range(6)).to("cuda")
    streams, present = [torch.cuda.Stream() for _ in range(2)], torch.cuda.current_stream()
    ones = torch.ones(5, 700, dtype=torch.float64, device="cuda")
    with mpiagg.DDP(layers, comm, bucket_bytes=cap) as ddp:
        for step in range(STEPS):
            layers.zero_grad(set_to_none=step != 1)
            found = []
            for number, layer in enumerate(layers):
                stream = streams[number % 2]
                stream.wait_stream(present)
                with torch.cuda.stream(stream):  # in which autograd computes the gradients, too
                    found.append(layer(ones * (comm.rank + step)).sum())
            for stream in streams:
                present.wait_stream(stream)
            sum(found).backward()
            ddp.sync_gradients()
            mean = 5 * ((comm.size - 1) / 2 + step)
            assert all((layer.weight.grad == mean).all() and (layer.bias.grad == 5).all() for layer in layers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_every_dtype_are_averaged(comm, dtype):
    model = torch.nn.Linear(300, 200, device="cuda", dtype=dtype)
    with mpiagg.DDP(model, comm) as ddp:
        ddp.broadcast_parameters()
        for step in range(STEPS):
            for parameter in model.parameters():
                parameter.grad = None
            sum((parameter * (comm.rank + step)).sum() for parameter in model.parameters()).backward()
            ddp.sync_gradients()
            mean = torch.tensor((comm.size - 1) / 2 + step, dtype=dtype)
            assert all((parameter.grad.cpu() == mean).all() for parameter in model.parameters())
