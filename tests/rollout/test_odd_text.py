"""Text that UTF-8 cannot hold, or that a file or a terminal takes amiss, costs no run and nobody the blame."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentrl.config.recipe import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, Node, StopReason, Task, Trajectory
from agentrl.core.message_shape import in_shape
from agentrl.core.workflow import LLM, Outcome
from agentrl.data.json_lines import json_lines
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.evaluate.metrics import summarize
from agentrl.inference.http import _encoded
from agentrl.inference.options import ChatOptions
from agentrl.inference.template import ChatTemplate
from agentrl.observe.examine_run import lines
from agentrl.observe.sinks import MetricsWriter
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from agentrl.rollout.group_account import judge, step_metrics
from agentrl.rollout.journal import Journal
from agentrl.rollout.journal_proof import valid_outcomes
from agentrl.rollout.stop_rules import StopRules
from tests.inference.fakes import answer
from tests.rollout.test_controller import Harness
from tests.rollout.test_episode_runner import Scripted, client, episode_of

HALF = "\ud83d"
ODD = ["\ud83d", "a\x00b", "a\u2028b\u2029c\x85d\x0be", "\x1b[2J\x9b31m", "x" * 200_000, "\ufeff\u202e"]

ENVIRONMENT = """
from agentrl import LanguageEnvironment
from agentrl.agents.chat import ChatAgent

class Odd(LanguageEnvironment):
    odd = "\\ud83d"
    async def reset(self, *, seed=None, options=None):
        self.task = options
        info = {"metrics": {"m" + self.odd[:9]: 1.0}, "tools": [{"type": "function", "function": {
            "name": "f", "description": self.odd, "parameters": {"type": "object", "properties": {}}}}]}
        return [{"role": "user", "content": self.odd + options["q"], "note": {self.odd: [self.odd]}}], info
    async def step(self, action):
        action["content"].encode()
        if self.task.get("raise"):
            raise ValueError(self.odd)
        end = {"role": "user", "content": [{"type": "text", "text": self.odd}]}
        return [end], 1.0, True, False, {"metrics": {"n": 2.0}}

class OddAgent(ChatAgent):
    async def step(self, observation, info):
        added = {"role": "user", "content": "\\ud83d" + "\\ude00"}
        said = await super().step([*observation, added], info)
        return {**said, "content": said["content"] + "\\udfff"}
