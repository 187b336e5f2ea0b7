"""docs/sdk_agents.md: its program runs as shown, in an episode."""

import re
from pathlib import Path
from typing import Any

import agentrl.inference.options as options
from agentrl.core.episode import StopReason, Task
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from tests.end_to_end import ROOT
from tests.inference.fakes import answer
from tests.rollout.test_episode_runner import client

TEXT = (ROOT / "docs" / "sdk_agents.md").read_text()


async def test_the_program_is_trained_as_it_is(tiny_model: Path) -> None:
    template = ChatTemplate.from_folder(tiny_model)
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {"__name__": "solver"}
    exec(block, names)
    said = iter(["3", " 2"])
    model = client(template, lambda ids, params: answer([*template.tokenizer.encode(next(said)), template.eos_id]))
    task = Task(id="train/0", data={"question": "What is 1 + 1?", "answer": "2"})
    episode = await run_episode(
        names["Solver"](), task, model, group_id="g", index=0, seed=1, limits=Limits(60.0, 9.0), left=Abandoned()
    )
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.TERMINATED, 1.0, None)
    nodes = episode.trajectories["assistant"].nodes
    assert [node.parent for node in nodes] == [None, 0, 1, 2], "the second call continues the stored ids"
    assert [sum(node.loss_mask) for node in nodes[1::2]] == [len(node.token_ids) for node in nodes[1::2]]


def test_the_options_that_the_page_names_are_those_that_are_taken() -> None:
    (taken,) = re.findall(r"- \*\*Taken and not used\*\*(.*?)\n- ", TEXT, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", taken)) - {"model"}
    assert named <= options.HARMLESS and len(named) > 7
