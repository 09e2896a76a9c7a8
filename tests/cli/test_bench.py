"""``mpiagg bench``: sizes, bandwidths, columns, and results that are checked."""

import importlib
import json

import pytest
from click.testing import CliRunner
from support import on_device

from mpiagg.benchmarks import columns
from mpiagg.benchmarks.flags import LARGEST, SMALLEST, BenchFlags, mlbench_counts, parse_range, parse_size
from mpiagg.cli import main
from mpiagg.errors import DeviceError
from mpiagg.launch import start as launch
from mpiagg.schedules import Collective, algorithms


@pytest.mark.parametrize(
    ("text", "nbytes"), [("64", 64), ("4K", 4096), ("1m", 2**20), ("2G", 2**31), ("8KiB", 8192), ("3KB", 3072)]
)
def test_sizes_have_suffixes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-4", "4X", "K", "1.5M", "1 2"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size; write 64, 4K, 1M or 2G"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("1K:1M", (1024, 2**20)),
        ("1M", (SMALLEST, 2**20)),
        ("1K:", (1024, LARGEST)),
        ("8", (8, 8)),
        ("8:8", (8, 8)),
        (":", (SMALLEST, LARGEST)),
    ],
)
def test_ranges_are_osus(text, ends):
    assert parse_range(text) == ends


@pytest.mark.parametrize("text", ["1M:1K", "1:2:3", "128M:"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(ValueError, match="size"):
        parse_range(text)


def test_sizes_grow_by_the_factor():
    assert list(parse_range("64:1K").sizes(4)) == [64, 256, 1024]
    assert list(parse_range("3:20").sizes(2)) == [3, 6, 12]


USUAL = BenchFlags("allreduce", (), parse_range("64:1K"), 4, 1000, 10, 4.0, False, "float32", "sum", 0, None, True)


def test_sizes_of_mlbench_are_whole_numbers_of_elements_each_once():
    counts = mlbench_counts()
    assert (len(counts), counts[:7], counts[-2:]) == (77, [1, 2, 3, 4, 5, 6, 8], [79201640, 100000000])
    assert counts == sorted(set(counts))


def test_sizes_of_mlbench_are_cut_to_the_largest():
    flags = USUAL._replace(protocol="mlbench")
    assert flags._replace(sizes=parse_range("20")).lengths() == [4, 8, 12, 16, 20]
    assert flags._replace(sizes=parse_range("23"), dtype="float64").lengths() == [8, 16]
    assert flags._replace(sizes=parse_range("64M")).lengths()[-1] == 4 * max(c for c in mlbench_counts() if c <= 2**24)
    assert USUAL.lengths() == [64, 256, 1024]


@pytest.mark.parametrize(
    ("collective", "nodes", "vectors"),
    [("allreduce", 4, 1.5), ("allreduce", 2, 1), ("allgather", 4, 0.75), ("reduce_scatter", 2, 0.5), ("reduce", 4, 1)],
)
def test_a_link_carries_what_a_node_must_send(collective, nodes, vectors):
    assert columns.link_seconds(Collective(collective), nodes, 125_000_000, 1e9) == vectors


def test_each_rank_of_a_node_has_a_vector_for_an_alltoall():
    assert columns.link_seconds(Collective.ALLTOALL, 4, 125_000_000, 1e9, ranks=8) == 1.5


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("allreduce", 1.5),
        ("reduce_scatter", 0.75),
        ("allgather", 0.75),
        ("alltoall", 0.75),
        ("broadcast", 1),
        ("reduce", 1),
    ],
)
def test_bus_bandwidth_factors_are_nccls(collective, factor):
    assert columns.bus_factor(Collective(collective), 4) == factor


ROW = columns.ResultRow(
    size=2**26,
    count=2**24,
    type="complex128",
    redop="prod",
    root=-1,
    algorithm="recursive_doubling",
    time_us=123456.789,
    algbw=1.25,
    busbw=2.5,
    wrong=0,
    min_us=1,
    max_us=2,
    p50_us=3,
    p99_us=234567.891,
    mean_us=5,
    iterations=20,
    ratio=0.5,
    over_peers={"gloo": 0.012345},
    over_limit=12345.6,
)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("peers", [(), ("gloo",), ("gloo", "absent")])
def test_rows_stand_under_their_titles(full, peers):
    titles, units = columns.header(peers, full=full).splitlines()
    line = columns.line(ROW, peers, full=full)
    assert len(titles) == len(units) == len(line)
    assert titles.startswith("#")
    assert units.startswith("#")
    values = {"size": "67108864", "algorithm": "recursive_doubling", "median": "123456.79", "p99": "234567.89"}
    values.update({"/native": "0.50", "/limit": "12346"}, **{f"/{peer}": "0.0123" for peer in peers[:1]})
    values.update({f"/{peer}": " -" for peer in peers[1:]}, **({"iterations": "20"} if full else {}))
    for title, value in values.items():
        end = titles.index(title) + len(title)
        assert line[:end].endswith(value)
    assert ("mean" in titles) == full
    assert len(line.split()) == len(titles[1:].split())