"""


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model, source="chatml_tools")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    file = tmp_path / "odd.py"
    file.write_text(ENVIRONMENT)
    return file


async def played(template: ChatTemplate, workflow: Any, task: Task) -> Episode:
    said = [*template.tokenizer.encode("It is 2"), template.eos_id]
    model = client(template, lambda ids, params: answer(said))
    return await run_episode(
        workflow, task, model, group_id="g", index=1, seed=5, limits=Limits(60.0, 9.0), left=Abandoned()
    )


@pytest.mark.parametrize("agent", ["chat", "odd"])
async def test_half_a_surrogate_pair_goes_through_a_whole_episode(
    template: ChatTemplate, environment: Path, tmp_path: Path, agent: str
) -> None:
    workflow = AgentEnvWorkflow(f"{environment}:Odd", "chat" if agent == "chat" else f"{environment}:OddAgent")
    row = {"q": HALF, HALF: [HALF], "tag": f"hard{HALF}"}
    episode = await played(template, workflow, Task(id=f"train/{HALF}", data=row))
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.TERMINATED, 1.0, None)
    assert (episode.task_id, episode.tag) == ("train/\ufffd", "hard\ufffd")
    assert episode.metrics == {"m\ufffd": 1.0, "n": 2.0}
    contents = [node.message["content"] for node in episode.trajectories["assistant"].nodes]
    assert contents[: 1 if agent == "chat" else 2] == (["\ufffd\ufffd"] if agent == "chat" else ["\ufffd\ufffd", "😀"])
    journal = Journal(tmp_path, episodes=True)
    assert journal.episode(episode) is episode
    journal.admitted(draw=0, task=episode.task_id, seed=0, version=0)
    journal.group("trained", draw=0, task=episode.task_id, step=0)
    journal.close()
    assert json.loads((tmp_path / "episodes.jsonl").read_text(encoding="utf-8"))["task_id"] == "train/\ufffd"
    assert valid_outcomes(tmp_path)[0]["task"] == "train/\ufffd"
    assert Columns.from_bytes(Columns.of([episode]).to_bytes(note=HALF))[0].episodes[0].tag == "hard\ufffd"
    metrics = step_metrics([judge([episode], RolloutConfig(group_size=1), RewardConfig())])
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(0, metrics | summarize([episode]).as_metrics())
    writer.close()


async def test_an_error_with_half_a_pair_is_the_environments_and_is_recorded(
    template: ChatTemplate, environment: Path
) -> None:
    task = Task(id="t", data={"q": "", "raise": True})
    episode = await played(template, AgentEnvWorkflow(f"{environment}:Odd"), task)
    assert episode.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert str(episode.error).endswith("ValueError: \ufffd\n")
    episode.model_dump_json()


@pytest.mark.parametrize("text", ODD)
async def test_odd_text_is_sampled_for_and_written_as_one_line(
    template: ChatTemplate, tmp_path: Path, text: str
) -> None:
    async def play(llm: LLM) -> Outcome:
        role = f"role {text[:20]}"
        ask = [{"role": "user", "content": text[:300]}]
        await llm.session(role).chat.completions.create(messages=ask, stop=[text[:20]])
        llm.reward(0.5, role)
        return Outcome(reward=1.0, metrics={f"m {text[:20]}": 1.0})

    episode = await episode_of(template, Scripted(play))
    assert episode.error is None and episode.reward == 1.0
    long = Episode(**{**episode.model_dump(), "error": text})
    journal = Journal(tmp_path, episodes=True)
    for one in (episode, long):
        journal.episode(one)
    journal.close()
    written = (tmp_path / "episodes.jsonl").read_text(encoding="utf-8")
    assert len(written.splitlines()) == 2, "also for a reader that splits at every line end of Unicode"
    found = list(lines(tmp_path / "episodes.jsonl"))
    assert [Episode.model_validate(one) for one in found] == [episode, long]


async def test_a_record_that_cannot_be_written_costs_one_episode(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model, "rollout.max_failure_rate=1.0")
    run = harness.controller.rollouts._run_episode

    async def spoilt(draw: int, task: Task, index: int, *rest: Any) -> Episode:
        episode = await run(draw, task, index, *rest)
        if index == 1:
            trajectory = episode.trajectories["assistant"]
            trajectory.nodes[0] = Node(parent=None, message={"role": "user", "content": object()})
        return episode

    harness.controller.rollouts._run_episode = spoilt  # type: ignore[method-assign]
    harness.controller.start()
    batch = Columns.from_bytes(await harness.controller.next_batch(0))[0]
    await harness.publish(1)
    await harness.controller.close()
    assert len(batch.episodes) == 4, "two groups of three, without one each"
    metrics = harness.written[-1][1]
    assert metrics["rollout/failed_environment_error"] == metrics["rollout/failed"] == 2
    failed = [one for one in lines(tmp_path / "episodes.jsonl") if one["stop_reason"] == "environment_error"]
    assert failed and all("cannot be written as JSON" in one["error"] and not one["trajectories"] for one in failed)


@pytest.mark.parametrize("value", [object(), b"\xff", {"deep": [object()]}])
def test_what_is_no_json_is_a_failed_record(tmp_path: Path, value: object) -> None:
    nodes = [Node(parent=None, message={"role": "user", "content": value})]
    episode = Episode(
        group_id="g", task_id="t", index=0, seed=0, reward=1.0, stop_reason=StopReason.TERMINATED, attempt=2,
        trajectories={"assistant": Trajectory(nodes=nodes)},
    )  # fmt: skip
    journal = Journal(tmp_path, episodes=True)
    found = journal.episode(episode, evaluation_step=3)
    journal.close()
    assert (
        found.attempt == 2 and found.failed and found.reward is None and "cannot be written as JSON" in str(found.error)
    )
    (written,) = lines(tmp_path / "eval-episodes.jsonl")
    assert written.pop("eval_step") == 3 and Episode.model_validate(written) == found


def test_a_message_is_valid_in_every_shape_that_it_comes_in() -> None:
    call = {"id": HALF, "type": "function", "function": {"name": f"f{HALF}", "arguments": {HALF: HALF}}}
    split = [{"type": "text", "text": "\ud83d"}, {"type": "text", "text": "\ude00"}]
    for message in (
        {"role": "user", "content": HALF},
        {"role": "user", "content": HALF, HALF: HALF},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": None, "function_call": call["function"]},
        {"role": "function", "name": HALF, "content": HALF},
        {"role": "assistant", "content": split, "reasoning_content": HALF},
    ):
        json.dumps(in_shape(message), ensure_ascii=False).encode()
        assert in_shape(in_shape(message)) == in_shape(message)
    assert in_shape({"role": "user", "content": split})["content"] == "😀", "two halves in two parts"


def test_a_dataset_line_with_half_a_pair_is_read(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'{"q": "a\\ud83d"}\n{"q": "b\\ud83d\\ude00"}\n')
    assert [line for line, _ in json_lines(file)] == [{"q": "a\ufffd"}, {"q": "b😀"}]
    for broken in (b'{"q": "\\ud83d", "n": NaN}\n', b'{"q": "\\ud83d"\n', b'{"q": "\xff"}\n'):
        file.write_bytes(broken)
        with pytest.raises(Exception, match=r"train\.jsonl:1 is not JSON"):
            list(json_lines(file))


def test_what_is_sent_to_a_server_is_valid() -> None:
    assert orjson.loads(_encoded({"stop": [HALF], "ids": [1, 2], HALF: 1})) == {
        "stop": ["\ufffd"], "ids": [1, 2], "\ufffd": 1,
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": HALF, "description": HALF}}
    options = ChatOptions.read({"tools": [tool], "stop": HALF})
    json.dumps([options.tools, options.params], ensure_ascii=False).encode()


def test_a_reason_that_is_logged_or_ends_the_run_moves_no_cursor(caplog: pytest.LogCaptureFixture) -> None:
    config = RolloutConfig(batch_size=1, group_size=2)
    bad = [
        Episode(
            group_id="g", task_id="t", index=i, seed=0, stop_reason=StopReason.ENVIRONMENT_ERROR,
            error="\x1b]0;owned\x07 \ud83d",
        )
        for i in range(2)
    ]  # fmt: skip
    reason = StopRules(config).check(bad, judge(bad, config, RewardConfig()))
    assert "\\x1b]0;owned\\x07 \ufffd" in str(reason) and "\x1b" not in str(reason) + caplog.text
