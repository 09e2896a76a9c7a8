"""Connections of unauthenticated peers to ports: as many as are wanted, held until whoever has started this ends.

    python bench/unauthenticated.py COUNT {idle,talk} PORT...

Started by root, they are another user's. What is dropped is opened again. It prints how many have been opened so far at
the port that has had fewest, until that is as many as are wanted.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - imported at the first connection else, when this user may not read it any more
import os
import socket
import sys
import time
from contextlib import suppress
from typing import Final

NOBODY: Final = 65534
PACE: Final = 0.05
"""Seconds between two looks at what was dropped."""


def main(count: int, how: str, ports: list[int]) -> None:
    """Hold connections."""
    parent = os.getppid()
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    crowds: dict[int, list[socket.socket]] = {port: [] for port in ports}
    opened, told = dict.fromkeys(ports, 0), 0
    while os.getppid() == parent:
        for port, crowd in crowds.items():
            crowd[:] = [each for each in crowd if not _dropped(each)]
            with suppress(OSError):  # its process has ended, or takes no more
                while len(crowd) < count:
                    crowd.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                    opened[port] += 1
                    crowd[-1].setblocking(False)
                    if how == "talk":
                        crowd[-1].sendall(bytes(48 if len(crowd) % 2 else 20))
        if told < count:
            told = min(opened.values())
            print(told, flush=True)
        time.sleep(PACE)


def _dropped(connection: socket.socket) -> bool:
    """Whether the other side has ended a connection."""
    try:
        while connection.recv(1000):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    connection.close()
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], [int(port) for port in sys.argv[3:]])
