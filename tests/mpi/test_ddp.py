"""DDP on small NumPy models."""

import numpy as np
import pytest
from mpi4py import MPI
from support import refused

import mpiagg

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
MEAN = (SIZE - 1) / 2

SHAPES = [(4, 8), (8,), (8, 3), (3,)]
SAMPLES = 840  # as many for each rank, for any number of ranks up to 8
"""As many for every rank, on 1, 2, 3, 4, 5 and 8 ranks."""


class Parameter:
    def __init__(self, data):
        self.data, self.grad = data, None


class Network:
    """Two layers and a squared error, differentiated by hand."""

    def __init__(self, seed, dtype=np.float64):
        random = np.random.default_rng(seed)
        self.layers = [Parameter(random.standard_normal(shape).astype(dtype)) for shape in SHAPES]
        self.training = True

    def parameters(self):
        return iter(self.layers)

    def named_parameters(self):
        return zip(["w1", "b1", "w2", "b2"], self.layers, strict=True)

    def hidden(self, x):
        w1, b1, _, _ = (layer.data for layer in self.layers)
        return np.tanh(x @ w1 + b1)

    def __call__(self, x):
        _, _, w2, b2 = (layer.data for layer in self.layers)
        return self.hidden(x) @ w2 + b2

    def gradients(self, x, y):
        """Return the gradients of the mean squared error."""
        hidden, (_, _, w2, _) = self.hidden(x), (layer.data for layer in self.layers)
        error = 2 * (self(x) - y) / len(x)
        inner = error @ w2.T * (1 - hidden**2)
        return [x.T @ inner, inner.sum(axis=0), hidden.T @ error, error.sum(axis=0)]


def data():
    random = np.random.default_rng(5)
    return random.standard_normal((SAMPLES, 4)), random.standard_normal((SAMPLES, 3))


def share(x):
    return np.array_split(x, SIZE)[RANK]


def noise(shapes, dtype=np.float32):
    random = np.random.default_rng(RANK)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def arrays(dtype=np.float64):
    return [np.zeros(shape, dtype) for shape in SHAPES]


def same(arrays, expected):
    for array, wanted in zip(arrays, expected, strict=True):
        assert array.dtype == wanted.dtype
        assert array.tobytes() == wanted.tobytes()


# -- training


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("cap", [0, 256, 25 * 2**20])
@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: mpiagg.AllReduce(algorithm="ring"),
        lambda: mpiagg.AllReduce(algorithm="tree", divide_before=True),
        lambda: mpiagg.ParameterServer(root=SIZE - 1),
    ],
    ids=["default", "ring", "tree", "server"],
)
def test_ranks_together_train_like_one_on_all_data(make, cap, overlapped):
    x, y = data()
    serial, mine = Network(0), Network(RANK)
    aggregation = make()
    with mpiagg.DDP(mine, aggregation=aggregation, bucket_bytes=cap) as ddp:
        ddp.broadcast_parameters()
        for _ in range(3):
            for layer, gradient in zip(mine.layers, mine.gradients(share(x), share(y)), strict=True):
                layer.grad = gradient
            (ddp.overlapped_sync_gradients if overlapped else ddp.sync_gradients)()
            for layer, wanted, gradient in zip(mine.layers, serial.layers, serial.gradients(x, y), strict=True):
                np.testing.assert_allclose(layer.grad, gradient, rtol=0, atol=1e-14)
                layer.data -= 0.1 * layer.grad
                wanted.data -= 0.1 * gradient
        assert len({layer.data.tobytes() for layer in mine.layers}) == len(SHAPES)
        everyone = COMM.allgather(b"".join(layer.data.tobytes() for layer in mine.layers))
        assert set(everyone) == {everyone[0]}
    if aggregation is not None:
        assert (aggregation.bytes_sent > 0) == (SIZE > 1)
        aggregation.free()


