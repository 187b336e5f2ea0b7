"""``agentrl env new``: writes an environment, its test and a recipe that work unchanged.

Guarantees: no file is overwritten; the unchanged environment passes ``agentrl env check`` and the written test, and can
be trained on.
"""

import keyword
from pathlib import Path
from string import Template

from agentrl.config.errors import UserError
from agentrl.core.registry import registered

ENVIRONMENT = Template('''"""$title: say here what an agent has to do."""

from typing import Any

from agentrl import Message, ToolEnvironment, tool, worked_call

PRICES = {"pen": 2, "book": 7, "lamp": 30, "chair": 55, "desk": 80, "cup": 4, "bag": 25, "clock": 19, "shelf": 64}


class $title(ToolEnvironment):
    """Look up prices with a tool, then say what several things cost."""

    dataset = [  # or a registered name such as "openai/gsm8k", or a file such as "tasks.jsonl"
        {"question": f"How much is {item} x {count}?", "answer": price * count}
        for count in range(2, 12)
        for item, price in PRICES.items()
    ]
    first_call_reward = 0.2  # for well-formed calls, which a small model has to learn first; 1.0 is for the answer

    @tool
    def cost(self, item: str, count: int) -> int:
        """Cost of several things of a kind.

        Args:
            item: Name of the thing, e.g. pen.
            count: How many.
        """
        return PRICES[item] * count

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """Two worked calls come first: without them a small model never writes a call, and nothing is learned."""
        ask = "{} Use the cost tool, then reply with just the number.".format
        first = worked_call(ask("How much is pen x 15?"), "cost", {"item": "pen", "count": 15}, 30, "30")
        second = worked_call(ask("How much is desk x 20?"), "cost", {"item": "desk", "count": 20}, 1600, "1600")
        return [*first, *second, {"role": "user", "content": ask(task["question"])}]

    def reward(self, task: dict[str, Any], answer: str) -> tuple[float, dict[str, float]]:
        right = float(answer.strip().rstrip(".") == str(task["answer"]))
        return right, {"accuracy": right}
''')

TEST = Template('''"""$title: what an agent meets in it."""

import asyncio

import agentrl


def test_a_right_answer_after_a_call_earns_the_reward() -> None:
    async def episode() -> None:
        env = agentrl.make("envs/$name.py:$title")
        task = {"question": "How much is pen x 3?", "answer": 6}
        messages, info = await env.reset(seed=0, options=task)
        assert "pen x 3" in messages[-1]["content"]
        function = {"name": "cost", "arguments": '{"item": "pen", "count": 3}'}
        calls = [{"id": "1", "type": "function", "function": function}]
        call = {"role": "assistant", "content": "", "tool_calls": calls}
        (result,), reward, terminated, truncated, info = await env.step(call)
        assert (result["content"], reward, terminated) == ("6", 0.2, False)
        _, reward, terminated, truncated, info = await env.step({"role": "assistant", "content": "6"})
        assert (reward, terminated, info["metrics"]["accuracy"]) == (1.0, True, 1.0)
        await env.close()

    asyncio.run(episode())
''')

RECIPE = Template("""# Trains on envs/$name.py. Every key can be set on the command line, and this explains them all:
#   agentrl recipe show ${name}_grpo
description: $title with GRPO.

env:
  id: envs/$name.py:$title     # its own dataset is used: see train_dataset and valid_dataset to change that

sampling:
  temperature: 1.0             # GRPO needs the whole distribution
  max_new_tokens: 48           # a call takes about 30

rollout:
  batch_size: 4                # tasks of a step
  group_size: 8                # episodes of a task: GRPO learns from the differences of their rewards

trainer:
  total_steps: 60
  learning_rate: 2.0e-5
  warmup_steps: 2
  schedule: linear
  aggregation: token           # every token of the batch weighs the same
  scale_rewards: none

eval:
  every: 0                     # before and after only
  tasks: null                  # all held-out ones

on_cpu:
  model:
    name: HuggingFaceTB/SmolLM2-135M-Instruct
    chat_template: chatml_tools  # this model's own template knows no tools
  inference:
    context_length: 512
    max_running: 32
  rollout:
    max_staleness: 0           # two cores do not gain from sampling ahead
  weights:
    pause_mode: in_place
  trainer:
    time_budget: 240           # seconds of training; also paces the decay
    tokens_per_microbatch: 2048
    save_seconds: null         # short run: one checkpoint at the end

on_gpu:
  model:
    name: Qwen/Qwen2.5-1.5B-Instruct
  inference:
    engine: sglang
    context_length: 2048
  trainer:
    learning_rate: 2.0e-6      # a larger model
""")


def write_environment(name: str, folder: Path) -> list[tuple[Path, str]]:
    """Write the three files.

    Args:
        name: Python name of the module; the class has the same name in CamelCase.
        folder: Working folder to write into.

    Returns:
        The path and a description of each file.

    Raises:
        UserError: ``name`` is not a Python name or is already registered, or a file exists.
    """
    title = "".join(part.capitalize() for part in name.split("_"))
    usable = all(one.isidentifier() and not keyword.iskeyword(one) for one in (name, title))
    if not usable or name != name.lower():
        raise UserError(f"{name!r} cannot be a module's name: use lower-case letters, digits and _, e.g. my_shop")
    taken = {one.rpartition("-v")[0].lower() or one.lower() for one in registered("env")}
    if name in taken:
        raise UserError(f"{name!r} is the name of a registered environment; choose another")
    files = [
        (folder / "envs" / f"{name}.py", ENVIRONMENT, "the environment"),
        (folder / "tests" / f"test_{name}.py", TEST, "its test"),
        (folder / "recipes" / f"{name}_grpo.yaml", RECIPE, "a recipe that trains on it"),
    ]
    for path, _, _ in files:
        if path.exists():
            raise UserError(f"{path} exists already; nothing was written")
    for path, template, _ in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(template.substitute(name=name, title=title), encoding="utf-8")
    return [(path, what) for path, _, what in files]
