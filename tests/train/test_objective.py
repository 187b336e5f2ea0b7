"""The policy objective against published values (see the reference figures of the project)."""

import pytest
import torch

from agentrl.train.objective import ClipRange, clipped_policy_loss, kl_k3

LOGP = torch.tensor([[-1, -0.5, -2], [-0.7, -1.2, -0.3]])
PROX = torch.tensor([[-1.2, -0.6, -1.5], [-0.7, -1, -0.9]])
ADVANTAGES = torch.tensor([[1.0, 1, -1], [-0.5, 2, 2]])
MASK = torch.tensor([[1.0, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize(("clip", "expected"), [(ClipRange(0.2, 0.2), -0.528526), (ClipRange(0.2, 0.28), -0.532807)])
def test_clipped_loss_matches_the_published_values(clip: ClipRange, expected: float) -> None:
    loss, _ = clipped_policy_loss(LOGP, PROX, ADVANTAGES, clip)
    assert ((loss * MASK).sum() / MASK.sum()).item() == pytest.approx(expected, abs=1e-5)


def test_the_gradient_is_zero_exactly_where_the_clip_says_so() -> None:
    logprobs = LOGP.clone().requires_grad_()
    loss, clipped = clipped_policy_loss(logprobs, PROX, ADVANTAGES, ClipRange())
    loss.sum().backward()
    assert logprobs.grad is not None
    assert clipped.any()
    assert torch.equal(logprobs.grad == 0, clipped)


def test_at_ratio_one_the_gradient_is_the_policy_gradient() -> None:
    logprobs = LOGP.clone().requires_grad_()
    loss, clipped = clipped_policy_loss(logprobs, LOGP, ADVANTAGES, ClipRange())
    loss.sum().backward()
    assert torch.equal(logprobs.grad, -ADVANTAGES)  # type: ignore[arg-type]
    assert not clipped.any()


def test_k3_matches_the_published_values() -> None:
    values = kl_k3(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
    assert values.tolist() == pytest.approx([0.106531, 0.718282], abs=1e-5)
