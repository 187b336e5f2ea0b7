"""Records of episodes: whatever was said is in the file, once, with what is needed to judge it."""

import json
import re
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentrl.core.episode import Episode, StopReason, Task
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
from agentrl.inference.client import Client, EpisodeLLM
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from agentrl.rollout.journal import Journal, read_episodes
from tests.end_to_end import ROOT
from tests.inference.fakes import answer
from tests.inference.kinds.test_openai import choices, serving
from tests.inference.test_session import TOOL, WITH_TOOLS
from tests.rollout.test_episode_runner import Scripted, client

LONG = "a long introduction " * 3
SYSTEM, FIRST = {"role": "system", "content": LONG}, {"role": "user", "content": "first question"}
SECOND, ASK = {"role": "user", "content": "second question"}, {"role": "user", "content": "plan it"}
TASK = Task(id="test/3", data={"question": "What is 1 + 1?", "answer": "2", "tag": "easy"})
READER = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "runs.md").read_text(), re.DOTALL)


@pytest.fixture
def template(tiny_model: Path) -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = WITH_TOOLS
    return ChatTemplate(tokenizer)


def saying(template: ChatTemplate, *texts: str) -> Client:
    replies = iter(texts)
    return client(template, lambda ids, params: answer([*template.tokenizer.encode(next(replies)), template.eos_id]))


async def recorded(
    model: Client, act: Callable[[LLM], Awaitable[Outcome]], folder: Path, task: Task = TASK, **more: Any
) -> tuple[Episode, dict[str, Any], str]:
    """Runs an episode and returns it, its line in the file as data, and as text."""
    workflow: RolloutWorkflow = Scripted(act)
    limits, journal = Limits(60.0, 9.0), Journal(folder, episodes=True)
    episode = await run_episode(
        workflow, task, model, group_id="g", index=1, seed=5, limits=limits, left=Abandoned(), **more
    )
    episode = journal.episode(episode, evaluation_step=7)
    journal.close()
    (line,) = (folder / "eval-episodes.jsonl").read_text().splitlines()
    return episode, json.loads(line), line


async def said(chat: Any, *messages: Any, **options: Any) -> Any:
    reply = await chat.chat.completions.create(messages=list(messages), **options)
    return reply.choices[0].message.model_dump(exclude_none=True)


async def two_roles_that_trim(llm: LLM) -> Outcome:
    """A planner speaks; then a conversation, the same with its middle left out, and one that begins anew."""
    await said(llm.session("planner"), ASK)
    chat = llm.session()
    one = await said(chat, SYSTEM, FIRST, tools=[TOOL])
    two = await said(chat, SYSTEM, FIRST, one, SECOND, tools=[TOOL])
    llm.reward(0.25)
    await said(chat, SYSTEM, SECOND, two, FIRST, tools=[TOOL])
    await said(chat, ASK, max_tokens=9)
    return Outcome(reward=0.25, metrics={"accuracy": 0.0})


def conversations(record: dict[str, Any], role: str) -> list[list[str]]:
    """The texts of each conversation of a role, read from the data alone."""
    nodes = record["trajectories"][role]["nodes"]
    parents = {node["parent"] for node in nodes}

    def way(index: int | None) -> list[str]:
        if index is None:
            return []
        message = nodes[index]["message"]
        return [*way(nodes[index]["parent"]), nodes[message.get("same_as", index)]["message"]["content"]]

    return [way(index) for index in range(len(nodes)) if index not in parents]


@asynccontextmanager
async def api(*texts: str) -> Any:
    async with serving(*(choices({"role": "assistant", "content": text}) for text in texts)) as (llm, release, _):

        class Given:
            def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
                return llm, release

        yield Given()


WHOLE = [
    [LONG, "first question", "a", "second question", "b"],
    [LONG, "second question", "b", "first question", "c"],
    ["plan it", "d"],
]


