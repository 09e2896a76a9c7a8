"""Sharded training of modules of torch's: the result of DDP and the same optimizer on every rank."""

import copy
import gc
import io
import weakref

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from mpi4py import MPI
from support import refused

import mpiagg
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
STORED = {"stage 1": (1, True), "stage 2": (2, True), "once on a node": (3, True), "divided": (3, False)}
STEPS, WORDS = 3, 11


class Language(torch.nn.Module):
    """A small model of words: the last weight is the embedding's, a layer is frozen, some parameters are its own."""

    def __init__(self, frozen=True):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, 8)
        self.places = torch.nn.Parameter(torch.randn(5, 8))
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 13), torch.nn.Tanh(), torch.nn.Linear(13, 8)) for _ in range(3)
        )
        self.between = torch.nn.Linear(8, 8).requires_grad_(not frozen)
        self.norm = torch.nn.BatchNorm1d(5)
        self.scales = torch.nn.ParameterDict({"between": torch.rand(8), "all": torch.nn.ParameterList([torch.ones(8)])})
        self.head = torch.nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x, blocks=3):
        x = self.embedding(x) + self.places
        for block in self.blocks[:blocks]:
            x = x + block(x)
        return self.words(x)

    def words(self, x):
        x = self.norm(self.between(x) * self.scales["between"]) + self.places
        return self.head(x * self.scales["all"][0])


def made(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return Language().to(dtype)


def batch(step, rank=RANK):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(WORDS, (4, 5), generator=generator), torch.randint(WORDS, (4, 5), generator=generator)


def loss(found, wanted):
    return torch.nn.functional.cross_entropy(found.reshape(-1, WORDS).double(), wanted.reshape(-1))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": adamw,
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2),
}


def plain(make=adamw, steps=STEPS, clip=None, blocks=3):
    module = made()
    optimizer = make(list(module.parameters()))
    norms = []
    with (
        mpiagg.AllReduce(algorithm="direct") as aggregation,
        mpiagg.DDP(module, aggregation=aggregation, broadcast_buffers=False) as ddp,
    ):
        for step in range(steps):
            x, y = batch(step)
            optimizer.zero_grad()
            loss(ddp(x, blocks), y).backward()
            if clip is not None:
                norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), clip)))
            optimizer.step()
    return {name: x.detach().numpy().copy() for name, x in module.named_parameters()}, norms


def sharded(stored, make=adamw, module=None, **keywords):
    stage, share = STORED[stored]
    given = {"bucket_bytes": 2000, "algorithm": "direct", **keywords}
    return mpiagg.Sharded(made(seed=RANK) if module is None else module, make, stage=stage, share=share, **given)


def train(training, steps=range(STEPS), blocks=3, **keywords):
    norms = []
    for step in steps:
        x, y = batch(step)
        loss(training(x, blocks), y).backward()
        norms.append(training.step(**keywords))
    return norms


def equal(found, expected):
    return all(found[name].tobytes() == expected[name].tobytes() for name in found)


def close(found, expected):
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("name", "split"), [("sgd", "tensors"), ("adamw", "elements"), ("rmsprop", "elements")])
def test_the_result_is_that_of_ddp(name, stored, split):
    expected, _ = plain(OPTIMIZERS[name])
    with sharded(stored, OPTIMIZERS[name], split=split) as training:
        same = list(training.module.parameters())
        assert train(training) == [None] * STEPS
        found = training.weights()
        assert all(x is y for x, y in zip(same, training.module.parameters(), strict=True))
        assert all(x.grad is None for x in same)
        assert found.keys() == (
            expected.keys() if training.stage == 3 else expected.keys() - {"between.weight", "between.bias"}
        )
        assert equal(found, expected)
    assert not equal(found, {name: x.detach().numpy() for name, x in made().named_parameters()})


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("blocks", [3, 2])
def test_a_submodule_waits_for_its_parameters(stored, blocks):
    """Those of a block that is not used arrive before they are updated again."""
    expected, _ = plain(steps=2 * STEPS, blocks=blocks)
    with sharded(stored) as training:
        train(training, blocks=blocks)
        train(training, range(STEPS, 2 * STEPS), blocks=blocks, wait=False)
        training.wait()
        if training.stage < 3:
            assert equal({name: x.detach().numpy() for name, x in training.module.named_parameters()}, expected)
        assert equal(training.weights(), expected)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("prefetch", [0, 3])
