"""Log-probabilities and entropies of given tokens without a full ``[tokens, vocab]`` tensor.

Guarantees: at most ``chunk`` rows of logits exist at one time, forward and backward; results equal a plain
``log_softmax(hidden @ weight.T / temperature)`` in the dtype of the product, with the softmax in float32. The chunk
size changes nothing but memory and rounding: the weight's gradient is summed over chunks in float32.

Two ways: :func:`chunked_logprobs` gives what any loss can be made of, and multiplies every chunk once more in the
backward pass; :func:`chunked_loss` is told the loss, takes its gradient while a chunk's logits are there, and so does
the three products that a plain softmax does.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 32  # rows of logits that stay in a CPU's cache from one operator to the next
WORDS = 8192  # of the vocabulary whose gradient is computed before it is added

# From some rows of the tokens, and their logprobs and entropies, to their part of a sum.
LossOf = Callable[[slice, Tensor, Tensor], Tensor]


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps the log-normaliser of each token; the backward pass recomputes one chunk of logits at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden, weight, targets, temperature, chunk)
        logprobs, entropies, normalizers = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for rows in head.chunks():
            logprobs[rows], entropies[rows], normalizers[rows] = head.measure(rows, head.logits(rows))
        ctx.save_for_backward(hidden, weight, targets, normalizers, entropies)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        of_logprobs, of_entropies = grads
        hidden, weight, targets, normalizers, entropies = ctx.saved_tensors
        head = _Head(hidden, weight, targets, ctx.temperature, ctx.chunk)
        sums = _Sums(hidden, weight if ctx.needs_input_grad[1] else None, ctx.chunk)
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(normalizers)
        for rows in head.chunks():
            logits = head.logits(rows)
            among = None if of_entropies is None else of_entropies[rows]
            of_logits = head.differentiate(rows, logits, normalizers[rows], of_logprobs[rows], entropies[rows], among)
            sums.add(rows, of_logits, weight)
        return *sums.gradients(), None, None, None


class _ChunkedLoss(torch.autograd.Function):
    """Keeps the gradients; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, loss_of: LossOf, temperature: float, chunk: int
    ) -> Tensor:
        sums = _Sums(hidden, weight if ctx.needs_input_grad[1] else None, chunk)
        total = _differentiated(_Head(hidden, weight, targets, temperature, chunk), loss_of, weight, sums)
        ctx.of_hidden, ctx.of_weight = sums.gradients()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        of_weight = None if ctx.of_weight is None else ctx.of_weight.mul_(grads[0])
        of_hidden = ctx.of_hidden.mul_(grads[0])
        ctx.of_hidden = ctx.of_weight = None  # there is no second time
        return of_hidden, of_weight, None, None, None, None


def _differentiated(head: "_Head", loss_of: LossOf, weight: Tensor, sums: "_Sums") -> Tensor:
    """The loss of all chunks; their gradients go to ``sums``. The head's memory is free when this returns."""
    total = weight.new_zeros((), dtype=torch.float32)
    for rows in head.chunks():
        logits = head.logits(rows)
        logprobs, entropies, normalizers = head.measure(rows, logits, shifted=True)
        with torch.enable_grad():
            leaves = logprobs.requires_grad_(), entropies.requires_grad_()
            loss = loss_of(rows, *leaves)
            of_logprobs, of_entropies = torch.autograd.grad(loss, leaves, allow_unused=True)
        total += loss.detach()
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(normalizers)
        of_logits = head.differentiate(rows, logits, normalizers, of_logprobs, entropies.detach(), of_entropies)
        sums.add(rows, of_logits, weight)
    return total


