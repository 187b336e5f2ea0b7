"""Makes the folder of a run with any number of episodes, for measurements of what reads runs.

Guarantees: the files are those of a real run (configuration, metrics, episodes, journal, evaluations with their
episodes); the same arguments give the same bytes.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from agentrl.core.trainer_logprobs import FILE, gaps_line
from agentrl.rollout.journal_lines import seal

WORDS = (
    "the",
    "sum",
    "of",
    "both",
    "numbers",
    "is",
    "carried",
    "then",
    "added",
    "so",
    "that",
    "we",
    "find",
    "it",
    "again",
)
STOPS = ("terminated", "terminated", "terminated", "length", "truncated")
TAGS = ("easy", "hard")
GROUP = 8
_ANSWER = {"role": "assistant"}
STARTED = 1_795_980_000.0  # seconds since 1970


def make_run(folder: Path, episodes: int, *, tokens: int = 60, evaluations: tuple[int, ...] = (0, 10)) -> Path:
    """Writes a run's folder.

    Args:
        folder: Folder to make.
        episodes: Number of training episodes.
        tokens: Mean number of sampled tokens of an episode.
        evaluations: Steps with an evaluation of 32 tasks.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True)
    drawn = random.Random(0)
    steps = max(1, episodes // (4 * GROUP))
    (folder / "config.json").write_text(json.dumps(_config(folder.name, steps)))
    with (folder / "episodes.jsonl").open("wb") as file:
        for number in range(episodes):
            file.write(orjson.dumps(made_episode(number, drawn, tokens)) + b"\n")
    _keep_gaps(folder, episodes)
    with (folder / "metrics.jsonl").open("wb") as file:
        for step in range(steps + 1):
            file.write(orjson.dumps(_metrics(step, steps, drawn)) + b"\n")
    (folder / "journal.jsonl").write_bytes(b"".join(_journal(episodes)))
    with (folder / "eval-episodes.jsonl").open("wb") as file:
        for step in evaluations:
            _evaluate(folder, file, step, drawn, tokens)
    return folder


def made_episode(number: int, drawn: random.Random, tokens: int = 60) -> dict[str, Any]:
    """Returns an episode's record: a question, an answer with a tool call, the tool's result, a last answer.

    Args:
        number: Number of the episode in the run.
        drawn: Source of chance.
        tokens: Mean number of sampled tokens.
    """
    group, member = divmod(number, GROUP)
    version = group // 4
    first, second = 100 + group % 900, 100 + (7 * group) % 900
    count = max(4, round(drawn.gauss(tokens, tokens / 4)))
    right = drawn.random() < 0.3 + 0.5 * min(1.0, version / 500)
    said = " ".join(drawn.choices(WORDS, k=count // 2))
    question = f"What is {first} + {second}?"
    nodes = [
        _node(None, {"role": "user", "content": question}, 24, None, drawn),
        _node(0, {**_ANSWER, "content": said, "tool_calls": [_call(first, second)]}, count // 2, version, drawn),
        _node(1, {"role": "tool", "tool_call_id": "c0", "content": str(first + second)}, 8, None, drawn),
        _node(2, {**_ANSWER, "content": f"#### {first + second + (not right)}"}, count - count // 2, version, drawn),
    ]  # fmt: skip
    return {
        "group_id": f"g{group}", "task_id": f"train/{group % 4000}", "index": member, "seed": number,
        "task": {"question": question, "answer": str(first + second)}, "version": version, "attempt": 0,
        "retried": False, "sampling": {"temperature": 1.0}, "abandoned": False,
        "started": f"2026-11-{1 + group % 28:02d}T10:{group % 60:02d}:00.000+00:00", "seconds": 2.0 + count / 50,
        "trajectories": {"assistant": {"nodes": nodes, "tools": []}}, "reward": float(right), "role_rewards": {},
        "tag": TAGS[group % 2], "metrics": {"accuracy": float(right)}, "drift": {},
        "stop_reason": drawn.choice(STOPS), "error": None,
    }  # fmt: skip


def _keep_gaps(folder: Path, episodes: int) -> None:
    """Writes what the trainer said of the first group of each step."""
    wanted = {number for number in range(episodes) if number // GROUP % 4 == 0}
    drawn = random.Random(1)
    with (folder / "episodes.jsonl").open("rb") as file, (folder / FILE).open("w") as target:
        for number, line in enumerate(file):
            if number not in wanted:
                continue
            record = orjson.loads(line)
            nodes = record["trajectories"]["assistant"]["nodes"]
            gaps = {at: [drawn.gauss(0, 0.1) for _ in nodes[at]["token_ids"]] for at in (1, 3)}
            key = str(record["group_id"]), record["index"]
            target.write(gaps_line(number // (4 * GROUP), *key, {"assistant": gaps}))


def _call(first: int, second: int) -> dict[str, Any]:
    arguments = json.dumps({"expression": f"{first} + {second}"})
    return {"id": "c0", "type": "function", "function": {"name": "calculate", "arguments": arguments}}


def _node(
    parent: int | None, message: dict[str, Any], size: int, version: int | None, drawn: random.Random
) -> dict[str, Any]:
    sampled = version is not None
    return {
        "parent": parent, "message": message, "token_ids": [drawn.randrange(1000, 49000) for _ in range(size)],
        "loss_mask": [int(sampled)] * size,
        "logprobs": [-drawn.expovariate(2.0) for _ in range(size)] if sampled else [0.0] * size,
        "versions": [version if sampled else -1] * size, "finish_reason": "stop" if sampled else None,
        "reward": None, "teacher_logprobs": [], "follows": None, "at": STARTED, "tools": None, "sampling": None,
    }  # fmt: skip


def _metrics(step: int, steps: int, drawn: random.Random) -> dict[str, float]:
    if step == 0:
        return {"step": 0, "time": STARTED, "eval/reward": 0.3, "eval/reward_low": 0.2, "eval/reward_high": 0.4}
    reward = 0.3 + 0.5 * step / steps + drawn.gauss(0, 0.04)
    return {
        "step": step, "time": STARTED + 10 * step, "reward/mean_drawn": reward, "metrics/accuracy": reward,
        "rollout/episodes": 32.0, "tokens/completion_mean": 60 - 20 * step / steps + drawn.gauss(0, 2),
        "train/entropy": 1.5 - step / steps, "train/loss": drawn.gauss(0, 0.05), "staleness/mean": 1.0,
        "time/step": 9.0 + drawn.random(), "mismatch/kl": abs(drawn.gauss(0, 1e-4)), "train/grad_norm": 0.2,
    }  # fmt: skip


def _journal(episodes: int) -> Iterator[bytes]:
    crc = 0
    for group in range(episodes // GROUP):
        record = {"outcome": "trained", "draw": group, "task": f"train/{group}", "step": group // 4 + 1}
        line, crc = seal(record, crc)
        yield line


def _evaluate(folder: Path, file: Any, step: int, drawn: random.Random, tokens: int) -> None:
    rewards = {}
    for number in range(32):
        record = made_episode(8 * (step + number), drawn, tokens)
        record |= {"group_id": f"eval{step}-{number}", "task_id": f"test/{number}", "index": 0, "eval_step": step}
        record["version"] = step
        rewards[record["task_id"]] = record["reward"]
        file.write(orjson.dumps(record) + b"\n")
    mean = sum(rewards.values()) / len(rewards)
    report = {
        "eval/n": 32.0, "eval/invalid": 0.0, "eval/reward": mean, "eval/reward_low": max(0.0, mean - 0.15),
        "eval/reward_high": min(1.0, mean + 0.15), "setup": {"data": "made", "tasks": 32, "samples": 1},
        "answers": {"all": 32}, "notes": [], "per_task": {"reward": rewards},
    }  # fmt: skip
    (folder / f"eval-{step:06d}.json").write_text(json.dumps(report))


def _config(name: str, steps: int) -> dict[str, Any]:
    return {
        "name": name, "model": {"name": "made"}, "env": {"id": "made", "kwargs": {}}, "reward": {},
        "trainer": {
            "type": "grpo", "total_steps": steps, "advantage": "group", "scale_rewards": "none", "whiten": "none",
            "baseline": "role", "kl_in": "loss", "kl_coef": 0.0, "dtype": "float32",
        },
    }  # fmt: skip
