"""Log-probabilities and entropies of given tokens without a full ``[tokens, vocab]`` tensor.

Guarantees: at most ``chunk`` rows of logits exist at one time, forward and backward; results equal a plain
``log_softmax(hidden @ weight.T / temperature)`` with the matrix product in the inputs' dtype and the softmax in
float32; a bias and a soft cap are applied where they are given. The chunk size changes only memory and rounding: the
gradients of weight and bias are summed over chunks in float32.

There are two functions. :func:`chunked_logprobs` returns logprobs and entropies for any loss, and computes every
chunk's logits again in the backward pass. :func:`chunked_loss` gets the loss as a function, takes its gradient while a
chunk's logits are in memory, and so computes the logits only once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 32  # rows of logits processed together on a CPU, so that they stay in its cache
WORDS = 8192  # vocabulary entries whose weight gradient is computed and added at a time

# (rows of the tokens, their logprobs, their entropies) -> these tokens' part of the loss, a scalar.
LossOf = Callable[[slice, Tensor, Tensor], Tensor]


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps each token's log-normalizer; the backward pass recomputes one chunk of logits at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        head = _Head(hidden, weight, bias, targets, temperature, chunk, cap)
        logprobs, entropies, normalizers = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for rows in head.chunks():
            logprobs[rows], entropies[rows], normalizers[rows] = head.measure(rows, head.logits(rows))
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropies)
        ctx.options = temperature, chunk, cap
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        of_logprobs, of_entropies = grads
        hidden, weight, bias, targets, normalizers, entropies = ctx.saved_tensors
        head = _Head(hidden, weight, bias, targets, *ctx.options)
        sums = _Sums(hidden, *_learned(ctx, weight, bias), ctx.options[1])
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(normalizers)
        for rows in head.chunks():
            logits = head.logits(rows)
            among, slopes = None if of_entropies is None else of_entropies[rows], head.slopes(logits)
            of_logits = head.differentiate(
                rows, logits, normalizers[rows], of_logprobs[rows], entropies[rows], among, slopes
            )
            sums.add(rows, of_logits, weight)
        return *sums.gradients(), None, None, None, None


class _ChunkedLoss(torch.autograd.Function):
    """Keeps the gradients; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, loss_of: LossOf,
        temperature: float, chunk: int, cap: float | None,
    ) -> Tensor:  # fmt: skip
        sums = _Sums(hidden, *_learned(ctx, weight, bias), chunk)
        head = _Head(hidden, weight, bias, targets, temperature, chunk, cap)
        total = _loss_with_gradients(head, loss_of, weight, sums)
        ctx.gradients = sums.gradients()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        found = [None if gradient is None else gradient.mul_(grads[0]) for gradient in ctx.gradients]
        ctx.gradients = None  # differentiable once
        return *found, None, None, None, None, None


