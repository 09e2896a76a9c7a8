"""The cluster on one machine: that it comes up, what it is for its ranks, and that nothing of it stays."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from jobs import MARK, all_gone, processes

from mpiagg.launch import start as launch

SCRIPT = Path(__file__).parents[2] / "bench" / "cluster.py"
_spec = importlib.util.spec_from_file_location("cluster", SCRIPT)
cluster = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cluster)
Cluster = cluster.Cluster

OBSTACLE = cluster.obstacle()
needs_nodes = pytest.mark.skipif(OBSTACLE is not None, reason=f"no cluster can be made here: {OBSTACLE}")

FACTS = """
import json, os, socket, sys
from pathlib import Path
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
window = MPI.Win.Allocate_shared(8 if node.rank == 0 else 0, 8, comm=node)
shared = np.frombuffer(window.Shared_query(0)[0], np.int64)
if node.rank == 0:
    shared[0] = 100 + world.rank
    Path("/dev/shm/mpiagg-test").write_text(socket.gethostname())
window.Fence()
facts = {
    "host": socket.gethostname(),
    "processor": MPI.Get_processor_name(),
    "addresses": [socket.gethostbyname(f"node{k}") for k in range(2)],
    "node": node.allgather(world.rank),
    "shared": int(shared[0]),
    "file": Path("/dev/shm/mpiagg-test").read_text(),
    "sum": world.allreduce(world.rank),
    "given": os.environ["GIVEN"],
    "folder": os.getcwd(),
}
Path(sys.argv[1], f"{world.rank}.json").write_text(json.dumps(facts))
window.Free()
node.Free()
"""

SLEEP = "import sys, time; sys.stdout.write('up\\n'); sys.stdout.flush(); time.sleep(300)"


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    """An environment that no launcher has touched, with a mark by which processes are known."""
    for variable in launch.launchers.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    return mark


@pytest.fixture
def nothing_stays(outside):
    """Show that nothing of the test's clusters is left: no namespace, link, process or file."""
    links = host_links()
    namespaces = set(cluster._namespaces())
    yield
    assert set(cluster._namespaces()) <= namespaces
    assert host_links() == links
    assert all_gone(outside, seconds=0), processes(outside)
    assert not list(Path(cluster.tempfile.gettempdir()).glob(f"mpiagg-{os.getpid()}-*"))


def host_links():
    return {link["ifname"] for link in json.loads(cluster._call("ip", "-j", "link").stdout)}


@contextlib.contextmanager
def command(*arguments):
    """Start the command, and hold it to a time limit."""
    words = [sys.executable, str(SCRIPT), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, **pipes) as process:
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


