"""``mpiagg simulate``: how quantities are written, what is told, saved and drawn, and what is refused."""

import json
import sys

import pytest
from click.testing import CliRunner

from mpiagg.cli import main
from mpiagg.cli.price_plot import MOST, alike, fastest
from mpiagg.cli.quantities import parse_network, parse_nodes, parse_rate, parse_stragglers, parse_time
from mpiagg.schedules import Cluster, Layout, algorithms, price
from mpiagg.schedules.model import Noise, Pricing
from mpiagg.schedules.networks import Groups, Torus


def simulate(*arguments):
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


@pytest.mark.parametrize(
    ("text", "seconds"), [("2us", 2e-6), ("0.3us", 3e-7), ("300 ns", 3e-7), ("1ms", 1e-3), ("1s", 1)]
)
def test_times(text, seconds):
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25GB/s", 25e9), ("1Gbit/s", 125e6), ("1gbit", 125e6), ("119.6 MB/s", 119.6e6), ("5kB/s", 5e3), ("1TB/s", 1e12)],
)
def test_rates(text, rate):
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        *[(parse_time, text, "is not a time; write 300ns") for text in ("", "2", "us", "-2us", "2 min", "1e3us")],
        *[(parse_rate, text, "is not a rate; write 25GB/s") for text in ("", "25", "25GB", "0GB/s", "1Gb/s", "-1GB/s")],
        *[(parse_nodes, text, "no layout of nodes; write 128, 4x2") for text in ("", "x", "4x", "8,", "-1", "4x2x2")],
        *[(parse_nodes, text, "leaves nodes without ranks") for text in ("0x2", "4x0", "8,0")],
        *[(parse_nodes, text, "at most 65,536 ranks, not ") for text in ("60000x60000", "9999999999x1", "65536,1")],
        (parse_nodes, "4", "how many ranks are on the 4 nodes"),
        *[
            (parse_network, f"{text}", "is no network; write fat-tree:32:2,512:4")
            for text in ("", "fat-tree", "fat-tree:", "fat-tree:4:", "fat-tree:4:x", "torus:4x", "torus:4,4", "ring:4")
        ],
        (parse_network, "dragonfly:4,8", "is no network"),
        *[(parse_stragglers, text, "write 2:5ms") for text in ("", "2", "2:", ":5ms", "x:5ms", "-1:5ms")],
        (parse_stragglers, "2:5", "is not a time"),
    ],
)
def test_what_is_not_written_so_is_refused(read, text, words):
    with pytest.raises(ValueError, match=words):
        read(text)


@pytest.mark.parametrize(
    ("text", "ranks", "sizes"),
    [
        ("3", 6, [2, 2, 2]),
        ("4", 6, [1, 2, 1, 2]),
        ("4x2", None, [2] * 4),
        ("4 x 2", 8, [2] * 4),
        ("8,8,4", 20, [8, 8, 4]),
        ("3 + 1", None, [3, 1]),
    ],
)
def test_layouts(text, ranks, sizes):
    assert parse_nodes(text, ranks) == Layout.of(sizes)


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("fat-tree:32", (Groups(32),)),
        ("fat-tree:32:2,512:4.5", (Groups(32, 2.0), Groups(512, 4.5))),
        ("dragonfly:64:2", (Groups(64, 2.0, paired=True),)),
        ("torus:16x8x8", Torus((16, 8, 8))),
    ],
)
def test_networks(text, network):
    assert parse_network(text) == network


