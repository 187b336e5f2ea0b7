"""Advantages of a group's episodes, computed from their recorded rewards as the trainer computes them.

Guarantees: the numbers come from the trainer's own advantage function. Where it needs more than the group's rewards (a
critic, the whole batch), there are none, and the reason is said. An attempt that was made again, a failed one, and one
that a later one of the same member replaced, has no advantage.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from agentrl.config.recipe import RewardConfig

FROM_REWARDS = ("group", "leave_one_out", "reward", "none")
Row = Mapping[str, Any]


def advantages(rows: Sequence[Row], config: Mapping[str, Any]) -> tuple[list[float | None], str]:
    """Returns the advantage of each row, and a sentence that says how they were computed, or why there are none.

    Args:
        rows: The rows of a group, by member and attempt.
        config: The run's resolved recipe.
    """
    none: list[float | None] = [None] * len(rows)
    trainer = config.get("trainer") or {}
    kind, scale = str(trainer.get("advantage")), str(trainer.get("scale_rewards"))
    why = _why_not(trainer)
    if why:
        return none, why
    counted = counted_members(rows)
    try:
        seen = RewardConfig.model_validate(config.get("reward") or {})
    except ValidationError as error:
        return none, f"advantages are not shown: the run's reward section cannot be read: {error}"
    rewards = [seen.seen(rows[at]["reward"]) for at in counted]
    for at, value in zip(counted, _computed(kind, rewards, scale), strict=True):
        none[at] = value
    return none, (
        f"Computed from the recorded rewards as trainer.advantage={kind}, scale_rewards={scale}; "
        "episodes that were too old to be trained are counted here."
    )


def _why_not(trainer: Mapping[str, Any]) -> str:
    """Says why a group's rewards do not give its advantages; empty if they do."""
    kind = trainer.get("advantage")
    if not kind:
        return "This run does not train on episodes: no advantages."
    if kind not in FROM_REWARDS:
        return f"Advantages are not recorded, and trainer.advantage={kind} needs more than a group's rewards."
    if trainer.get("scale_rewards") == "batch" or trainer.get("whiten", "none") != "none":
        return "Advantages are not recorded, and this recipe scales them by the whole batch."
    if trainer.get("baseline", "role") == "tag":
        return "Advantages are not recorded, and trainer.baseline=tag compares the whole batch."
    if trainer.get("kl_in") == "reward" and trainer.get("kl_coef"):
        return "Advantages are not recorded, and a KL penalty in the reward changes them token by token."
    return ""


def counted_members(rows: Sequence[Row]) -> list[int]:
    """Returns the indices of the rows that count: of each member the last one, if it has a reward and did not fail."""
    last = {row["member"]: at for at, row in enumerate(rows)}
    return [at for at in sorted(last.values()) if not rows[at]["failed"] and not rows[at]["retried"]]


def _computed(kind: str, rewards: list[float], scale: str) -> list[float]:
    from agentrl.config.recipe import TrainerConfig
    from agentrl.train import advantages as functions
    from agentrl.train.returns import Scored

    scored = [Scored(("group",), reward, (), True) for reward in rewards]
    function = {"group": functions.group, "leave_one_out": functions.leave_one_out,
                "reward": functions.reward, "none": functions.none}[kind]  # fmt: skip
    settings = TrainerConfig.model_construct(scale_rewards=scale)
    return [float(value) for value in function(scored, settings)] if scored else []  # type: ignore[arg-type]
