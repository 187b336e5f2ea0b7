"""Sets how often Python looks for reference cycles, in a process that holds many objects at a time.

Guarantees: cycles are still found. A process that runs thousands of episodes at once makes new objects that stay, and
with Python's own setting a third of its time goes into looking through them again and again.
"""

import gc

NEW_OBJECTS = 50_000  # made and not freed, before the newest ones are looked through; Python's own is 700
OF_AN_EPISODE = 500  # objects that a running episode holds: 390 after 50 turns of a simulated session
YOUNG_ROUNDS, OLD_ROUNDS = 20, 50  # rounds of one generation before the next older one is looked through


def collect_rarely(episodes: int = 0) -> None:
    """Look for cycles after more new objects; what exists now is taken as permanent and never looked through again.

    Args:
        episodes: Episodes that run at a time. What they hold until they end is no reason to look: cycles are looked for
            when as much as all of them hold is new, so at most their memory once more is lost to cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(NEW_OBJECTS, OF_AN_EPISODE * episodes), YOUNG_ROUNDS, OLD_ROUNDS)
