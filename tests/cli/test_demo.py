"""``mpiagg demo``: what it trains, what it tells, and what it refuses."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from thorough import thorough

from mpiagg.cli import main, summary, training
from mpiagg.cli.aggregators import AGGREGATORS
from mpiagg.cli.network import Network
from mpiagg.cli.settings import DemoSettings
from mpiagg.launch import start as launch

RING = DemoSettings(aggregator="allreduce", algorithm="ring", epochs=2, batch_size=50, learning_rate=0.1, seed=1)
RESULT = training.TrainingResult(
    settings=RING,
    test_accuracy=0.97,
    difference_from_serial=1e-14,
    difference_between_ranks=0.0,
    losses=[1.0, 0.5],
    computing=[1.0, 2.0],
    communicating=[3.0, 4.0],
    bytes_sent=[10, 20],
    bytes_by_epoch=[7.5, 15.0],
    steps=54,
)


# -- the network and its batches, in one process


def test_gradients_are_those_of_the_loss():
    random = np.random.default_rng(0)
    network = Network(inputs=3, hidden=4, classes=5, seed=0)
    images, labels = random.normal(size=(6, 3)), random.integers(5, size=6)
    network.backward(images, labels, scale=0.5)
    gradients = [parameter.grad.copy() for parameter in network.parameters()]
    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
        for place in np.ndindex(parameter.data.shape):
            at = parameter.data[place]
            losses = []
            for step in (1e-5, -1e-5):
                parameter.data[place] = at + step
                losses.append(network.backward(images, labels, scale=0.5))
            parameter.data[place] = at
            assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(gradient[place], abs=1e-8)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
def test_the_average_over_ranks_is_the_gradient_of_the_whole_batch(size):
    batch = np.arange(7)
    digits = training.load(seed=0)

    def backward(rank, size):
        trainer = training.Trainer(RING, digits, rank, size)
        loss = trainer._backward(batch)
        return [loss, *(parameter.grad for parameter in trainer.network.parameters())]

    whole_loss, *whole = backward(0, 1)
    losses, *gradients = zip(*(backward(rank, size) for rank in range(size)), strict=True)
    assert sum(losses) == pytest.approx(whole_loss)
    for ours, expected in zip(gradients, whole, strict=True):
        np.testing.assert_allclose(np.mean(ours, axis=0), expected, atol=1e-15)


def test_a_quarter_of_the_digits_is_held_out():
    digits = training.load(seed=3)
    assert len(digits.labels) + len(digits.test_labels) == 1797
    assert len(digits.test_labels) == 1797 // 4
    together = np.concatenate([digits.images, digits.test_images])
    everything = np.concatenate([other := training.load(seed=4).images, training.load(seed=4).test_images])
    assert not np.array_equal(other, digits.images)
    assert sorted(map(bytes, together)) == sorted(map(bytes, everything))


def test_faults_are_found():
    assert summary.fault(RESULT) is None
    far = replace(RESULT, difference_from_serial=1.1e-8)
    assert "weights differ from the serial training's by 1.1e-08" in summary.fault(far)
    assert summary.fault(replace(far, difference_from_serial=math.nan)) is not None
    assert summary.fault(replace(far, settings=replace(RING, aggregator="decentralized"))) is None
    for loss in (math.nan, math.inf, 5.0):
        assert "the training diverged" in summary.fault(replace(RESULT, losses=[1.0, loss]))


def test_a_fault_is_the_exit_status(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(summary.job, "vendor", lambda: "Some MPI 1.0")
    assert summary.report([RESULT], tmp_path / "loss.png", None) == 0
    assert summary.report([replace(RESULT, losses=[math.nan])], tmp_path / "loss.png", None) == 1
    assert "Error: the training diverged" in capsys.readouterr().err


def test_a_picture_that_was_asked_for_needs_matplotlib_before_any_rank_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(
        sys.modules["mpiagg.cli.demo"], "find_spec", lambda name: None if name == "matplotlib" else name
    )
    monkeypatch.setattr("mpiagg.launch.job.run", lambda *_: pytest.fail("ranks were started"))
    result = CliRunner().invoke(main, ["demo", "--plot", str(tmp_path / "loss.png")])
    assert result.exit_code == 1
    assert "--plot needs matplotlib: pip install matplotlib" in result.output


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in summary.draw([RESULT], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_ranks_that_outnumber_processors_get_a_hint(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(summary.job, "vendor", lambda: "Some MPI 1.0")
    for crowded in (False, True):
        summary.report([replace(RESULT, crowded=crowded)], tmp_path / "loss.png", None)
        assert ("Hint: 2 ranks share fewer processors" in capsys.readouterr().out) == crowded


def test_the_tables_say_what_communication_and_one_process_take(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(summary.job, "vendor", lambda: "Some MPI 1.0")
    summary.report([replace(RESULT, serial_seconds=0.125, native_seconds=0.25)], tmp_path / "loss.png", None)
    said = " ".join(capsys.readouterr().out.split())
    assert "on the slowest rank (s) │ 6.000" in said
    assert "on one process (s) │ 0.125" in said
    assert "70%" in said  # 7 of 10 seconds
    assert "0.250" in said


def test_the_picture_has_whole_epochs_the_serial_curve_and_every_aggregator(monkeypatch, tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    monkeypatch.setattr(figure, "savefig", lambda self, *_, **__: drawn.append(self))
    one = replace(RESULT, serial_losses=[1.0, 0.4])
    summary.draw([one, replace(one, settings=replace(RING, aggregator="power-sgd"))], tmp_path / "loss.png")
    (axes,) = drawn[0].axes
    assert [text.get_text().split(",")[0] for text in axes.get_legend().get_texts()] == [
        "one process",
        "allreduce",
        "power-sgd",
    ]
    assert len({line.get_color() for line in axes.lines}) == 3
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert len(summary.COLOURS) == len(summary.MARKS) == 7  # and the serial training


def test_with_matplotlib_the_loss_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert "loss.png" in summary.draw([RESULT], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--aggregator", "bees"], "'allreduce', 'parameter-server', 'allreduce-fp16'"),
        (["--algorithm", "bees"], "known: auto, native, ring, tree"),
        (["--aggregator", "decentralized", "--algorithm", "ring"], "--algorithm is for --aggregator allreduce"),
        (["-n", "0"], "x>=1"),
        (["--aggregator", "allreduce"] * 8, "--aggregator can be given 7 times"),
        (["--aggregator", "allreduce"] * 2 + ["--kill-rank", "1"], "with --kill-rank once"),
        (["--at-step", "50"], "--at-step goes with --kill-rank"),
    ],
)
def test_bad_arguments_are_told_with_the_known_names(arguments, words):
    done = CliRunner().invoke(main, ["demo", *arguments])
    assert done.exit_code == 2
    assert words in done.output


@pytest.mark.parametrize("option", [[], ["--json", "numbers.json"]])
def test_a_folder_that_nothing_can_be_written_to_is_told_before_the_work(monkeypatch, tmp_path, option):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)
    done = CliRunner().invoke(main, ["demo", *option])
    assert done.exit_code == 2
    assert "nothing can be written to the folder" in done.output


# -- the ranks

TRAIN = """
import json, sys
from dataclasses import asdict
from mpiagg.cli import summary, training
from mpiagg.launch import job
from mpiagg.cli.settings import DemoSettings
world = job.join()
told = []
few = training.load(1)
few = few._replace(images=few.images[:200], labels=few.labels[:200])
training.load = lambda seed: few
for aggregator, algorithm in (
    ("allreduce", "ring"), ("allreduce", "tree"), ("allreduce", "native"), ("parameter-server", "auto"),
    ("decentralized", "auto"),
):
    for batch_size in (50, 3):
        settings = DemoSettings(aggregator, algorithm, 2, batch_size, 0.02, 1)
        result = training.work(settings, world, lambda: None)
        if world.rank == 0:
            told.append({**asdict(result), "fault": summary.fault(result)})
