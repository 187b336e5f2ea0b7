"""docs/images.md: its environment runs as shown, with a tiny model that sees; a tool answers with an image."""

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl import ToolEnvironment, tool
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, StopReason, Task
from agentrl.core.images import data_url, image_bytes, images_of, opened
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from tests.end_to_end import ROOT
from tests.inference.fakes import Script, answer
from tests.rollout.test_episode_runner import client
from tests.tiny_vision import build_tiny_vision, picture

TEXT = (ROOT / "docs" / "images.md").read_text()


class Camera(ToolEnvironment):
    """Shows a picture when it is asked for one."""

    dataset = ({"question": "look"},)

    @tool
    def photo(self, number: int) -> Any:
        """Take a picture.

        Args:
            number: Which one.
        """
        return [f"picture {number}:", picture(number)]

    def prompt(self, task: dict[str, Any]) -> list[Any]:
        return [{"role": "user", "content": task["question"]}]

    def reward(self, task: dict[str, Any], answer: str) -> float:
        return float(answer == "seen")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate.from_folder(build_tiny_vision(tmp_path_factory.mktemp("vision")))


async def played(template: ChatTemplate, workflow: AgentEnvWorkflow, data: dict[str, Any], script: Script) -> Episode:
    return await run_episode(
        workflow, Task(id="train/0", data=data), client(template, script), group_id="g", index=0, seed=1,
        limits=Limits(60.0, 9.0), left=Abandoned(),
    )  # fmt: skip


def saying(template: ChatTemplate, *texts: str) -> Script:
    left = iter(texts)
    return lambda ids, params: answer(
        [*template.tokenizer.encode(next(left), add_special_tokens=False), template.eos_id]
    )


async def test_the_shown_environment_runs_in_an_episode(template: ChatTemplate, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "shade.py").write_text(block)
    workflow = AgentEnvWorkflow(f"{tmp_path / 'shade.py'}:Shade")
    episode = await played(template, workflow, {"shade": 255}, saying(template, "bright"))
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.TERMINATED, 1.0, None)
    nodes = episode.trajectories["assistant"].nodes
    (url,) = images_of(nodes[0].message)
    assert opened(image_bytes(url)).getpixel((0, 0)) == (255, 255, 255)
    assert template.shown.reader is not None and template.shown.reader.token_id in nodes[0].token_ids
    again = Episode.model_validate_json(episode.model_dump_json())
    assert Columns.of([again]).images == Columns.of([episode]).images != {}


async def test_a_tool_answers_with_an_image(template: ChatTemplate) -> None:
    call = '<tool_call>\n{"name": "photo", "arguments": {"number": 3}}\n</tool_call>'
    workflow = AgentEnvWorkflow(f"{__file__}:Camera")
    episode = await played(template, workflow, {"question": "look"}, saying(template, call, "seen"))
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.TERMINATED, 1.0, None)
    result = episode.trajectories["assistant"].nodes[2]
    assert result.message["role"] == "tool" and result.message["content"][0]["text"] == "picture 3:"
    assert images_of(result.message) == [data_url(picture(3))]
    assert template.shown.reader is not None
    count = template.shown.reader.placeholders(data_url(picture(3))).count(template.shown.reader.token)
    assert result.token_ids.count(template.shown.reader.token_id) == count and not any(result.loss_mask)
    assert Columns.of([episode]).message_images() == {2: (image_bytes(data_url(picture(3))),)}