def test_how_many_are_gathered_ahead_changes_nothing(stored, prefetch):
    expected, _ = plain()
    with sharded(stored, prefetch=prefetch) as training:
        train(training)
        assert equal(training.weights(), expected)


@pytest.mark.parametrize("stored", STORED)
def test_blocks_are_gathered_together(stored):
    expected, _ = plain()
    module = made()
    with sharded(stored, module=module, layers=list(module.blocks)) as training:
        train(training)
        assert equal(training.weights(), expected)


@pytest.mark.parametrize("stored", STORED)
def test_the_module_computes_with_what_was_trained(stored):
    expected, _ = plain()
    whole = made()
    with torch.no_grad():
        for name, x in whole.named_parameters():
            x.copy_(torch.from_numpy(expected[name]))
    x, _ = batch(7)
    with sharded(stored) as training:
        train(training)
        training.module.eval()
        whole.eval()
        whole.load_state_dict(dict(training.module.named_buffers()), strict=False)
        with torch.no_grad():
            np.testing.assert_allclose(training(x).numpy(), whole(x).numpy(), rtol=1e-12)


@pytest.mark.parametrize("stored", STORED)
def test_gradients_are_clipped_by_the_norm_of_all(stored):
    expected, norms = plain(clip=0.1)
    assert min(norms) > 0.1
    with sharded(stored, clip_norm=0.1) as training:
        np.testing.assert_allclose(train(training), norms, rtol=1e-9)
        close(training.weights(), expected)


@pytest.mark.parametrize("stored", STORED)
def test_what_no_rank_has_used_stays_as_it_is(stored):
    expected, _ = plain(blocks=2)
    with sharded(stored) as training:
        train(training, blocks=2)
        assert equal(training.weights(), expected)
        before, other = training.weights(), 3 if RANK == 0 or training._gathering else 2
        loss(training(batch(9)[0], other), batch(9)[1]).backward()  # if it may be, one rank alone has a gradient
        training.step()
        after = training.weights()
        assert (before["blocks.2.0.weight"] != after["blocks.2.0.weight"]).any()


@pytest.mark.parametrize("stored", STORED)
def test_gradients_of_several_passes_add_up(stored):
    module = made()
    optimizer = adamw(module.parameters())
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(SIZE):
            for half in range(2):
                x, y = batch(10 * step + half, rank)
                (loss(module(x), y) / SIZE).backward()
        optimizer.step()
    expected = {name: x.detach().numpy() for name, x in module.named_parameters()}
    with sharded(stored) as training:
        for step in range(2):
            with training.no_sync():
                x, y = batch(10 * step)
                loss(training(x), y).backward()
            x, y = batch(10 * step + 1)
            loss(training(x), y).backward()
            training.step()
        close(training.weights(), expected)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_trained_in_float32(stored, half):
    if half == torch.bfloat16:
        pytest.importorskip("ml_dtypes")
    with sharded(stored, module=made(dtype=half), master_dtype=torch.float32) as training:
        assert all(x.dtype == torch.float32 for x in training.optimizer.param_groups[0]["params"])
        train(training)
        assert training.memory()["masters"] > 0
        state, found = training.state_dict()["tensors"], training.weights()
    for name, part in state.items():
        assert part["values"].dtype == (np.float32 if not name.startswith("between") else found[name].dtype)
        own = found[name].reshape(-1)[part["start"] : part["stop"]]
        assert part["values"].astype(own.dtype).tobytes() == own.tobytes()
        assert np.isfinite(own.astype(np.float32)).all()
    assert (found["places"] != made(dtype=half).places.detach().float().numpy().astype(found["places"].dtype)).any()