if world.rank == 0:
    json.dump(told, sys.stdout)
"""


@pytest.mark.parametrize("ranks", [3, *thorough(1, 2, 4, 5)])
def test_weights_are_those_of_the_serial_training(run_ranks, ranks):
    done = run_ranks(ranks, TRAIN)
    assert done.status == 0, done.err
    results = json.loads(done.out)
    assert len(results) == 10
    for result in results:
        assert result["fault"] is None
        assert result["losses"][1] < result["losses"][0]
        if result["settings"]["aggregator"] != "decentralized":
            assert result["difference_from_serial"] <= 1e-10
            assert result["difference_between_ranks"] == 0
        elif ranks > 2:
            # A negative control: where ranks only meet in pairs, the comparison sees that they differ.
            assert result["difference_from_serial"] > 1e-6
            assert result["difference_between_ranks"] > 1e-6
        assert result["steps"] == 2 * -(-200 // result["settings"]["batch_size"])
        if result["settings"]["algorithm"] == "native":
            assert result["bytes_sent"] is None
        else:
            assert result["bytes_by_epoch"][1] == pytest.approx(np.mean(result["bytes_sent"]))
            assert result["bytes_by_epoch"][1] == pytest.approx(2 * result["bytes_by_epoch"][0], rel=0.01)
            assert len(result["bytes_sent"]) == ranks
            assert all(sent > 0 for sent in result["bytes_sent"]) == (ranks > 1)


def test_the_command_needs_no_arguments_and_learns(mpiagg, tmp_path):
    done = mpiagg("demo", "--json", str(tmp_path / "demo.json"))
    assert done.status == 0, done.err
    assert "\x1b" not in done.out, "no escape codes where the output is not a terminal"
    assert not done.err
    for words in ("allreduce", "auto", launch.mpi_vendor(), "test accuracy", "bytes sent", "communicating (s)"):
        assert words in done.out
    told = json.loads((tmp_path / "demo.json").read_text())
    assert told["ranks"] == 4
    assert told["test_accuracy"] >= 0.96
    assert told["difference_from_serial"] <= 1e-8
    assert told["difference_between_ranks"] == 0
    assert told["settings"]["aggregator"] == "allreduce"
    assert told["machine"]["mpi"].startswith(launch.mpi_vendor())
    assert len(told["losses"]) == told["settings"]["epochs"]
    assert told["losses"][-1] < told["losses"][0] / 5
    assert all(len(told[key]) == 4 for key in ("computing", "communicating", "bytes_sent"))


LEARN = """
import json, sys
from mpiagg.cli import summary, training
from mpiagg.launch import job
from mpiagg.cli.aggregators import AGGREGATORS
from mpiagg.cli.settings import DemoSettings
world = job.join()
told = {}
for name, aggregator in AGGREGATORS.items():
    result = training.work(DemoSettings(name, "auto", 20, 32, aggregator.learning_rate, 0), world, lambda: None)
    if world.rank == 0:
        told[name] = result.test_accuracy, max(result.bytes_sent), summary.fault(result)
