"""What a machine is: its processor and its networks, as Linux tells them."""

from __future__ import annotations

import os
import platform
import re
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from typing import Final

PROCESSORS: Final = Path("/sys/devices/system/cpu")
FABRICS: Final = ("/sys/class/infiniband", "/sys/class/cxi")
"""Where Linux lists the adapters of fast networks: those with InfiniBand's calls, as also Omni-Path, RoCE and EFA, and
Slingshot's."""
_SIOCGIFADDR: Final = 0x8915
"""Linux's call for the IPv4 address of an interface."""
_NUMBER: Final = re.compile("[0-9]{1,6}")
_NUMBERS: Final = re.compile("[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*")


def processor() -> str:
    """Return what the processor calls itself."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def levels(ranks: int, processors: Path = PROCESSORS) -> list[int]:
    """Return the factors of so many ranks, if they fill the machine evenly: of a cache, of a socket, and of all.

    Those are the ranks that share a last-level cache, the caches of a socket, and the sockets; but for ones. There are
    none where the machine does not tell, or is not even.
    """
    caches: dict[str, str] = {}
    for processor in processors.glob("cpu[0-9]*"):
        try:
            shared = dict(_caches(processor / "cache"))
            if not shared:  # of a processor that is off
                continue
            package = _read(processor / "topology" / "physical_package_id", _NUMBER)
        except (OSError, ValueError):
            return []
        if caches.setdefault(shared[max(shared)], package) != package:
            return []
    sockets = len(set(caches.values()))
    if not caches or len(caches) % sockets or ranks % len(caches):
        return []
    return [factor for factor in (ranks // len(caches), len(caches) // sockets, sockets) if factor > 1]


def _caches(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield the level of each cache of a processor, and which processors share it."""
    for cache in folder.glob("index[0-9]*"):
        yield int(_read(cache / "level", _NUMBER)), _read(cache / "shared_cpu_list", _NUMBERS)


def _read(path: Path, pattern: re.Pattern[str]) -> str:
    text = path.read_text().strip()
    if not pattern.fullmatch(text):
        raise ValueError(f"{path}: {text[:80]!r}")
    return text


def networks() -> list[str]:
    """Return the kinds of networks that the machine is on, with their rates, as in ``ethernet 10000``."""
    return sorted({*_of_infiniband(), *_of_others()})


def has_fabric() -> bool:
    """Return whether the machine has an adapter that MPI libraries use without TCP: InfiniBand or one alike."""
    return any(any(Path(place).glob("*")) for place in FABRICS)


def _of_infiniband() -> Iterator[str]:
    for rate in Path(FABRICS[0]).glob("*/ports/*/rate"):
        with suppress(OSError):
            yield f"infiniband {rate.read_text().strip()}"


def _of_others() -> Iterator[str]:
    for place in Path("/sys/class/net").glob("*"):
        with suppress(OSError):
            if place.name != "lo" and (place / "operstate").read_text().strip() == "up":
                rate = ""
                with suppress(OSError):  # of what has none, as bridges
                    rate = (place / "speed").read_text().strip()
                yield f"ethernet {rate}".strip()


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one."""
    found = {}
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # it has none
                    told = ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    found[name] = socket.inet_ntoa(told[20:24])
    return found


def description() -> dict[str, object]:
    """Return what is the same on machines that are alike."""
    return {"cpu": processor(), "cores": os.cpu_count(), "networks": networks()}
