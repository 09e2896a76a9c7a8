"""Which device a rank takes, from what its launcher says; and which ranks share one."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.cuda import placement
from mpiagg.cuda.placement import Sharing, shared_devices
from mpiagg.errors import DeviceError

A, B, C = "00000000-a", "00000000-b", "00000000-c"


class Runtime:
    """What is asked of CUDA, written down."""

    def __init__(self, count):
        self._count = count
        self.asked = []

    def count(self):
        return self._count

    def use(self, ordinal):
        self.asked.append(("use", ordinal))

    def limit(self, share):
        self.asked.append(("limit", share))


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A process that no launcher has started, without MPI and torch, on a node whose driver tells nothing."""
    for launcher in placement._LAUNCHERS:
        for variable in launcher:
            monkeypatch.delenv(variable, raising=False)
    for variable in (*placement._RANKS, placement.LIMIT, "SLURM_GPUS_ON_NODE", "SLURM_NODEID"):
        monkeypatch.delenv(variable, raising=False)
    for module in ("mpi4py.MPI", "torch"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(placement, "_DRIVER", tmp_path / "gpus")
    return monkeypatch


@pytest.fixture
def place(alone):
    """Return a function that makes this process a rank of a node, started by Hydra."""

    def place(rank, size):
        alone.setenv("MPI_LOCALRANKID", str(rank))
        alone.setenv("MPI_LOCALNRANKS", str(size))

    return place


# -- what launchers say


@pytest.mark.parametrize("launcher", placement._LAUNCHERS[:-1])
def test_every_launcher_is_known(launcher):
    environment = {launcher.rank: "3", launcher.size: "8"}
    assert placement.local_rank(environment) == 3
    assert placement.local_size(environment) == 8
    assert placement.local_size({launcher.rank: "3"}) is None
    assert placement.local_rank({launcher.rank: "bees"}) is None
    # Within an allocation Slurm speaks of the launcher, not of the rank.
    environment |= {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}
    assert placement.local_rank(environment) == 3
    assert placement.local_size(environment) == 8


def test_without_a_launcher_there_is_no_local_rank():
    assert placement.local_rank({}) is None
    assert placement.local_size({"MPI_LOCALNRANKS": "8"}) is None


@pytest.mark.parametrize(
    ("tasks", "node", "size"),
    [
        ("4", "0", 4),
        ("2(x3),1", "2", 2),
        ("2(x3),1", "3", 1),
        ("2(x3),1", "4", None),
        ("2(x3),1", "", None),
        ("", "0", None),
        ("bees", "0", None),
    ],
)
def test_slurm_tells_all_nodes_at_once(tasks, node, size):
    environment = {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert placement.local_rank(environment) == 1
    assert placement.local_size(environment) == size


# -- which device


def test_no_device_is_no_error(place):
    place(1, 2)
    cuda = Runtime(0)
    assert placement.bind(cuda) is None
    assert cuda.asked == []


def test_a_process_alone_takes_the_first(alone):  # noqa: ARG001 - it sets the scene
    cuda = Runtime(3)
    assert placement.bind(cuda) == 0
    assert cuda.asked == [("use", 0)]


@given(size=st.integers(1, 20), devices=st.integers(1, 9))
def test_ranks_are_spread_evenly_and_know_how_many_share(size, devices):
    taken = [rank % devices for rank in range(size)]
    shares = [taken.count(device) for device in range(devices)]
    assert max(shares) - min(shares) <= 1
    for rank in range(size):
        assert placement.sharers(rank, size, devices, devices) == (shares[taken[rank]] if devices > 1 else size)
        assert placement.sharers(rank, None, devices, devices) == 1


@pytest.mark.parametrize("rank", range(5))
def test_a_device_that_is_shared_is_divided(place, rank):
    place(rank, 5)
    cuda = Runtime(2)
    assert placement.bind(cuda) == rank % 2
    assert cuda.asked == [("use", rank % 2), ("limit", 3 if rank % 2 == 0 else 2)]


def test_a_rank_that_has_a_device_for_itself_has_all_of_it(place):
    place(3, 4)
    cuda = Runtime(4)
    assert placement.bind(cuda) == 3
    assert cuda.asked == [("use", 3)]


@pytest.mark.parametrize(("count", "ordinal", "share"), [(1, 0, 4), (2, 1, 2)])
def test_fewer_devices_may_be_taken(place, count, ordinal, share):
    place(3, 4)
    cuda = Runtime(4)
    assert placement.bind(cuda, count) == ordinal
    assert cuda.asked == [("use", ordinal), ("limit", share)]


@pytest.mark.parametrize(
    ("count", "words"), [(0, "at least 1, not 0"), (3, "count=3, but this process sees 2 devices")]
)
def test_a_bad_count_is_told_before_anything_is_done(alone, count, words):  # noqa: ARG001 - it sets the scene
    cuda = Runtime(2)
    with pytest.raises(ValueError, match=words):
        placement.bind(cuda, count)
    assert cuda.asked == []


@pytest.mark.parametrize(
    ("slurm", "driver", "share"),
    [
        ("4", 8, None),  # each task has one of the four
        ("1", 8, 4),  # the job has one
        ("2", 8, 2),
        (None, 1, 4),  # the machine has one
        (None, 8, None),  # a device of its own, perhaps
        (None, None, None),
    ],
)
def test_one_visible_device_is_divided_where_it_is_certainly_shared(alone, place, tmp_path, slurm, driver, share):  # noqa: PLR0917 - fixtures and parameters
    place(2, 4)
    if slurm is not None:
        alone.setenv("SLURM_GPUS_ON_NODE", slurm)
    for number in range(driver or 0):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    cuda = Runtime(1)
    assert placement.bind(cuda) == 0
    assert cuda.asked == [("use", 0), *([("limit", share)] if share else [])]


def test_a_limit_of_the_users_stays(place, alone):
    place(0, 4)
    alone.setenv(placement.LIMIT, "30%")
    cuda = Runtime(1)
    assert placement.bind(cuda) == 0
    assert cuda.asked == [("use", 0)]


def test_torch_takes_the_same_device_if_it_is_there_and_can(place, alone):
    place(1, 2)
    taken = []
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(is_available=lambda: True, set_device=taken.append)
    alone.setitem(sys.modules, "torch", torch)
    assert placement.bind(Runtime(2)) == 1
    assert taken == [1]
    torch.cuda.is_available = lambda: False
    assert placement.bind(Runtime(2)) == 1
    assert taken == [1]


@pytest.mark.parametrize("variable", placement._RANKS)
def test_a_launcher_that_does_not_say_it_is_told(alone, variable):
    alone.setenv(variable, "1")
    cuda = Runtime(2)
    with pytest.raises(DeviceError, match=rf"{variable} is set.*import mpi4py.MPI before bind_device\(\)"):
        placement.bind(cuda)
    assert cuda.asked == []
    # With one device there is nothing to choose.
    assert placement.bind(Runtime(1)) == 0


# -- CuPy


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"error {status}")
        self.status = status


def cupy(error=None, driver=13000, *, count=1):
    """Return what stands for CuPy; ``error`` is the status that CUDA fails with."""

    def raising(value):
        def call(*_, **__):
            if error is not None:
                raise CUDARuntimeError(error)
            return value

        return call

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=raising(count),
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: 12090,
        memGetInfo=raising((2**34, 2**35)),
    )
    pool = SimpleNamespace(set_limit=raising(None))
    return SimpleNamespace(
        cuda=SimpleNamespace(runtime=runtime, Device=lambda _: SimpleNamespace(use=raising(None))),
        get_default_memory_pool=lambda: pool,
    )


