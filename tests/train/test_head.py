"""Logprobs and losses of heads with biases, soft caps and code of their own, against plain autograd in float64."""

import pytest
import torch
from torch import Tensor

from agentrl.train.logprobs import chunked_logprobs, chunked_loss

TOKENS, HIDDEN, VOCABULARY, CHUNK, TEMPERATURE = 11, 7, 23, 4, 0.7


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return draw(TOKENS, HIDDEN) * 2, draw(VOCABULARY, HIDDEN), draw(VOCABULARY), targets


def plain(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T + bias
    logits = logits if cap is None else cap * (logits / cap).tanh()
    rows = (logits / TEMPERATURE).log_softmax(-1)
    return rows.gather(-1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(-1)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("chunk", [CHUNK, 512])
def test_biases_and_soft_caps_have_the_logprobs_and_gradients_of_autograd(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor], cap: float | None, chunk: int
) -> None:
    *parameters, targets = inputs
    exact = [parameter.clone().requires_grad_() for parameter in parameters]
    weights = torch.linspace(-1, 2, TOKENS)
    wanted, spread = plain(*exact, targets, cap)
    (weights * (wanted - 0.3 * spread)).sum().backward()

    def leaves() -> list[Tensor]:
        return [parameter.float().requires_grad_() for parameter in parameters]

    options = {"temperature": TEMPERATURE, "chunk": chunk, "cap": None if cap is None else cap / TEMPERATURE}
    hidden, weight, bias = first = leaves()
    found, entropies = chunked_logprobs(hidden, weight, targets, bias=bias, **options)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies.double(), spread, atol=1e-5, rtol=1e-5)
    (weights * (found - 0.3 * entropies)).sum().backward()
    hidden, weight, bias = second = leaves()

    def loss_of(rows: slice, logprobs: Tensor, entropies: Tensor) -> Tensor:
        return (weights[rows] * (logprobs - 0.3 * entropies)).sum()

    (2 * chunked_loss(hidden, weight, targets, loss_of, bias=bias, **options)).backward()
    for one, two, reference in zip(first, second, exact, strict=True):
        assert one.grad is not None and two.grad is not None and reference.grad is not None
        torch.testing.assert_close(one.grad.double(), reference.grad, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(two.grad.double(), 2 * reference.grad, atol=1e-4, rtol=1e-4)
