"""Parts of ``agentrl bench gpu``: a batch, a model, a trainer, and the output heads that it compares.

Guarantees: tokens, lengths and advantages are the same in every run; every group has the same number of tokens, and two
groups of the full size fill a micro-batch.
"""

import contextlib
import math
import random
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from agentrl.bench.made_batch import TrainSequence, made_batch
from agentrl.config.recipe import TrainerConfig
from agentrl.train.batch import TrainBatch
from agentrl.train.learner import PolicyLearner
from agentrl.train.logprobs import LossOf, chunked_loss
from agentrl.train.memory_saving import use_memory_saving_layers
from agentrl.train.policy import Policy, shard
from agentrl.train.row_attention import use_tree_attention

Head = Callable[..., Tensor]


@dataclass(frozen=True)
class Size:
    """Size of the model and the batch.

    Attributes:
        shape: Arguments of ``Qwen2Config``.
        prompt: Tokens of each group's prompt.
        answer: Mean tokens of an answer.
        spread: Largest difference of an answer's length from the mean, in tokens.
        tokens: Token budget of a micro-batch.
        chunk: Number of tokens whose logits exist at one time.
        decode: Number of requests that are decoded together, and of new tokens of each.
        groups: Number of groups of a batch.
        members: Answers of a group, an even number.
        tied: Whether the output head is the embeddings.
    """

    shape: dict[str, int]
    prompt: int
    answer: int
    spread: int
    tokens: int
    chunk: int
    decode: tuple[int, int]
    groups: int = 8
    members: int = 8
    tied: bool = True


FULL = Size(  # Qwen2-1.5B
    {
        "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "intermediate_size": 8960, "vocab_size": 151936,
    },
    prompt=256, answer=960, spread=320, tokens=16384, chunk=2048, decode=(128, 128),
)  # fmt: skip
LONG = replace(FULL, prompt=1024, answer=31744, spread=0, tokens=32768, groups=4, members=2)  # whole rows of 32k
EIGHT = Size(  # of Qwen3-8B's sizes
    {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 12288, "vocab_size": 151936,
    },
    prompt=256, answer=960, spread=320, tokens=16384, chunk=2048, decode=(128, 128), tied=False,
)  # fmt: skip
EIGHT_LONG = replace(EIGHT, prompt=1024, answer=31744, spread=0, tokens=32768, groups=4, members=2)
TINY = Size(
    {
        "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
        "intermediate_size": 64, "vocab_size": 300,
    },
    prompt=16, answer=12, spread=4, tokens=256, chunk=64, decode=(4, 4),
)  # fmt: skip


def make_batch(size: Size) -> TrainBatch:
    """Makes a batch of random tokens; its logprobs fit random weights about, so importance ratios are near 1."""
    rng = random.Random(0)
    vocabulary = size.shape["vocab_size"]
    sequences = []
    for group in range(size.groups):
        prompt = [rng.randrange(vocabulary) for _ in range(size.prompt)]
        off = [rng.randint(0, size.spread) for _ in range(size.members // 2)]
        for length in [size.answer + d for d in off] + [size.answer - d for d in off]:
            ids = prompt + [rng.randrange(vocabulary) for _ in range(length)]
            mask = [0] * size.prompt + [1] * length
            logprobs = [-math.log(vocabulary)] * len(ids)
            advantages = [rng.gauss(0, 1)] * len(ids)
            sequences.append(TrainSequence(ids, mask, logprobs, advantages, 1 / length, group=group))
    return made_batch(sequences, len(sequences), 1.0)


def make_model(size: Size, device: torch.device) -> Any:
    """Makes a model with random float32 weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape: dict[str, Any] = {**size.shape, "tie_word_embeddings": size.tied, "max_position_embeddings": 32768}
    config = Qwen2Config(**shape)
    with device:
        model: Any = Qwen2ForCausalLM(config)
    return model.to(torch.float32)


def save_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of two words, for programs that want one beside a model."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, "<unknown>": 1}, unk_token="<unknown>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)


def make_engine(
    size: Size, device: torch.device, *, compiled: bool = False, checkpointed: bool = False
) -> PolicyLearner:
    """Makes a learner that packs rows and computes in bfloat16, with compiled layers or activation checkpointing."""
    config = TrainerConfig(tokens_per_microbatch=size.tokens, logprob_chunk=size.chunk, attention="packed")
    model = make_model(size, device)
    use_tree_attention(model)
    if not compiled:
        use_memory_saving_layers(model)
    if compiled:
        for layer in model.get_decoder().layers:
            layer.compile(backend="inductor" if device.type == "cuda" else "eager")
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = Policy(model, 1.0, config.logprob_chunk)
    shard(policy, init_device_mesh(device.type, (1,)), torch.bfloat16)
    return PolicyLearner(policy, None, config, device)


def plain_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss_of: LossOf, *, temperature: float = 1.0, chunk: int = 512
) -> Tensor:
    """Reference for :func:`~agentrl.train.logprobs.chunked_loss`, with all logits; entropies have no gradient."""
    logprobs = ((hidden @ weight.t()).float() / temperature).log_softmax(-1)
    entropies = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
    return _of_all(loss_of, logprobs.gather(-1, targets[:, None]).squeeze(-1), entropies, chunk)


def liger_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss_of: LossOf, *, temperature: float = 1.0, chunk: int = 512
) -> Tensor:
    """The same loss from Liger (0.8.3 or later): a kernel on Hopper, chunks of 512 tokens elsewhere."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Liger  # type: ignore[import-not-found]

    negative, entropies = Liger.apply(hidden, weight, targets, temperature, -100, 1, True)
    return _of_all(loss_of, -negative, entropies, chunk)


def _of_all(loss_of: LossOf, logprobs: Tensor, entropies: Tensor, chunk: int) -> Tensor:
    """The loss of all tokens, computed chunk by chunk."""
    parts = (slice(start, min(start + chunk, len(logprobs))) for start in range(0, len(logprobs), chunk))
    return torch.stack([loss_of(part, logprobs[part], entropies[part]) for part in parts]).sum()


def heads() -> dict[str, Head]:
    """Output heads by the prefix of their figures; Liger's is included if it is installed and recent enough."""
    found: dict[str, Head] = {"head": chunked_loss, "plain_head": plain_loss}
    with contextlib.suppress(ImportError):
        from liger_kernel.ops import (  # type: ignore[import-not-found]
            LigerFusedLinearScaledCrossEntropyFunction,  # noqa: F401
        )

        found["liger_head"] = liger_loss
    return found


@contextlib.contextmanager
def measured(device: torch.device) -> Iterator[dict[str, float]]:
    """Measures seconds and GiB, allocated before and at the peak; on a CPU both are the process's peak so far."""
    found: dict[str, float] = {}
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    found["before_gib"] = torch.cuda.memory_allocated(device) / 2**30 if cuda else _resident_gib()
    begun = time.perf_counter()
    yield found
    if cuda:
        torch.cuda.synchronize(device)
    found["seconds"] = time.perf_counter() - begun
    found["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30 if cuda else _resident_gib()


def _resident_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