def test_devices_are_counted():
    assert placement._CuPy(cupy(count=3)).count() == 3
    assert placement._CuPy(cupy(error=100)).count() == 0
    assert placement._CuPy(cupy(error=35, driver=0)).count() == 0
    with pytest.raises(DeviceError, match=r"error 35 \(the driver is for CUDA 11.4, CuPy for 12.9\)"):
        placement._CuPy(cupy(error=35, driver=11040)).count()


def test_devices_have_identities(monkeypatch):
    monkeypatch.setattr(placement, "find_device", {"cuda:1": SimpleNamespace(identity=A)}.get)
    assert placement._CuPy(cupy()).identity(1) == A


@pytest.mark.parametrize("method", ["use", "limit"])
def test_a_device_that_others_have_for_themselves_is_told(method):
    getattr(placement._CuPy(cupy()), method)(1)
    with pytest.raises(DeviceError, match="error 46; in exclusive mode ranks share one through MPS alone"):
        getattr(placement._CuPy(cupy(error=46)), method)(1)


def test_limits_leave_room_for_contexts_and_for_memory_that_is_mapped():
    fake, asked = cupy(), []

    def set_limit(size):
        asked.append(size)

    fake.get_default_memory_pool().set_limit = set_limit
    placement._CuPy(fake).limit(4)
    assert asked == [(2**35 // 4 - 2**29) * 3 // 4]
    assert placement.pool_bytes(2**30, 4) == 0
    for share in range(1, 9):
        assert share * (placement.pool_bytes(2**37, share) + 2**29) < 2**37


def test_a_missing_cupy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"need CuPy.*ModuleNotFoundError.*pip install 'cupy-cuda12x\[ctk\]'"):
        placement.bind_device()


def test_a_broken_cupy_is_told(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("raise OSError('libcudart.so is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(DeviceError, match=r"OSError: libcudart.so is missing"):
        placement.bind_device()


def test_nothing_is_loaded_to_choose_a_device():
    script = (
        "import sys, mpiagg.cuda.placement; print([m for m in ('mpi4py.MPI', 'cupy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


# -- who shares


@pytest.mark.parametrize(
    ("identities", "visible", "shared"),
    [
        ([], [], []),
        ([A, B], [[A, B], [A, B]], []),
        ([A, A], [], [Sharing((0, 1), accident=False)]),
        # As many devices as there are have ranks.
        ([A, B, A, B], [[A, B]] * 4, [Sharing((0, 2), accident=False), Sharing((1, 3), accident=False)]),
        ([A, A], [[A], [A]], [Sharing((0, 1), accident=False)]),
        # They see one that nobody has.
        ([A, A], [[A, B], [A, B]], [Sharing((0, 1), accident=True)]),
        ([A, A, B, B], [[A], [A], [B], [B, C]], [Sharing((0, 1), accident=False), Sharing((2, 3), accident=True)]),
        # Ranks without a device share nothing.
        (["", "", A], [[], [], [A]], []),
    ],
)
def test_sharing_is_found(identities, visible, shared):
    assert shared_devices(identities, visible) == shared


@given(st.lists(st.sampled_from(["", A, B, C]), max_size=8))
def test_everyone_who_shares_is_told_once(identities):
    told = [rank for sharing in shared_devices(identities) for rank in sharing.ranks]
    assert sorted(told) == [rank for rank, one in enumerate(identities) if one and identities.count(one) > 1]
    for sharing in shared_devices(identities):
        assert len({identities[rank] for rank in sharing.ranks}) == 1
