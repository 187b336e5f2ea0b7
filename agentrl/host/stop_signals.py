"""Turns the signals that end a program into ``KeyboardInterrupt`` while a run goes on.

Guarantees: SIGTERM does what SIGINT does, which inside an event loop is to cancel the main task first; the handlers
from before are set again afterwards; outside the main thread, where Python allows no handlers, nothing is changed.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

STOP_SIGNAL_CODE = 130  # the shell's code for a process ended by Ctrl-C
Handlers = Mapping[signal.Signals, Callable[[int, FrameType | None], None]]


def _as_interrupt(signum: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)


HANDLERS: Handlers = {
    signal.SIGINT: signal.default_int_handler,  # a shell's background job is started with SIGINT ignored
    signal.SIGTERM: _as_interrupt,
}


@contextlib.contextmanager
def interruptible(more: Handlers | None = None) -> Iterator[None]:
    """Raises ``KeyboardInterrupt`` on SIGINT and SIGTERM inside the block.

    Args:
        more: Handlers of further signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in {**HANDLERS, **(more or {})}.items()}
    try:
        yield
    finally:
        for number, handler in before.items():  # None: set by other code than Python's, which cannot be set again
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