def test_a_submodule_may_be_frozen_in_part():
    def partly(seed):
        torch.manual_seed(seed)
        module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        for each in module:
            each.weight.requires_grad_(False)
        return module

    module, x = partly(0), torch.ones(2, 4)
    optimizer = adamw(module.parameters())
    with mpiagg.Sharded(partly(RANK), adamw, stage=3, share=False, prefetch=0, bucket_bytes=0) as training:
        for _ in range(2):
            for each in module, training:
                each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            training.step()
        found = training.weights()
    for name, y in module.named_parameters():
        np.testing.assert_allclose(found[name], y.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_activation_checkpoints_gather_again():
    class Checkpointed(Language):
        def forward(self, x, blocks=3):
            x = self.embedding(x) + self.places
            for block in self.blocks[:blocks]:
                x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.words(x)

    expected, _ = plain()
    torch.manual_seed(0)
    with sharded("divided", module=Checkpointed().double()) as training:
        train(training)
        close(training.weights(), expected)


def test_groups_are_made_by_place():
    def make(parameters):
        return torch.optim.AdamW([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": 0.01}])

    expected, _ = plain(lambda parameters: make([x for x in parameters if x.requires_grad]))
    with sharded("stage 2", make) as training:
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 10)
        for step in range(STEPS):
            train(training, [step])
            scheduler.step()
        assert equal(training.weights(), expected)


def test_muon_has_whole_matrices():
    if not hasattr(torch.optim, "Muon"):  # which came with torch 2.9
        return
    torch.manual_seed(0)
    module, other = (torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(3))) for _ in range(2))
    other.load_state_dict(module.state_dict())
    x = torch.ones(4, 6)

    def make(parameters):
        return torch.optim.Muon([x for x in parameters if x.numel()] or [torch.nn.Parameter(torch.zeros(1, 1))], lr=0.1)

    refused(
        ValueError, "Muon needs whole tensors", mpiagg.Sharded, other, lambda _: torch.optim.Muon([module[0].weight])
    )
    optimizer = torch.optim.Muon(module.parameters(), lr=0.1)
    with mpiagg.Sharded(other, make, stage=2, split="tensors") as training:
        for _ in range(2):
            for each in module, training:
                each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            training.step()
        for y, z in zip(module.parameters(), other.parameters(), strict=True):
            np.testing.assert_allclose(y.detach().numpy(), z.detach().numpy(), rtol=1e-4, atol=1e-5)


# -- what modules compute with, and when


class Attention(torch.nn.Module):
    """Layers of torch's that compute with the parameters of those within without calling these."""

    def __init__(self, frozen=False):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).requires_grad_(not frozen)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.last = torch.nn.utils.weight_norm(torch.nn.Linear(8, 3))

    def forward(self, x):
        x = self.first(x)
        x = x + self.attention(x, x, x)[0]
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def attention(**keywords):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = Attention(**keywords).double()
        for each in module.parameters():
            torch.nn.init.uniform_(each, -0.5, 0.5)
        return module


def inputs(step):
    return torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(10 * step + RANK), dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_layers_that_read_the_parameters_of_those_within(stored, listed, frozen):
    alone = attention(frozen=frozen)
    optimizer = adamw([x for x in alone.parameters() if x.requires_grad])
    with mpiagg.AllReduce(algorithm="direct") as aggregation, mpiagg.DDP(alone, aggregation=aggregation) as ddp:
        for step in range(STEPS):
            optimizer.zero_grad()
            ddp(inputs(step)).square().mean().backward()
            optimizer.step()
    module = attention(frozen=frozen)
    layers = list(module.blocks) if listed else None
    with sharded(stored, module=module, layers=layers) as training:
        for step in range(STEPS):
            training(inputs(step)).square().mean().backward()
            training.step(wait=False)
        alone.eval()
        module.eval()
        for context in (torch.no_grad, torch.enable_grad):  # without gradients a layer takes another way
            with context():
                found, wanted = (each(inputs(9)).detach().numpy() for each in (training, alone))
                np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
        close(training.weights(), {name: x.detach().numpy() for name, x in alone.named_parameters()})


