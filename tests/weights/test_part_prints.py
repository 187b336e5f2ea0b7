"""Fingerprints of tensors that several ranks write are those of the whole bytes."""

import random

import pytest

from agentrl.core.weight_manifest import WINDOW, fingerprint, windows
from agentrl.weights.part_prints import PartPrints, combined

SIZES = [0, 1, 7, 100, WINDOW, 2 * WINDOW + 5, 3 * WINDOW, 3 * WINDOW + 1, 10 * WINDOW + 3]
RANKS = 3


def contents() -> list[bytes]:
    rng = random.Random(0)
    return [rng.randbytes(size) for size in SIZES]


def pieces(rank: int) -> list[tuple[int, int, bytes]]:
    """Returns number, place and bytes of what a rank writes: every byte is some rank's, in pieces of odd sizes."""
    rng, found = random.Random(1), []
    for number, data in enumerate(contents()):
        place = 0
        while place < len(data):
            length = rng.choice([1, 3, 50, 5000, 40_000])
            if rng.randrange(RANKS) == rank:
                found.append((number, place, data[place : place + length]))
            place += length
    return found


def test_the_prints_of_parts_are_those_of_the_whole() -> None:
    changes = []
    for rank in range(RANKS):
        prints = PartPrints(SIZES, {})
        for number, place, data in pieces(rank):
            prints.add(number, place, memoryview(data))
        changes.append(prints.changes())
    whole = [fingerprint(memoryview(data)) for data in contents()]
    assert combined(SIZES, changes) == whole
    assert combined(SIZES, changes[:-1]) != whole, "a rank that wrote nothing"


@pytest.mark.parametrize("size", SIZES)
def test_windows_lie_in_the_tensor(size: int) -> None:
    assert all(0 <= start < end <= size for start, end in windows(size)) or size == 0
    assert all(end - start <= WINDOW for start, end in windows(size))