def test_the_usual_columns_fit_a_terminal_of_100():
    assert len(columns.line(ROW, ("gloo",), full=False)) < 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-a", "bees"], "known: auto, native, ring, tree"),
        (["allgather", "-a", "tree"], "no algorithm 'tree' for allgather; known: auto, native, ring, circulant"),
        (["reduce", "-a", "knomial-1"], "the number in 'knomial-1' must be from 2 to 64"),
        (["bees"], "'allreduce', 'reduce', 'broadcast'"),
        (["-m", "bees"], "'bees' is not a size"),
        (["reduce", "--root", "2"], "--root must be a rank from 0 to 1, not 2"),
        (["--link-rate", "1"], "'1' is not a rate; write 25GB/s"),
        (["--sizes", "mlbench", "--plan"], "--plan is not for --sizes mlbench, which times calls"),
        (["--sizes", "mlbench", "--factor", "2"], "--factor is not for --sizes mlbench"),
        (["--root", "0"], "--root is not for allreduce, which has no root"),
        (["allgather", "--op", "max"], "--op is not for allgather, which does not reduce"),
        (["--beside", "bees"], "'bees' is not one of 'gloo', 'mpi'"),
        (["--beside", "mpi"], "--beside mpi is for arrays on a device"),
        (["-d", "bees"], "'bees' is no device; write cpu, cuda, or cuda:1"),
        (["-d", "cuda:x"], "'cuda:x' is no device"),
        (["-d", "cuda", "--beside", "gloo"], "are for arrays on the host, not for --device"),
        (["-d", "cuda", "--sizes", "mlbench"], "are for arrays on the host, not for --device"),
        (["--wire", "bees"], "'fp16', 'bf16', 'u8', 'u4', 'u2', 'exact'"),
        (["allgather", "--wire", "u8"], "--wire is for allreduce by sum, avg, min, max"),
        (["--op", "max", "--wire", "exact"], "wire 'exact' is for sums and averages, not for op 'max'"),
        (["--op", "prod", "--wire", "u8"], "--wire is for allreduce by sum, avg, min, max"),
        (["--sizes", "mlbench", "--wire", "u8"], "not for mlbench's sizes"),
        (["--dtype", "int32", "--wire", "u8"], "wire 'u8' is for real floating-point numbers, not for int32"),
        (["--sizes", "mlbench", "-m", "3"], "none of mlbench's sizes is up to 3 bytes"),
    ],
)
def test_bad_arguments_are_told_with_the_known_names(monkeypatch, arguments, words):
    for variable in launch.launchers.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


@pytest.mark.parametrize("fault", [None, DeviceError("no launcher says")])
def test_a_rank_takes_its_device_before_mpi_starts(monkeypatch, fault):
    bench, done = importlib.import_module("mpiagg.cli.bench"), []

    def bind_device():
        done.append("bind")
        if fault is not None:
            raise fault

    monkeypatch.setattr(bench, "bind_device", bind_device)
    monkeypatch.setattr(bench.launch, "launched_ranks", lambda: 2)
    monkeypatch.setattr(bench.job, "run", lambda *_: done.append("run"))
    for arguments in (["-d", "cuda"], ["-d", "cuda:1"], []):
        assert CliRunner().invoke(main, ["bench", *arguments]).exit_code == 0
    assert done == ["bind", "run", "run", "run"]
    monkeypatch.setattr(bench.launch, "launched_ranks", lambda: None)
    CliRunner().invoke(main, ["bench", "-d", "cuda"])
    assert done[4:] == ["run"]  # who only starts ranks takes none


