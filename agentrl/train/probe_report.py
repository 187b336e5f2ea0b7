"""Tries a model as the trainer would, without a process group, and says what came of it.

Guarantees: the way, the head and the layout are those of a run with ``trainer.attention=auto`` on this device; the
logprobs of a small group are compared with the model's own forward pass over each sequence alone, in float32.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from agentrl.config.recipe import TrainerConfig
from agentrl.core.images import data_url, image_bytes
from agentrl.models.linear_layers import stacked_share, text_targets
from agentrl.models.own_head import HeadForm
from agentrl.models.pixels import embedded_as, pixels_of
from agentrl.models.probe import FAULTS
from agentrl.models.probe import TOLERANCE as EXACT
from agentrl.models.routing import NoRouters, find_routers
from agentrl.models.tree_support import ids_of
from agentrl.models.way import Way, form_of, set_form
from agentrl.train.layout import collate
from agentrl.train.layout_choice import layout_of
from agentrl.train.policy import ModelRefused, Policy, compute_in, load_model
from agentrl.train.row_attention import choose_attention, is_packed
from agentrl.train.trial_update import TOLERANCE, TrialBatch, trial_batch

CHUNK = 64  # tokens whose logits exist at one time


@dataclass(frozen=True)
class TrainerProbe:
    """Verdict of the trainer on a model.

    Attributes:
        way: Way in which the model computes several sequences.
        end_to_end: Whether the rows of prefix trees lie end to end, with sparse attention.
        head: Form of the output head.
        gaps: Mean difference of a logprob from the model's own forward pass in float32, in nats, by compute dtype.
        fault: Error of its code in bfloat16, for which ``gaps`` has no number then, or why the number is too large;
            empty if there is neither.
        lora_targets: Names of the linear layers that get adapters by default.
        stacked: Share of the parameters in stacked experts, which get none.
        tensor_parallel: Whether the class has a plan for tensor parallelism.
        routing: Experts that its layers choose from, or why their choice cannot be replayed.
        replays: Whether it can.
        images: Of a model with an image tower, what is wrong with rows that hold images; ``None`` if nothing is.
    """

    way: Way
    end_to_end: bool
    head: HeadForm
    gaps: dict[str, float]
    fault: str
    lora_targets: tuple[str, ...]
    stacked: float
    tensor_parallel: bool
    routing: str
    replays: bool
    images: str | None = None


def probe_trainer(folder: Path, context: int, *, trust: bool = False) -> TrainerProbe:
    """Tries a model as the trainer would.

    Args:
        folder: Folder of the model, with weights.
        context: Longest sequence in tokens.
        trust: Whether code that comes with the model may run.

    Raises:
        ModelRefused: The model cannot be trained.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    how: dict[str, Any] = {"context": context, "packed": device.type == "cuda", "trust": trust}
    why = ""
    tried: list[tuple[Literal["auto", "padded"], bool]] = [("auto", True), ("padded", True), ("padded", False)]
    for attention, trees in tried:  # as a run falls back
        model = load_model(folder, **how)
        if not trees:
            set_form(model, replace(form_of(model), way=Way("padded", why=why)))
        trial, routing = trial_batch(model, 1.0), _routing(model)
        choose_attention(model, TrainerConfig(attention=attention), device)
        model.to(device).train()
        try:
            gaps = {"float32": _gap(model, trial, device, torch.float32)}
        except FAULTS as error:
            why = f"its rows cannot be computed ({type(error).__name__}: {error})"
            continue
        if gaps["float32"] <= TOLERANCE[torch.float32]:
            fault = ""
            try:
                gaps["bfloat16"] = gap = _gap(model, trial, device, torch.bfloat16)
                if not gap <= TOLERANCE[torch.bfloat16]:
                    fault = f"its logprobs differ by {gap:.2g} nats on average"
            except FAULTS as error:  # code that mixes dtypes
                fault = f"{type(error).__name__}: {error}"
            wrong = None if pixels_of(model) is None else wrong_image_rows(model.eval())
            form, plan = form_of(model), getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
            return TrainerProbe(
                form.way,
                is_packed(model),
                form.head,
                gaps,
                fault,
                tuple(text_targets(model)),
                stacked_share(model),
                bool(plan),
                *routing,
                wrong,
            )
        why = f"its logprobs differ from the plain model's by {gaps['float32']:.2g} nats on average"
    raise ModelRefused(f"the model in {folder} cannot be trained: {why}")


def _gap(model: Any, trial: TrialBatch, device: torch.device, dtype: torch.dtype) -> float:
    """Computes the mean difference of a policy's logprobs from the plain model's in float32, in nats."""
    policy = Policy(model, 1.0, CHUNK)
    if dtype != torch.float32:
        compute_in(policy, dtype)
    layout = layout_of(model)
    rows = layout.rows(trial.branches, trial.tokens, 4096)
    batch = collate(rows, trial.branches, trial.tokens, layout, device)
    with torch.no_grad():
        found = policy(batch)[0].float().cpu()
    return (found - trial.expected[batch.places.cpu()]).abs().mean().item()


def _routing(model: Any) -> tuple[str, bool]:
    """Tells what experts a model's layers choose, and whether they take given ones."""
    try:
        routers = find_routers(model)
    except NoRouters as error:
        return str(error), False
    return f"{len(routers)} routers choose {routers.chosen} of {routers.experts} experts", True


@torch.no_grad()
def wrong_image_rows(model: Any) -> str | None:
    """Returns what is wrong with padded rows of a model that takes images; ``None`` if they are computed right.

    A row with two images of different sizes, one with one and one without are computed together, and each alone by the
    model's own forward pass.

    Args:
        model: Model as the trainer loads it, with what makes its arguments for images.
    """
    pixels = pixels_of(model)
    if pixels is None:
        return "the model is loaded without its image tower"
    from PIL import Image

    sizes = ((64, 96), (96, 48))
    urls = [data_url(Image.effect_mandelbrot(size, (-2.0, -1.0, 1.0, 1.0), 20)) for size in sizes]
    shown = [[pixels.reader.token_id] * pixels.reader.count(url) for url in urls]
    ids = [one for one in ids_of(model, 12) if one != pixels.reader.token_id][:10]
    rows = [[*ids[:4], *shown[0], ids[9], *shown[1], *ids[4:8]], [*ids[2:4], *shown[1], *ids[:2]], ids[3:]]
    tokens = torch.zeros(3, len(rows[0]), dtype=torch.long, device=model.device)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
    first, second = map(image_bytes, urls)
    try:
        together = _image_logits(model, tokens, [first, second, second])
        for index, (row, images) in enumerate(zip(rows, ([first, second], [second], []), strict=True)):
            alone = _image_logits(model, tokens[index : index + 1, : len(row)], images)[0]
            gap = ((together[index, : len(row)] - alone).abs().mean() / alone.abs().mean()).item()
            if not gap <= EXACT[torch.float32]:
                return f"tokens depend on the rows beside them where some hold images (by {gap:.1%} on average)"
    except FAULTS as error:
        return f"rows with images cannot be computed ({type(error).__name__}: {error})"
    return None


def _image_logits(model: Any, tokens: Tensor, images: list[bytes]) -> Tensor:
    pixels = pixels_of(model)
    assert pixels is not None
    pictured = torch.zeros_like(tokens, dtype=torch.bool)
    pictured[: min(len(images), 2)] = True  # the last row has none
    with embedded_as(model, tokens, pixels.arguments(tokens, pictured, images)) as inputs:
        return model(use_cache=False, **inputs).logits.float()
