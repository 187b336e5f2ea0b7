"""Each preset improves the reward of a toy task, and a run with broken gradients stops."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from agentrl.config.algorithm import PRESETS
from agentrl.config.recipe import Recipe, TrainerConfig
from agentrl.core.episode import Episode, Node, StopReason, Trajectory
from agentrl.train.batch import make_train_batch
from agentrl.train.critic import Critic, ValueLearner
from agentrl.train.engine import TrainEngine
from agentrl.train.policy import Policy, load_model
from agentrl.train.trainer import Trainer, TrainingStopped

GROUPS, MEMBERS, ANSWER, STEPS, RATE = 8, 8, 5, 14, 2e-2
CPU = torch.device("cpu")
SEEDS = [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]


@torch.no_grad()
def sample(policy: Policy, version: int, generator: torch.Generator) -> list[Episode]:
    """Groups of answers; the reward is the share of even ids in an answer, half of them at first."""
    prompts = torch.randint(3, 200, (GROUPS, 3), generator=generator).repeat_interleave(MEMBERS, 0)
    ids, logprobs = prompts, []
    for _ in range(ANSWER):
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
    nodes = [
        Node(
            parent=None, message={"role": "user"}, token_ids=prompt, loss_mask=[0] * 3, logprobs=[0.0] * 3,
            versions=[-1] * 3,
        ),
        Node(
            parent=0, message={"role": "assistant"}, token_ids=answer, loss_mask=[1] * ANSWER, logprobs=logprobs,
            versions=[version] * ANSWER, finish_reason="stop",
        ),
    ]  # fmt: skip
    reward = sum(token % 2 == 0 for token in answer) / ANSWER
    return Episode(
        group_id=f"{version}-{index // MEMBERS}", task_id="t", index=index, seed=0, reward=reward,
        stop_reason=StopReason.TERMINATED, trajectories={"assistant": Trajectory(nodes=nodes)},
    )  # fmt: skip


def make_engine(folder: Path, mesh: DeviceMesh, choices: dict[str, Any]) -> TrainEngine:
    """Not sharded: its model samples, too. The mesh is there for the process group."""
    config = TrainerConfig.model_validate({"aggregation_length": ANSWER, "logprob_chunk": 64, **choices})
    critic = ValueLearner(Critic(load_model(folder).get_decoder()), config, CPU) if config.advantage == "gae" else None
    return TrainEngine(Policy(load_model(folder), 1.0, config.logprob_chunk), None, config, CPU, critic)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_improves_the_reward(preset: str, seed: int, tiny_model: Path, mesh: DeviceMesh) -> None:
    engine = make_engine(tiny_model, mesh, {"preset": preset})
    generator = torch.Generator().manual_seed(seed)
    rewards = []
    for step in range(STEPS):
        episodes = sample(engine.policy, step, generator)
        rewards.append(sum(e.reward or 0.0 for e in episodes) / len(episodes))
        values = engine.critic.values if engine.critic is not None else None
        engine.update(make_train_batch(episodes, engine.config, version=step, values=values), RATE)
    assert rewards[0] < 0.65 and max(rewards[-3:]) > rewards[0] + 0.2, " ".join(f"{reward:.2f}" for reward in rewards)


class OneBatch:
    """A controller's client that has a batch for every step."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch = batch

    def next_batch(self, step: int) -> bytes:
        return json.dumps(self.batch).encode()


class Nowhere:
    """A way out for weights that goes nowhere."""

    unchanged = None

    def publish(self, version: int, offer: Any) -> None:
        return None


def test_a_run_whose_gradients_stay_broken_stops_and_keeps_the_batches(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    engine = make_engine(tiny_model, mesh, {"max_nonfinite": 3})
    batch = {"episodes": [e.model_dump() for e in sample(engine.policy, 0, torch.Generator().manual_seed(0))]}
    with torch.no_grad():
        next(engine.policy.parameters()).fill_(float("nan"))
    recipe = Recipe.model_validate(
        {"model": {"name": "x"}, "env": {"id": "arithmetic"}, "trainer": {"max_nonfinite": 3, "save_seconds": None}}
    )
    trainer = Trainer(recipe, tiny_model, tmp_path, engine, Nowhere(), OneBatch(batch))  # type: ignore[arg-type]
    with pytest.raises(TrainingStopped, match=r"3 steps in a row .*nonfinite"):
        trainer.run()
    kept = sorted((tmp_path / "nonfinite").iterdir())
    assert [file.name for file in kept] == ["step-000000.json", "step-000001.json", "step-000002.json"]
    assert len(json.loads(kept[0].read_text())["episodes"]) == GROUPS * MEMBERS