@pytest.mark.parametrize("dtypes", [[np.float32], [np.float16, np.float32, np.complex64]])
@pytest.mark.parametrize("cap", [0, 100, 100_000])
def test_overlapped_has_the_bits_of_one_by_one(dtypes, cap):
    shapes = [(17, 3), (5,), (), (0, 2), (40_000,), (9,)]
    gradients = [x for dtype in dtypes for x in noise(shapes, dtype)]
    one, other = [x.copy() for x in gradients], [x.copy() for x in gradients]
    with mpiagg.DDP([np.zeros_like(x) for x in gradients], bucket_bytes=cap) as ddp:
        ddp.sync_gradients(one)
        for _ in range(2):
            other = [x.copy() for x in gradients]
            ddp.overlapped_sync_gradients(other)
            same(other, one)
        assert len(set(COMM.allgather(b"".join(x.tobytes() for x in one)))) == 1


def test_every_bucket_is_an_allreduce_of_its_own():
    gradients = noise(SHAPES)
    everyone = COMM.allgather(gradients)
    with mpiagg.DDP(arrays(np.float32), bucket_bytes=0) as ddp:
        ddp.sync_gradients(gradients)
    for index, gradient in enumerate(gradients):
        same([gradient], mpiagg.simulate([one[index] for one in everyone], "avg")[:1])


# -- missing gradients


@pytest.mark.parametrize("form", ["items", "list"])
def test_a_gradient_that_some_have_counts_as_zeros_elsewhere(form):
    module = Network(0)
    with mpiagg.DDP(module, bucket_bytes=256) as ddp:
        for turn in range(3):
            # Parameter 0: all have it. 1: only the last rank. 2: nobody. 3: all but rank `turn`.
            has = [True, RANK == SIZE - 1, False, turn != RANK]
            gradients = [
                np.full(shape, RANK + 1.0) if given else None for shape, given in zip(SHAPES, has, strict=True)
            ]
            if form == "list":
                ddp.sync_gradients(gradients)
            else:
                for layer, gradient in zip(module.layers, gradients, strict=True):
                    layer.grad = gradient
                ddp.sync_gradients()
                gradients = [layer.grad for layer in module.layers]
            total = SIZE * (SIZE + 1) / 2
            missing = turn + 1 if turn < SIZE else 0
            assert (gradients[0] == total / SIZE).all()
            assert (gradients[1] == SIZE / SIZE).all()
            assert gradients[2] is None
            if SIZE == 1 and turn == 0:
                assert gradients[3] is None
            else:
                assert (gradients[3] == (total - missing) / SIZE).all()
            assert not any(np.shares_memory(x, view) for x in gradients[:2] for view in ddp.gradient_views())


def test_no_gradient_anywhere_stays_that_way():
    module = Network(0)
    with mpiagg.DDP(module) as ddp:
        ddp.sync_gradients()
        assert all(layer.grad is None for layer in module.layers)


# -- adding up


def test_nothing_is_sent_inside_no_sync():
    module = Network(0)
    with mpiagg.DDP(module) as ddp:
        views = ddp.gradient_views()
        for layer, view in zip(module.layers, views, strict=True):
            layer.grad = view
        with ddp.no_sync():
            for _ in range(3):
                for view in views:
                    np.add(view, RANK, out=view)
                ddp.sync_gradients()
                ddp.overlapped_sync_gradients()
        assert all((view == 3 * RANK).all() for view in views)
        assert ddp.aggregation.bytes_sent == 0
        for view in views:
            np.add(view, RANK, out=view)
        ddp.sync_gradients()
        assert all((view == 4 * MEAN).all() for view in views)
        with pytest.raises(KeyError), ddp.no_sync():
            raise KeyError
        ddp.sync_gradients()
        assert (ddp.aggregation.bytes_sent > 0) == (SIZE > 1)


# -- memory


