"""A policy small enough to learn a task in the test process, and the task: to answer with even ids.

The real ``PolicyLearner`` updates the tiny model, whose own forward samples. It needs a process group: ask for
``mesh``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agentrl.config.recipe import TrainerConfig
from agentrl.core.episode import Episode, Node, StopReason, Trajectory
from agentrl.train.critic import Critic, ValueLearner
from agentrl.train.learner import PolicyLearner
from agentrl.train.policy import Policy, load_model

GROUPS, MEMBERS, ANSWER = 8, 8, 5
CPU = torch.device("cpu")


def make_engine(folder: Path, choices: dict[str, Any]) -> PolicyLearner:
    """Makes a learner that is not sharded, because its model also samples."""
    config = TrainerConfig.model_validate({"aggregation_length": ANSWER, "logprob_chunk": 64, **choices})
    critic = ValueLearner(Critic(load_model(folder).get_decoder()), config, CPU) if config.advantage == "gae" else None
    policy, frozen = (Policy(load_model(folder), 1.0, config.logprob_chunk) for _ in range(2))
    reference = frozen.requires_grad_(False) if config.kl_coef > 0 else None
    return PolicyLearner(policy, reference, config, CPU, critic)


@torch.no_grad()
def sample(
    policy: Policy,
    version: int,
    generator: torch.Generator,
    length: int = ANSWER,
    prompts: torch.Tensor | None = None,
) -> list[Episode]:
    """Groups of answers; the reward is the share of even ids in an answer, half of them at first.

    ``prompts`` are ``[GROUPS, 3]``, and drawn where they are not given.
    """
    if prompts is None:
        prompts = torch.randint(3, 200, (GROUPS, 3), generator=generator)
    prompts = prompts.repeat_interleave(MEMBERS, 0)
    ids, logprobs = prompts, []
    for _ in range(length):
        rows = policy.model(input_ids=ids, use_cache=False).logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(rows.exp(), 1, generator=generator)
        logprobs.append(rows.gather(-1, token))
        ids = torch.cat([ids, token], dim=1)
    return [
        episode(
            index, prompts[index].tolist(), ids[index, 3:].tolist(), torch.cat(logprobs, 1)[index].tolist(), version
        )
        for index in range(len(ids))
    ]


def episode(index: int, prompt: list[int], answer: list[int], logprobs: list[float], version: int) -> Episode:
    """Makes an episode of one answer to one prompt."""
    nodes = [
        Node(
            parent=None, message={"role": "user"}, token_ids=prompt, loss_mask=[0] * 3, logprobs=[0.0] * 3,
            versions=[-1] * 3,
        ),
        Node(
            parent=0, message={"role": "assistant"}, token_ids=answer, loss_mask=[1] * len(answer), logprobs=logprobs,
            versions=[version] * len(answer), finish_reason="stop",
        ),
    ]  # fmt: skip
    reward = sum(token % 2 == 0 for token in answer) / len(answer)
    return Episode(
        group_id=f"{version}-{index // MEMBERS}", task_id="t", index=index, seed=0, reward=reward,
        stop_reason=StopReason.TERMINATED, trajectories={"assistant": Trajectory(nodes=nodes)},
    )  # fmt: skip


def mean_reward(episodes: Sequence[Episode]) -> float:
    """Returns the mean reward of episodes, which all have one."""
    return sum(episode.reward or 0.0 for episode in episodes) / len(episodes)
