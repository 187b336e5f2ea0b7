"""Sets how often Python looks for reference cycles, in a process that holds many objects at a time.

Guarantees: cycles are still found. A process that runs thousands of episodes at once makes new objects that stay, and
with Python's own setting a third of its time goes into looking through them again and again.
"""

import gc

NEW_OBJECTS = 50_000  # made and not freed, before the newest ones are looked through; Python's own is 700
YOUNG_ROUNDS, OLD_ROUNDS = 20, 50  # rounds of one generation before the next older one is looked through


def collect_rarely() -> None:
    """Look for cycles after more new objects; what exists now is taken as permanent and never looked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_ROUNDS, OLD_ROUNDS)
