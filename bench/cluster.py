"""A cluster on one machine: nodes of their own names and addresses, with links of a given rate between them.

    python bench/cluster.py --nodes 4 --rate 1gbit -- python -m mpiagg bench allreduce -m 1M:16M --json FILE
    python bench/cluster.py --nodes 2 --ranks 2 --rate 1gbit,100mbit -- python script.py
    python bench/cluster.py --clean

The command runs on every rank, under the mpiexec of the MPI library that mpi4py loads (MPICH or Open MPI). It needs
Linux and root, and ``ip`` and ``tc`` of iproute2. Everything is taken down again, however the command ends; what a run
that was killed by SIGKILL has left, ``--clean`` takes down.

Every node is a network namespace, joined by a pair of virtual Ethernet devices to a bridge, the switch, which
lives in a namespace too: nothing is added to the machine's own network, and no address can collide with one of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, NoReturn

import click

from mpiagg.cli.quantities import POSITIVE
from mpiagg.launch import start as launch

MOST_NODES: Final = 200
_UNITS: Final = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TOOLS: Final = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "mount", "hostname": "hostname"}
"""What is called, and the package of Debian that has it."""

_NETWORK: Final = "10.77.0"
_SWITCH: Final = f"{_NETWORK}.254"
_NAME: Final = re.compile(r"mpiagg-(?P<pid>\d+)-\d+-(switch|\d+)")
_SERIAL: Final = itertools.count()
_END_SECONDS: Final = 10
_TIMED_OUT: Final = 124

_ONLY_TCP: Final = {
    # All nodes are one machine, and UCX could see that. Between the ranks of a node MPICH uses shared memory of its
    # own, not UCX's, and Open MPI its `sm`; both ask the launcher who is on the node.
    "UCX_TLS": "tcp,self",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,sm,self",
    "OMPI_MCA_btl_tcp_if_include": f"{_NETWORK}.0/24",
}

_AGENT: Final = """\
#!/bin/sh
# In the place of ssh: [OPTION]... ADDRESS COMMAND... runs the command on the node that has the address. /dev/shm and
# /etc/hosts are the node's own: no other node shares its memory, and all know each other's names.
while [ "${{1#-}}" != "$1" ]; do shift; done
node=$((${{1##*.}} - 1))
shift
exec ip netns exec {name}-$node unshare --uts --ipc --mount sh -c '
    hostname "$0" && mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && shift && exec sh -c "$*"
' node$node {hosts} "$@"
"""


def obstacle() -> str | None:
    """Return what this machine lacks for a cluster, in words; None if nothing."""
    if sys.platform != "linux":
        return f"a cluster on one machine is made of Linux's network namespaces; this is {sys.platform}"
    lacking = [tool for tool in _TOOLS if shutil.which(tool, path=_path()) is None]
    if lacking:
        packages = " ".join(sorted({_TOOLS[tool] for tool in lacking}))
        return f"found no {', '.join(lacking)} on PATH. On Debian: apt-get install {packages}"
    if os.geteuid():
        return (
            "making network namespaces takes root. Run it with sudo, or, where the kernel lets users make namespaces:\n"
            "unshare --map-root-user --net --mount sh -c 'mount -t tmpfs tmpfs /run && python bench/cluster.py ...'"
        )
    tried = _call("unshare", "--net", "--uts", "--ipc", "--mount", "true", check=False)
    if tried.returncode:
        return f"this root may not make namespaces, as in most containers: {tried.stderr.strip()}"
    return None


def parse_rates(text: str, nodes: int) -> list[int]:
    """Return the rates of the nodes' links in bit/s, from one rate for all or one for each: ``1gbit,100mbit``.

    Raises
    ------
    click.ClickException
        If it is not a list of 1 or as many rates as there are nodes, each from 1 Mbit/s to 100 Gbit/s.
    """
    rates = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]bit)\s*", word, re.IGNORECASE)
        rate = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
        if not 10**6 <= rate <= 10**11:
            raise click.ClickException(f"{word!r} is no rate from 1mbit to 100gbit, such as 1gbit or 2.5gbit")
        rates.append(rate)
    if len(rates) not in (1, nodes):
        raise click.ClickException(f"there are {len(rates)} rates for {nodes} nodes: give one for all, or one for each")
    return rates * nodes if len(rates) == 1 else rates


class Cluster:
    """Nodes on this machine with links between them, from entering the context to leaving it.

    Node k is called ``node<k>``, and its r-th rank is rank ``k * ranks + r`` of the job. Several clusters
    can be up at once.

    Parameters
    ----------
    nodes : int
        How many nodes, from 1 to 200.
    ranks : int
        How many ranks on each.
    rate : str
        The rate of the nodes' links, each way: ``"1gbit"``, or one for each node, ``"1gbit,100mbit"``.

    Raises
    ------
    click.ClickException
        If an argument is out of range; on entering, if this machine lacks what it takes, or a tool fails.

    Examples
    --------
    >>> with Cluster(nodes=4, rate="1gbit") as cluster:  # doctest: +SKIP
    ...     status = cluster.run(["python", "script.py"])
    """

    def __init__(self, nodes: int, ranks: int = 1, rate: str = "1gbit") -> None:
        if not 1 <= nodes <= MOST_NODES or ranks < 1:
            raise click.ClickException(
                f"there can be 1 to {MOST_NODES} nodes of 1 rank or more, not {nodes} of {ranks}"
            )
        self.nodes, self.ranks, self.rates = nodes, ranks, parse_rates(rate, nodes)
        self.name = f"mpiagg-{os.getpid()}-{next(_SERIAL)}"
        self.addresses = [f"{_NETWORK}.{node + 1}" for node in range(nodes)]
        self._folder: Path | None = None

    def __enter__(self) -> Cluster:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Make the nodes and their links."""
        if words := obstacle():
            raise click.ClickException(words)
        try:
            self._write_agent()
            self._make_switch()
            for node in range(self.nodes):
                self._make_node(node)
        except BaseException:
            take_down(self.name)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what still runs on the nodes, and take them down."""
        take_down(self.name)

    def run(self, command: Sequence[str], timeout: float | None = None) -> int:
        """Run a command on every rank and return the launcher's exit status; no process of it is left afterwards.

        The ranks get this process's environment and working directory.

        Parameters
        ----------
        command : sequence of str
            The program and its arguments.
        timeout : float, optional
            How long it may take, in seconds; for ever by default.

        Raises
        ------
        TimeoutError
            If it had to be ended.
        click.ClickException
            If there is no MPI library, or it is neither MPICH nor Open MPI.
        """
        launcher = ["ip", "netns", "exec", f"{self.name}-switch", *self._launcher(), *command]
        job = None
        try:
            # In a session of its own, so that Ctrl-C comes to this process alone, which then ends it in good order.
            job = subprocess.Popen(launcher, env=self._environment(), start_new_session=True)  # noqa: S603 - the caller's
            status = job.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the command was ended, since it still ran after {timeout:g} s") from None
        finally:
            self._end(job)
        return status if status >= 0 else 128 - status

    def _end(self, job: subprocess.Popen[bytes] | None) -> None:
        if job is not None and job.poll() is None:
            # A launcher that is asked to end removes its files; one that does not is killed with its ranks.
            job.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(_END_SECONDS)
        for namespace in _namespaces(self.name):
            _end_processes(namespace)
        if job is not None:
            job.wait()

    def _launcher(self) -> list[str]:
        """Return the launcher's part of the command line."""
        vendor, size = launch.mpi_vendor(), str(self.nodes * self.ranks)
        hosts = ",".join(f"{address}:{self.ranks}" for address in self.addresses)
        if vendor == "MPICH":
            agent = ["-launcher", "ssh", "-launcher-exec", str(self._agent), "-localhost", _SWITCH]
            return [launch.mpiexec(), *agent, "-hosts", hosts, "-n", size]
        if vendor == "Open MPI":
            # Bound, the first ranks of all nodes would share the machine's first core.
            places = ["--map-by", f"ppr:{self.ranks}:node:oversubscribe", "--bind-to", "none"]
            return [launch.mpiexec(), "--host", hosts, *places, "-n", size]
        raise click.ClickException(
            f"the cluster can start ranks of MPICH and of Open MPI, by their launchers' options; mpi4py loads {vendor}"
        )

    def _environment(self) -> dict[str, str]:
        width = {launch.TERMINAL_WIDTH: str(shutil.get_terminal_size().columns)} if sys.stdout.isatty() else {}
        own = {"PATH": _path(), "PRTE_MCA_plm_ssh_agent": str(self._agent), **width}
        return {**_ONLY_TCP, **launch.environment(own)}

    @property
    def _agent(self) -> Path:
        assert self._folder is not None, "the cluster is not up"
        return self._folder / "agent"

    def _write_agent(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        hosts = self._folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} node{node}" for node, address in enumerate(self.addresses))]
        hosts.write_text("\n".join([*lines, ""]))
        self._agent.write_text(_AGENT.format(name=self.name, hosts=shlex.quote(str(hosts))))
        self._agent.chmod(0o700)

    def _make_switch(self) -> None:
        switch = f"{self.name}-switch"
        _call("ip", "netns", "add", switch)
        _call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", switch, "addr", "add", f"{_SWITCH}/24", "dev", "bridge")
        for device in ("lo", "bridge"):
            _call("ip", "-n", switch, "link", "set", device, "up")

    def _make_node(self, node: int) -> None:
        switch, name, port = f"{self.name}-switch", f"{self.name}-{node}", f"port{node}"
        _call("ip", "netns", "add", name)
        _call("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
        _call("ip", "-n", name, "addr", "add", f"{self.addresses[node]}/24", "dev", "eth0")
        _call("ip", "-n", switch, "link", "set", port, "master", "bridge")
        _limit(name, "eth0", self.rates[node])
        _limit(switch, port, self.rates[node])
        for where, device in ((name, "lo"), (name, "eth0"), (switch, port)):
            _call("ip", "-n", where, "link", "set", device, "up")
        # Linux's own default, whatever the machine's is; a kernel without it keeps what it has.
        cubic = "echo cubic > /proc/sys/net/ipv4/tcp_congestion_control"
        _call("ip", "netns", "exec", name, "sh", "-c", cubic, check=False)


def _limit(namespace: str, device: str, rate: int) -> None:
    """Let a device send at no more than a rate, in bit/s.

    What may leave at once after a pause, the burst, is not held to the rate: it is what the link carries in a
    millisecond. With less, the kernel hands over TCP in smaller pieces and its timers are too late for the next, and
    four nodes on two cores do not come near the rate any more.
    """
    burst = max(2**15, rate // 8 // 1000)
    _call("ip", "-n", namespace, "link", "set", device, "gso_max_size", str(min(burst // 2, 2**16)))
    shape = ["tbf", "rate", f"{rate}bit", "burst", str(burst), "latency", "50ms"]
    _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)


def take_down(name: str) -> None:
    """End all processes on a cluster's nodes, and remove what is there of the nodes and of its files.

    Raises
    ------
    click.ClickException
        If a process does not end, or a tool fails.
    """
    for namespace in _namespaces(name):
        _end_processes(namespace)
        # Its devices, and with them the links, go with the namespace.
        _call("ip", "netns", "del", namespace)
    for folder in Path(tempfile.gettempdir()).glob(f"{name}-*"):
        shutil.rmtree(folder)


def clean() -> list[str]:
    """Take down the clusters of processes that are no more, and return their names."""
    names = {namespace.rpartition("-")[0] for namespace in _namespaces() if not _runs(_owner(namespace))}
    for name in names:
        take_down(name)
    return sorted(names)


def _namespaces(name: str | None = None) -> list[str]:
    """Return the namespaces of a cluster, or of all."""
    listed = (line.split()[0] for line in _call("ip", "netns", "list").stdout.splitlines())
    return [each for each in listed if _NAME.fullmatch(each) and name in (None, each.rpartition("-")[0])]


def _owner(namespace: str) -> int:
    match = _NAME.fullmatch(namespace)
    assert match is not None
    return int(match["pid"])


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _end_processes(namespace: str) -> None:
    """Kill all processes in a namespace, those included that they start meanwhile."""
    deadline = time.monotonic() + _END_SECONDS
    while pids := _call("ip", "netns", "pids", namespace).stdout.split():
        if time.monotonic() > deadline:
            raise click.ClickException(f"processes {' '.join(pids)} in the namespace {namespace} cannot be killed")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _path() -> str:
    """Return where tools are looked for: root's are not always on PATH."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _call(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": _path(), "LC_ALL": "C"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    if check and done.returncode:
        raise click.ClickException(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """Turn the first signal that asks this process to end into SystemExit; later ones do not disturb the clean-up."""
    ending = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]

    def end(number: int, _: FrameType | None) -> NoReturn:
        for each in ending:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "allow_interspersed_args": False}
)
@click.option("--nodes", type=click.IntRange(1, MOST_NODES), default=2, help="How many nodes.")
@click.option("--ranks", type=click.IntRange(1), default=1, help="How many ranks on each node.")
@click.option("--rate", default="1gbit", help="The links' rate each way; or one for each node: 1gbit,100mbit,...")
@click.option("--timeout", type=POSITIVE, help="End it after so many seconds; the status is 124.")
@click.option("--clean", "cleaning", is_flag=True, help="Only take down what killed runs have left.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def main(*, nodes: int, ranks: int, rate: str, timeout: float | None, cleaning: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND on all ranks of a cluster that is made on this machine, and take the cluster down again."""
    if cleaning:
        if words := obstacle():
            raise click.ClickException(words)
        for name in clean():
            print(f"took down {name}")
        return
    if not command:
        raise click.UsageError("there is no command to run: cluster.py [OPTIONS] -- COMMAND...")
    with _signals_end_it(), Cluster(nodes, ranks, rate) as cluster:
        try:
            status = cluster.run(command, timeout)
        except TimeoutError as late:
            print(f"Error: {late}", file=sys.stderr)
            status = _TIMED_OUT
    sys.exit(status)


if __name__ == "__main__":
    main()
