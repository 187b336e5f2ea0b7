"""Counts the floating-point operations of an update, and those that a GPU can do.

Guarantees: what is counted is what the model needs, not what was done: recomputed activations and logits count once,
masked attention counts what each token really sees, tokens that several sequences share count once.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from agentrl.train.batch import TrainBatch
from agentrl.train.rows import build_rows, lay_out

# Dense bfloat16 TFLOP/s that NVIDIA publishes, by the words of a card's name; the first that fits.
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
    """Published dense bfloat16 peak of a card by its name; None where it is not known."""
    words = set(re.split(r"[\s\-]+", card))
    return next((peak for names, peak in PEAKS if words.issuperset(names)), None)


@dataclass(frozen=True)
class Work:
    """Size of an update's work.

    Attributes:
        tokens: In the decoder; what sequences share counts once.
        predicted: States that go through the output head.
        pairs: Number of query-key pairs that attention computes, in one layer and head.
        trained: Tokens in the loss.
    """

    tokens: int
    predicted: int
    pairs: int
    trained: int

    @classmethod
    def of(cls, batch: TrainBatch, max_tokens: int) -> "Work":
        """The work of an update of packed rows of at most ``max_tokens`` tokens."""
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
    """``6 N tokens + 6 vocab hidden predicted + 12 layers heads head_dim pairs``.

    Two operations for each multiplication and addition, once forward and twice backward; ``N`` is the number of the
    decoder's parameters without its embeddings; queries times keys and weights times values for the attention.

    Args:
        model: A Hugging Face causal LM.
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
