"""What a machine is: its processor and its networks, as Linux tells them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def processor() -> str:
    """Return what the processor calls itself."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def networks() -> list[str]:
    """Return the kinds of networks that the machine is on, with their rates, as in ``ethernet 10000``."""
    return sorted({*_of_infiniband(), *_of_others()})


def _of_infiniband() -> Iterator[str]:
    for rate in Path("/sys/class/infiniband").glob("*/ports/*/rate"):
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


def description() -> dict[str, object]:
    """Return what is the same on machines that are alike."""
    return {"cpu": processor(), "cores": os.cpu_count(), "networks": networks()}