@pytest.mark.parametrize("in_text", [False, True])
async def test_all_conversations_of_all_roles_are_in_the_record(
    template: ChatTemplate, tmp_path: Path, in_text: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ("p", "a", "b", "c", "d")
    async with api(*texts) as model:
        found = model if in_text else saying(template, *texts)
        _, record, line = await recorded(found, two_roles_that_trim, tmp_path)
    assert conversations(record, "assistant") == WHOLE and conversations(record, "planner") == [["plan it", "p"]]
    assert line.count(LONG) == 1, "a message that two conversations hold is stored once"
    nodes = record["trajectories"]["assistant"]["nodes"]
    times = [record["trajectories"]["planner"]["nodes"][1]["at"], *(node["at"] for node in nodes)]
    assert times == sorted(times) and abs(times[0] - datetime.now(UTC).timestamp()) < 600
    assert [node["reward"] for node in nodes if node["reward"] is not None] == [0.25]
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "eval-episodes.jsonl").write_text(line + "\n")
    exec(READER[0].replace("runs/mine", str(folder)), {})
    shown = capsys.readouterr().out
    assert (
        "'answer': '2'" in shown and shown.count(LONG) == (1 if in_text else 2) and "planner" in shown.splitlines()[1]
    )
    assert len(READER[0].strip().splitlines()) <= 10


@pytest.mark.parametrize("in_text", [False, True])
async def test_a_record_has_the_task_the_time_the_version_the_tools_and_the_sampling(
    template: ChatTemplate, tmp_path: Path, in_text: bool
) -> None:
    texts = ("p", "a", "b", "c", "d")
    async with api(*texts) as model:
        found = model if in_text else saying(template, *texts)
        _, record, line = await recorded(found, two_roles_that_trim, tmp_path, version=7)
    assert record["task"] == TASK.data and (record["task_id"], record["eval_step"], record["version"]) == (
        "test/3",
        7,
        7,
    )
    started = datetime.fromisoformat(record["started"])
    assert abs((datetime.now(UTC) - started).total_seconds()) < 600
    assert record["sampling"]["model"] == "m"
    if not in_text:
        assert (record["sampling"]["temperature"], record["sampling"]["max_new_tokens"]) == (1.0, 20)
    one = record["trajectories"]["assistant"]
    assert one["tools"] == [[TOOL]] and line.count('"description":"Adds."') == 1
    roots = [node for node in one["nodes"] if node["parent"] is None]
    assert [root["tools"] for root in roots] == ([0, None] if in_text else [0, 0, None])
    set_by_calls = [node["sampling"] for node in one["nodes"] if node["finish_reason"]]
    assert set_by_calls == [None, None, None, {"max_tokens" if in_text else "max_new_tokens": 9}]


async def test_a_record_is_read_back_as_the_episode(template: ChatTemplate, tmp_path: Path) -> None:
    episode, _, line = await recorded(saying(template, "p", "a", "b", "c", "d"), two_roles_that_trim, tmp_path)
    with (tmp_path / "eval-episodes.jsonl").open("a") as file:
        file.write(line[: len(line) // 2])  # the writer was killed
    assert list(read_episodes(tmp_path / "eval-episodes.jsonl")) == [episode]


async def test_a_row_that_is_no_json_does_not_cost_the_episode(template: ChatTemplate, tmp_path: Path) -> None:
    class Picture:
        def __repr__(self) -> str:
            return "<a picture>"

    async def act(llm: LLM) -> Outcome:
        await said(llm.session(), FIRST)
        return Outcome(reward=1.0)

    task = Task(id="0", data={"image": Picture(), "raw": b"\xff", "answer": "2"})
    episode, record, _ = await recorded(saying(template, "a"), act, tmp_path, task)
    assert episode.reward == 1.0 and record["task"] == {"image": "<a picture>", "raw": r"b'\xff'", "answer": "2"}


async def test_the_prompt_of_a_call_that_failed_is_in_the_record(tmp_path: Path) -> None:
    async def act(llm: LLM) -> Outcome:
        await said(llm.session(), FIRST)
        raise AssertionError("not reached")

    async with serving(b"no json") as (llm, release, _):

        class Given:
            def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
                return llm, release

        _, record, _ = await recorded(Given(), act, tmp_path)
    assert record["stop_reason"] == StopReason.INFERENCE_ERROR
    assert conversations(record, "assistant") == [["first question"]]


async def test_an_outcome_that_does_not_fit_keeps_the_messages(template: ChatTemplate, tmp_path: Path) -> None:
    async def act(llm: LLM) -> Outcome:
        await said(llm.session(), FIRST)
        return Outcome(reward=1.0, rewards={"nobody": 1.0})

    episode, record, _ = await recorded(saying(template, "a"), act, tmp_path)
    assert episode.failed and "nobody" in (episode.error or "")
    assert conversations(record, "assistant") == [["first question", "a"]]
