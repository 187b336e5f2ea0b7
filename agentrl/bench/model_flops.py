"""Counts the floating-point operations of an update, and lists the peak rates of GPUs.

Guarantees: only the operations that the model needs are counted, even if more are executed: recomputed activations and
logits count once, attention counts the pairs that the mask allows, and tokens that several sequences share count once.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from agentrl.train.batch import TrainBatch
from agentrl.train.rows import build_rows, lay_out

# Dense bfloat16 TFLOP/s that NVIDIA publishes, by words of a GPU's name; the first row whose words all occur is used.
PEAKS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("H100", "PCIe"), 756.0),
    (("H100", "NVL"), 835.0),
    (("H200", "NVL"), 835.0),
    (("H100",), 989.0),
    (("H200",), 989.0),
    (("GH200",), 989.0),
    (("A100",), 312.0),
    (("B200",), 2250.0),
    (("L40S",), 362.0),
    (("L4",), 121.0),
    (("A10",), 125.0),
)


def peak_tflops(card: str) -> float | None:
    """Published dense bfloat16 peak of a GPU in TFLOP/s, by its name; ``None`` for an unknown GPU."""
    words = set(re.split(r"[\s\-]+", card))
    return next((peak for names, peak in PEAKS if words.issuperset(names)), None)


@dataclass(frozen=True)
class Work:
    """Size of an update's work.

    Attributes:
        tokens: Number of tokens that the decoder computes; shared tokens count once.
        predicted: Number of hidden states that go through the output head.
        pairs: Number of query-key pairs that the attention mask allows, in one layer and head.
        trained: Number of tokens in the loss.
    """

    tokens: int
    predicted: int
    pairs: int
    trained: int

    @classmethod
    def of(cls, batch: TrainBatch, max_tokens: int) -> "Work":
        """Returns the work of an update with packed rows of at most ``max_tokens`` tokens."""
        rows = build_rows(batch.branches, batch.tokens, max_tokens, math.inf)
        laid_out = [lay_out(row, batch.branches, batch.tokens) for row in rows]
        tokens = sum(map(len, rows))
        return cls(
            tokens=tokens,
            predicted=sum(len(row.sources) for row in laid_out),
            pairs=tokens + sum(row.depths for row in rows),
            trained=sum(len(row.trained) for row in laid_out),
        )


def update_flops(model: Any, work: Work) -> float:
    """Counts ``6 N tokens + 6 vocab hidden predicted + 12 layers heads head_dim pairs`` operations.

    A multiply-add is two operations; the backward pass needs twice those of the forward pass; ``N`` is the number of
    the decoder's parameters without its embeddings; attention has two products, queries with keys and weights with
    values.

    Args:
        model: Hugging Face causal LM.
        work: Size of the work.
    """
    config = model.config.get_text_config()
    vocabulary, hidden = model.get_output_embeddings().weight.shape
    embeddings = model.get_input_embeddings().weight.numel()
    parameters = sum(p.numel() for p in model.get_decoder().parameters()) - embeddings
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = 12 * config.num_hidden_layers * heads * head_dim * work.pairs
    return float(6 * parameters * work.tokens + 6 * vocabulary * hidden * work.predicted + attention)
