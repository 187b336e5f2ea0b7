"""What the tests of the workers run in them."""

import os
import signal
import sys
import time
from pathlib import Path


def pid_after(*_: object) -> int:
    return os.getpid()


def hang(fifo: str | None = None) -> None:
    """Say our process id to whoever opens ``fifo``, then never return."""
    announce(fifo)
    while True:
        signal.pause()


def hang_in_c(fifo: str | None = None) -> int:
    """The same in C code that holds the GIL and hears no signal handler."""
    announce(fifo)
    return 7 ** (7**12)


def announce(fifo: str | None) -> None:
    if fifo is not None:
        Path(fifo).write_text(str(os.getpid()))


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)  # the signal comes first


def leave(code: int) -> None:
    os._exit(code)


def leave_politely(code: int) -> None:
    sys.exit(code)


def fill_memory() -> int:
    return len(bytearray(1 << 32))


def modules_with(prefix: str) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == prefix]


class LocalError(Exception):
    """One that cannot be pickled back: its constructor wants two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def raise_local() -> None:
    raise LocalError("left", "behind")


def raise_value_error(text: str) -> None:
    raise ValueError(text)


def give_lock() -> object:
    import threading

    return threading.Lock()
