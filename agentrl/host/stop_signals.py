"""Turns the signals that end a program into ``KeyboardInterrupt`` while a run goes on.

Guarantees: the handlers from before are set again afterwards; outside the main thread, where Python allows no handlers,
nothing is changed.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM)  # a shell's background job is started with SIGINT ignored


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raises ``KeyboardInterrupt`` on SIGINT and SIGTERM inside the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():  # None: set by other code than Python's, which cannot be set again
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