@needs_nodes
@pytest.mark.usefixtures("nothing_stays")
def test_the_ranks_of_a_node_share_its_memory_and_its_name_and_no_others_do(tmp_path, monkeypatch):
    monkeypatch.setenv("GIVEN", "a b'c\" $d")
    monkeypatch.chdir(tmp_path)
    with Cluster(nodes=2, ranks=2) as made:
        assert made.run([sys.executable, "-c", FACTS, str(tmp_path)], timeout=60) == 0
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [fact["host"] for fact in facts] == ["node0", "node0", "node1", "node1"]
    assert [fact["processor"] for fact in facts] == ["node0", "node0", "node1", "node1"]
    assert [fact["file"] for fact in facts] == ["node0", "node0", "node1", "node1"]
    assert [fact["node"] for fact in facts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [fact["shared"] for fact in facts] == [100, 100, 102, 102]
    assert {tuple(fact["addresses"]) for fact in facts} == {tuple(made.addresses)}
    assert {fact["sum"] for fact in facts} == {6}
    assert {fact["given"] for fact in facts} == {"a b'c\" $d"}
    assert {fact["folder"] for fact in facts} == {str(tmp_path)}


@needs_nodes
@pytest.mark.usefixtures("nothing_stays")
def test_links_have_their_rates_both_ways_and_clusters_do_not_meet():
    with Cluster(nodes=2, rate="1gbit,2.5mbit") as one, Cluster(nodes=1, rate="10gbit") as other:
        assert one.name != other.name
        assert one.rates == [10**9, 2_500_000]
        for made in (one, other):
            for node, rate in enumerate(made.rates):
                for namespace, device in ((node, "eth0"), ("switch", f"port{node}")):
                    told = cluster._call("tc", "-j", "-n", f"{made.name}-{namespace}", "qdisc", "show", "dev", device)
                    (shape,) = json.loads(told.stdout)
                    assert (shape["kind"], shape["options"]["rate"] * 8) == ("tbf", rate)
        # Not of a process that runs.
        assert cluster.clean() == []
        assert len(cluster._namespaces(one.name)) == 3


@needs_nodes
@pytest.mark.usefixtures("nothing_stays")
def test_the_exit_status_of_the_ranks_comes_back():
    with command("--", sys.executable, "-c", "raise SystemExit(3)") as process:
        process.communicate(timeout=60)
    assert process.returncode == 3


@needs_nodes
@pytest.mark.usefixtures("nothing_stays")
def test_what_hangs_is_ended(capfd):
    with Cluster(nodes=2) as made:
        with pytest.raises(TimeoutError, match=r"ended, since it still ran after 1.5 s"):
            made.run([sys.executable, "-c", SLEEP], timeout=1.5)
        assert [cluster._call("ip", "netns", "pids", name).stdout for name in cluster._namespaces(made.name)] == [
            ""
        ] * 3
        # And the nodes can be used again.
        assert made.run([sys.executable, "-c", "print('again')"], timeout=60) == 0
    assert capfd.readouterr().out.count("again") == 2


@needs_nodes
@pytest.mark.usefixtures("nothing_stays")
def test_a_time_limit_gives_a_status_of_its_own(monkeypatch):
    def run(made, command, timeout):
        assert len(cluster._namespaces(made.name)) == 4
        raise TimeoutError(f"{command} took more than {timeout}")

    monkeypatch.setattr(Cluster, "run", run)
    done = CliRunner().invoke(cluster.main, ["--nodes", "3", "--timeout", "0.5", "sleep", "--odd", "9"])
    assert done.exit_code == 124
    assert done.output == "Error: ('sleep', '--odd', '9') took more than 0.5\n"


@pytest.fixture
def heard():
    """Have what the test starts hear interrupts, which all ignore that a shell has started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@needs_nodes
@pytest.mark.usefixtures("nothing_stays", "heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_take_it_down(number):
    with command("--", sys.executable, "-c", SLEEP) as process:
        assert process.stdout.readline() == "up\n"
        assert len([name for name in cluster._namespaces() if cluster._owner(name) == process.pid]) == 3
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number


@needs_nodes
@pytest.mark.usefixtures("nothing_stays")
def test_a_failure_takes_it_down():
    with pytest.raises(ZeroDivisionError), Cluster(nodes=2):
        raise ZeroDivisionError


@needs_nodes
@pytest.mark.usefixtures("nothing_stays")
def test_a_failure_while_it_is_made_takes_down_what_there_is(monkeypatch, tmp_path):
    tool = tmp_path / "tc"
    tool.write_text('#!/bin/sh\ncase "$*" in *port1*) echo "no such thing" >&2; exit 1;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(click.ClickException, match=r"tc -n \S+-switch qdisc .* failed: no such thing"):
        Cluster(nodes=2).__enter__()


@needs_nodes
@pytest.mark.usefixtures("nothing_stays")
def test_what_a_killed_run_has_left_is_cleaned():
    with command("--", sys.executable, "-c", SLEEP) as process:
        assert process.stdout.readline() == "up\n"
        process.kill()
        process.wait(60)
        left = {name for name in cluster._namespaces() if cluster._owner(name) == process.pid}
        assert len(left) == 3
        # The ranks hold the pipes' other ends until they are ended.
        cleaned = CliRunner().invoke(cluster.main, ["--clean"])
    assert cleaned.exit_code == 0
    assert f"took down mpiagg-{process.pid}-0" in cleaned.output
    assert not list(Path(cluster.tempfile.gettempdir()).glob(f"mpiagg-{process.pid}-*"))


def refused(*arguments):
    done = CliRunner().invoke(cluster.main, [*arguments, "true"])
    assert done.exit_code == 1
    return done.output


@pytest.fixture
def able(monkeypatch):
    """A machine that has everything, as far as is asked before anything is made."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool, path=None: f"{path}/{tool}")
    return monkeypatch


def test_another_system_is_told(able):
    able.setattr(sys, "platform", "darwin")
    assert "is made of Linux's network namespaces; this is darwin" in refused()
    assert "this is darwin" in refused("--clean")


def test_missing_root_is_told(able):
    able.setattr(os, "geteuid", lambda: 1000)
    assert "takes root. Run it with sudo" in refused()


def test_missing_tools_are_told_with_their_packages(able):
    able.setattr(shutil, "which", lambda tool, path=None: None if tool in ("ip", "tc") else tool)  # noqa: ARG005 - the arguments of what it stands for
    assert "found no ip, tc on PATH. On Debian: apt-get install iproute2" in refused()


def test_a_root_that_may_not_make_namespaces_is_told(able):
    failed = subprocess.CompletedProcess([], 1, "", "unshare failed: Operation not permitted\n")
    able.setattr(cluster, "_call", lambda *_, **__: failed)
    assert "as in most containers: unshare failed: Operation not permitted" in refused()


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        ("fast", "'fast' is no rate from 1mbit to 100gbit"),
        ("1gbit,", "'' is no rate"),
        ("-1gbit", "'-1gbit' is no rate"),
        ("999kbit", "'999kbit' is no rate"),
        ("101gbit", "'101gbit' is no rate"),
        ("1gbit,1gbit,1gbit", "there are 3 rates for 2 nodes"),
    ],
)
def test_odd_rates_are_told(rate, words):
    with pytest.raises(click.ClickException, match=words):
        Cluster(nodes=2, rate=rate)
    assert words in refused("--rate", rate)


def test_rates_are_one_for_all_or_one_for_each():
    assert Cluster(nodes=3, rate="1Gbit").rates == [10**9] * 3
    assert Cluster(nodes=3, rate="2.5gbit, 100mbit,5000kbit").rates == [2_500_000_000, 10**8, 5 * 10**6]


@pytest.mark.parametrize(("nodes", "ranks"), [(0, 1), (201, 1), (1, 0), (1, -1)])
def test_odd_sizes_are_told(nodes, ranks):
    with pytest.raises(click.ClickException, match=f"not {nodes} of {ranks}"):
        Cluster(nodes, ranks)


def test_no_command_is_told():
    done = CliRunner().invoke(cluster.main, [])
    assert done.exit_code == 2
    assert "there is no command to run" in done.output


def test_another_mpi_library_is_told(monkeypatch):
    monkeypatch.setattr(launch, "mpi_vendor", lambda: "Some MPI")
    with pytest.raises(click.ClickException, match=r"of MPICH and of Open MPI.*mpi4py loads Some MPI"):
        Cluster(nodes=2).run(["true"])
