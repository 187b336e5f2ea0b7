"""Tries a first update on a tiny batch, when a model is loaded, through everything that training uses.

Guarantees: a module that :func:`trial_error` accepts has computed a forward and a backward pass over a small forest of
prefix trees with its own attention, layout, chunked loss, sharding, compilation, checkpointing and adapters, in
training mode, and its logprobs were those of the plain model; all ranks come to the same answer; parameters and
gradients are left as they were.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.train.branches import Branch, TokenColumns
from agentrl.train.layout import collate
from agentrl.train.layout_choice import layout_of
from agentrl.train.mesh import RankMesh
from agentrl.train.policy import Policy, accumulate, reshard

LENGTH, SHARED = 9, 4  # tokens of each sequence; common leading tokens of the first two
SEQUENCES = 3
# Largest mean difference of a logprob from the plain model's, in nats. Rounding gives 1e-6, and 0.05 in bfloat16; with
# another token's position or a neighbour's keys it is above 0.5.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.3}
_FAULTS = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError, AssertionError)


@dataclass(frozen=True, eq=False)
class TrialBatch:
    """A tiny batch, and what a plain forward pass says of it.

    Attributes:
        branches: One branch of one message for each sequence.
        tokens: Columns that the branches index.
        expected: float32 ``[places]`` logprob of each trained token.
    """

    branches: list[Branch]
    tokens: TokenColumns
    expected: Tensor


@torch.no_grad()
def trial_batch(model: Any, temperature: float) -> TrialBatch:
    """Makes a tiny batch and computes its logprobs, each sequence alone, with a model as it was loaded.

    Args:
        model: Hugging Face causal LM, before its attention or its layers are replaced.
        temperature: Sampling temperature of the behavior policy.
    """
    ids = _ids(model)
    was_training = model.training
    model.eval()
    logits = [model(input_ids=row[None].to(model.device), use_cache=False).logits[0, :-1].float() for row in ids]
    model.train(was_training)
    logprobs = [(one / temperature).log_softmax(-1).cpu() for one in logits]
    expected = [one.gather(-1, row[1:, None])[SHARED - 1 :, 0] for one, row in zip(logprobs, ids, strict=True)]
    return TrialBatch(*_columns(ids.numpy().astype(np.int32)), torch.cat(expected))


def trial_without_logprobs(model: Any) -> TrialBatch:
    """Makes the same batch for a model without a head, whose logprobs are not compared."""
    columns = _columns(_ids(model).numpy().astype(np.int32))
    return TrialBatch(*columns, torch.zeros(columns[1].total))


def _ids(model: Any) -> Tensor:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    count = SEQUENCES * LENGTH  # ids from the whole vocabulary: on special tokens some models have huge activations
    ids = ((torch.arange(count) * 2 + 1) * vocabulary // (2 * count)).view(SEQUENCES, LENGTH)
    ids[1, :SHARED] = ids[0, :SHARED]
    return ids


def _columns(ids: Any) -> tuple[list[Branch], TokenColumns]:
    """Makes the columns of sequences whose tokens after the first ``SHARED`` are trained."""
    trained = LENGTH - SHARED
    zeros = np.zeros(SEQUENCES * trained, np.float32)
    sampled_starts = np.arange(SEQUENCES + 1) * trained
    tokens = TokenColumns(
        starts=np.arange(SEQUENCES + 1) * LENGTH,
        sampled_starts=sampled_starts,
        token_ids=ids.reshape(-1),
        loss_mask=np.tile(np.arange(LENGTH) >= SHARED, SEQUENCES),
        sampled={"behavior": zeros, "versions": zeros.astype(np.int32)},
        places=sampled_starts[:-1],
        turns=np.zeros(SEQUENCES, np.int32),
        total=len(zeros),
    )
    return [Branch((n,), (True,), trajectory=n, number=n) for n in range(SEQUENCES)], tokens


def trial_error(
    module: Any, trial: TrialBatch, device: torch.device, dtype: torch.dtype, mesh: RankMesh | None = None
) -> str | None:
    """Returns why a policy or a critic cannot be trained, from a trial; ``None`` if it can. A collective.

    Args:
        module: Policy or critic, ready for training.
        trial: Batch from :func:`trial_batch`.
        device: Device of the micro-batches.
        dtype: Compute dtype.
        mesh: Mesh of the ranks; by default all are shards of one replica.
    """
    was_training = module.training
    module.train()
    try:
        why = _try(module, trial, device, TOLERANCE[dtype], mesh)
    except torch.OutOfMemoryError:
        raise
    except _FAULTS as error:
        why = f"its first update fails ({type(error).__name__}: {error})"
    reshard(module)  # the parameters that hold gradients are the shards
    module.zero_grad(set_to_none=True)
    module.train(was_training)
    failed = torch.tensor(float(why is not None))
    dist.all_reduce(failed)
    return why or ("its first update fails on another rank" if failed else None)


def _try(module: Any, trial: TrialBatch, device: torch.device, tolerance: float, mesh: RankMesh | None) -> str | None:
    layout = layout_of(module.model, mesh)
    batch = collate(layout.rows(trial.branches, trial.tokens, 2 * LENGTH), trial.branches, trial.tokens, layout, device)
    accumulate(module, last=True)
    if not isinstance(module, Policy):
        module(batch).sum().backward()
        return _wrong_gradients(module)
    found = torch.zeros(len(batch.trained))

    def loss_of(chosen: Tensor, logprobs: Tensor, entropies: Tensor) -> Tensor:
        found[chosen.cpu()] = logprobs.detach().cpu()
        return logprobs.sum() + entropies.sum()

    module(batch, loss_of).backward()
    wrong = _wrong_gradients(module)
    with torch.no_grad():
        again = module(batch)[0].cpu()
    for what, logprobs in (("", found), ("recomputed ", again)):
        gaps = (logprobs - trial.expected[batch.places.cpu()]).abs()
        gap = gaps.sum().item() / max(1, len(gaps))  # with context parallelism a rank may have none of them
        if not gap <= tolerance:  # also true for NaN
            return f"its {what}logprobs differ from the plain model's by {gap:.2g} nats on average"
    return wrong


def _wrong_gradients(module: nn.Module) -> str | None:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    if not gradients:
        return "no parameter gets a gradient"
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
        return "its gradients are not finite"
    return None
