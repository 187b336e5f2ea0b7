"""Tests a sandbox from inside by attempting actions that must fail.

Guarantees: it prints ``held`` and nothing else if all attempts failed; otherwise one line for each that succeeded. It
expects a limit of 8 processes and needs only the standard library.
"""

import os
import socket
from pathlib import Path

PROCESSES = 8
ENVIRONMENT = {"PATH", "LANG", "HOME", "TMPDIR", "PYTHONDONTWRITEBYTECODE"}


def capabilities() -> int:
    """Return the effective capabilities of this process, as a bit mask."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return int(status["CapEff"], 16)


def writable(folder: str) -> bool:
    """Return whether a file could be created in a folder; creates none."""
    return os.access(folder, os.W_OK)


def connects() -> bool:
    """Return whether an internet socket can be created."""
    try:
        socket.socket(socket.AF_INET).close()
    except OSError:
        return False
    return True


def forks() -> int:
    """Return how many children can run at the same time, up to four more than allowed."""
    ready, hold = os.pipe()
    for count in range(PROCESSES + 4):
        try:
            child = os.fork()
        except OSError:
            return count
        if child == 0:
            os.close(hold)
            os.read(ready, 1)  # until the parent is gone
            os._exit(0)
    return PROCESSES + 4


def main() -> None:
    """Make all attempts and print the result."""
    leaks = []
    if os.getuid() == 0 or capabilities():
        leaks.append(f"it runs as user {os.getuid()} with capabilities {capabilities():x}")
    if os.environ.keys() - ENVIRONMENT:
        leaks.append("it has an environment")
    if os.getppid() != 1:
        leaks.append("it sees processes from outside")
    leaks += [f"it can write to {folder}" for folder in ("/", "/usr", "/dev", "/etc") if writable(folder)]
    if not writable("/tmp"):
        leaks.append("it has no temporary folder")
    if connects():
        leaks.append("it can make a socket")
    if forks() >= PROCESSES + 2:
        leaks.append("it can fork without end")
    print("\n".join(leaks) or "held", flush=True)


if __name__ == "__main__":
    main()
