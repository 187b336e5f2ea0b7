"""docs/agents.md: each of its blocks is run, and its commands."""

import asyncio
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from agentrl.config.recipe import TrainerConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, StopReason, Task
from agentrl.core.workflow import RolloutWorkflow
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.inference.backend import SamplingParams
from agentrl.inference.client import ChatClient
from agentrl.inference.router import Router
from agentrl.inference.session import SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from agentrl.train.batch import Batch
from tests.end_to_end import run
from tests.inference.fakes import FakeBackend
from tests.inference.test_session import WITH_TOOLS, calling
from tests.test_docs import AGENTS, shown_commands

TEXT = AGENTS.read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
PLACES = {
    "SecondThought": "agents/second_thought.py",
    "PlannerExecutor": "agents/planner.py",
    "Vote": "vote.py",
    "Cart": "envs/cart.py",
    "Countdown": "envs/countdown.py",
}
SUM = Task(id="t", data={"question": "What is 3 + 4?", "answer": "7"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with every block in the file that the page names."""
    made = tmp_path_factory.mktemp("reader")
    assert len(BLOCKS) == len(PLACES)
    for (name, place), block in zip(PLACES.items(), BLOCKS, strict=True):
        assert f"class {name}(" in block and (place in TEXT or name == "Countdown")
        (made / place).parent.mkdir(exist_ok=True)
        (made / place).write_text(block)
    return made


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = WITH_TOOLS
    return ChatTemplate(tokenizer)


async def episode(template: ChatTemplate, workflow: RolloutWorkflow, *texts: str, task: Task = SUM) -> Episode:
    settings = SessionSettings(SamplingParams(max_new_tokens=200), 5000, locked=True, model="m")
    client = ChatClient(Router([FakeBackend(calling(template, *texts))]), template, settings, settings)
    limits = Limits(60.0, 9.0)
    return await run_episode(workflow, task, client, group_id="g", index=0, seed=0, limits=limits, left=Abandoned())


def said(found: Episode, role: str) -> list[tuple[str | None, float | None]]:
    nodes = found.trajectories[role].nodes
    return [(node.message["content"], node.reward) for node in nodes if node.finish_reason is not None]


async def test_the_second_thought_is_acted_on_and_both_are_recorded(folder: Path, template: ChatTemplate) -> None:
    workflow = AgentEnvWorkflow("arithmetic", f"{folder}/agents/second_thought.py:SecondThought")
    found = await episode(template, workflow, "It is 8", "7")
    assert (found.reward, found.error) == (1.0, None)
    assert said(found, "assistant") == [("It is 8", None), ("7", 1.0)]


async def test_planner_and_executor_share_the_reward_and_the_executor_earned_it(
    folder: Path, template: ChatTemplate
) -> None:
    workflow = AgentEnvWorkflow("arithmetic", f"{folder}/agents/planner.py:PlannerExecutor")
    found = await episode(template, workflow, "Add the two.", "7")
    assert (found.reward, found.error, set(found.trajectories)) == (1.0, None, {"planner", "executor"})
    assert said(found, "planner") == [("Add the two.", None)] and said(found, "executor") == [("7", 1.0)]
    assert "Follow this plan: Add the two." in found.trajectories["executor"].nodes[0].message["content"]
    assert [found.reward_of(role) for role in ("planner", "executor")] == [1.0, 1.0]
    batch = Batch(Columns.of([found]), TrainerConfig(advantage="reward", scale_rewards="none")).train_batch()
    assert set(batch.tokens.sampled["advantages"].tolist()) == {1.0}, "the shared reward counts for both"


async def test_a_long_plan_costs_both_roles_and_is_credited_to_the_planner(
    folder: Path, template: ChatTemplate
) -> None:
    workflow = AgentEnvWorkflow(
        "arithmetic", f"{folder}/agents/planner.py:PlannerExecutor", agent_kwargs={"words": 2}
    )  # fmt: skip
    found = await episode(template, workflow, "Add the two.", "7")
    assert said(found, "planner") == [("Add the two.", -0.1)] and said(found, "executor") == [("7", 1.0)]
    assert (found.reward, found.role_rewards) == (pytest.approx(0.9), {})
    batch = Batch(Columns.of([found]), TrainerConfig(advantage="reward", scale_rewards="none")).train_batch()
    assert all(one == pytest.approx(0.9) for one in batch.tokens.sampled["advantages"].tolist())


async def test_the_executor_calls_the_environments_tools(folder: Path, template: ChatTemplate) -> None:
    workflow = AgentEnvWorkflow("calculator", f"{folder}/agents/planner.py:PlannerExecutor")
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "3 + 4"}}</tool_call>'
    task = Task(id="t", data={"question": "What is 3 + 4?", "answer": "7"})
    found = await episode(template, workflow, "Use the calculator.", call, "7", task=task)
    assert found.error is None and found.metrics["tool_calls_ok"] == 1.0 and found.metrics["accuracy"] == 1.0


@pytest.fixture
def api() -> Iterator[str]:
    """URL of a server that answers at once, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl.bench.instant_server"], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdout is not None
    yield f"{process.stdout.readline().strip()}/v1"
    process.terminate()
    process.communicate()


async def test_the_same_function_runs_in_an_episode_and_with_a_bare_openai_client(
    folder: Path, template: ChatTemplate, api: str
) -> None:
    names: dict[str, Any] = {"__name__": "vote"}
    exec((folder / "vote.py").read_text(), names)
    found = await episode(template, names["Vote"](votes=3), "7", "8", "7")
    assert (found.reward, found.metrics, found.error) == (1.0, {"accuracy": 1.0}, None)
    assert [text for text, _ in said(found, "assistant")] == ["7", "8", "7"]
    async with AsyncOpenAI(base_url=api, api_key="none") as client:
        assert await names["solve"](client, "What is 40 + 2?") == "42"


def tool(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


ADD = [tool("add", '{"item": "pen"}'), tool("add", '{"item": "book"}')]
BUY = Task(id="t", data={"wanted": ["pen", "book"]})


@pytest.mark.parametrize(
    ("texts", "reward", "reason", "metrics"),
    [
        (("".join(ADD), tool("checkout")), 1.1, StopReason.TERMINATED, {"accuracy": 1.0, "filled": 1.0}),
        (("".join([*ADD, tool("checkout")]),), 1.05, StopReason.TERMINATED, {"accuracy": 1.0, "filled": 1.0}),
        ((*ADD, "I am done."), 0.4, StopReason.TERMINATED, {"accuracy": 0.0, "filled": 1.0}),
        ((tool("add", '{"item": "car"}'), tool("checkout")), -0.05, StopReason.TERMINATED, {"accuracy": 0.0}),
        ((*ADD, *ADD), 0.2, StopReason.TRUNCATED, {"accuracy": 0.0, "filled": 0.0}),
    ],
)
async def test_the_cart_is_judged_at_the_checkout_at_an_answer_and_when_turns_run_out(
    folder: Path, template: ChatTemplate, texts: Any, reward: float, reason: StopReason, metrics: dict[str, float]
) -> None:
    workflow = AgentEnvWorkflow(f"{folder}/envs/cart.py:Cart", env_kwargs={"max_tool_turns": 4})
    found = await episode(template, workflow, *texts, task=BUY)
    assert (found.reward, found.stop_reason, found.error) == (pytest.approx(reward), reason, None)
    assert metrics.items() <= found.metrics.items()


@pytest.mark.parametrize("limit", ["max_tool_turns", "max_turns"])
async def test_a_full_cart_is_judged_as_it_stands_at_either_limit(
    folder: Path, template: ChatTemplate, limit: str
) -> None:
    own = {"env_kwargs": {"max_tool_turns": 1}} if limit == "max_tool_turns" else {"max_turns": 1}
    found = await episode(
        template, AgentEnvWorkflow(f"{folder}/envs/cart.py:Cart", **own), "".join(ADD), task=BUY  # type: ignore[arg-type]
    )  # fmt: skip
    assert (found.reward, found.stop_reason) == (pytest.approx(0.35), StopReason.TRUNCATED)


@pytest.mark.parametrize(
    ("turns", "texts", "reward", "reason"),
    [
        (9, ("2", "1", "0"), 1.0, StopReason.TERMINATED),
        (2, ("2", "1"), 0.5 * 2 / 3, StopReason.TRUNCATED),
        (9, ("2", "7"), 0.5 * 1 / 3, StopReason.TERMINATED),
    ],
)
async def test_the_countdown_says_what_unfinished_work_is_worth(
    folder: Path, template: ChatTemplate, turns: int, texts: Any, reward: float, reason: StopReason
) -> None:
    workflow = AgentEnvWorkflow(f"{folder}/envs/countdown.py:Countdown", max_turns=turns)
    found = await episode(template, workflow, *texts, task=Task(id="t", data={"start": 2}))
    assert (found.reward, found.stop_reason, found.error) == (pytest.approx(reward), reason, None)
    assert found.metrics == {"accuracy": float(reward == 1.0)}


@pytest.mark.parametrize("line", [*shown_commands([AGENTS]), "agentrl env check countdown --strict"])
def test_the_commands_run_as_shown(line: str, folder: Path, tiny_model: Path) -> None:
    words = shlex.split(line)[1:]
    if words[:2] == ["recipe", "run"]:
        words += ["--dry-run", f"model.name={tiny_model}"]
    else:
        assert words[:2] == ["env", "check"]
    result = run(*words, cwd=folder)
    assert result.returncode == 0, result.stdout


def test_every_name_that_the_page_imports_is_public() -> None:
    import agentrl

    for names in re.findall(r"^from agentrl import (.*)$", TEXT, re.MULTILINE):
        assert all(name.strip() in agentrl.__all__ for name in names.split(","))
    assert asyncio.iscoroutinefunction(agentrl.RolloutWorkflow.arun_episode)


def test_every_setting_that_the_page_names_exists() -> None:
    from agentrl.config.keys import is_known
    from agentrl.core.registry import registered

    found = re.findall(r"`((?:trainer|workflow|agent|env)\.[a-z_.]+)(?:=(\w+))?`", TEXT)
    assert len(found) >= 4
    for key, value in found:
        assert is_known(key)
        assert key != "trainer.advantage" or value in registered("advantage")