def test_a_layout_is_read_as_it_is_told():
    for sizes in ([4], [2, 2], [3, 1, 2]):
        assert parse_nodes(str(Layout.of(sizes))) == Layout.of(sizes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bees", "-n", 4], "unknown algorithm 'bees'; known: all, ring, tree"),
        (["knomial-1", "-n", 4], "the number in 'knomial-1' must be from 2 to 64"),
        (["all"], "how many ranks? Give -n, or --nodes with the ranks of each"),
        (["tree", "-n", 4, "--collective", "allgather"], "'tree' does not serve allgather; these do: ring, circulant"),
        (["ring", "-n", 4, "--alpha", "3"], "'3' is not a time"),
        (["ring", "-n", 4, "--bandwidth", "3Gb/s"], "'3Gb/s' is not a rate"),
        (["ring", "-n", 4, "--bytes", "bees"], "'bees' is not a size"),
        (["ring", "-n", 4, "--nodes", "5"], "--nodes: '5' leaves nodes without ranks"),
        (["ring", "-n", 4, "--nodes", "0"], "--nodes: '0' leaves nodes without ranks"),
        (["ring", "-n", 4, "--nodes", "3x2"], "is a layout of 6 ranks, not of 4"),
        (["ring", "--nodes", "65537x1"], "at most 65,536 ranks, not 65,537"),
        (["ring", "-n", 65537], "65537 is not in the range"),
        (["ring", "-n", 4, "--slow-node", "4:1GB/s"], "--slow-node must be from 0 to 3, not 4"),
        (["ring", "-n", 4, "--slow-node", "1GB/s"], "'1GB/s' is no slow node; write 3:1GB/s"),
        (["ring", "-n", 8, "--network", "torus:3x2"], "--network: a torus of 3 x 2 has 6 nodes, but there are 8"),
        (["ring", "-n", 8, "--network", "fat-tree:4,6"], "groups of 6 nodes cannot be made of groups of 4"),
        (["ring", "-n", 8, "--network", "fat-tree:4:0"], "an oversubscription above 0"),
        (["ring", "-n", 8, "--network", f"fat-tree:{'9' * 30}"], "has a number above 65,536"),
        (["ring", "--nodes", "1x4", "--slow-node", "0:1MB/s"], "--slow-node is about links between nodes"),
        (["ring", "-n", 4, "--node-alpha", "1us"], "--node-alpha is about what is within --nodes"),
        (["ring", "-n", 4, "--seed", 1], "--seed is for --jitter and --stragglers"),
        (["ring", "-n", 4, "--hop", "1us"], "--hop is a latency of a --network"),
        (["ring", "--nodes", "1x8", "--network", "fat-tree:4"], "--network is between nodes, and there is one"),
        (["ring", "-n", 4, "--stragglers", "5:1ms"], "--stragglers: there are 4 ranks, not 5"),
        (["ring", "-n", 4, "--jitter", "0.2"], "'0.2' is not a time"),
        (["ring", "-n", 1, "--plot", "x.png"], "--plot is for two ranks and more"),
        (["ring", "-n", 4, "--plot", "nowhere/x.png"], "folder 'nowhere' does not exist"),
        (["ring", "-n", 4, "--plot", "x.jpg"], "the name must end in .png, .pdf or .svg"),
    ],
)
def test_what_is_wrong_is_told(arguments, words):
    done = simulate(*arguments)
    assert done.exit_code == 2
    assert words in done.output


def test_no_message_need_be_eager(tmp_path):
    done = simulate("ring", "-n", 4, "--eager", "0", "--json", tmp_path / "ring.json")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "ring.json").read_text())["cluster"]["eager"] == 0


def test_large_nodes_need_not_be_equally_full():
    assert simulate("hierarchical", "--nodes", "9000,1").exit_code == 0


