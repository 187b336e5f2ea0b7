"""Tests chunked logprobs and their gradients against a plain log-softmax in float64."""

import pytest
import torch

from agentrl.train.logprobs import chunked_logprobs, chunked_loss


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize(("of_logprobs", "of_entropy"), [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_values_and_gradients_equal_plain_log_softmax(
    temperature: float, chunk: int, of_logprobs: float, of_entropy: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (7,), generator=generator)
    upstream = torch.randn(7, dtype=torch.float64, generator=generator)

    plain = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    expected = plain.gather(-1, targets[:, None]).squeeze(-1)
    expected_entropy = -(plain.exp() * plain).sum(-1)
    other = torch.randn(7, dtype=torch.float64, generator=generator)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        terms = [(logprobs * upstream * of_logprobs).sum()] if of_logprobs else []
        return sum(terms + ([(entropy * other * of_entropy).sum()] if of_entropy else []), torch.zeros(()))

    expected_grads = torch.autograd.grad(loss(expected, expected_entropy), [hidden, weight])

    logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperature=temperature, chunk=chunk)
    grads = torch.autograd.grad(loss(logprobs, entropy), [hidden, weight])
    torch.testing.assert_close(logprobs, expected.float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy.float(), atol=1e-5, rtol=0)

    def part_of_loss(rows: slice, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        of_entropy_part = (entropy * other[rows] * of_entropy).sum() if of_entropy else torch.zeros(())
        return (logprobs * upstream[rows] * of_logprobs).sum() + of_entropy_part

    total = chunked_loss(hidden, weight, targets, part_of_loss, temperature=temperature, chunk=chunk)
    torch.testing.assert_close(total.double(), loss(expected, expected_entropy), atol=1e-5, rtol=0)
    told_grads = torch.autograd.grad(3 * total, [hidden, weight])
    for grad, told, reference in zip(grads, told_grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, reference, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(told, 3 * reference, atol=3e-5, rtol=1e-5)


def weight_gradient_error(dtype: torch.dtype, chunk: int) -> float:
    """Returns the relative error of the weight's gradient against float64."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 16, generator=generator).to(dtype)
    weight = torch.randn(64, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, 64, (512,), generator=generator)
    exact = weight.detach().double().requires_grad_()
    (hidden.double() @ exact.t()).log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    chunked_loss(hidden, weight, targets, lambda rows, logprobs, entropies: logprobs.sum(), chunk=chunk).backward()
    assert weight.grad is not None and exact.grad is not None
    return ((weight.grad.double() - exact.grad).norm() / exact.grad.norm()).item()


def test_many_chunks_lose_no_precision_in_bfloat16() -> None:
    whole, chunked = (weight_gradient_error(torch.bfloat16, chunk) for chunk in (512, 8))
    assert chunked < 1.2 * whole


def test_a_frozen_head_changes_nothing_for_what_is_below_it() -> None:
    hidden, weight = torch.randn(7, 5), torch.randn(11, 5)
    targets = torch.randint(0, 11, (7,))
    found = []
    for frozen in (False, True):
        states, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        logprobs, entropies = chunked_logprobs(states, head, targets, chunk=3)
        (logprobs + entropies).sum().backward()
        assert (head.grad is None) == frozen
        found.append(states.grad)
    assert torch.equal(*found)
    states, head = hidden.clone().requires_grad_(), weight.clone()
    chunked_loss(states, head, targets, lambda rows, lp, h: (lp + h).sum(), chunk=3).backward()
    assert states.grad is not None and found[0] is not None
    torch.testing.assert_close(states.grad, found[0], atol=1e-6, rtol=1e-6)


def test_no_tokens_give_no_logprobs_and_zero_gradients() -> None:
    weight = torch.randn(11, 5, requires_grad=True)
    logprobs, _ = chunked_logprobs(torch.zeros(0, 5, requires_grad=True), weight, torch.zeros(0, dtype=torch.long))
    logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        chunked_logprobs(
            torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(1, dtype=torch.long), temperature=temperature
        )
