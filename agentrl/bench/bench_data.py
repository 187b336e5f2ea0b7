"""Measures the CPU time and memory that turn finished episodes into one rank's micro-batches (``agentrl bench data``).

The batch has 64 episodes of 8,192 tokens in groups of 8, with a prompt of 512 tokens, and packed rows. Time is CPU
seconds of this process (one thread), so waiting does not count. Rank 0's figure includes the controller's part (columns
of each group, the batch as bytes). The ranks of a larger world run one after the other in this process: rank 0 packs
their shares, and they unpack them. Attention masks are the blocks that attention on a GPU uses; they are computed on
the CPU here, and by the GPU in a real run. The tiles that attention on a CPU uses are a separate figure.
"""

import gc
import random
import time
import tracemalloc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentrl.config.recipe import TrainerConfig
from agentrl.core.columns import Columns, concatenate
from agentrl.core.episode import NOT_SAMPLED, Episode, Node, StopReason, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.train.layout import Packed

GROUPS, MEMBERS = 8, 8
PROMPT, ANSWER = 512, 7680
BUDGET = 16384  # tokens of a micro-batch
HIDDEN = 1536  # hidden size of the model; rows depend on the cost of attention
VOCABULARY = 150_000
REPEATS = 5
RANKS = 8


def make_groups(seed: int, groups: int = GROUPS, prompt: int = PROMPT, answer: int = ANSWER) -> list[list[Episode]]:
    """Makes groups of finished episodes with random tokens and rewards."""
    rng = random.Random(seed)

    def episode(group: int, index: int, first: list[int]) -> Episode:
        ids = [rng.randrange(VOCABULARY) for _ in range(answer)]
        nodes = [
            Node(
                parent=None, message={"role": "user", "content": "?"}, token_ids=first, loss_mask=[0] * prompt,
                logprobs=[0.0] * prompt, versions=[NOT_SAMPLED] * prompt,
            ),
            Node(
                parent=0, message={"role": "assistant", "content": "!"}, token_ids=ids, loss_mask=[1] * answer,
                logprobs=[-rng.random() for _ in ids], versions=[3] * answer, finish_reason="stop",
            ),
        ]  # fmt: skip
        return Episode(
            group_id=f"g{group}", task_id=f"t{group}", index=index, seed=index, reward=rng.random(),
            stop_reason=StopReason.TERMINATED, trajectories={"assistant": Trajectory(nodes=nodes)},
        )  # fmt: skip

    return [
        [episode(group, index, first) for index in range(MEMBERS)]
        for group, first in enumerate([[rng.randrange(VOCABULARY) for _ in range(prompt)] for _ in range(groups)])
    ]


def run(
    repeats: int = REPEATS, groups: int = GROUPS, prompt: int = PROMPT, answer: int = ANSWER
) -> dict[str, list[float]]:
    """Measure the preparation of a batch.

    Args:
        repeats: Number of measurements.
        groups: Number of groups in a batch.
        prompt: Number of tokens of a prompt.
        answer: Number of tokens of an answer.

    Returns:
        Times are CPU seconds per million tokens of the batch. ``cpu_per_million_tokens``: controller and rank 0, with
        one rank; ``cpu_per_million_tokens_8``: the same with 8 ranks; ``cpu_per_million_tokens_of_8``: the slowest of
        the other 7 ranks; ``wire_bytes_per_token``; ``peak_over_columns``: rank 0's peak memory beside the columns,
        over their size. Parts of the first: ``controller_s``, ``batch_s`` (advantages and rows) and
        ``micro_batches_s``; ``block_mask_s``: the part of ``micro_batches_s`` for masks; ``cpu_tiles_s``: masks for
        attention on a CPU instead.
    """
    import torch

    torch.set_num_threads(1)
    figures: dict[str, list[float]] = {}
    for repeat in range(repeats):
        for key, value in _measure(make_groups(repeat, groups, prompt, answer)).items():
            figures.setdefault(key, []).append(value)
    return figures


def _measure(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    from agentrl.train.shares import pack, plan_shares, unpack

    plain, blocks, tiles = _layouts()
    gc.collect()
    clock = _Clock()
    wire = concatenate([Columns.of(group) for group in groups]).to_bytes(step=0)
    controller = clock.lap()
    columns, _ = Columns.from_bytes(wire)
    (share,) = plan_shares(_work(columns), blocks, BUDGET, 1)
    batch = clock.lap()
    _micro_batches(share, blocks)
    micro_batches = clock.lap()
    _micro_batches(share, plain)
    unmasked = clock.lap()
    _micro_batches(share, tiles)
    in_tiles = clock.lap()

    others: list[float] = []
    rank0 = 0.0
    for rank, part in enumerate(plan_shares(_work(columns), blocks, BUDGET, RANKS)):
        if rank == 0:
            _micro_batches(part, blocks)
            continue
        data = pack(part)
        rank0 += clock.lap()
        _micro_batches(unpack(data), blocks)
        others.append(clock.lap())
    millions = len(columns.token_ids) / 1e6
    return {
        "cpu_per_million_tokens": (controller + batch + micro_batches) / millions,
        "cpu_per_million_tokens_8": (controller + rank0) / millions,
        "cpu_per_million_tokens_of_8": max(others) / millions,
        "wire_bytes_per_token": len(wire) / len(columns.token_ids),
        "peak_over_columns": _peak(wire) / columns.nbytes,
        "controller_s": controller / millions,
        "batch_s": batch / millions,
        "micro_batches_s": micro_batches / millions,
        "block_mask_s": (micro_batches - unmasked) / millions,
        "cpu_tiles_s": (in_tiles - unmasked) / millions,
    }


class _Clock:
    """Stopwatch of this process's CPU seconds; each lap begins at the end of the last one."""

    def __init__(self) -> None:
        self._last = time.process_time()

    def lap(self) -> float:
        before, self._last = self._last, time.process_time()
        return self._last - before


def _layouts() -> "tuple[Packed, Packed, Packed]":
    """Layouts of packed rows without a mask, with blocks and with tiles."""
    from agentrl.train.layout import Packed
    from agentrl.train.rows import attention_span

    class Unmasked(Packed):
        def mask(self, ends: "Tensor", *, blocks: bool) -> Any:
            return ends

    span = attention_span(HIDDEN)
    return Unmasked(span, blocks=True), Packed(span, blocks=True), Packed(span, blocks=False)


def _work(columns: Columns):
    from agentrl.train.batch import Batch
    from agentrl.train.shares import Work

    made = Batch(columns, TrainerConfig()).train_batch()
    return Work(made.branches, made.tokens, made.normalizer)


def _micro_batches(share, layout) -> None:
    import torch

    for part in range(len(share.parts)):
        for _ in share.micro_batches(part, layout, torch.device("cpu")):
            pass


def _peak(wire: bytes) -> float:
    """Peak bytes of rank 0 beside the columns, from the received batch to the last micro-batch."""
    from agentrl.train.shares import plan_shares

    layout = _layouts()[0]
    tracemalloc.start()
    try:
        columns, _ = Columns.from_bytes(bytes(bytearray(wire)))  # a copy: counted, and freed after
        (share,) = plan_shares(_work(columns), layout, BUDGET, 1)
        _micro_batches(share, layout)
        return tracemalloc.get_traced_memory()[1] - columns.nbytes
    finally:
        tracemalloc.stop()
