"""Every decoder family trains: logprobs and gradients of a group equal the model's own on each sequence alone.

A group of four answers to one prompt, longer than the windows of the miniatures, goes through the layout that the
model was given when it was loaded. The reference is transformers' own forward pass, in evaluation mode.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.bench.made_batch import TrainSequence
from agentrl.models.auto_class import auto_class
from agentrl.models.way import form_of
from agentrl.train.layout_choice import layout_of
from agentrl.train.policy import ModelRefused, Policy, load_model
from tests.models.families import FAMILIES, REFUSED, SAMPLE, SAMPLE_WITH_IMAGES, small_model
from tests.models.ways import WAYS, WAYS_WITH_IMAGES
from tests.train.test_rows import collated

PROMPT, ANSWERS, TEMPERATURE, CHUNK = 7, (6, 4, 7, 5), 0.8, 5
EXACT = 1e-5  # largest difference of a logprob in nats, and of a gradient relative to the largest, in float32


def group(vocabulary: int = 64) -> list[TrainSequence]:
    """Makes four answers to one prompt, of ids that are not special."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, vocabulary, (PROMPT,), generator=generator).tolist()
    made = []
    for length in ANSWERS:
        answer = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        made.append(TrainSequence(prompt + answer, [0] * PROMPT + [1] * length, [0.0] * (PROMPT + length)))
    return made


def weights_of(count: int) -> Tensor:
    return torch.linspace(0.5, 1.5, count, dtype=torch.float32)


def expected(model: Any, sequences: list[TrainSequence]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs of the trained tokens, and the gradients of a weighted sum of logprobs and entropies."""
    logprobs, entropies = [], []
    for one in sequences:
        ids = torch.tensor(one.token_ids)
        rows = (model(input_ids=ids[None], use_cache=False).logits[0].float() / TEMPERATURE).log_softmax(-1)
        logprobs.append(rows[PROMPT - 1 : -1].gather(-1, ids[PROMPT:, None])[:, 0])
        entropies.append(-(rows.exp() * rows).sum(-1)[PROMPT - 1 : -1])
    found, spread = torch.cat(logprobs), torch.cat(entropies)
    return found.detach(), gradients(model, (weights_of(len(found)) * (found - 0.1 * spread)).sum())


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(folder: Path, like: Any) -> Any:
    """The same model with the attention that the trainer chose, in evaluation mode: its masks are transformers'."""
    attention = like.config.get_text_config(decoder=True)._attn_implementation
    kind = auto_class(like.config)
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


def check(policy: Policy, layout: Any, reference: Any, sequences: list[TrainSequence]) -> None:
    """Compares both ways to take a loss with the reference."""
    wanted, of_wanted = expected(reference, sequences)
    batch = collated(sequences, 200, layout)
    weights = weights_of(len(wanted))[batch.places]
    logprobs, entropies = policy(batch)
    assert (logprobs.detach() - wanted[batch.places]).abs().max() < EXACT
    same(gradients(policy.model, (weights * (logprobs - 0.1 * entropies)).sum()), of_wanted)

    def loss_of(chosen: Tensor, some: Tensor, spread: Tensor) -> Tensor:
        return (weights[chosen] * (some - 0.1 * spread)).sum()

    same(gradients(policy.model, policy(batch, loss_of)), of_wanted)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    scale = max(gradient.abs().max().item() for gradient in wanted.values())
    for name, gradient in wanted.items():
        other = found.get(name, torch.zeros_like(gradient))
        assert (other - gradient).abs().max().item() < EXACT * max(1.0, scale), name


def write(name: str, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small_model(name).save_pretrained(folder)
    return folder


def check_family(name: str, folder: Path) -> str:
    """Checks a family in the way that it is given, and in packed rows of trees; returns the way."""
    write(name, folder)
    model = load_model(folder, context=64)
    model.train()
    reference = plain(folder, model)
    check(Policy(model, TEMPERATURE, CHUNK), layout_of(model), reference, group())
    return form_of(model).way.rows


@pytest.mark.parametrize("name", SAMPLE)
def test_a_characteristic_family_trains_exactly(name: str, tmp_path: Path) -> None:
    assert check_family(name, tmp_path) == WAYS[name][0]


@pytest.mark.parametrize("name", SAMPLE_WITH_IMAGES)
def test_a_model_that_takes_images_trains_as_text(name: str, tmp_path: Path) -> None:
    assert check_family(name, tmp_path) == WAYS_WITH_IMAGES[name][0]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(SAMPLE) - set(REFUSED)))
def test_every_family_trains_exactly(name: str, tmp_path: Path) -> None:
    assert check_family(name, tmp_path) == WAYS[name][0]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(WAYS_WITH_IMAGES) - set(SAMPLE_WITH_IMAGES)))
def test_every_model_that_takes_images_trains_as_text(name: str, tmp_path: Path) -> None:
    assert check_family(name, tmp_path) == WAYS_WITH_IMAGES[name][0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_train_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=REFUSED[name]):
        load_model(write(name, tmp_path), context=64)
