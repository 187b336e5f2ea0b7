"""``agentrl bench data``: what a batch costs on its way from finished episodes to one rank's micro-batches.

Measured on 64 episodes of 8,192 tokens, 8 to a group with a prompt of 512, and rows packed as for a GPU (the mask as
blocks): CPU seconds of this process (one thread), so that waiting does not count. The controller's part (columns of
each group, the batch as bytes) is in rank 0's figure. The ranks of a larger world take turns in this process: what rank
0 packs for them, they unpack. What a CPU's attention prepares beside (tiles of the mask) is a figure of its own.
"""

import gc
import random
import time
import tracemalloc
from collections.abc import Sequence

from agentrl.config.recipe import TrainerConfig
from agentrl.core.columns import Columns, concatenate
from agentrl.core.episode import NOT_SAMPLED, Episode, Node, StopReason, Trajectory

GROUPS, MEMBERS = 8, 8
PROMPT, ANSWER = 512, 7680
BUDGET = 16384  # tokens of a micro-batch
HIDDEN = 1536  # of the model whose rows these are: what attention costs
VOCABULARY = 150_000
REPEATS = 5
RANKS = 8


def make_groups(seed: int, groups: int = GROUPS, prompt: int = PROMPT, answer: int = ANSWER) -> list[list[Episode]]:
    """Groups of finished episodes with random tokens and rewards."""
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
    """Measure the way of a batch.

    Args:
        repeats: Number of measurements.
        groups: Groups of a batch.
        prompt: Tokens of a prompt.
        answer: Tokens of an answer.

    Returns:
        ``cpu_per_million_tokens``, CPU seconds of the controller and of rank 0 with one rank, for each million tokens
        of the batch; ``cpu_per_million_tokens_8``, the same of rank 0 with 8 ranks; ``cpu_per_million_tokens_of_8``,
        any other of the 8 at most; ``wire_bytes_per_token``; ``peak_over_columns``, the most memory beside the columns
        on rank 0 over their size; and the parts ``controller_s``, ``batch_s`` (advantages and rows) and
        ``micro_batches_s``, for each million tokens; ``cpu_tiles_s``, what attention on a CPU prepares beside.
    """
    import torch

    torch.set_num_threads(1)
    figures: dict[str, list[float]] = {}
    for repeat in range(repeats):
        for key, value in _measure(make_groups(repeat, groups, prompt, answer)).items():
            figures.setdefault(key, []).append(value)
    return figures


def _measure(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    from agentrl.train.layout import Packed
    from agentrl.train.rows import attention_span
    from agentrl.train.shares import pack, plan_shares, unpack

    layout, tiled = (Packed(attention_span(HIDDEN), blocks=blocks) for blocks in (True, False))
    gc.collect()
    begun = time.process_time()
    wire = concatenate([Columns.of(group) for group in groups]).to_bytes(step=0)
    sent = time.process_time()
    columns, _ = Columns.from_bytes(wire)
    work = _work(columns)
    (share,) = plan_shares(work, layout, BUDGET, 1)
    planned = time.process_time()
    _micro_batches(share, layout)
    ended = time.process_time()
    millions = len(columns.token_ids) / 1e6
    _micro_batches(share, tiled)
    cut = time.process_time()

    others: list[float] = []
    dealing = 0.0
    start = time.process_time()
    for rank, part in enumerate(plan_shares(_work(columns), layout, BUDGET, RANKS)):
        if rank == 0:
            _micro_batches(part, layout)
            continue
        data = pack(part)
        dealing += time.process_time() - start
        start = time.process_time()
        _micro_batches(unpack(data), layout)
        others.append(time.process_time() - start)
        start = time.process_time()
    return {
        "cpu_per_million_tokens": (ended - begun) / millions,
        "cpu_per_million_tokens_8": (sent - begun + dealing) / millions,
        "cpu_per_million_tokens_of_8": max(others) / millions,
        "wire_bytes_per_token": len(wire) / len(columns.token_ids),
        "peak_over_columns": _peak(wire, layout) / columns.nbytes,
        "controller_s": (sent - begun) / millions,
        "batch_s": (planned - sent) / millions,
        "micro_batches_s": (ended - planned) / millions,
        "cpu_tiles_s": (cut - ended - (ended - planned)) / millions,
    }


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


def _peak(wire: bytes, layout) -> float:
    """Most bytes that rank 0 holds beside the columns, from the arrived bytes to the last micro-batch."""
    from agentrl.train.shares import plan_shares

    tracemalloc.start()
    try:
        columns, _ = Columns.from_bytes(wire)
        (share,) = plan_shares(_work(columns), layout, BUDGET, 1)
        _micro_batches(share, layout)
        return tracemalloc.get_traced_memory()[1] + len(wire) - columns.nbytes
    finally:
        tracemalloc.stop()