def test_a_peer_that_is_not_there_is_told_before_anything_is_started(monkeypatch):
    monkeypatch.setattr(importlib.import_module("mpiagg.cli.bench"), "find_spec", lambda _: None)
    done = CliRunner().invoke(main, ["bench", "--beside", "gloo"])
    assert done.exit_code == 1
    assert "--beside gloo needs torch: pip install torch" in done.output


# -- the ranks


def test_the_command_measures_and_saves(mpiagg, tmp_path):
    path = tmp_path / "bench.json"
    flags = (
        "-m",
        "64:1K",
        "-i",
        "7",
        "-x",
        "1",
        "--time-limit",
        "1000",
    )  # however busy the machine is
    done = mpiagg("bench", *flags, "-f", "--json", str(path))
    assert done.status == 0, done.err
    names = ["native", "auto", *algorithms("allreduce"), "copy"]
    lines = [line for line in done.out.splitlines() if not line.startswith("#")]
    assert [line.split()[1] for line in lines] == names * 3
    told = json.loads(path.read_text())
    assert (told["ranks"], told["layout"]) == (2, "1 x 2")
    assert told["machine"]["mpi"].startswith(launch.mpi_vendor())
    assert {"cpu", "cores", "mpiagg", "mpi4py", "numpy", "python"} <= set(told["machine"])
    assert told["flags"]["iterations"] == 7
    assert [(row["size"], row["algorithm"]) for row in told["rows"]] == [(s, a) for s in (64, 256, 1024) for a in names]
    for row in told["rows"]:
        assert row["count"] == row["size"] // 4
        assert (row["type"], row["redop"], row["root"], row["wrong"]) == ("float32", "sum", -1, 0)
        assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"])  # 2 (n-1)/n is 1 for two ranks
        assert 0 < row["min_us"] <= row["p50_us"] <= row["p99_us"] <= row["max_us"]
        assert row["min_us"] <= row["mean_us"] <= row["max_us"]
        assert row["iterations"] == 7
        here = {other["algorithm"]: other["time_us"] for other in told["rows"] if other["size"] == row["size"]}
        assert row["ratio"] == pytest.approx(row["time_us"] / here["native"])
        assert row["over_limit"] == pytest.approx(row["time_us"] / here["copy"])
        assert row["over_peers"] == {}