class Reader(torch.nn.Module):
    """Computes with the parameters of a module within, which it does not call."""

    def __init__(self):
        super().__init__()
        self.within = torch.nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return torch.tanh(x @ self.within.weight)


class Scaled(torch.nn.Module):
    """Computes with a list of parameters, which has no ``forward``."""

    def __init__(self):
        super().__init__()
        self.scales = torch.nn.ParameterList([torch.full((8,), 2.0)])
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x * self.scales[0])


@pytest.mark.parametrize("bucket_bytes", [0, 2000])
def test_parameters_in_a_list_are_there_when_their_module_computes(bucket_bytes):
    x = torch.ones(2, 8)
    torch.manual_seed(0)
    module = Scaled()
    wanted = module(x).detach().numpy()
    with sharded("divided", module=module, prefetch=0, bucket_bytes=bucket_bytes) as training:
        for _ in range(2):
            found = training(x)
            np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-5)
            found.sum().backward()
            training.zero_grad()


def test_a_listed_layer_has_all_its_parameters_when_it_computes():
    x = torch.ones(2, 8)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), Reader(), torch.nn.Linear(8, 8), Reader())
    wanted = module(x).detach().numpy()
    layers = [module[1], module[3]]
    with sharded("divided", module=module, layers=layers, prefetch=0, bucket_bytes=0) as training:
        for _ in range(2):
            found = training(x)
            np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-5)
            found.sum().backward()
            training.zero_grad()


class Part(torch.nn.Module):
    """Returns something made of its parameter."""

    def __init__(self, make):
        super().__init__()
        self.weight, self.make = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.float64)), make

    def forward(self, x):
        return self.make(self.weight, x)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda weight, x: weight[: len(x)], "returns a view of its parameters"),
        (lambda weight, x: {1, weight @ x}, "in an object that"),
    ],
)
def test_what_could_be_undefined_is_an_error_where_parameters_make_room(make, match):
    with sharded("divided", module=Part(make)) as training, pytest.raises(mpiagg.PlanError, match=match):
        training(torch.ones(8, dtype=torch.float64))


def test_copies_of_a_module_are_modules_of_their_own():
    expected, _ = plain()
    with sharded("stage 2") as training:
        train(training, wait=False)
        training.wait()
        other = copy.deepcopy(training.module)
        assert equal({name: x.detach().numpy() for name, x in other.named_parameters()}, expected)
        saved = io.BytesIO()
        torch.save(training.module, saved)
        before = training.weights()
        if RANK == 0:  # alone: no hook of the copy meets the other ranks
            loss(other(batch(0)[0]), batch(0)[1]).backward()
            assert all(x.grad is not None for x in other.parameters() if x.requires_grad)
        assert equal(training.weights(), before)


@pytest.mark.parametrize("stored", STORED)
def test_gradients_are_discarded(stored):
    expected, _ = plain()
    with sharded(stored) as training:
        for step in range(STEPS):
            loss(training(batch(9)[0], 3), batch(9)[1]).backward()
            training.zero_grad()
            assert all(x.grad is None for x in training.module.parameters())
            train(training, [step])
        assert equal({name: x for name, x in training.weights().items() if "norm" not in name}, expected)


def test_gradients_that_another_one_takes_are_refused():
    module = made()
    with sharded("stage 1", module=module):
        refused(ValueError, "another DDP or Sharded trains", sharded, "stage 2", module=module)
        refused(ValueError, "another DDP or Sharded trains", mpiagg.DDP, module)
    with mpiagg.DDP(module):
        refused(ValueError, "another DDP or Sharded trains", sharded, "stage 2", module=module)
    with sharded("stage 2", module=module) as training:
        train(training)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["buffer", "frozen", "sparse"])
