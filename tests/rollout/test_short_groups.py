"""Groups that lost episodes: the trainer's advantages and divisor are those of the episodes that are left."""

import random
from pathlib import Path

import pytest

from agentrl.config.recipe import TrainerConfig
from agentrl.core.workflow import LLM, Outcome
from agentrl.inference.backend import InferenceError
from agentrl.train.batch import Batch
from tests.references.credit import Entry, Turn, group_relative, leave_one_out
from tests.rollout.instant import Instant, run_virtually
from tests.rollout.test_group_run import Plays, one_step

SIZE = 6


@pytest.mark.parametrize(
    ("choices", "reference", "divisor"),
    [
        ({"preset": "grpo"}, group_relative("group"), "episodes"),
        ({"preset": "rloo"}, leave_one_out, "episodes"),
        ({"preset": "dr_grpo", "aggregation_length": 8}, group_relative("none"), "8 episodes"),
        ({"preset": "dapo"}, group_relative("group"), "tokens"),
    ],
)
@pytest.mark.parametrize("settings", [["rollout.on_failure=keep"], ["rollout.retries=3"], ["rollout.group_extra=2"]])
def test_a_group_of_those_that_are_left_is_compared_among_them(
    tmp_path: Path, choices: dict, reference, divisor: str, settings: list[str]
) -> None:
    rng = random.Random(5)

    async def act(llm: LLM, number: int) -> Outcome:
        if rng.random() < 0.4:
            raise InferenceError("gone") if number % 2 else KeyError("fault")
        llm.session().say(rng.randrange(1, 9))  # type: ignore[attr-defined]
        return Outcome(reward=rng.choice([0.0, 0.5, 1.0]))

    run = Instant(tmp_path, Plays(act), f"rollout.group_size={SIZE}", "rollout.batch_size=8", *settings)
    run_virtually(one_step(run))
    (columns,) = run.batches
    sizes = [sum(e.group_id == g for e in columns.episodes) for g in {e.group_id for e in columns.episodes}]
    assert len(set(sizes)) > 1 and 2 <= min(sizes) < SIZE
    entries = [
        Entry((e.group_id,), e.reward, [Turn(e.reward, [0.0] * int(n), [])])
        for e, n in zip(columns.episodes, columns.sampled_counts(), strict=True)
        if e.reward is not None
    ]
    found = Batch(columns, TrainerConfig.model_validate(choices)).train_batch()
    expected = [value for own in reference(entries) for value in own]
    assert found.tokens.sampled["advantages"] == pytest.approx(expected, abs=1e-5)
    divisors = {"tokens": sum(one.tokens for one in entries), "episodes": len(entries), "8 episodes": 8 * len(entries)}
    assert found.normalizer == divisors[divisor], "what failed is in no divisor"
