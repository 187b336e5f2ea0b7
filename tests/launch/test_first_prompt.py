"""A run's first prompt: rendered as the session sends it, before any server is ready."""

import asyncio
import io
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl import Agent, Message
from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.core.environment import Environment
from agentrl.core.episode import Task
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
from agentrl.data.datasets import load_tasks
from agentrl.inference.client import EpisodeLLM
from agentrl.inference.session import ChatSession
from agentrl.launch import evaluation, first_prompt
from agentrl.launch.first_prompt import PromptError, check_prompt
from agentrl.rollout.assemble import make_settings, make_workflow
from tests.end_to_end import overrides, processes_of, run
from tests.inference.fakes import FakeBackend, answer

Say = Callable[..., Awaitable[Any]]


class Odd(Environment[list[Message], Message]):
    """Fails or hangs in reset, or works; notes that it was closed."""

    def __init__(self, log: str, fault: str = "") -> None:
        self.log, self.fault = Path(log), fault

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin."""
        if self.fault == "hangs":
            await asyncio.Event().wait()
        if self.fault == "fails":
            raise OSError("no such [disk]")
        return [{"role": self.fault or "user", "content": "hello" * (900 if self.fault == "user" else 1)}], {}

    async def step(self, action: Message) -> Any:
        """End."""
        return [], 1.0, True, False, {}

    async def close(self) -> None:
        """Note it."""
        with self.log.open("a") as file:
            file.write("closed\n")


class Hot(Agent):
    """Asks for another temperature than training assumes, or does not ask at all."""

    def __init__(self, llm: Any, asks: bool = True) -> None:
        super().__init__(llm)
        self.asks = asks

    async def step(self, observation: list[Message], info: dict[str, Any]) -> Message:
        """Answer."""
        if self.asks:
            await self.llm.chat.completions.create(messages=observation, temperature=0.1)
        return {"role": "assistant", "content": "yes"}


class Asking(RolloutWorkflow):
    """Runs a function that asks the model."""

    def __init__(self, episode: Callable[[Say, Task], Awaitable[None]]) -> None:
        self.episode = episode

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        """Run it."""
        say = partial(llm.session().chat.completions.create, messages=[{"role": "user", "content": "hello"}])
        await self.episode(say, task)
        return Outcome(0.0)


def odd(log: Path, *settings: str) -> Recipe:
    given = [f"env.id={__file__}:Odd", f"env.kwargs.log={log}", *settings]
    return load_recipe("arithmetic_grpo", given, device="cpu")


async def test_it_is_the_prompt_that_an_episode_sends(tiny_model: Path) -> None:
    recipe = load_recipe("calculator_grpo", ["env.kwargs.examples=0"], device="cpu")
    found = await check_prompt(recipe, tiny_model)
    assert not found.problem and "calculate" in found.text and "Use the calculate tool" in found.text
    template, settings, _ = make_settings(recipe, tiny_model)
    backend = FakeBackend(lambda ids, params: answer([template.eos_id]))
    llm = EpisodeLLM(lambda role: ChatSession(backend, template, settings, role))
    task = load_tasks(recipe.train_dataset, seed=recipe.seed, env=recipe.env).tasks[0]
    await make_workflow(recipe).arun_episode(task, llm, seed=0)
    assert backend.requests[0][0] == list(found.token_ids)
    assert found.lines()[0].startswith(f"prompt     {len(found.token_ids)} tokens: '<|im_start|>system")


class Planning(Agent):
    """Asks as a planner first."""

    async def step(self, observation: list[Message], info: dict[str, Any]) -> Message:
        """Answer."""
        await self.llm.session("planner").chat.completions.create(messages=observation)  # type: ignore[attr-defined]
        raise AssertionError


async def test_it_is_that_of_the_role_that_speaks_first(tiny_model: Path, tmp_path: Path) -> None:
    found = await check_prompt(odd(tmp_path / "log", f"agent.id={__file__}:Planning"), tiny_model)
    assert not found.problem and "hello" in found.text


async def test_tools_that_the_model_would_never_see_are_refused(tiny_model: Path) -> None:
    recipe = load_recipe("calculator_grpo", ["model.chat_template=null", "env.kwargs.examples=0"], device="cpu")
    with pytest.raises(PromptError, match=r"does not render tools.*model\.chat_template=chatml_tools"):
        await check_prompt(recipe, tiny_model)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["env.kwargs.fault=fails"], ": OSError: no such [disk]"),
        (["env.kwargs.fault=hangs"], ": no request to the model within 0.05 s"),
        ([f"agent.id={__file__}:Hot"], "training samples with sampling.temperature="),
        ([f"agent.id={__file__}:Hot", "agent.kwargs.asks=false"], "has sampled no message"),
    ],
)
async def test_what_else_goes_wrong_is_told_and_the_environment_closed(
    settings: list[str], problem: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_prompt, "LIMIT", 0.05)
    found = await check_prompt(odd(tmp_path / "log", *settings), tiny_model)
    assert problem in found.problem and problem in found.lines()[0] and not found.token_ids
    assert (tmp_path / "log").read_text() == "closed\n" * 2, "the one that is made as a test, and the episode's"


async def in_a_group(say: Say, task: Task) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(say())


async def again_and_again(say: Say, task: Task) -> None:
    while True:
        try:
            return await say()
        except BaseException:  # as an agent with a bare except does
            continue


async def from_a_thread(say: Say, task: Task) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(say(), loop).result())


async def with_a_failing_end(say: Say, task: Task) -> None:
    try:
        await say()
    finally:
        raise OSError("no connection left to close")


async def with_its_task_changed(say: Say, task: Task) -> None:
    task.data.clear()
    await say()


@pytest.mark.parametrize(
    "episode", [in_a_group, again_and_again, from_a_thread, with_a_failing_end, with_its_task_changed]
)
async def test_a_workflow_that_asks_in_its_own_way_ends_at_its_first_request(
    episode: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_prompt, "LIMIT", 1.0)
    recipe = load_recipe("arithmetic_grpo", ["rollout.close_timeout=1"], device="cpu")
    task, before = Task(id="t", data={"question": "a"}), asyncio.all_tasks()
    found = await first_prompt.first_prompt(recipe, tiny_model, Asking(episode), [task])
    assert not found.problem and "hello" in found.text
    assert task.data == {"question": "a"}, "the run's first episodes get the task as it was loaded"
    await asyncio.sleep(0)
    assert {one for one in asyncio.all_tasks() - before if "generate" in str(one.get_stack())} == set()


async def test_a_cancellation_of_the_workflows_own_is_told(tiny_model: Path) -> None:
    async def cancelled(say: Say, task: Task) -> None:
        raise asyncio.CancelledError("a scope of its own")

    recipe = load_recipe("arithmetic_grpo", device="cpu")
    found = await first_prompt.first_prompt(recipe, tiny_model, Asking(cancelled), [Task(id="t", data={})])
    assert found.problem == "task t: CancelledError: a scope of its own"


async def test_a_refusal_in_a_group_is_a_refusal(tiny_model: Path) -> None:
    async def odd_roles(say: Say, task: Task) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(say(tools=[{"type": "function", "function": {"name": "f"}}]))

    recipe = load_recipe("arithmetic_grpo", device="cpu")
    with pytest.raises(PromptError, match="does not render tools"):
        await first_prompt.first_prompt(recipe, tiny_model, Asking(odd_roles), [Task(id="t", data={})])


def test_an_evaluation_is_refused_before_its_server_starts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*arguments: Any) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(evaluation, "start_servers", started)
    settings = ["trainer.type=null", "model.chat_template=null", f"model.name={tiny_model}"]
    recipe = load_recipe("calculator_grpo", settings, device="cpu")
    with pytest.raises(PromptError, match=r"does not render tools|leaves out a tool call"):
        evaluation.evaluate_recipe(recipe, tmp_path, Console(file=io.StringIO()))


def test_a_training_run_is_refused_in_one_line_while_its_servers_load(tiny_model: Path, tmp_path: Path) -> None:
    settings = overrides(tiny_model, tmp_path, "x", "env.id=Calculator-v0", "model.chat_template=null")
    begun = time.monotonic()
    result = run("recipe", "run", "calculator_grpo", *settings)
    assert result.returncode == 2 and "Traceback" not in result.stdout, result.stdout
    assert "leaves out a tool call" in result.stdout and "chatml_tools" in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if "chatml_tools" in line]
    assert line.startswith("agentrl: model ") and "controller" not in line
    assert time.monotonic() - begun < 120 and not processes_of(tmp_path)
    assert not (tmp_path / "x").exists(), "its name is free again"


async def test_prompts_that_do_not_fit_are_refused_and_one_long_task_is_not(tiny_model: Path, tmp_path: Path) -> None:
    """Seven others are tried before a run is refused: one long task of a data set is an ordinary thing."""
    recipe = load_recipe("arithmetic_grpo", ["inference.context_length=200"], device="cpu")

    tried: list[str] = []

    class Long(RolloutWorkflow):
        async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
            tried.append(task.id)
            message = {"role": "user", "content": task.data["text"]}
            await llm.session().chat.completions.create(messages=[message])
            return Outcome(0.0)

    tasks = [Task(id=str(number), data={"text": "long " * 100}) for number in range(40)]
    with pytest.raises(
        PromptError, match=r"task 0: .*context_length=200, nor does that of 7 other tasks: set inference"
    ):
        await first_prompt.first_prompt(recipe, tiny_model, Long(), tasks)
    assert tried == ["0", "1", "6", "11", "16", "21", "26", "31"]
    tasks[6].data["text"] = "short"
    found = await first_prompt.first_prompt(recipe, tiny_model, Long(), tasks)
    assert "task 0: " in found.problem and "context_length=200" in found.problem and not found.token_ids
    with pytest.raises(PromptError, match=r"context_length=200: set inference"):
        await first_prompt.first_prompt(recipe, tiny_model, Long(), tasks[:1])


async def test_an_image_for_a_text_model_is_refused(tiny_model: Path) -> None:
    recipe = load_recipe("shapes_grpo", [f"model.name={tiny_model}", "trainer.freeze=[]"], device="cpu")
    with pytest.raises(PromptError, match="the user message holds a part of type 'image_url': models here read text"):
        await check_prompt(recipe, tiny_model)