def _learned(ctx: Any, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns weight and bias, ``None`` for one that is frozen or absent."""
    return weight if ctx.needs_input_grad[1] else None, bias if ctx.needs_input_grad[2] else None


def _loss_with_gradients(head: "_Head", loss_of: LossOf, weight: Tensor, sums: "_Sums") -> Tensor:
    """Returns the loss of all chunks and adds their gradients to ``sums``; frees the head's buffers on return."""
    total = weight.new_zeros((), dtype=torch.float32)
    for rows in head.chunks():
        logits = head.logits(rows)
        slopes = head.slopes(logits)
        logprobs, entropies, normalizers = head.measure(rows, logits, shifted=True)
        with torch.enable_grad():
            leaves = logprobs.requires_grad_(), entropies.requires_grad_()
            loss = loss_of(rows, *leaves)
            of_logprobs, of_entropies = torch.autograd.grad(loss, leaves, allow_unused=True)
        total += loss.detach()
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(normalizers)
        of_logits = head.differentiate(rows, logits, normalizers, of_logprobs, entropies.detach(), of_entropies, slopes)
        sums.add(rows, of_logits, weight)
    return total


class _Head:
    """Computes on one chunk of logits at a time, in buffers that all chunks share.

    Allocating buffers for each chunk would cost as much time as the arithmetic.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int,
        cap: float | None,
    ) -> None:  # fmt: skip
        self._hidden, self._weight, self._bias, self._targets = hidden, weight, bias, targets
        self._temperature, self._chunk, self._cap = temperature, chunk, cap
        rows = min(chunk, len(hidden))
        self._block = min(BLOCK, rows) if hidden.device.type == "cpu" else rows
        self._logits_buffer = self._empty(rows, torch.float32)
        self._block_buffer = self._empty(self._block, torch.float32)
        self._narrow = self._logits_buffer if hidden.dtype == torch.float32 else self._empty(rows, hidden.dtype)

    def _empty(self, rows: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, len(self._weight), dtype=dtype, device=self._hidden.device)

    def chunks(self) -> Iterator[slice]:
        """Yields the rows of each chunk."""
        for start in range(0, len(self._hidden), self._chunk):
            yield slice(start, min(start + self._chunk, len(self._hidden)))

    def logits(self, rows: slice) -> Tensor:
        """Computes the chunk's logits, ``[rows, vocab]`` float32, valid until the next call."""
        hidden = self._hidden[rows]
        narrow, logits = self._narrow[: len(hidden)], self._logits_buffer[: len(hidden)]
        if self._bias is None:
            torch.mm(hidden, self._weight.t(), out=narrow)
        else:
            torch.addmm(self._bias, hidden, self._weight.t(), out=narrow)
        if narrow.dtype != torch.float32:
            logits.copy_(narrow)
        if self._cap is not None:
            return logits.div_(self._temperature * self._cap).tanh_().mul_(self._cap)
        return logits if self._temperature == 1.0 else logits.div_(self._temperature)

    def slopes(self, logits: Tensor) -> Tensor | None:
        """Computes the slope of the soft cap at each of a chunk's logits; ``None`` without a cap."""
        return None if self._cap is None else 1.0 - (logits / self._cap).square_()

    def measure(self, rows: slice, logits: Tensor, *, shifted: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Computes logprobs, entropies and log-normalizers of a chunk, ``[rows]`` each.

        Args:
            rows: Rows of the chunk among all tokens.
            logits: ``[rows, vocab]`` logits of the chunk; each row's maximum is subtracted in place.
            shifted: Whether the normalizers are those of the shifted logits, not of the original ones.
        """
        logprobs, entropies, normalizers = (logits.new_empty(len(logits)) for _ in range(3))
        for part in self._blocks(logits):
            one, targets = logits[part], self._targets[rows][part]
            top = one.amax(-1, keepdim=True)
            one.sub_(top)
            exponentials = torch.exp(one, out=self._block_buffer[: len(one)])
            total = exponentials.sum(-1)
            normalizer = total.log()
            logprobs[part] = one.gather(-1, targets[:, None]).squeeze(-1) - normalizer
            entropies[part] = normalizer - exponentials.mul_(one).sum(-1) / total
            normalizers[part] = normalizer if shifted else normalizer + top.squeeze(-1)
        return logprobs, entropies, normalizers

    def differentiate(
        self, rows: slice, logits: Tensor, normalizers: Tensor, of_logprobs: Tensor, entropies: Tensor,
        of_entropies: Tensor | None, slopes: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes the gradient of a chunk's ``hidden @ weight.T``, valid until the next call of :meth:`logits`.

        Args:
            rows: Rows of the chunk among all tokens.
            logits: ``[rows, vocab]`` logits of the chunk; overwritten.
            normalizers: ``[rows]`` log-normalizers of these logits.
            of_logprobs: ``[rows]`` gradient of the loss with respect to the logprobs.
            entropies: ``[rows]`` entropies.
            of_entropies: ``[rows]`` gradient of the loss with respect to the entropies, or None.
            slopes: ``[rows, vocab]`` slopes of the soft cap, see :meth:`slopes`.

        Returns:
            ``[rows, vocab]`` in the dtype of ``hidden``.
        """
        upstream = of_logprobs / self._temperature
        for part in self._blocks(logits):
            one, targets, weights = logits[part], self._targets[rows][part], upstream[part, None]
            one.sub_(normalizers[part, None])  # now logprobs
            if of_entropies is None:
                one.exp_().mul_(-weights)
            else:  # d entropy / d logit = -p (log p + entropy) / T
                scale = (of_entropies[part] / self._temperature)[:, None]
                weighed = torch.add(one, entropies[part, None], out=self._block_buffer[: len(one)])
                weighed.mul_(scale).add_(weights)
                one.exp_().mul_(weighed).neg_()
            one.scatter_add_(-1, targets[:, None], weights)
            if slopes is not None:
                one.mul_(slopes[part])
        narrow = self._narrow[: len(logits)]
        return logits if narrow.dtype == torch.float32 else narrow.copy_(logits)

    def _blocks(self, logits: Tensor) -> Iterator[slice]:
        """Yields the rows of a chunk that are processed together."""
        for first in range(0, len(logits), self._block):
            yield slice(first, min(first + self._block, len(logits)))


class _Sums:
    """Accumulates the gradients of hidden states, weight and bias over chunks.

    Args:
        hidden: ``[tokens, hidden]`` hidden states.
        weight: ``[vocab, hidden]`` weight of the output head; None if it is frozen.
        bias: ``[vocab]`` bias of the output head; None if it is frozen or absent.
        chunk: Number of tokens of a chunk.
    """

    def __init__(self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, chunk: int) -> None:
        self._hidden = hidden
        self._of_hidden = torch.empty_like(hidden)
        self._of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        self._of_weight: Tensor | None = None
        if weight is not None:  # in float32 for several chunks: bfloat16 would round after each chunk
            wide = torch.promote_types(weight.dtype, torch.float32) if len(hidden) > chunk else weight.dtype
            self._of_weight = torch.zeros_like(weight, dtype=wide)

    def add(self, rows: slice, of_logits: Tensor, weight: Tensor) -> None:
        """Adds the gradients of one chunk."""
        hidden = self._hidden[rows]
        torch.mm(of_logits, weight, out=self._of_hidden[rows])
        if self._of_bias is not None:
            self._of_bias += of_logits.sum(0, dtype=torch.float32)
        if self._of_weight is not None and self._of_weight.dtype == hidden.dtype:
            self._of_weight.addmm_(of_logits.t(), hidden)
        elif self._of_weight is not None:
            for some, part in zip(self._of_weight.split(WORDS), of_logits.split(WORDS, dim=1), strict=True):
                some.add_(part.t() @ hidden)

    def gradients(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the gradients of the hidden states, the weight and the bias, None for what is frozen or absent."""
        of_weight = None if self._of_weight is None else self._of_weight.to(self._hidden.dtype)
        of_bias = None if self._of_bias is None else self._of_bias.to(self._hidden.dtype)
        return self._of_hidden, of_weight, of_bias


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk: int = 512,
    bias: Tensor | None = None, cap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes each target's log-probability under ``softmax(hidden @ weight.T / temperature)``, and the entropy.

    Args:
        hidden: ``[tokens, hidden]`` hidden states that predict the targets.
        weight: ``[vocab, hidden]`` weight of the output head.
        targets: ``[tokens]`` target token ids.
        temperature: Sampling temperature; must be positive.
        chunk: Number of rows of logits in memory at one time.
        bias: ``[vocab]`` bias of the output head.
        cap: Soft cap of the logits after division by the temperature: ``cap * tanh(logits / cap)``.

    Returns:
        ``[tokens]`` float32 log-probabilities and ``[tokens]`` float32 entropies, in nats; both are differentiable.

    Raises:
        ValueError: The temperature is not positive.
    """
    _check(temperature)
    return _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperature, chunk, cap)  # type: ignore[return-value]


def chunked_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss_of: LossOf, *, temperature: float = 1.0, chunk: int = 512,
    bias: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Sums a loss over chunks of tokens and takes its gradient chunk by chunk.

    Args:
        hidden: ``[tokens, hidden]`` hidden states that predict the targets.
        weight: ``[vocab, hidden]`` weight of the output head.
        targets: ``[tokens]`` target token ids.
        loss_of: Function of a slice of tokens, and their logprobs and entropies as in :func:`chunked_logprobs`, that
            returns these tokens' part of the loss, a scalar. It is called once for each chunk, also without gradients.
        temperature: Sampling temperature; must be positive.
        chunk: Number of rows of logits in memory at one time.
        bias: ``[vocab]`` bias of the output head.
        cap: Soft cap of the logits after division by the temperature: ``cap * tanh(logits / cap)``.

    Returns:
        A float32 scalar, differentiable once with respect to ``hidden``, ``weight`` and ``bias``.

    Raises:
        ValueError: The temperature is not positive.
    """
    _check(temperature)
    return _ChunkedLoss.apply(hidden, weight, bias, targets, loss_of, temperature, chunk, cap)  # type: ignore[return-value]


def _check(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive: at 0 there is no distribution to differentiate")