if world.rank == 0:
    json.dump(told, sys.stdout)
"""


@pytest.mark.thorough
def test_every_aggregator_learns(run_ranks):
    done = run_ranks(4, LEARN)
    assert done.status == 0, done.err
    told = json.loads(done.out)
    assert list(told) == list(AGGREGATORS)
    for name, (accuracy, _, fault) in told.items():
        assert fault is None
        assert accuracy >= (0.96 if AGGREGATORS[name].full_precision else 0.95), name
    # What is meant to save bytes does; values of float64 are 8 bytes.
    sent = {name: nbytes for name, (_, nbytes, _) in told.items()}
    for name, saving in [("allreduce-fp16", 3.9), ("allreduce-u8", 7), ("power-sgd", 7), ("local-sgd-outer", 50)]:
        assert sent[name] * saving < sent["allreduce"], name


def test_several_aggregators_are_compared(mpiagg, tmp_path):
    names = ("allreduce", "allreduce-u8")
    options = [option for name in names for option in ("--aggregator", name)]
    done = mpiagg("demo", "-n", "2", "--epochs", "2", *options, "--json", str(tmp_path / "demo.json"))
    assert done.status == 0, done.err
    told = json.loads((tmp_path / "demo.json").read_text())
    assert [each["settings"]["aggregator"] for each in told] == list(names)
    for each in told:
        assert each["serial_seconds"] > 0
        assert each["native_seconds"] > 0
        assert len(each["serial_losses"]) == 2
    assert told[0]["serial_losses"] == pytest.approx(told[0]["losses"])
    assert told[1]["serial_losses"] != pytest.approx(told[1]["losses"], rel=1e-12)


def test_it_is_a_rank_where_mpiexec_has_started_it(run):
    arguments = ["-m", "mpiagg", "demo", "--epochs", "1", "-n", "7"]
    done = run(launch.command(3, arguments), **{launch.TERMINAL_WIDTH: "100"})
    assert done.status == 0, done.err
    # One rank tells: three rows of ranks, with the progress bar that a terminal gets.
    assert done.out.count("test accuracy") == 1
    assert done.out.count("│    2 │") == 1
    assert "│    3 │" not in done.out
    assert "\x1b" in done.out
    assert "1/1" in done.out


def test_a_training_that_diverges_fails(mpiagg):
    done = mpiagg("demo", "-n", "2", "--epochs", "1", "--learning-rate", "1e300")
    assert done.status == 1
    assert "Error: the training diverged" in done.err
    assert "Warning" not in done.err


@pytest.mark.parametrize(
    ("command", "value"), [("demo --learning-rate", "nan"), ("bench --time-limit", "inf"), ("tune --time", "nan")]
)
def test_numbers_are_finite(mpiagg, command, value):
    done = mpiagg(*command.split(), value)
    assert done.status == 2
    assert f"{value} is not a finite number" in done.err


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_job_started_by_another_librarys_launcher_is_told(mpiagg, variable):
    done = mpiagg("demo", **{variable: "4"})
    assert done.status == 2
    assert done.err.count("Error: this process is one of 4") == 1
    assert variable in done.err
    assert f"mpi4py loads {launch.mpi_vendor()}" in done.err
    assert launch.mpiexec() in done.err
    assert not done.out


FAILING = """
import sys
from mpiagg.cli import main, training
def work(settings, comm, after_epoch):
    if comm.rank == 1:
        raise RuntimeError("it rained")
    comm.Barrier()
training.work = work
main(["demo"])
"""


def test_a_rank_that_fails_ends_the_job(run_ranks):
    done = run_ranks(3, FAILING)
    assert done.status not in (0, 2)
    assert "rank 1 of 3 failed" in done.err
    assert "RuntimeError: it rained" in done.err
    assert "Traceback" in done.err


def test_without_its_data_the_demo_says_what_to_install(monkeypatch):
    module = sys.modules["mpiagg.cli.demo"]
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "sklearn" else name)
    done = CliRunner().invoke(main, ["demo"])
    assert done.exit_code == 1
    assert "pip install scikit-learn" in done.output