def test_gloo_takes_part(mpiagg, tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "bench.json"
    done = mpiagg("bench", "-m", "64:64", "-i", "3", "-a", "auto", "--beside", "gloo", "--json", str(path))
    assert done.status == 0, done.err
    native, auto, gloo, copy = json.loads(path.read_text())["rows"]
    assert (gloo["algorithm"], gloo["wrong"], copy["algorithm"]) == ("gloo", 0, "copy")
    assert auto["over_peers"] == {"gloo": pytest.approx(auto["time_us"] / gloo["time_us"])}
    assert native["over_peers"] == {"gloo": pytest.approx(1 / gloo["ratio"])}
    assert "/gloo" in done.out.splitlines()[2]


def test_the_limit_of_a_network_is_computed(mpiagg, tmp_path):
    path = tmp_path / "bench.json"
    command = ["bench", "-m", "1K:1K", "-i", "3", "-a", "ring", "--link-rate", "1gbit", "--json", str(path)]
    done = mpiagg(*command, "-n", "4", MPIAGG_NODES="2,2")
    assert done.status == 0, done.err
    saved = json.loads(path.read_text())
    assert saved["layout"] == "2 x 2"
    _, ring, link = saved["rows"]
    assert link["algorithm"] == "link"
    assert link["time_us"] == pytest.approx(1024 * 8 / 1e9 * 1e6)  # 2 (n-1)/n is 1 for two nodes
    assert (link["iterations"], link["wrong"], link["over_limit"]) == (0, 0, 1)
    assert ring["over_limit"] == pytest.approx(ring["time_us"] / link["time_us"])


def test_a_node_has_no_link_to_give_a_rate_for(mpiagg):
    done = mpiagg("bench", "-m", "64:64", "--link-rate", "1gbit")
    assert done.status == 1
    assert "Error: --link-rate is for ranks on several nodes; all of these are on one" in done.err
    assert "Traceback" not in done.err


EVERYTHING = """
import sys
from mpiagg.launch import job
from mpiagg.benchmarks.contenders import Contender
from mpiagg.benchmarks.flags import BenchFlags, SizeRange
from mpiagg.schedules import Collective, algorithms
world = job.join()
from mpiagg.benchmarks.sweep import Sweep
usual = BenchFlags("allreduce", (), SizeRange(4, 1000), 16, 2, 1, 1.0, False, "float32", "sum", 0, None, True)
others = (
    dict(dtype="float16", op="avg"), dict(dtype="int32", op="prod"), dict(dtype="complex64"), dict(dtype="uint8"),
    dict(dtype="float64", op="min", planned=False), dict(op="max", lanes=2), dict(op="avg"),
    dict(wires=("fp16", "bf16", "u8", "exact"), sizes=SizeRange(40, 40)),
    dict(wires=("fp16", "bf16", "u8", "exact"), sizes=SizeRange(40, 40), planned=False, op="avg"),
    dict(protocol="mlbench", sizes=SizeRange(4, 12), planned=False),
)
runs = [usual._replace(collective=collective.value) for collective in Collective]
rooted = [collective for collective in Collective if collective.rooted]
runs += [usual._replace(collective=collective.value, root=world.size - 1) for collective in rooted]
runs += [usual._replace(**changed) for changed in others]
runs += [flags._replace(buffer="registered") for flags in runs]
for flags in runs:
    sweep = Sweep(world, flags, ("auto", *algorithms(flags.collective)))
    # Blind checks would pass everything: doing nothing must be seen, by every collective, whatever a wire may lose.
    task = sweep.task(400 if flags.buffer == "any" else flags.lengths()[-1])
    off = max([task.wired(wire, planned=True).off for wire in flags.wires], default=0)
    if sweep._wrong(task, [Contender("nothing", lambda: None, off=off)])[0] == 0:
        raise AssertionError(f"a call that does nothing passes as {flags}")
    for row in sweep.rows():
        if row.wrong:
            raise AssertionError(f"{row} of {flags}")
if world.rank == 0:
    sys.stdout.write("all right")
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_collectives_are_right_and_doing_nothing_is_wrong(run_ranks, ranks):
    done = run_ranks(ranks, EVERYTHING)
    assert done.status == 0, done.err
    assert done.out == "all right"


BROKEN = """
import sys
from dataclasses import replace
from mpiagg.cli import main
from mpiagg.schedules import TABLE, Collective
ring = TABLE["ring"]
half_of_it = {Collective.ALLREDUCE: ring.schedules[Collective.REDUCE_SCATTER]}
TABLE["broken"] = replace(ring, name="broken", schedules=half_of_it)
main(["bench", "-a", "broken", "-m", "1K:1K", "-i", "2", "--json", sys.argv[1]])
"""


def test_an_algorithm_that_is_wrong_is_told_and_fails(run_ranks, tmp_path):
    path = tmp_path / "broken.json"
    done = run_ranks(2, BROKEN, str(path))
    assert done.status == 1
    native, broken, _ = json.loads(path.read_text())["rows"]
    assert (native["algorithm"], native["wrong"]) == ("native", 0)
    # On each of two ranks half of 256 elements, before and after the timing.
    assert (broken["algorithm"], broken["wrong"]) == ("broken", 512)
    assert "Error: 512 elements are wrong" in done.err


GLOO = """
import sys
from mpiagg.launch import job
from mpiagg.benchmarks.flags import BenchFlags, SizeRange
from mpiagg.schedules import Collective
world = job.join()
import numpy as np
from mpiagg.benchmarks.gloo import unserved
from mpiagg.benchmarks.sweep import Sweep
usual = BenchFlags("allreduce", (), SizeRange(64, 64), 2, 1, 1, 1.0, False, "float32", "sum", 0, None, True)
usual = usual._replace(beside=("gloo",))
runs = [usual._replace(collective=collective.value, root=world.size - 1) for collective in Collective]
runs += [usual._replace(op=op, dtype="float64") for op in ("avg", "min", "max", "prod")]
runs += [usual._replace(dtype=dtype) for dtype in ("float16", "bfloat16", "complex64", "int64", "uint8")]
for flags in runs:
    if unserved(Collective(flags.collective), np.dtype("float32"), "sum"):
        continue
    gloo = {row.algorithm: row for row in Sweep(world, flags, ()).rows()}["gloo"]
    if gloo.wrong:
        raise AssertionError(f"{gloo} of {flags}")
told = []
rows = list(Sweep(world, usual._replace(dtype="int16"), (), told.append).rows())
if [row.algorithm for row in rows] != ["native", "copy"] or "# without gloo: Gloo has no int16" not in told:
    raise AssertionError(f"{rows} {told}")
if world.rank == 0:
    sys.stdout.write("all right")
"""


def test_gloo_is_right(run_ranks):
    pytest.importorskip("torch")
    done = run_ranks(2, GLOO)
    assert done.status == 0, done.err
    assert done.out == "all right"


PICKY = """
import sys
from dataclasses import replace
from mpiagg.cli import main
from mpiagg.schedules import TABLE, Collective
def generator(rank, layout):
    raise ValueError("wants another number of ranks")
TABLE["picky"] = replace(TABLE["ring"], name="picky", schedules={Collective.ALLREDUCE: generator})
main(["bench", "-m", "64:256", "-i", "2", *sys.argv[1:]])
"""


@pytest.mark.parametrize("how", ["--plan", "--call"])
def test_an_algorithm_that_refuses_is_left_out_and_told_once(run_ranks, how):
    done = run_ranks(2, PICKY, how)
    assert done.status == 0, done.err
    assert done.out.count("# without picky: wants another number of ranks") == 1
    assert " ring " in done.out


def test_an_algorithm_that_refuses_and_was_asked_for_is_an_error(run_ranks):
    done = run_ranks(2, PICKY, "-a", "ring", "-a", "picky")
    assert done.status == 1
    assert "Error: picky: wants another number of ranks" in done.err
    assert "Traceback" not in done.err


# -- arrays on a device


BENCH = """
from mpiagg.cli import main
main(["bench", "-d", "standin", *sys.argv[1:]])
"""


@pytest.mark.parametrize("aware", ["0", "1"])
def test_arrays_on_a_device_are_measured(run_ranks, monkeypatch, tmp_path, aware):
    monkeypatch.setenv("MPIAGG_CUDA_AWARE", aware)
    path = tmp_path / "bench.json"
    sizes = ["-m", "1K:128K", "--factor", "128", "-i", "4", "-x", "1"]
    done = run_ranks(2, on_device(BENCH), *sizes, "-f", "--beside", "mpi", "--json", str(path))
    assert done.status == 0, done.err
    titles = done.out.splitlines()
    slots = "; longer ones by slots that ranks map" if aware != "1" else ""
    assert titles[2] == f"# on standin:0, STANDIN-standin:0; vectors of up to 64 KiB go to the host as a whole{slots}"
    way = "are of the device's memory (CUDA-aware)" if aware == "1" else "go by way of the host (staged)"
    assert titles[3] == f"# messages of longer ones {way}: MPIAGG_CUDA_AWARE={aware} says so"
    assert ("# without mpi: messages do not reach the device's memory" in titles) == (aware == "0")
    assert sum("share STANDIN-standin:0, and algorithm 'nccl' is for ranks" in line for line in titles) == 1
    names = ["native", "auto", *algorithms("allreduce"), "by-hand", *["mpi"] * int(aware), "registered", "copy"]
    told = json.loads(path.read_text())
    assert told["machine"]["device"] == {"name": "standin:0", "identity": "STANDIN-standin:0"}
    assert told["flags"]["device"] == "standin"
    assert [(row["size"], row["algorithm"]) for row in told["rows"]] == [(s, a) for s in (1024, 2**17) for a in names]
    assert {(row["wrong"], row["device_us"]) for row in told["rows"]} == {(0, None)}
    assert all(("mpi" in row["over_peers"]) == (aware == "1") for row in told["rows"])


EVERYTHING_ON_DEVICE = """
from mpiagg.launch import job
from mpiagg.benchmarks.contenders import Contender
from mpiagg.benchmarks.flags import BenchFlags, SizeRange
from mpiagg.schedules import Collective, algorithms
world = job.join()
from mpiagg.benchmarks.sweep import Sweep
from mpiagg.transport import channel_of
aware = channel_of(world).aware = sys.argv[1] == "aware"
usual = BenchFlags("allreduce", (), SizeRange(100_000, 100_000), 2, 1, 0, 1.0, False, "float32", "sum", 0, None, True)
usual = usual._replace(device="standin")
others = (
    dict(dtype="bfloat16", op="avg"), dict(dtype="float16", op="max"), dict(dtype="complex128"), dict(dtype="uint8"),
    dict(dtype="int32", op="prod", planned=False), dict(op="avg", beside=("mpi",)), dict(beside=("mpi",)),
    dict(wires=("fp16", "bf16", "u8", "exact"), dtype="float16"),
    dict(wires=("fp16", "bf16", "u8", "exact"), planned=False),
)
runs = [usual._replace(collective=collective.value) for collective in Collective]
runs += [usual._replace(collective=collective, root=world.size - 1) for collective in ("reduce", "broadcast")]
runs += [flags._replace(buffer="registered") for flags in runs[:4]]
runs += [usual._replace(**changed) for changed in others]
with standin.watch(device_messages=aware):
    for flags in runs:
        sweep = Sweep(world, flags, ("auto", algorithms(flags.collective)[-1]))
        # Blind checks would pass everything: doing nothing must be seen, whatever a wire may lose.
        task = sweep.task(100_000)
        off = max([task.wired(wire, planned=True).off for wire in flags.wires], default=0)
        if sweep._wrong(task, [Contender("nothing", lambda: None, off=off)])[0] == 0:
            raise AssertionError(f"a call that does nothing passes as {flags}")
        for row in sweep.rows():
            if row.wrong:
                raise AssertionError(f"{row} of {flags}")
if world.rank == 0:
    sys.stdout.write("all right")
"""


@pytest.mark.parametrize(("ranks", "how"), [(2, "aware"), (3, "staged")])
def test_all_collectives_are_right_on_a_device(run_ranks, ranks, how):
    done = run_ranks(ranks, on_device(EVERYTHING_ON_DEVICE), how)
    assert done.status == 0, done.err
    assert done.out == "all right"


MISSING = """
from mpi4py import MPI
from mpiagg.arrays import where
from mpiagg.errors import DeviceError
def missing(number):
    raise DeviceError("it is not there")
if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
    where.KINDS["standin"] = missing
from mpiagg.cli import main
main(["bench", "-d", "standin", "-m", "64:64"])
"""


@pytest.mark.parametrize(
    ("ranks", "words"), [(1, "it is not there"), (2, "rank 1 raised DeviceError: it is not there")]
)
def test_a_device_that_a_rank_has_not_is_told_to_all(run_ranks, ranks, words):
    done = run_ranks(ranks, on_device(MISSING))
    assert done.status == 1
    assert f"Error: {words}" in done.err
    assert "Traceback" not in done.err


WATCH = """
import types
done = []
class Event:
    def record(self):
        done.append("record")
    def synchronize(self):
        done.append("wait for the event")
class Device:
    def __init__(self, ordinal):
        done.append(f"device {ordinal}")
    def __enter__(self):
        pass
    def __exit__(self, *_):
        pass
    def synchronize(self):
        done.append("wait for all")
cuda = types.SimpleNamespace(Event=Event, Device=Device, get_elapsed_time=lambda first, last: 250.0)
sys.modules["cupy"] = types.SimpleNamespace(cuda=cuda)
from mpiagg.benchmarks.on_device import DeviceWatch
device = types.SimpleNamespace(kind="cuda", name="cuda:3", synchronise=lambda: done.append("synchronise"))
watch = DeviceWatch(device)
watch.start()
done.append("call")
seconds, by_events = watch.stop()
assert by_events == 0.25 and seconds >= 0
assert done == ["device 3", "synchronise", "wait for all", "record", "call", "synchronise", "wait for all", "record",
                "wait for the event"], done
sys.stdout.write("all right")
"""


def test_a_device_s_events_time_what_lies_between_two_waits_for_all_of_it(run_ranks):
    done = run_ranks(1, on_device(WATCH))
    assert (done.status, done.out) == (0, "all right"), done.err


@pytest.mark.parametrize(
    ("setting", "words"),
    [("MPIAGG_TIMEOUT", "must be a number of seconds above 0"), ("MPIAGG_ALGORITHM", "unknown algorithm")],
)
def test_a_setting_that_is_wrong_is_told_once(mpiagg, setting, words):
    done = mpiagg("bench", "-m", "64:64", **{setting: "bogus"})
    assert done.status == 1
    assert done.err.count("Error: ") == done.err.count(words) == 1
    assert "Traceback" not in done.err


def test_what_no_memory_is_there_for_is_told_in_words(mpiagg):
    done = mpiagg("bench", "-m", "1000000G:1000000G", "-n", "1")
    assert done.status != 0
    assert "Unable to allocate" in done.err
    assert "Traceback" not in done.err


def test_a_terminal_without_columns_is_one_that_says_nothing(mpiagg):
    assert "scan" in mpiagg("tune", "--show", "--collective", "scan", COLUMNS="0").out
