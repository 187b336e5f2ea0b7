"""Writes an evaluation as a log of Inspect AI, which its viewer and its library open.

Guarantees: the log is in Inspect's JSON format (version 2) and needs none of its packages to be written; an invalid
episode is a sample with an error and no score. Conversations of several roles are one after the other.
Source: https://inspect.aisi.org.uk/eval-logs.html.
"""

import json
import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import agentrl
from agentrl.core.episode import Episode, Message
from agentrl.core.images import shown_text
from agentrl.evaluate.measures import usage_of
from agentrl.evaluate.metrics import MAIN
from agentrl.evaluate.setup import prompt_of, shown_component
from agentrl.evaluate.stored import StoredEpisodes
from agentrl.launch.export_markdown import read_result
from agentrl.launch.results import Evaluation

_ROLES = ("system", "user", "assistant", "tool")
_STOPS = {"length": "max_tokens", "tool_calls": "tool_calls", "content_filter": "content_filter", "refusal": "stop"}


def write_inspect(run_dir: Path, target: Path) -> Path:
    """Writes the log.

    Args:
        run_dir: Folder of the evaluation.
        target: File that ends with ``.json``, or a folder, in which the log gets a name that Inspect's viewer lists.

    Returns:
        The file.
    """
    evaluation, found = read_result(run_dir)
    setup = evaluation.setup
    episodes = StoredEpisodes(run_dir)
    created = next((one.started for one in episodes if one.started), None) or datetime.now(UTC).isoformat()
    if target.suffix != ".json":
        target.mkdir(parents=True, exist_ok=True)
        target = target / _file_name(created, str(setup["env"]["id"]), run_dir.resolve().name)
    model = str(setup.get("model") or "model")
    sampling = {"temperature": setup.get("temperature"), "max_tokens": setup.get("max_new_tokens")}
    spec = {
        "eval_id": run_dir.name,
        "run_id": run_dir.name,
        "created": created,
        "task": setup["env"]["id"],
        "task_id": run_dir.name,
        "task_args": setup["env"]["kwargs"],
        "dataset": {"name": setup.get("data"), "samples": setup.get("tasks")},
        "model": f"openai-api/{model}",
        "model_generate_config": sampling,
        "config": {"epochs": setup.get("samples")},
        "packages": {"agentrl": agentrl.__version__},
        "metadata": {"setup": setup, "answers": found.get("answers"), "failures": found.get("failures")},
    }
    log = {
        "version": 2,
        "status": "success",
        "eval": spec,
        "plan": {"name": "plan", "steps": [{"solver": shown_component(setup["agent"]), "params": {}}]},
        "results": _results(evaluation),
        "stats": {"started_at": created, "completed_at": _end(episodes) or created, "model_usage": {}},
    }
    with open(target, "w", encoding="utf-8") as file:
        file.write(json.dumps(log)[:-1])
        file.write(', "samples": [')
        for number, episode in enumerate(episodes):
            file.write(f"{', ' if number else ''}{json.dumps(_sample(episode, model))}")
        file.write("]}\n")
    return target


def is_listed(file: Path) -> bool:
    """Returns whether Inspect's viewer lists a log: it takes JSON files whose names begin with a time."""
    return re.match(r"\d{4}-\d{2}-\d{2}T\d{2}[:-]\d{2}[:-]\d{2}", file.name) is not None


def _file_name(created: str, *parts: str) -> str:
    """Returns the name that Inspect gives a log: time, task and id, with underscores between them alone."""
    names = [re.sub(r"[^A-Za-z0-9.]+", "-", one).strip("-") or "log" for one in parts]
    return "_".join([re.sub(r"[^0-9T-]", "-", created[:19]), *names]) + ".json"


def _end(episodes: Iterable[Episode]) -> str:
    """Returns the time at which the last episode ended; empty where no episode says."""
    told = [
        datetime.fromisoformat(one.started) + timedelta(seconds=one.seconds or 0) for one in episodes if one.started
    ]
    return max(told).isoformat() if told else ""


def _results(evaluation: Evaluation) -> dict[str, Any]:
    scores = []
    main = [name for name in MAIN if name in evaluation.estimates]  # the viewer shows the first ones
    for name in dict.fromkeys([*main, *evaluation.estimates]):
        one = evaluation.estimates[name]
        values = {"mean": one.mean, "ci_low": one.low, "ci_high": one.high}
        told = {key: {"name": key, "value": value} for key, value in values.items() if not math.isnan(value)}
        scores.append({"name": name, "scorer": name, "metrics": told})
    total = evaluation.n + evaluation.failed
    return {"total_samples": total, "completed_samples": evaluation.n, "scores": scores}


def _sample(episode: Episode, model: str) -> dict[str, Any]:
    messages = [_message(one) for role in episode.trajectories for one in episode.conversation(role)]
    last = next((one for one in reversed(messages) if one["role"] == "assistant"), None)
    usage = usage_of(episode)
    told = {"input_tokens": usage.get("prompt", 0), "output_tokens": usage.get("completion", 0)}
    told["total_tokens"] = sum(told.values())
    found: dict[str, Any] = {
        "id": episode.task_id,
        "epoch": episode.index + 1,
        "input": [_message(one) for one in prompt_of(episode)] or json.dumps(episode.task),
        "target": str(episode.task.get("answer", "")),
        "messages": messages,
        "output": _output(last, episode, model, told),
        "metadata": {"task": episode.task, "stop_reason": str(episode.stop_reason), "tag": episode.tag},
        "model_usage": {model: told} if usage else {},
        "total_time": episode.seconds,
    }
    if episode.failed:
        text = episode.error or "no reward"
        found["error"] = {"message": text, "traceback": text, "traceback_ansi": text}
    else:
        values = {**episode.metrics, **({"reward": episode.reward} if episode.reward is not None else {})}
        found["scores"] = {name: {"value": value, "answer": episode.answer} for name, value in values.items()}
    return found


def _output(last: dict[str, Any] | None, episode: Episode, model: str, usage: dict[str, int]) -> dict[str, Any]:
    if last is None:
        return {"model": model, "choices": []}
    nodes = [node for one in episode.trajectories.values() for node in one.nodes if node.finish_reason is not None]
    stop = _STOPS.get(nodes[-1].finish_reason or "stop", "stop") if nodes else "stop"
    return {"model": model, "choices": [{"message": last, "stop_reason": stop}], "usage": usage}


def _message(message: Message) -> dict[str, Any]:
    """Returns a message in Inspect's shape: a call has its arguments as an object, reasoning is a part."""
    role = message.get("role")
    text = shown_text(message.get("content"))
    found: dict[str, Any] = {"role": role if role in _ROLES else "user", "content": text}
    if role == "assistant":
        if message.get("reasoning_content"):
            thought = {"type": "reasoning", "reasoning": message["reasoning_content"]}
            found["content"] = [thought, {"type": "text", "text": text}]
        if message.get("tool_calls"):
            found["tool_calls"] = [_call(one, number) for number, one in enumerate(message["tool_calls"])]
    if role == "tool" and message.get("tool_call_id"):
        found["tool_call_id"] = message["tool_call_id"]
    return found


def _call(call: dict[str, Any], number: int) -> dict[str, Any]:
    function = call.get("function") or {}
    given = function.get("arguments")
    problem = None
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            problem = f"the arguments are no JSON: {error}"
    if not isinstance(given, dict):
        given = {"arguments": given}
    name = str(function.get("name"))
    found = {"id": call.get("id") or f"call_{number}", "function": name, "arguments": given, "type": "function"}
    return found if problem is None else {**found, "parse_error": problem}
