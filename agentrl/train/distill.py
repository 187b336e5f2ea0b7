"""On-policy distillation: what a teacher says of each token that the policy sampled, as an advantage.

Guarantees: a token's share depends on its own two logprobs alone, so that order, batch and ranks change nothing; a
token that the teacher has not scored is an error, never a zero.

The gradient of the reverse KL from policy to teacher, token by token and without regard to later tokens (discount 0),
is a policy gradient whose advantage is the log ratio of teacher and policy. Lu and Thinking Machines Lab 2025,
On-Policy Distillation; Agarwal et al. 2024 (GKD), arXiv:2306.13649.
"""

from collections.abc import Sequence

from agentrl.config.recipe import TrainerConfig
from agentrl.core.episode import Node


def taught(advantages: Sequence[Sequence[float]], turns: Sequence[Node], config: TrainerConfig) -> list[list[float]]:
    """Advantages of one role of one episode with the teacher's say.

    Args:
        advantages: ``[turns][sampled tokens]`` of the reward.
        turns: ``[turns]`` the sampled messages.
        config: For ``distill_coef``.

    Returns:
        ``[turns][sampled tokens]``: ``advantage - distill_coef * (behavior logprob - teacher logprob)``.

    Raises:
        ValueError: No teacher has scored a message.
    """
    return [
        [value - config.distill_coef * gap for value, gap in zip(of_turn, node.teacher_gaps(), strict=True)]
        for of_turn, node in zip(advantages, turns, strict=True)
    ]