def test_ranks_that_have_other_modules_are_told(stage, kind):
    module = torch.nn.Linear(3, 2)
    if kind == "frozen":
        module.more = torch.nn.Parameter(torch.zeros(3 + RANK), requires_grad=False)
    else:
        more = torch.zeros(3 + RANK) if kind == "buffer" else torch.zeros(3)
        module.register_buffer("more", more.to_sparse() if kind == "sparse" and RANK == 0 else more)
    if SIZE == 1 and kind != "sparse":  # alone there is nobody to differ
        mpiagg.Sharded(module, adamw, stage=stage).free()
        return
    with pytest.raises(TypeError if kind == "sparse" and RANK == 0 else mpiagg.MismatchError):
        mpiagg.Sharded(module, adamw, stage=stage)


def test_an_optimizer_may_leave_parameters_out():
    with sharded("stage 2", lambda parameters: adamw(parameters[1:])) as training:
        before = training.weights()
        train(training)
        training.load_state_dict(training.state_dict())
        train(training)
        after = training.weights()
        assert (before["places"] == after["places"]).all()
        assert (before["embedding.weight"] != after["embedding.weight"]).any()


# -- states


@pytest.mark.parametrize("stored", STORED)
def test_a_checkpoint_is_for_any_number_of_ranks_stage_and_units(stored, tmp_path):
    folder = COMM.bcast(str(tmp_path / "saved"))
    with sharded(stored) as training:
        train(training, range(2))
        mpiagg.save_checkpoint(folder, training.state_dict())
        saved = training.weights()
    with sharded(stored, lambda parameters: torch.optim.AdamW(parameters, lr=0.5, betas=(0.5, 0.5))) as training:
        training.load_state_dict(mpiagg.load_checkpoint(folder))
        train(training, range(2, STEPS))
        assert equal(training.weights(), plain()[0])
    if training.stage < 3:
        saved |= {name: x.detach().numpy() for name, x in made().named_parameters() if name not in saved}
    few = COMM.Split(RANK < (SIZE + 1) // 2, RANK)
    stage, share = STORED[
        "divided" if stored == "once on a node" else "once on a node" if stored == "divided" else "stage 2"
    ]
    units = {"bucket_bytes": 0} if few.size != SIZE else {"bucket_bytes": 2000}
    module = made()
    with mpiagg.Sharded(module, adamw, stage=stage, share=share, comm=few, algorithm="direct", **units) as training:
        training.load_state_dict(mpiagg.load_checkpoint(folder, few))
        found = training.weights()
        assert equal(found, saved)
        for index, shard in training._shards.items():
            if shard.numel():
                assert float(training.optimizer.state[shard]["step"]) == 2, index
        assert int(module.norm.num_batches_tracked) == 2
    few.Free()
    COMM.Barrier()


def test_states_that_do_not_fit_are_refused():
    with sharded("stage 2") as training:
        train(training, range(1))
        before, state = training.weights(), training.state_dict()
        optimizer = state["optimizer"]
        short = {**state["buffers"], "norm.running_mean": np.zeros(1)}
        for wrong, words in [
            ({**state, "buffers": {}}, "has not the buffers"),
            ({**state, "buffers": short}, "buffer norm.running_mean is"),
            ({**state, "optimizer": {**optimizer, "name": "SGD"}}, "the state is not one of AdamW"),
            ({**state, "optimizer": {**optimizer, "groups": []}}, "groups of parameters"),
            *(
                ({**state, "optimizer": {**optimizer, "groups": [group]}}, f"{key} of an optimizer cannot be")
                for key, value in (
                    *(("betas", "ab"), ("betas", [0.9]), ("betas", [0.9, None]), ("lr", None), ("lr", True)),
                    *(("amsgrad", [1]), ("amsgrad", "yes"), ("maximize", 1.0), ("params", [])),
                )
                for group in [{"initial_lr": 1.0, **optimizer["groups"][0], key: value}]
            ),
        ]:
            refused(ValueError, words, training.load_state_dict, wrong)
        assert equal(training.weights(), before)
        assert training.state_dict()["optimizer"] == optimizer


@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="torch has no Adafactor yet")
@pytest.mark.parametrize("numbers", [((None, 1e-3), (1e-30, 1e-3)), ((1e-30, 1e-3), (None, 1e-3))])
def test_settings_may_be_those_that_torch_sets_itself(numbers):
    def make(eps):
        return mpiagg.Sharded(made(), lambda given: torch.optim.Adafactor(given, eps=eps), split="tensors")

    with make(numbers[0]) as one, make(numbers[1]) as other:
        assert one.optimizer.param_groups[0]["eps"] != other.optimizer.param_groups[0]["eps"]
        other.load_state_dict(one.state_dict())
        assert one.optimizer.param_groups[0]["eps"] == other.optimizer.param_groups[0]["eps"]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("step", ["on_gradient", "broadcast_buffers"])
