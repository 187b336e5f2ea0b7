"""Tests the teacher's part of the advantages, and that a student learns a teacher's distribution from it."""

import asyncio
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from agentrl.config.recipe import TrainerConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode
from agentrl.inference.kinds.embedded import EmbeddedBackend
from agentrl.inference.router import Router
from agentrl.rollout.teacher_scoring import Teacher
from tests.served import served
from tests.tiny import build_tiny_model
from tests.train.test_batch import make_train_batch, trained
from tests.train.toy_policy import GROUPS, episode, make_engine, sample

STEPS, RATE = 20, 3e-2
PURE = TrainerConfig(preset="distill")


def scored(index: int, logprobs: list[float], teacher: list[float]) -> Episode:
    """Two sampled tokens after three of a prompt; the reward is 1 for an even index, else 0."""
    made = episode(index, [3, 4, 5], [6 + index % 2, 8 + index % 2], logprobs, 0)
    made.trajectories["assistant"].nodes[1].teacher_logprobs = teacher
    return made


def test_an_advantage_is_the_rewards_less_the_gap_to_the_teacher() -> None:
    episodes = [scored(0, [-1.0, -2.0], [-1.5, -0.25]), scored(1, [-0.5, -0.75], [-0.5, -3.0])]
    config = TrainerConfig(distill_coef=0.5, scale_rewards="none")  # of the reward: 0.5 and -0.5
    made = make_train_batch(episodes, config)
    found = [trained(made, branch) for branch in made.branches]
    assert found[0] == pytest.approx([0.5 - 0.25, 0.5 + 0.875])
    assert found[1] == pytest.approx([-0.5, -0.5 - 1.125])
    pure = make_train_batch(episodes[:1], PURE)  # needs no group
    assert trained(pure, pure.branches[0]) == pytest.approx([-0.5, 1.75]) and pure.signal == 1.0
    white = make_train_batch(episodes, TrainerConfig(distill_coef=0.5, scale_rewards="none", whiten="batch"))
    plain = torch.tensor([0.25, 1.375, -0.5, -1.625], dtype=torch.float64)  # the reward's and the teacher's together
    expected = (plain - plain.mean()) / plain.std()
    assert [value for branch in white.branches for value in trained(white, branch)] == pytest.approx(expected.tolist())


def test_a_token_that_no_teacher_scored_is_an_error() -> None:
    with pytest.raises(ValueError, match="no teacher_logprobs"):
        make_train_batch([episode(0, [3, 4, 5], [6], [-1.0], 0)], PURE)


@torch.no_grad()
def exact_kl(student: torch.nn.Module, teacher: torch.nn.Module, episodes: list[Episode]) -> float:
    """Computes the mean reverse KL over the whole vocabulary at sampled tokens, without the server's logprobs."""
    nodes = [e.trajectories["assistant"].nodes for e in episodes]
    ids, mask = (
        torch.tensor([[*getattr(first, name), *getattr(second, name)] for first, second in nodes])
        for name in ("token_ids", "loss_mask")
    )
    ours, theirs = (m(input_ids=ids).logits[:, :-1].double().log_softmax(-1) for m in (student, teacher))
    return (ours.exp() * (ours - theirs)).sum(-1)[mask[:, 1:] == 1].mean().item()


async def test_a_student_learns_the_distribution_of_a_served_teacher(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    """Two random models; answers of two tokens to one prompt, so that 64 of them tell enough of the distribution."""
    folder = build_tiny_model(tmp_path / "teacher", seed=1)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = make_engine(tiny_model, {"preset": "distill"})
    generator = torch.Generator().manual_seed(0)
    prompts = torch.tensor([[3, 4, 5]]).repeat(GROUPS, 1)
    exact: list[float] = []
    measured: list[float] = []
    with served(folder) as url:
        teacher = Teacher(Router([EmbeddedBackend(url, 60.0)]))
        await teacher.start()
        for step in range(STEPS):
            sampled = sample(engine.policy, step, generator, 2, prompts)
            episodes = await asyncio.gather(*(teacher.score(e) for e in sampled))
            columns = Columns.of(episodes)
            measured.append(float((columns.logprobs - columns.teacher_logprobs).mean()))
            exact.append(exact_kl(engine.policy.model, reference, episodes))
            engine.update(make_train_batch(episodes, engine.config, version=step), RATE)
        await teacher.close()
    assert exact[0] > 2.0 and exact[-1] < 0.65 * exact[0], exact
    late, true = sum(measured[-4:]) / 4, sum(exact[-4:]) / 4
    assert late == pytest.approx(true, abs=0.5) and late < 0.7 * measured[0], (measured, exact)


async def test_a_served_teacher_scores_as_the_plain_model(tiny_model: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()
    ids = list(range(3, 40))
    with torch.no_grad():
        rows = reference(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    known = rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    with served(tiny_model) as url:
        backend = EmbeddedBackend(url, 60.0)
        for start in (1, 2, 20, 36):
            told = torch.tensor(await backend.score(ids, start), dtype=torch.float64)
            torch.testing.assert_close(told, known[start - 1 :], atol=1e-4, rtol=0)
        await backend.close()
