"""Counts the CPU cores that this process may use."""

import os


def usable_cores() -> int:
    """Returns the number of cores that this process may use; all of the machine where the system does not say."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
