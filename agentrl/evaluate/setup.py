"""Tells what an evaluation measures: model, environment, tasks and sampling, without the hardware that it runs on.

Guarantees: two evaluations with equal set-ups measure the same thing, on whatever machine; batch sizes, dtypes, numbers
of requests and addresses are no part of it. Temperature and longest answer are those that are sent; ``None`` is the
API's own.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.config.recipe import ComponentConfig, Recipe
from agentrl.core.episode import Episode, Message, Task
from agentrl.inference.kinds.kind import server_kind
from agentrl.rollout.assemble import request_options


def setup_of(recipe: Recipe, tasks: Sequence[Task], source: str) -> dict[str, Any]:
    """Returns the set-up of an evaluation as JSON data.

    Args:
        recipe: Resolved recipe.
        tasks: Evaluation tasks of the recipe.
        source: Source of the tasks, as a sentence.
    """
    sampling, inference = recipe.sampling, recipe.inference
    own = {
        "chat_template": recipe.model.chat_template,
        "chat_template_kwargs": inference.chat_template_kwargs,
        "context_length": inference.context_length,
        "history": inference.history,
        "tool_parser": inference.tool_parser,
    }
    in_text = not server_kind(inference.engine).capabilities.token_logprobs
    sent = request_options(recipe)
    limit = sent.get("max_completion_tokens", sent.get("max_tokens"))
    return {
        "model": inference.model or recipe.model.name,
        "env": _component(recipe.env),
        "agent": _component(recipe.agent),
        "workflow": _component(recipe.workflow),
        "reward": {"id": recipe.reward.id, "kwargs": recipe.reward.kwargs},
        "data": source,
        "tasks": len(tasks),
        "tasks_digest": digest(tasks),
        "samples": recipe.eval.samples,
        "temperature": sent.get("temperature") if in_text else sampling.eval_temperature,
        "max_new_tokens": limit if in_text else sampling.max_new_tokens,
        "seed": recipe.seed,
        **({} if in_text else own),  # there it is the API's
        **({"options": inference.options} if inference.options else {}),
    }


def digest(tasks: Sequence[Task]) -> str:
    """Returns 12 hexadecimal digits that differ where tasks or their order do."""
    found = hashlib.sha256()
    for task in tasks:
        found.update(json.dumps([task.id, task.data], sort_keys=True, default=str).encode())
    return found.hexdigest()[:12]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns what two set-ups differ in, as texts ``key: before, now``."""
    now = json.loads(json.dumps(now))
    names = [*now, *(name for name in before if name not in now)]
    return [
        f"{name}: {before.get(name)!r:.200}, now {now.get(name)!r:.200}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def shown_component(component: Mapping[str, Any]) -> str:
    """Returns a component in one line: ``gsm8k examples=1``."""
    return " ".join([str(component["id"]), *(f"{key}={value}" for key, value in component["kwargs"].items())])


def prompt_of(episode: Episode) -> list[Message]:
    """Returns the messages of an episode before its first answer; empty if nothing was sampled."""
    for trajectory in episode.trajectories.values():
        for index, node in enumerate(trajectory.nodes):
            if node.finish_reason is not None:
                return [trajectory.nodes[one].message for one in trajectory.path(index)[:-1]]
    return []


def _component(component: ComponentConfig) -> dict[str, Any]:
    return {"id": component.id, "kwargs": component.kwargs}