@pytest.mark.parametrize("form", ["items", "list"])
def test_gradients_that_are_views_are_not_copied(form, monkeypatch):
    module = Network(0) if form == "items" else arrays()
    with mpiagg.DDP(module, bucket_bytes=256) as ddp:
        views = ddp.gradient_views()
        assert [view.shape for view in views] == SHAPES
        bases = {id(view.base) for view in views}
        assert len(bases) == 3
        if form == "items":
            for layer, view in zip(module.layers, views, strict=True):
                layer.grad = view
        copies = []
        monkeypatch.setattr("mpiagg.ddp.buckets.np.copyto", lambda *_: copies.append(1))
        for method in (ddp.sync_gradients, ddp.overlapped_sync_gradients):
            for view in views:
                view[...] = RANK
            method()
            assert all((view == MEAN).all() for view in views)
        assert not copies
        again = ddp.gradient_views()
        assert all(view is other for view, other in zip(views, again, strict=True))
        if form == "items":
            assert all(layer.grad is view for layer, view in zip(module.layers, views, strict=True))


def test_gradients_keep_their_identity_and_layout():
    gradients = [np.asfortranarray(np.full((4, 8), float(RANK))), np.full((8, 2), float(RANK))[:, 0]]
    before = list(gradients)
    with mpiagg.DDP([np.zeros((4, 8)), np.zeros(8)]) as ddp:
        ddp.sync_gradients(gradients)
    assert all(x is y for x, y in zip(gradients, before, strict=True))
    assert all((x == MEAN).all() for x in gradients)


@pytest.mark.parametrize("root", range(SIZE))
def test_parameters_are_broadcast_in_place(root):
    module = [np.full(shape, RANK, dtype) for shape, dtype in zip(SHAPES, ["f8", "f4", "f2", "i8"], strict=True)]
    module[0] = np.asfortranarray(module[0])
    before = list(module)
    with mpiagg.DDP(module[:3]) as ddp:
        ddp.broadcast_parameters(root)
        refused(ValueError, "root must be a rank", ddp.broadcast_parameters, SIZE)
    assert all(x is y for x, y in zip(module, before, strict=True))
    assert all((x == root).all() for x in module[:3])


def test_everything_is_given_back():
    mpiagg.AllReduce().free()
    channel = mpiagg.DDP([np.zeros(3)])._channel
    opened = len(channel.open)
    for _ in range(3):
        with mpiagg.DDP(arrays(), bucket_bytes=0) as ddp:
            ddp.sync_gradients()
            assert len(channel.open) > opened
        assert len(channel.open) == opened


# -- the module behind it


def test_what_ddp_has_not_comes_from_the_module():
    module = Network(0)
    x, _ = data()
    with mpiagg.DDP(module) as ddp:
        assert ddp.module is module
        assert ddp.training
        assert list(ddp.parameters()) == module.layers
        assert ddp(x).tolist() == module(x).tolist()
        with pytest.raises(AttributeError, match="unknown"):
            _ = ddp.unknown
    with mpiagg.DDP(arrays()) as ddp:
        assert [x.shape for x in ddp.parameters()] == SHAPES


def test_no_parameters():
    with mpiagg.DDP([]) as ddp:
        ddp.sync_gradients()
        ddp.overlapped_sync_gradients([])
        ddp.broadcast_parameters()


class Largest(mpiagg.Aggregation):
    """An aggregation that needs the tensors, and has no plans."""

    def aggregate(self, tensors):
        self.shapes = [x.shape for x in tensors]
        for x in tensors:
            mpiagg.allreduce(x, "max", out=x, comm=self.comm)


def test_an_aggregation_without_plans_gets_the_tensors():
    aggregation = Largest()
    for method in ("sync_gradients", "overlapped_sync_gradients"):
        gradients = [np.full(shape, float(RANK)) for shape in SHAPES]
        with mpiagg.DDP(arrays(), aggregation=aggregation) as ddp:
            getattr(ddp, method)(gradients)
        assert aggregation.shapes == SHAPES[::-1]
        assert all((x == SIZE - 1).all() for x in gradients)
    # It is the caller's.
    assert not aggregation._freed