def test_parameters_are_where_they_were_if_sharded_cannot_be_made(step, stored, monkeypatch):
    def fail(*_):
        raise MemoryError("no memory for hooks")

    stage, share = STORED[stored]
    module = made()
    before = [(x.data_ptr(), x.detach().clone()) for x in module.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr(f"mpiagg.sharded.torch_sharded.{step}", fail)
        with pytest.raises(MemoryError, match="for hooks"):
            mpiagg.Sharded(module, adamw, stage=stage, share=share)
    after = zip(module.parameters(), before, strict=True)
    assert all(x.data_ptr() == place and x.equal(old) for x, (place, old) in after)
    with mpiagg.Sharded(module, adamw, stage=stage, share=share, algorithm="direct") as training:
        train(training)


def test_what_adafactor_keeps_of_whole_matrices_is_saved(tmp_path):
    folder = COMM.bcast(str(tmp_path / "saved"))

    def make(parameters):
        return torch.optim.Adafactor(parameters, lr=0.1)

    with sharded("stage 2", make, split="tensors") as training, sharded("stage 1", make, split="tensors") as other:
        train(training, range(2))
        mpiagg.save_checkpoint(folder, training.state_dict())
        other.load_state_dict(mpiagg.load_checkpoint(folder))
        train(training, range(2, 4))
        train(other, range(2, 4))
        close(other.weights(), training.weights())
    COMM.Barrier()


class Rows(torch.optim.Optimizer):
    """Steps by the mean of the squares of each row, as CAME and some Adafactors keep it: in a vector."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for x in self.param_groups[0]["params"]:
            if x.grad is not None and x.dim() > 1:
                row = self.state[x].setdefault("row", torch.ones(len(x), dtype=x.dtype))
                row.lerp_(x.grad.square().flatten(1).mean(1), 0.5)
                x.sub_(0.1 * x.grad / row.sqrt().view(-1, *[1] * (x.dim() - 1)))


def test_states_of_rows_are_saved_and_loaded():
    with sharded("stage 2", Rows, split="tensors") as training, sharded("stage 1", Rows, split="tensors") as other:
        train(training, range(2))
        other.load_state_dict(training.state_dict())
        assert other.memory()["state"] == training.memory()["state"]
        train(training, range(2, 4))
        train(other, range(2, 4))
        close(other.weights(), training.weights())


# -- errors


@pytest.mark.parametrize("stored", ["stage 1", "stage 2", "once on a node"])
def test_two_passes_before_a_step_are_an_error_on_all(stored):
    with sharded(stored) as training:
        before = training.weights()
        if training._gathering:
            return  # forward passes are collective between nodes
        for _ in range(1 + (RANK == 0)):
            loss(training(batch(0)[0]), batch(0)[1]).backward()
        error = (mpiagg.PlanError, "got a gradient twice") if RANK == 0 else (mpiagg.MismatchError, "rank 0 raised")
        refused(*error, training.step)
        assert equal(training.weights(), before)
        train(training)
        assert equal(training.weights(), plain()[0])


@pytest.mark.parametrize("stored", STORED)
def test_a_pass_inside_no_sync_comes_before_the_one_that_sends(stored):
    with sharded(stored) as training:
        before = training.weights()
        loss(training(batch(0)[0]), batch(0)[1]).backward()
        with training.no_sync():
            loss(training(batch(1)[0]), batch(1)[1]).backward()
        refused(mpiagg.PlanError, "got a gradient twice", training.step)
        assert equal(training.weights(), before)
        train(training)
        assert equal(training.weights(), plain()[0])


def test_a_parameter_that_has_made_room_too_early_is_an_error():
    """Two layers are computed, and their gradients come in the order of the forward pass."""

    class Crossed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.first(x), self.second(x)

    with mpiagg.Sharded(Crossed(), adamw, stage=3, share=False, bucket_bytes=0, prefetch=0) as training:
        first, second = training(torch.ones(2, 4))
        gathered = training._gathering
        (first.sum() + second.sum()).backward()  # the last one's first: in order
        training.step()
        first, second = training(torch.ones(2, 4))
        first = first.sum()
        gathered.bring([1], backward=True)
        gathered.bring = lambda *_, **__: None  # as if nobody had gathered it again
        first.backward()
        del gathered.bring
        refused(mpiagg.PlanError, "made room for other parameters", training.step)


class Grows(torch.nn.Linear):
    """A layer that resizes a buffer, as those do that observe values to quantise them."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("seen", torch.full((1,), RANK + 1, dtype=torch.bfloat16))
        self.register_buffer("odd", torch.tensor([RANK == 0, RANK > 0]))

    def forward(self, x):
        self.seen.resize_(self.seen.numel() + 1)[-1] = 10 + RANK
        return super().forward(x)


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_can_be_resized(stage):
    pytest.importorskip("ml_dtypes")
    with mpiagg.Sharded(Grows(), adamw, stage=stage) as training:
        seen, odd = training.module.seen, training.module.odd
        assert (seen.tolist(), odd.tolist()) == ([1], [True, False])
        for _ in range(2):
            training(torch.ones(1, 3)).sum().backward()
            training.step()
        state = training.state_dict()
        assert seen.tolist() == [1, 10 + RANK, 10 + RANK]
        with torch.no_grad():
            seen.zero_()
            odd.logical_not_()
        training.load_state_dict(state)
        assert (seen.tolist(), odd.tolist()) == ([1, 10 + RANK, 10 + RANK], [True, False])
        seen.resize_(7)
        odd.resize_(7)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (TypeError, "must be a function", {"optimizer": None}),
        (TypeError, "has made a list", {"optimizer": list}),
        (ValueError, "no parameters that require", {"module": torch.nn.Linear(2, 2).requires_grad_(False)}),
        (ValueError, "is not initialised", {"module": torch.nn.LazyLinear(2)}),
        (TypeError, "on the CPU or a CUDA device", {"module": torch.nn.Linear(2, 2, device="meta")}),
        (
            ValueError,
            "weight is expanded",
            {"module": torch.nn.ParameterDict({"weight": torch.ones(1, 3).expand(2, 3)})},
        ),
        (ValueError, "layers must be submodules", {"layers": [torch.nn.Linear(1, 1)], "stage": 3}),
        (ValueError, "layers must be submodules", {"layers": 5, "stage": 3}),
        (ValueError, "unknown split", {"split": "rows"}),
        (TypeError, "real numbers", {"module": torch.nn.Linear(2, 2, dtype=torch.complex64)}),
    ],
)
def test_bad_arguments(error, words, arguments):
    given = {"module": torch.nn.Linear(2, 2), "optimizer": adamw, **arguments}
    refused(error, words, lambda: mpiagg.Sharded(**given))


