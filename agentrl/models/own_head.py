"""A causal language model's own output head, as a function of hidden states.

Guarantees: :class:`OwnHead` computes with the model's own code whatever follows the decoder: transforms, biases,
soft-capping, scaling. :func:`head_form` says what of it is a function of ``hidden @ weight.T``, found by trying the
head on small, ordinary and huge hidden states; no class of models is known by name.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.models.decoder import decoder_of

ROWS = 6  # hidden states of a probe
SMALL, HUGE = 1e-3, 1e5  # factors on them: a soft cap is the identity on the first and constant on the second
TOLERANCE = 2e-5  # largest difference over largest logit, in float32


@dataclass(frozen=True)
class HeadForm:
    """The logits of a head: ``cap * tanh(scale * (hidden @ weight.T + bias) / cap)``.

    Attributes:
        own: Whether the head is of another form, so that only the model's own code can compute it.
        biased: Whether there is a bias.
        scale: Factor on the logits.
        cap: Soft cap of the logits; ``None`` for none.
    """

    own: bool = False
    biased: bool = False
    scale: float = 1.0
    cap: float | None = None

    def __str__(self) -> str:
        if self.own:
            return "the model's own, in chunks"
        parts = ["a bias"] if self.biased else []
        parts += [f"scale {self.scale:.4g}"] if self.scale != 1 else []
        parts += [f"soft cap {self.cap:.4g}"] if self.cap is not None else []
        return "linear" + (f" with {', '.join(parts)}" if parts else "")


class _States(dict[str, Tensor]):
    """Output of a decoder: hidden states, and nothing else of what a head may ask for.

    Models of more than text unpack it into an output of their own.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(last_hidden_state=hidden)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if isinstance(index, str) else tuple(self.values())[index]


class OwnHead(nn.Module):
    """Calls a causal language model with its decoder replaced by given hidden states.

    Args:
        model: A causal language model of transformers.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes ``[tokens, vocab]`` logits of ``[tokens, hidden]`` hidden states."""
        decoder = decoder_of(self.model)
        before = decoder.__dict__.get("forward")
        decoder.forward = lambda *args, **kwargs: _States(hidden[None])
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            return self.model(input_ids=ids).logits[0]
        finally:
            if before is None:
                del decoder.forward
            else:
                decoder.forward = before


def head_parameters(model: Any) -> list[str]:
    """Returns the names of the parameters that the head uses, in the order of :meth:`named_parameters`."""
    named = {name: one for name, one in model.named_parameters() if one.is_floating_point()}
    probe, parameters = _probe(model), list(named.values())
    trained = [parameter.requires_grad for parameter in parameters]
    with torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(True)
        try:
            found = torch.autograd.grad(OwnHead(model)(probe).float().sum(), parameters, allow_unused=True)
        finally:
            for parameter, was in zip(parameters, trained, strict=True):
                parameter.requires_grad_(was)
    return [name for name, gradient in zip(named, found, strict=True) if gradient is not None]


@torch.no_grad()
def head_form(model: Any) -> HeadForm:
    """Finds the form of a model's head by trying it; parameters must be float32 for a form other than the plain one."""
    output, head = model.get_output_embeddings(), OwnHead(model)
    weight = getattr(output, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return HeadForm(own=True)
    bias = getattr(output, "bias", None)
    probe = _probe(model)
    if weight.shape[1] != probe.shape[1]:
        return HeadForm(own=True)

    def linear(states: Tensor) -> Tensor:
        product = states @ weight.t()
        return product if bias is None else product + bias

    def agrees(form: HeadForm) -> bool:
        expected, raw = head(probe).float(), linear(probe).float() * form.scale
        found = raw if form.cap is None else (raw / form.cap).tanh() * form.cap
        gap = (found - expected).abs().max()
        return found.shape == expected.shape and bool(gap <= TOLERANCE * expected.abs().max().clamp_min(1.0))

    plain = HeadForm(biased=bias is not None)
    if agrees(plain):
        return plain
    tiny, large = probe * SMALL, probe * HUGE
    if bias is not None:  # a bias hides the slope at small states: differences of two probes do not
        slope = _slope(head(probe * SMALL * 2) - head(tiny), linear(probe * SMALL * 2) - linear(tiny))
    else:
        slope = _slope(head(tiny), linear(tiny))
    scaled = HeadForm(biased=bias is not None, scale=slope)
    if agrees(scaled):
        return _rounded(scaled, agrees)
    cap = head(large).float().abs().max().item()
    capped = HeadForm(biased=bias is not None, scale=slope, cap=cap)
    return _rounded(capped, agrees) if agrees(capped) else HeadForm(own=True)


def _slope(logits: Tensor, raw: Tensor) -> float:
    logits, raw = logits.double(), raw.double()
    return float((logits * raw).sum() / (raw * raw).sum())


def _rounded(form: HeadForm, agrees: Any) -> HeadForm:
    """Returns the form with fewer digits where that agrees as well: a measured 0.99999994 is 1."""
    cap = None if form.cap is None else float(f"{form.cap:.5g}")
    rounded = HeadForm(biased=form.biased, scale=float(f"{form.scale:.5g}"), cap=cap)
    return rounded if agrees(rounded) else form


@torch.no_grad()
def _probe(model: Any) -> Tensor:
    """Hidden states ``[ROWS, hidden]``, of the width that the decoder returns."""
    decoder = decoder_of(model)
    token = torch.zeros(1, 1, dtype=torch.long, device=next(decoder.parameters()).device)
    states = decoder(input_ids=token, use_cache=False).last_hidden_state
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, states.shape[-1], generator=generator).to(states)
