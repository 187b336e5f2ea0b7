"""A run with images in one process: episodes of the shipped environment over HTTP, updates, pushed weights.

Everything is the run's own: workflow, sessions, the kind of server, columns, learner, publisher; only processes are
left out. The shipped recipe in its own processes is `tests/test_learning.py`'s.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from agentrl.config.load import load_recipe
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, Task
from agentrl.launch.resolve import resolve
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.assemble import make_client, make_workflow
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from agentrl.train.__main__ import make_policy
from agentrl.train.batch import Batch
from agentrl.train.branches import TokenColumns, branches_of
from agentrl.train.learner import PolicyLearner
from agentrl.train.mesh import RankMesh
from agentrl.train.publishing import make_publisher
from agentrl.train.shares import Work
from tests.served import served

EXACT = 1e-4  # largest difference of a logprob between server and trainer in nats, in float32
SETTINGS = (
    "env.kwargs={size: 16, short: true}", "sampling.max_new_tokens=3", "inference.context_length=256",
    "inference.dtype=float32", "rollout.batch_size=2", "rollout.group_size=4", "weights.transport=disk",
    "trainer.dtype=float32", "trainer.freeze=[]", "trainer.tokens_per_microbatch=512", "trainer.adam_epsilon=1e-6",
)  # fmt: skip


class Run:
    """A run's parts around a served model."""

    def __init__(self, folder: Path, out: Path, url: str, *settings: str) -> None:
        named = [f"model.name={folder}", *SETTINGS, *settings]
        self.recipe = resolve(load_recipe("shapes_grpo", named, device="cpu"), None)
        device, ranks = torch.device("cpu"), RankMesh.of_world(torch.device("cpu"))
        policy = make_policy(self.recipe, folder, ranks, device)
        self.learner = PolicyLearner(policy, None, self.recipe.trainer, device, None, ranks)
        self.publisher = make_publisher(self.recipe, policy, out, device, None, ranks, folder)
        self.client = make_client(self.recipe, folder, [url])
        self.workflow = make_workflow(self.recipe)
        self.version = 0

    async def play(self, tasks: list[dict[str, Any]], *, evaluation: bool = False) -> list[Episode]:
        """Plays a group of each task."""
        size = 1 if evaluation else self.recipe.rollout.group_size
        jobs = [
            run_episode(
                self.workflow, Task(id=f"train/{place}", data=task), self.client, group_id=f"g{place}", index=index,
                seed=1000 * self.version + 10 * place + index, limits=Limits(60.0, 9.0), left=Abandoned(),
                evaluation=evaluation,
            )
            for place, task in enumerate(tasks)
            for index in range(size)
        ]  # fmt: skip
        return list(await asyncio.gather(*jobs))

    def logprobs(self, columns: Columns) -> torch.Tensor:
        """The trainer's logprobs of all sampled tokens."""
        learner, work = self.learner, Work(branches_of(columns), TokenColumns.of(columns))
        with torch.no_grad():
            return learner._scores(learner.policy, learner._share(work))

    async def update(self, columns: Columns, rate: float) -> dict[str, float]:
        """Makes an update, and pushes its weights to the server."""
        batch = Batch(columns, self.recipe.trainer, self.recipe.reward).train_batch(version=self.version)
        metrics = self.learner.update(batch, rate)
        self.version += 1
        manifest = self.publisher.write(self.version)
        (backend,) = self.client.router.backends
        assert manifest is not None and manifest.path is not None
        await backend.pause("retract")
        await backend.load(manifest.path, self.version)
        assert await backend.verify(manifest) == []
        await backend.resume()
        return metrics


@pytest.mark.parametrize("tiny_vision", ["qwen2_vl", "idefics3"], indirect=True)
async def test_three_steps_with_images(tiny_vision: Path, tmp_path: Path, mesh: DeviceMesh) -> None:
    from agentrl.data.shapes import load

    tasks, _ = load("train", None, train=2)
    with served(tiny_vision) as url:
        run = Run(tiny_vision, tmp_path, url)
        for step in range(3):
            episodes = await run.play(tasks)
            assert not any(episode.error for episode in episodes), episodes[0].error
            columns = Columns.of(episodes)
            assert len(columns.images) == len(tasks), "a group's image is carried once"
            assert set(columns.versions.tolist()) == {step}
            gap = np.abs(run.logprobs(columns).numpy() - columns.logprobs).max()
            assert gap < EXACT, f"server and trainer compute the same policy after {step} updates"
            varied = [one.model_copy(update={"reward": float(place % 2)}) for place, one in enumerate(episodes)]
            metrics = await run.update(Columns.of(varied), 1e-2)
            assert metrics["train/grad_norm"] > 0 and not metrics["train/skipped"]
        run.publisher.close()
        await run.client.close()