def test_ranks_that_disagree():
    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.1 + RANK)

    if SIZE > 1:  # one rank agrees with itself
        refused(mpiagg.MismatchError, "ranks disagree", mpiagg.Sharded, torch.nn.Linear(2, 2), make)
        refused(mpiagg.MismatchError, "ranks disagree", mpiagg.Sharded, torch.nn.Linear(2, 2 + RANK), adamw)


def test_an_optimizer_that_fails_on_one_rank_is_an_error_on_all():
    with sharded("stage 2") as training:
        step = training.optimizer.step

        def fails():
            step()
            if RANK == 0:
                raise RuntimeError("no more")

        training.optimizer.step = fails
        loss(training(batch(0)[0]), batch(0)[1]).backward()
        error = (RuntimeError, "no more") if RANK == 0 else (mpiagg.MismatchError, "rank 0 raised RuntimeError")
        refused(*error, training.step)


# -- memory


@pytest.mark.parametrize("stored", STORED)
def test_a_rank_has_its_part_of_everything(stored):
    module = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(6)))
    nbytes = sum(4 * x.numel() for x in module.parameters())
    one, part = 4 * 51 * 50, nbytes / SIZE + 6 * 4
    stage, share = STORED[stored]
    comm = COMM.Dup()  # on which no other training has memory
    with mpiagg.Sharded(module, adamw, comm=comm, stage=stage, share=share, bucket_bytes=one, prefetch=0) as training:
        module(torch.ones(2, 50)).sum().backward()
        training.step()
        held = training.memory()
    assert held["state"] <= 2 * part
    assert held["gradients"] <= part
    assert held["buckets"] == (nbytes if stage == 1 else one)
    wanted = {"stage 1": nbytes, "stage 2": nbytes, "once on a node": part, "divided": part + one}
    together = channel_of(COMM).node.size == SIZE
    assert held["parameters"] <= wanted[stored if together or stored != "once on a node" else "divided"]
    if stage == 3:
        assert all(x.numel() == 0 for x in module.parameters())
        assert not channel_of(comm).memory.host._common  # its memory is given back
    comm.Free()


