"""A list of arrays has the interface of a module; and equal buckets are not exchanged."""

import numpy as np
import pytest
from mpi4py import MPI

import mpiagg

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
MEAN = (SIZE - 1) / 2


def test_a_list_of_arrays_has_the_face_of_a_module():
    arrays = [np.arange(3.0), np.ones((2, 2), np.float32)]
    with mpiagg.DDP(arrays) as ddp:
        assert ddp.module is arrays
        assert all(x is y for x, y in zip(ddp.parameters(), arrays, strict=True))
        assert [(name, x.shape) for name, x in ddp.named_parameters()] == [("0", (3,)), ("1", (2, 2))]
        assert ddp.training
        assert ddp.eval() is ddp
        assert not ddp.training
        assert ddp.train() is ddp
        assert ddp.training
        state = ddp.state_dict()
        before = list(arrays)
        for x in arrays:
            x[...] = -1
        assert not any(ddp.load_state_dict(state))
        assert all(x is y for x, y in zip(before, arrays, strict=True))
        assert arrays[0].tolist() == [0, 1, 2]
        with pytest.raises(KeyError, match="unexpected"):
            ddp.load_state_dict({**state, "2": np.zeros(1)})
        for call in (ddp, ddp.forward):
            with pytest.raises(TypeError, match="cannot be called"):
                call(1)
        with pytest.raises(TypeError, match="arrays stay as they are"):
            ddp.to(np.float32)


class Model:
    """What a program has of its own."""

    def __init__(self):
        self.weights = [np.zeros(2)]
        self.training = True

    def parameters(self):
        return self.weights

    def train(self, mode):
        self.training = mode


def test_a_module_of_the_programs_own_does_what_it_can():
    model = Model()
    with mpiagg.DDP(model) as ddp:
        assert ddp.eval() is ddp
        assert not model.training
        assert ddp.weights is model.weights
        for name in ("state_dict", "named_parameters"):
            with pytest.raises(AttributeError, match=name):
                getattr(ddp, name)()
        with pytest.raises(TypeError, match="arrays stay as they are"):
            ddp.to("cpu")


@pytest.mark.parametrize("method", ["sync_gradients", "overlapped_sync_gradients"])
def test_equal_buckets_are_not_exchanged(method):
    with mpiagg.DDP([np.zeros(5) for _ in range(8)], bucket_bytes=0) as ddp:
        for step in range(20):
            mine = [np.full(5, 100.0 * step + 10 * index + RANK) for index in range(8)]
            getattr(ddp, method)(mine)
            assert all((x == 100 * step + 10 * index + MEAN).all() for index, x in enumerate(mine))


def test_the_first_bucket_has_one_mebibyte():
    arrays = [np.zeros(2**17, np.float32) for _ in range(6)]  # half a mebibyte each
    with mpiagg.DDP(arrays) as ddp:
        bases = [id(view.base) for view in ddp.gradient_views()]
        assert bases[0] == bases[1] == bases[2] == bases[3] != bases[4] == bases[5]