def test_the_prices_are_the_models(tmp_path):
    path = tmp_path / "prices.json"
    done = simulate(
        "all", "--nodes", "4,4,2", "--bytes", "1M", "--alpha", "3us", "--bandwidth", "1GB/s", "--gamma", "10GB/s",
        *["--node-alpha", "0.5us", "--node-bandwidth", "20GB/s", "--slow-node", "2:100MB/s", "--json", path],
        *["--overhead", "0.7us", "--node-overhead", "0.2us", "--network", "fat-tree:2:3"],
        *["--hop", "0.4us", "--eager", "4K"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    told = json.loads(path.read_text())
    network = (Groups(2, 3.0, 0.4e-6),)
    cluster = Cluster(3e-6, 1e-9, 1e-10, 0.5e-6, 5e-11, (1e-9, 1e-9, 1e-8), 0.7e-6, 0.2e-6, 4096, network)
    assert (told["ranks"], told["layout"], told["size"]) == (10, "4 + 4 + 2", 2**20)
    assert told["cluster"]["links"] == pytest.approx(cluster.links)
    assert "noise" not in told
    assert [row["algorithm"] for row in told["rows"]] == list(algorithms("allreduce"))
    for row in told["rows"]:
        expected = price(row["algorithm"], "allreduce", Layout.of([4, 4, 2]), 2**20, cluster)
        assert row["seconds"] == pytest.approx(expected)
        assert row["latency"] + row["bandwidth"] + row["reduction"] == pytest.approx(row["seconds"])
        assert len(row["crossing"]) == 2
        assert "runs" not in row


def test_runs_with_chance_are_the_models(tmp_path):
    path = tmp_path / "prices.json"
    chance = ("--jitter", "2us", "--stragglers", "1:1ms", "--seed", 5)
    done = simulate("ring", "-n", 6, "--network", "torus:3x2", *chance, "--json", path)
    assert done.exit_code == 0, done.output
    told = json.loads(path.read_text())
    (row,) = told["rows"]
    pricing = Pricing("ring", "allreduce", Layout.by_name(range(6)), Cluster(network=Torus((3, 2))))
    noise = Noise(2e-6, 1, 1e-3)
    assert row["runs"] == pytest.approx(pricing.sample(100 * 2**20, noise, range(5, 15)))
    assert (told["noise"], told["seed"]) == ({"jitter": 2e-6, "stragglers": 1, "delay": 1e-3}, 5)
    assert "10 runs with chance, from seed 5" in done.output
    assert "in hops of" in done.output


def test_the_table_is_sorted_and_fits():
    done = simulate("all", "-n", 1024, "--nodes", 128)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].strip() == "allreduce of 100 MiB, ranks: 1,024, nodes: 128 x 8"
    assert max(map(len, lines)) <= 80
    assert "…" not in done.output  # which stands for what does not fit
    names = [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in algorithms()]
    names, crossing = names[: len(names) // 2], names[len(names) // 2 :]
    assert names == crossing
    assert sorted(names) == sorted(algorithms("allreduce"))
    assert names[:2] == ["halving_doubling", "hierarchical"]
    assert "bytes that cross, in all" in done.output
    assert "30.22 ms" in next(line for line in lines if line.startswith("hierarchical"))


@pytest.mark.thorough
def test_65536_ranks():
    done = simulate("all", "-n", 65536, "--nodes", 8192)
    assert done.exit_code == 0, done.output
    assert "131,070" in done.output


@pytest.mark.parametrize(
    "where",
    [
        *[("-n", 5), ("-n", 6, "--nodes", 1), ("--nodes", "2,1,2", "--slow-node", "1:1GB/s")],
        *[("-n", 12, "--network", "torus:6x2"), ("-n", 12, "--network", "fat-tree:2:2,6:3")],
    ],
)
def test_a_plot(where, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    done = simulate("ring", "--collective", "broadcast", *where, "--plot", path)
    assert done.exit_code == 0, done.output
    assert f"Saved the plot to {path}" in done.output.replace("\n", "")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_name_of_a_plot_says_its_format(tmp_path):
    pytest.importorskip("matplotlib")
    done = simulate("ring", "-n", 4, "--plot", tmp_path / "plot.pdf")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "plot.pdf").read_bytes().startswith(b"%PDF")


def test_curves_that_cannot_be_told_apart_are_one():
    curves = {"a": [1, 2, 3], "b": [1, 2, 4], "c": [1.001, 2, 3], "d": [1, 2, 4.0]}
    assert alike(curves) == [("a", "c"), ("b", "d")]


def test_the_fastest_curves_are_drawn_and_those_asked_for():
    by_size = {f"a{number}": [number + 1.0, 100 * (number + 1.0)] for number in reversed(range(MOST + 4))}
    by_ranks = {name: [0.0, *seconds] for name, seconds in by_size.items()}
    plots = [by_size, by_ranks]
    assert fastest(plots, []) == fastest(plots, list(by_size)) == [f"a{number}" for number in reversed(range(MOST))]
    assert fastest(plots, ["a10"]) == ["a10", *(f"a{number}" for number in reversed(range(MOST - 1)))]
    few = [{"one": [1.0], "other": [2.0]}]
    assert fastest(few, ["other"]) == ["one", "other"]


def test_a_plot_without_what_has_too_many_messages(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("mpiagg.schedules.posts.MOST_ENDS", 500)
    done = simulate("all", "--collective", "alltoall", "-n", 64, "--plot", tmp_path / "plot.png")
    assert done.exit_code == 0, done.output
    assert "Left out: pairwise on 64 ranks" in done.output


def test_a_plot_without_what_has_too_many_messages_on_fewer_ranks(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("mpiagg.schedules.posts.MOST_ENDS", 500)
    done = simulate("direct", "-n", 33, "--network", "dragonfly:3:1", "--plot", tmp_path / "plot.png")
    assert done.exit_code == 0, done.output


def test_a_plot_without_matplotlib_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = simulate("ring", "-n", 4, "--plot", tmp_path / "plot.png")
    assert done.exit_code == 1
    assert done.output == "Error: --plot needs matplotlib: pip install matplotlib\n"


def test_what_has_too_many_messages_is_left_out_of_all(monkeypatch):
    monkeypatch.setattr("mpiagg.schedules.posts.MOST_ENDS", 5000)
    told = simulate("all", "--collective", "alltoall", "-n", 128)
    assert told.exit_code == 0
    assert "Left out: pairwise on 128 ranks has too many messages" in told.output
    assert "bruck" in told.stdout
    assert "pairwise" not in told.stdout
    told = simulate("pairwise", "--collective", "alltoall", "-n", 128)
    assert told.exit_code == 2
    assert "too many messages of too many kinds" in told.output