@pytest.mark.parametrize(
    "change", [lambda module: module.float(), lambda module: module.blocks[0].requires_grad_(False)]
)
def test_parameters_that_were_changed_are_an_error(change):
    with sharded("stage 1") as training:
        train(training, range(1))
        change(training.module)
        error = (ValueError, "was moved, converted, or has come")
        refused(*error, training.step)


@pytest.mark.parametrize(
    ("stored", "dtype", "master"),
    [("divided", torch.float64, None), ("stage 1", torch.bfloat16, np.float32), ("stage 1", torch.float64, None)],
)
def test_what_is_written_into_parameters_and_would_be_lost_is_an_error(stored, dtype, master):
    with sharded(stored, module=torch.nn.Linear(3, 2, dtype=dtype), master_dtype=master) as training:
        for written in (False, True, False):
            if written:
                training.module.load_state_dict(training.module.state_dict())
            training(torch.ones(1, 3, dtype=dtype)).sum().backward()
            if written and (stored == "divided" or master is not None):
                refused(ValueError, "parameters were written", training.step)
            else:
                training.step()


def test_an_optimizer_that_needs_a_closure_is_refused():
    refused(ValueError, "LBFGS needs arguments in step", mpiagg.Sharded, torch.nn.Linear(2, 2), torch.optim.LBFGS)


def test_an_optimizer_may_hand_on_whatever_its_step_is_given():
    class Logged(torch.optim.SGD):
        def step(self, *given, **keywords):
            return super().step(*given, **keywords)

    with mpiagg.Sharded(torch.nn.Linear(2, 2), Logged) as training:
        training(torch.ones(1, 2)).sum().backward()
        training.step()


@pytest.mark.parametrize("stored", STORED)
def test_a_function_that_fails_leaves_the_module_as_it_was(stored):
    def fails(_):
        raise RuntimeError("no optimizer")

    module = made()
    refused(RuntimeError, "no optimizer", lambda: sharded(stored, fails, module))
    for x, y in zip(module.parameters(), made().parameters(), strict=True):
        assert (x == y).all()
    loss(module(batch(0)[0]), batch(0)[1]).backward()
    assert module.places.grad is not None


def test_the_module_outlives_it():
    module = torch.nn.Linear(2, 2)
    training = mpiagg.Sharded(module, adamw)
    gone = weakref.ref(training)
    training.free()
    training.free()
    del training
    gc.collect()
    assert gone() is None
    module(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad is not None
