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

from agentrl import Message, ToolEnvironment, tool

PRICES = {"pen": 2, "book": 7, "lamp": 30, "chair": 55}


class $title(ToolEnvironment):
    """Look up prices with a tool, then say what two things cost together."""

    dataset = [  # or a registered name such as "openai/gsm8k", or a file such as "tasks.jsonl"
        {"question": f"What do a {a} and a {b} cost together?", "answer": PRICES[a] + PRICES[b]}
        for a in PRICES
        for b in PRICES
    ]

    @tool
    def price(self, item: str) -> int:
        """Price of one item.

        Args:
            item: Its name, e.g. pen.
        """
        return PRICES[item]

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        return [{"role": "user", "content": f"{task['question']} Use the price tool. Finish with just the number."}]

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
        task = {"question": "What do a pen and a book cost together?", "answer": 9}
        messages, info = await env.reset(seed=0, options=task)
        assert "pen" in messages[-1]["content"]
        function = {"name": "price", "arguments": '{"item": "pen"}'}
        calls = [{"id": "1", "type": "function", "function": function}]
        call = {"role": "assistant", "content": "", "tool_calls": calls}
        (result,), reward, terminated, truncated, info = await env.step(call)
        assert (result["content"], reward, terminated) == ("2", 0.0, False)
        _, reward, terminated, truncated, info = await env.step({"role": "assistant", "content": "9"})
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
  temperature: 1.0
  max_new_tokens: 64

rollout:
  batch_size: 8
  group_size: 8

trainer:
  total_steps: 50
  learning_rate: 2.0e-5
  schedule: linear

eval:
  every: 10
  tasks: null                  # all of them

on_cpu:
  model:
    name: HuggingFaceTB/SmolLM2-135M-Instruct
    chat_template: chatml_tools  # this model's own template knows no tools
  inference:
    context_length: 512

on_gpu:
  model:
    name: Qwen/Qwen2.5-1.5B-Instruct
  inference:
    engine: sglang
    context_length: 2048
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
