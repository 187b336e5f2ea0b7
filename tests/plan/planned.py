"""Cases of plans for tests."""

import json
from pathlib import Path
from typing import Any

from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.core.episode import Episode, Node, StopReason, Trajectory
from agentrl.models.sizes import Decoder, decoder_of
from agentrl.plan.assumptions import Assumptions, assumed
from agentrl.plan.cards import find_card
from agentrl.plan.published import PUBLISHED
from agentrl.plan.times import Case
from agentrl.plan.work import work_of
from agentrl.rollout.journal import Journal

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"


def recipe_for(*settings: str, device: Any = "cuda") -> Recipe:
    """``gsm8k_grpo`` for a device, in bfloat16."""
    made = load_recipe("gsm8k_grpo", [*settings, "trainer.dtype=bfloat16", "inference.dtype=bfloat16"], device=device)
    return made.model_copy(update={"launch": made.launch.model_copy(update={"device": device})})


def case_for(model: str = "Qwen/Qwen2.5-1.5B-Instruct", *settings: str, gpu: str = "h100", **values: float) -> Case:
    """A case on a card, with some assumptions set."""
    recipe = recipe_for(*settings, device="cpu" if gpu == "cpu" else "cuda")
    known = assumed(find_card(gpu), recipe).replaced(values, "test")
    return Case(recipe, decoder(model), work_of(recipe, known), known)


def decoder(model: str) -> Decoder:
    """The sizes of a published model."""
    return decoder_of(PUBLISHED[model])


def known_for(case: Case, **values: float) -> Assumptions:
    """The assumptions of a case with other values."""
    return case.known.replaced(values, "test")


START = 1_700_000_000.0


def episode(group: int, index: int, prompt: list[int], sampled: list[list[int]], given: list[int]) -> Episode:
    """An episode with tool results of ``given`` between its answers, each 2 s long, with 1 s between."""

    def told(ids: list[int], role: str, parent: int | None, at: float) -> Node:
        columns = {"loss_mask": [0] * len(ids), "logprobs": [0.0] * len(ids), "versions": [-1] * len(ids)}
        return Node(parent=parent, message={"role": role, "content": "?"}, token_ids=ids, at=at, **columns)

    nodes = [told(prompt, "user", None, START)]
    at = START
    for turn, ids in enumerate(sampled):
        if turn:
            nodes.append(told(given, "tool", len(nodes) - 1, at + 1))
            at += 1
        at += 2
        nodes.append(Node(
            parent=len(nodes) - 1, message={"role": "assistant", "content": "."}, token_ids=ids, at=at,
            loss_mask=[1] * len(ids), logprobs=[-1.0] * len(ids), versions=[0] * len(ids), finish_reason="stop",
        ))  # fmt: skip
    return Episode(
        group_id=f"g{group}", task_id=f"t{group}", index=index, seed=index, reward=float(index % 2), seconds=at - START,
        stop_reason=StopReason.TERMINATED, started="2023-11-14T22:13:20+00:00",
        trajectories={"assistant": Trajectory(nodes=nodes)},
    )  # fmt: skip


def made_run(folder: Path, steps: list[dict[str, float]] | None = None, *settings: str) -> Path:
    """A recorded run of four episodes with two turns each."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe(
        "arithmetic_grpo", [*settings, "trainer.dtype=float32", "inference.dtype=float32"], device="cpu"
    )
    recipe = recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"device": "cpu"})})
    (folder / "config.json").write_text(recipe.model_dump_json())
    journal = Journal(folder, episodes=True)
    for group in range(2):
        for member in range(2):
            ids = [[5, 6 + member, 7, 8], [9, 9]]
            journal.episode(episode(group, member, [1, 2, 3, 30 + group], ids, [4, 4, 4]))
    journal.close()
    lines = [
        {"step": 0, "eval/accuracy": 0.1},
        *({"step": n + 1, **step} for n, step in enumerate([STEP] if steps is None else steps)),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


STEP = {
    "time/step": 10.0, "time/wait_batch": 6.0, "time/update": 3.0, "time/gather": 0.25, "time/publish": 0.25,
    "time/wait_evaluation": 0.0, "train/signal": 0.5, "train/rows_tokens": 300.0,
}  # fmt: skip