class _Head:
    """The arithmetic on one chunk of logits at a time, in memory that all chunks share.

    Memory taken anew for each chunk costs as much as its arithmetic.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int) -> None:
        self._hidden, self._weight, self._targets = hidden, weight, targets
        self._temperature, self._chunk = temperature, chunk
        rows = min(chunk, len(hidden))
        self._block = min(BLOCK, rows) if hidden.device.type == "cpu" else rows
        self._room = self._empty(rows, torch.float32)
        self._beside = self._empty(self._block, torch.float32)
        self._narrow = self._room if hidden.dtype == torch.float32 else self._empty(rows, hidden.dtype)

    def _empty(self, rows: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, len(self._weight), dtype=dtype, device=self._hidden.device)

    def chunks(self) -> Iterator[slice]:
        """The rows of each."""
        for start in range(0, len(self._hidden), self._chunk):
            yield slice(start, min(start + self._chunk, len(self._hidden)))

    def logits(self, rows: slice) -> Tensor:
        """``[rows, vocab]`` float32, until the next chunk's."""
        hidden = self._hidden[rows]
        narrow, logits = self._narrow[: len(hidden)], self._room[: len(hidden)]
        torch.mm(hidden, self._weight.t(), out=narrow)
        if narrow.dtype != torch.float32:
            logits.copy_(narrow)
        return logits if self._temperature == 1.0 else logits.div_(self._temperature)

    def measure(self, rows: slice, logits: Tensor, *, shifted: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs, entropies and log-normalisers of a chunk, ``[rows]`` each; its logits lose their largest.

        Args:
            rows: Rows of the chunk among all.
            logits: ``[rows, vocab]`` logits of the chunk; overwritten.
            shifted: Give the normalisers of what is left of the logits.
        """
        logprobs, entropies, normalizers = (logits.new_empty(len(logits)) for _ in range(3))
        for part in self._blocks(logits):
            one, targets = logits[part], self._targets[rows][part]
            top = one.amax(-1, keepdim=True)
            one.sub_(top)
            exponentials = torch.exp(one, out=self._beside[: len(one)])
            total = exponentials.sum(-1)
            normalizer = total.log()
            logprobs[part] = one.gather(-1, targets[:, None]).squeeze(-1) - normalizer
            entropies[part] = normalizer - exponentials.mul_(one).sum(-1) / total
            normalizers[part] = normalizer if shifted else normalizer + top.squeeze(-1)
        return logprobs, entropies, normalizers

    def differentiate(
        self, rows: slice, logits: Tensor, normalizers: Tensor, of_logprobs: Tensor, entropies: Tensor,
        of_entropies: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The gradient of a chunk's ``hidden @ weight.T``, in the dtype of the product, until the next chunk's logits.

        Args:
            rows: Rows of the chunk among all.
            logits: ``[rows, vocab]`` logits of the chunk; overwritten.
            normalizers: ``[rows]`` log-normalizers of these logits.
            of_logprobs: Gradient of the logprobs.
            entropies: ``[rows]`` entropies of the chunk.
            of_entropies: Their gradient, or None.
        """
        upstream = of_logprobs / self._temperature
        for part in self._blocks(logits):
            one, targets, weights = logits[part], self._targets[rows][part], upstream[part, None]
            one.sub_(normalizers[part, None])  # now logprobs
            if of_entropies is None:
                one.exp_().mul_(-weights)
            else:  # d entropy / d logit = -p (log p + entropy) / T
                scale = (of_entropies[part] / self._temperature)[:, None]
                weighed = torch.add(one, entropies[part, None], out=self._beside[: len(one)])
                weighed.mul_(scale).add_(weights)
                one.exp_().mul_(weighed).neg_()
            one.scatter_add_(-1, targets[:, None], weights)
        narrow = self._narrow[: len(logits)]
        return logits if narrow.dtype == torch.float32 else narrow.copy_(logits)

    def _blocks(self, logits: Tensor) -> Iterator[slice]:
        """Rows of a chunk that are worked on together."""
        for first in range(0, len(logits), self._block):
            yield slice(first, min(first + self._block, len(logits)))


class _Sums:
    """The gradients of hidden states and weight, chunk by chunk.

    Args:
        hidden: ``[tokens, hidden]``.
        weight: None where it is frozen.
        chunk: Tokens of a chunk.
    """

    def __init__(self, hidden: Tensor, weight: Tensor | None, chunk: int) -> None:
        self._hidden = hidden
        self._of_hidden = torch.empty_like(hidden)
        self._of_weight: Tensor | None = None
        if weight is not None:  # several chunks: sums of sums, which bfloat16 would round one by one
            wide = torch.promote_types(weight.dtype, torch.float32) if len(hidden) > chunk else weight.dtype
            self._of_weight = torch.zeros_like(weight, dtype=wide)

    def add(self, rows: slice, of_logits: Tensor, weight: Tensor) -> None:
        """Take a chunk's share."""
        hidden = self._hidden[rows]
        torch.mm(of_logits, weight, out=self._of_hidden[rows])
        if self._of_weight is not None and self._of_weight.dtype == hidden.dtype:
            self._of_weight.addmm_(of_logits.t(), hidden)
        elif self._of_weight is not None:
            for some, part in zip(self._of_weight.split(WORDS), of_logits.split(WORDS, dim=1), strict=True):
                some.add_(part.t() @ hidden)

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Gradients of the hidden states, and of the weight where it has one."""
        of_weight = None if self._of_weight is None else self._of_weight.to(self._hidden.dtype)
        return self._of_hidden, of_weight


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk: int = 512
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under ``softmax(hidden @ weight.T / temperature)``, and the entropy.

    Args:
        hidden: ``[tokens, hidden]`` states that predict the targets.
        weight: ``[vocab, hidden]`` of the output head.
        targets: ``[tokens]`` ids.
        temperature: Sampling temperature; must be positive.
        chunk: Rows of logits in memory at one time.

    Returns:
        ``[tokens]`` float32 log-probabilities and ``[tokens]`` float32 entropies, in nats; both are differentiable.

    Raises:
        ValueError: The temperature is not positive.
    """
    _check(temperature)
    return _ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk)  # type: ignore[return-value]


def chunked_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss_of: LossOf, *, temperature: float = 1.0, chunk: int = 512
) -> Tensor:
    """The sum of a loss over chunks of tokens, with its gradient taken chunk by chunk.

    Args:
        hidden: ``[tokens, hidden]`` states that predict the targets.
        weight: ``[vocab, hidden]`` of the output head.
        targets: ``[tokens]`` ids.
        loss_of: From some rows of the tokens, and their logprobs and entropies as :func:`chunked_logprobs` gives them,
            to a scalar that depends on these. It is called once for each chunk, gradients or not.
        temperature: Sampling temperature; must be positive.
        chunk: Rows of logits in memory at one time.

    Returns:
        A float32 scalar, differentiable once with respect to ``hidden`` and ``weight``.

    Raises:
        ValueError: The temperature is not positive.
    """
    _check(temperature)
    return _ChunkedLoss.apply(hidden, weight, targets, loss_of, temperature, chunk)  # type: ignore[return-value]


def _check(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive: at 0 there is no distribution to differentiate")
