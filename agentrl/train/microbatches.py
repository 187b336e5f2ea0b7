"""Plans micro-batches: distributes rows over micro-batches and ranks.

Guarantees: every row is in exactly one micro-batch; no micro-batch is over the token budget, except that a longer row
has a micro-batch of its own; every rank gets the same number of micro-batches (some may be empty); the same rows give
the same plan.

A *padded* micro-batch is ``[rows, longest]`` with a dense mask, so rows of similar length should be together. A
*packed* micro-batch has its rows end to end and computes only the allowed pairs of attention, so its bins are filled
and nothing is padded.
"""

from collections.abc import Callable, Sequence

from agentrl.train.binpacking import pack, partition
from agentrl.train.rows import Row

# Fixed cost of a padded micro-batch in tokens: all weights are read, and gradients added, once more. Measured as 36
# tokens' time, by six rows of 100 tokens in one or in six micro-batches (135M float32 parameters, two cores).
_BATCH_COST = 32.0

MicroBatches = list[list[Row]]


def plan_packed(rows: Sequence[Row], ranks: int, max_tokens: int, attention_span: float) -> list[MicroBatches]:
    """Fills packed micro-batches with rows and distributes them over ranks.

    Args:
        rows: All rows of the global batch.
        ranks: Number of trainer ranks.
        max_tokens: Token budget of one micro-batch.
        attention_span: Row length in tokens, see :func:`~agentrl.train.rows.attention_span`.

    Returns:
        ``[ranks][micro-batches][rows]``.
    """
    return _deal(*_filled(sorted(rows, key=len, reverse=True), ranks, max_tokens, attention_span), ranks)


def plan_padded(rows: Sequence[Row], ranks: int, max_tokens: int, attention_span: float) -> list[MicroBatches]:
    """Distributes rows over ranks with balanced cost, and cuts each rank's rows into padded micro-batches.

    Arguments and result are those of :func:`plan_packed`; the budget includes the padding.
    """
    ordered = sorted(rows, key=len, reverse=True)

    def wide(row: Row) -> float:
        return len(row) + len(row) * len(row) / attention_span

    def padded(batch: Sequence[Row]) -> float:
        return _BATCH_COST + len(batch) * (wide(batch[0]) if batch else 0.0)

    together = _cut(ordered, max_tokens, wide)
    if ranks == 1:
        return [together]
    shares = partition([wide(row) for row in ordered], ranks)
    apart = [_cut([ordered[index] for index in sorted(share)], max_tokens, wide) for share in shares]
    plans = (_even(apart), _deal(_split(together, ranks, padded), padded, ranks))
    return min(plans, key=lambda plan: max(sum(map(padded, share)) for share in plan))


def _filled(
    rows: Sequence[Row], ranks: int, max_tokens: int, attention_span: float
) -> tuple[MicroBatches, Callable[[Sequence[Row]], float]]:
    """Packs rows into bins, and returns these with their cost function.

    The number of bins is the smallest possible, rounded up to a multiple of ``ranks``; rows are then spread evenly over
    them if the budget allows.
    """
    costs = {id(row): len(row) + (row.depths + len(row)) / attention_span for row in rows}

    def cost(batch: Sequence[Row]) -> float:
        return sum(costs[id(row)] for row in batch)

    lone = [[row] for row in rows if len(row) > max_tokens]
    fitting = [row for row in rows if len(row) <= max_tokens]
    bins = [[fitting[index] for index in one] for one in pack([len(row) for row in fitting], max_tokens)]
    count = -(-(len(lone) + len(bins)) // ranks) * ranks - len(lone)
    if count:
        even = [[fitting[i] for i in part] for part in partition([cost([row]) for row in fitting], count)]
        if all(sum(map(len, batch)) <= max_tokens for batch in even):
            bins = even
    return lone + bins, cost


def _cut(rows: Sequence[Row], max_tokens: int, wide: Callable[[Row], float]) -> MicroBatches:
    """Cuts rows, sorted from the longest, into padded micro-batches of neighbors at the lowest total cost.

    Dynamic programming: ``least[i]`` is the lowest cost of rows ``i`` and after; a micro-batch that begins at row ``i``
    is padded to that row's length.
    """
    least = [0.0] * (len(rows) + 1)
    ends = [0] * len(rows)
    for start in reversed(range(len(rows))):
        most = max(1, max_tokens // len(rows[start]))
        each = wide(rows[start])
        least[start], negative_end = min(
            (_BATCH_COST + (end - start) * each + least[end], -end)
            for end in range(start + 1, min(start + most, len(rows)) + 1)
        )
        ends[start] = -negative_end
    batches: MicroBatches = []
    start = 0
    while start < len(rows):
        batches.append(list(rows[start : ends[start]]))
        start = ends[start]
    return batches


def _split(batches: MicroBatches, ranks: int, cost: Callable[[Sequence[Row]], float]) -> MicroBatches:
    """Halves the costliest micro-batches until their number is a multiple of ``ranks`` or none can be halved."""
    batches = list(batches)
    while len(batches) % ranks and any(len(batch) > 1 for batch in batches):
        batch = max((batch for batch in batches if len(batch) > 1), key=cost)
        batches.remove(batch)
        half = (len(batch) + 1) // 2
        batches += [batch[:half], batch[half:]]
    return batches


def _deal(batches: MicroBatches, cost: Callable[[Sequence[Row]], float], ranks: int) -> list[MicroBatches]:
    """Distributes micro-batches over ranks in rounds of similar cost, the costliest to the rank with the least load."""
    dearest_first = sorted(batches, key=cost, reverse=True)
    plans: list[MicroBatches] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for first in range(0, len(dearest_first), ranks):
        lightest_first = sorted(range(ranks), key=loads.__getitem__)
        for rank, batch in zip(lightest_first, dearest_first[first : first + ranks], strict=False):
            plans[rank].append(batch)
            loads[rank] += cost(batch)
    return _even(plans)


def _even(plans: list[MicroBatches]) -> list[MicroBatches]:
    """Adds empty micro-batches so that all ranks have the same number."""
    count = max(map(len, plans))
    return [plan + [[] for _ in range(count - len(plan))] for plan in plans]
