"""Tests a sandbox: code inside attempts what must fail.

Guarantees: it prints ``held`` and nothing else only where every attempt failed; otherwise one line for each that did
not. It runs with 8 processes allowed, with the standard library only.
"""

import os
import socket
from pathlib import Path

PROCESSES = 8
ENVIRONMENT = {"PATH", "LANG", "HOME", "TMPDIR", "PYTHONDONTWRITEBYTECODE"}


def capabilities() -> int:
    """Return what this process may do beyond an ordinary user."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return int(status["CapEff"], 16)


def writable(folder: str) -> bool:
    """Return whether a file could be made in a folder; makes none."""
    return os.access(folder, os.W_OK)


def connects() -> bool:
    """Return whether a socket to anywhere can be made."""
    try:
        socket.socket(socket.AF_INET).close()
    except OSError:
        return False
    return True


def forks() -> int:
    """Return how many children can be had at the same time, up to some more than are allowed."""
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
    """Attempt all of it."""
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
