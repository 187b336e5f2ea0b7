"""Logprobs, entropies and losses of given tokens under a model's output head, chunk by chunk.

Guarantees: a head that is linear, with or without a bias, a scale and a soft cap, is computed by
:mod:`agentrl.train.logprobs`; any other by the model's own code, a chunk of tokens at a time. Both give the logprobs
of ``softmax(logits / temperature)`` and the gradients of every parameter of the head.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from agentrl.models.own_head import HeadForm, OwnHead
from agentrl.train.logprobs import LossOf, chunked_logprobs, chunked_loss


class Head:
    """The output head of a causal language model.

    Args:
        model: Hugging Face causal LM.
        form: Form of its head.
        parameters: Names of the head's parameters, for a head of its own form.
        temperature: Sampling temperature of the behavior policy.
        chunk: Number of tokens whose logits exist at one time.
    """

    def __init__(self, model: Any, form: HeadForm, parameters: Sequence[str], temperature: float, chunk: int) -> None:
        self._model, self._form = model, form
        self._names = [f"model.{name}" for name in parameters]
        self._temperature, self._chunk = temperature, chunk

    def logprobs(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Computes ``[tokens]`` logprobs and entropies of ``[tokens]`` targets from ``[tokens, hidden]`` states."""
        if not self._form.own:
            weight, options = self._linear()
            return chunked_logprobs(states, weight, targets, **options)
        return _OwnLogprobs.apply(states, targets, self._own(), *self._own_parameters())  # type: ignore[return-value]

    def loss(self, states: Tensor, targets: Tensor, loss_of: LossOf) -> Tensor:
        """Sums a loss over chunks of tokens, as :func:`~agentrl.train.logprobs.chunked_loss` does."""
        if not self._form.own:
            weight, options = self._linear()
            return chunked_loss(states, weight, targets, loss_of, **options)
        return _OwnLoss.apply(states, targets, loss_of, self._own(), *self._own_parameters())  # type: ignore[return-value]

    def _linear(self) -> tuple[Tensor, dict[str, Any]]:
        """Returns the weight, and the options of the chunked functions: a scale is a part of the temperature."""
        form, output = self._form, self._model.get_output_embeddings()
        options: dict[str, Any] = {"temperature": self._temperature / form.scale, "chunk": self._chunk}
        if form.biased:
            options["bias"] = output.bias
        if form.cap is not None:
            options["cap"] = form.cap / self._temperature
        return output.weight, options

    def _own(self) -> "_OwnChunks":
        return _OwnChunks(OwnHead(self._model), self._names, self._temperature, self._chunk)

    def _own_parameters(self) -> list[Tensor]:
        return [reduce(getattr, name.split("."), OwnHead(self._model)) for name in self._names]


class _OwnChunks:
    """Computes the logprobs and entropies of chunks with a model's own head."""

    def __init__(self, head: OwnHead, names: Sequence[str], temperature: float, chunk: int) -> None:
        self._head, self._names = head, names
        self._temperature, self._chunk = temperature, chunk

    def rows(self, count: int) -> Iterator[slice]:
        """Yields the rows of each chunk."""
        for start in range(0, count, self._chunk):
            yield slice(start, min(start + self._chunk, count))

    def measure(self, states: Tensor, targets: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Computes ``[rows]`` logprobs and entropies of a chunk, with the given values of the parameters."""
        values = dict(zip(self._names, parameters, strict=True))
        logits = functional_call(self._head, values, (states,)).float()
        logprobs = (logits / self._temperature).log_softmax(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)

    def gradients(
        self, states: Tensor, targets: Tensor, parameters: Sequence[Tensor], loss_of: Callable[..., Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Sums a loss over chunks; returns it, and its gradients in the order of states and parameters.

        Args:
            states: ``[tokens, hidden]``.
            targets: ``[tokens]``.
            parameters: Parameters of the head.
            loss_of: Function of a chunk's rows, logprobs and entropies.
        """
        total = states.new_zeros((), dtype=torch.float32)
        of_states = torch.zeros_like(states)
        sums: list[Tensor | None] = [None] * len(parameters)
        learned = [index for index, parameter in enumerate(parameters) if parameter.requires_grad]
        leaves = [parameter.detach().requires_grad_(parameter.requires_grad) for parameter in parameters]
        for rows in self.rows(len(states)):
            with torch.enable_grad():
                part = states[rows].detach().requires_grad_()
                loss = loss_of(rows, *self.measure(part, targets[rows], leaves))
                found = torch.autograd.grad(loss, [part, *(leaves[i] for i in learned)], allow_unused=True)
            total += loss.detach()
            if found[0] is not None:
                of_states[rows] = found[0]
            for index, gradient in zip(learned, found[1:], strict=True):
                if gradient is not None:
                    before = sums[index]
                    sums[index] = gradient.float() if before is None else before.add_(gradient)
        typed = [None if s is None else s.to(p.dtype) for s, p in zip(sums, parameters, strict=True)]
        return total, [of_states, *typed]


class _OwnLogprobs(torch.autograd.Function):
    """Computes each chunk again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, targets: Tensor, own: _OwnChunks, *parameters: Tensor) -> Any:
        parts = [own.measure(states[rows], targets[rows], parameters) for rows in own.rows(len(states))]
        ctx.save_for_backward(states, targets, *parameters)
        ctx.own = own
        empty = states.new_empty(0, dtype=torch.float32)
        return (
            tuple(torch.cat([empty, *some]) for some in zip(*parts, strict=True)) if parts else (empty, empty.clone())
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        states, targets, *parameters = ctx.saved_tensors
        of_logprobs, of_entropies = grads

        def loss_of(rows: slice, logprobs: Tensor, entropies: Tensor) -> Tensor:
            return (logprobs * of_logprobs[rows]).sum() + (entropies * of_entropies[rows]).sum()

        _, (of_states, *found) = ctx.own.gradients(states, targets, parameters, loss_of)
        return of_states, None, None, *found


class _OwnLoss(torch.autograd.Function):
    """Keeps the gradients; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, targets: Tensor, loss_of: LossOf, own: _OwnChunks, *parameters: Tensor
    ) -> Tensor:
        total, ctx.gradients = own.gradients(states, targets, parameters, loss_of)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        of_states, *found = (None if one is None else one * grads[0] for one in ctx.gradients)
        ctx.gradients = None  # differentiable once
        return of_states, None, None, None, *found
