"""The recipe's rollout section: groups, filters, the curriculum, and settings that contradict them.

Guarantees: a filter or a curriculum key that cannot act beside another setting is refused before anything starts, with
both keys named.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from agentrl.config.section import Positive, Section

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe

Seconds = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(ge=0, le=1)]
StalePolicy = Literal["drop", "mask", "keep"]
"""Treatment of an episode that is older than ``rollout.max_staleness``."""

_OTHER_BASELINES = {
    "gae": "takes the critic as baseline",
    "turns": "credits each turn, also in a group with equal sums",
    "reward": "has no baseline",
}


class CurriculumConfig(Section):
    """Choice of training tasks by solve rate, the share of a group's episodes that solve the task; off by default."""

    retire_at: Rate | None = Field(
        default=None, description="Drop a task whose groups have at least this solve rate; null: never."
    )
    retire_after: Positive = Field(
        default=2, description="Consecutive groups with retire_at after which it is dropped."
    )
    hard_at: Rate | None = Field(
        default=None, description="Draw a task less often while its mean solve rate is at most this; null: never."
    )
    hard_every: int = Field(default=4, ge=2, description="A hard task is drawn in one of so many passes.")
    window: Positive = Field(default=4, description="Latest groups of a task that its mean solve rate is taken over.")
    column: str | None = Field(
        default=None, description="Column of the dataset that sorts tasks into pools, easiest first; null: one pool."
    )
    pools: tuple[str | int | float, ...] = Field(
        default=(), description="Values of the column, easiest first; empty: numbers in ascending order."
    )
    open_at: Rate = Field(default=0.7, description="Mean solve rate of the hardest open pool that opens the next one.")
    open_groups: Positive = Field(default=32, description="Latest groups of the pool that this mean is taken over.")

    @property
    def active(self) -> bool:
        """Whether any part of the curriculum is on."""
        return self.retire_at is not None or self.hard_at is not None or self.column is not None


class RolloutConfig(Section):
    """Rollout: groups, concurrency and limits of episodes."""

    batch_size: Positive = Field(default=8, description="Groups (tasks) per trainer step.")
    group_size: Positive = Field(default=8, description="Episodes per task.")
    group_extra: int = Field(
        default=0,
        ge=0,
        description="Episodes per task that are started beside group_size: the first group_size that end without a "
        "failure make the group, and the others are cancelled. Faster, and biased towards short episodes.",
    )
    on_failure: Literal["retry", "keep", "drop"] = Field(
        default="retry",
        description="A failed episode: `retry` tries it again if the infrastructure failed it, then does as `keep`; "
        "`keep` trains the group without it; `drop` leaves the group out.",
    )
    retries: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Most retries in a group; null: as many as group_size."
    )
    min_group: Positive = Field(
        default=2, description="Fewest episodes without a failure of a group that is trained on; at most group_size."
    )
    max_staleness: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default=1,
        description="Bound of an episode's age when it is trained: the step minus the policy version of its oldest "
        "token. 0: no group starts before the batch ahead of it is trained. auto: the smallest bound that keeps the "
        "trainer fed, from 0 to 8; it is found and changed while the run goes on.",
    )
    stale: StalePolicy = Field(
        default="drop",
        description="An episode that is older than max_staleness: `drop` cancels it as soon as it cannot be trained "
        "any more; `mask` takes the loss of its older tokens away; `keep` trains it, and max_staleness bounds the mean "
        "age alone.",
    )
    max_stale_groups: Positive = Field(
        default=64,
        description="Groups in a row that are too old although no step was taken since their start, after which the "
        "run stops.",
    )
    max_concurrent: Positive = Field(default=128, description="Episodes in flight.")
    workers: int = Field(
        default=0,
        ge=0,
        description="Worker processes that run the episodes of training and its evaluations; 0: the controller's own "
        "process, which is one core's worth of Python.",
    )
    nodes: int = Field(
        default=0,
        ge=0,
        description="Machines that run rollout workers only, without GPUs, beside trainer.nodes and inference.nodes; "
        "0: they run on the head.",
    )
    episode_timeout: Seconds = Field(default=300.0, description="Seconds after which an episode is cancelled.")
    on_timeout: Literal["judge", "fail"] = Field(
        default="judge",
        description="An episode that is cancelled at its limit: `judge` has the environment judge what there is, and "
        "it counts as cut; where nothing was sampled, or in the middle of a step, it fails. `fail`: it always fails.",
    )
    close_timeout: Seconds = Field(
        default=30.0,
        description="Seconds of an episode's teardown, after its end or its cancellation; then it is cut, and a task "
        "that runs on nevertheless is abandoned. As many abandoned tasks as max_concurrent end the run.",
    )
    max_failure_rate: float = Field(
        default=0.5, gt=0, le=1, description="Fraction of failed episodes at which the run stops."
    )
    max_failed_groups: Positive = Field(
        default=256,
        description="Groups in a row with too few episodes that did not fail, after which the run stops: few failures "
        "in each group may leave nothing to train on, below max_failure_rate.",
    )
    max_failures_in_a_row: Positive | None = Field(
        default=None,
        description="Failures of the infrastructure in a row, retried ones too, after which the run stops; null: twice "
        "max_concurrent.",
    )
    skip_uniform_groups: bool = Field(
        default=False, description="Drop groups whose rewards are all equal, and sample more."
    )
    max_uniform_groups: Positive = Field(
        default=256, description="Groups dropped in a row by skip_uniform_groups after which the run stops."
    )
    solved_reward: float = Field(
        default=1.0,
        description="Unscaled reward from which an episode has solved its task, if it reports no metric `accuracy` and "
        "the environment ended it.",
    )
    curriculum: CurriculumConfig = CurriculumConfig()


def rollout_contradictions(recipe: "Recipe") -> Iterator[str]:
    """Yields contradictions between the rollout section and other settings of a run that trains on episodes."""
    rollout, trainer = recipe.rollout, recipe.trainer
    if rollout.skip_uniform_groups:
        if trainer.advantage in _OTHER_BASELINES:
            yield (
                f"rollout.skip_uniform_groups=true drops groups that trainer.advantage={trainer.advantage} learns "
                f"from: it {_OTHER_BASELINES[trainer.advantage]}; use an advantage relative to the group, or false"
            )
        if trainer.kl_coef > 0 and trainer.kl_in == "reward":
            yield (
                "rollout.skip_uniform_groups=true compares rewards before trainer.kl_in=reward makes them differ; use "
                "trainer.kl_in=loss, or false"
            )
        if trainer.distill_coef > 0 and trainer.advantage != "none":
            yield (
                "rollout.skip_uniform_groups=true compares rewards, and drops groups whose tokens "
                f"trainer.distill_coef={trainer.distill_coef:g} gives advantages; use one of the two"
            )
        if rollout.group_size == 1:
            yield "rollout.skip_uniform_groups=true drops every group of rollout.group_size=1"
    elif _changed(rollout, "max_uniform_groups"):
        yield (
            f"rollout.max_uniform_groups={rollout.max_uniform_groups} does nothing with "
            "rollout.skip_uniform_groups=false"
        )
    if rollout.stale == "keep" and _changed(rollout, "max_stale_groups"):
        yield f"rollout.max_stale_groups={rollout.max_stale_groups} does nothing with rollout.stale=keep"
    if rollout.on_failure != "retry" and _changed(rollout, "retries"):
        yield f"rollout.retries={rollout.retries} does nothing with rollout.on_failure={rollout.on_failure}"
    if _changed(rollout, "min_group"):
        if rollout.on_failure == "drop":
            yield f"rollout.min_group={rollout.min_group} does nothing with rollout.on_failure=drop"
        if rollout.min_group > rollout.group_size:
            yield f"rollout.min_group={rollout.min_group} is more than rollout.group_size={rollout.group_size}"
    yield from _curriculum_contradictions(recipe)


def _curriculum_contradictions(recipe: "Recipe") -> Iterator[str]:
    own, trainer = recipe.rollout.curriculum, recipe.trainer
    needs = {"retire_after": "retire_at", "hard_every": "hard_at", "window": "hard_at"}
    needs |= {"pools": "column", "open_at": "column", "open_groups": "column"}
    for key, base in needs.items():
        if _changed(own, key) and getattr(own, base) is None:
            yield f"rollout.curriculum.{key} does nothing with rollout.curriculum.{base}=null"
    if own.retire_at is not None and own.hard_at is not None and own.hard_at >= own.retire_at:
        yield (
            f"rollout.curriculum.hard_at={own.hard_at:g} is not below rollout.curriculum.retire_at={own.retire_at:g}: "
            "a task would be too hard and solved"
        )
    if len(set(own.pools)) != len(own.pools):
        yield f"rollout.curriculum.pools={list(own.pools)} names a pool twice"
    for key in ("epochs", "save_epochs"):
        if own.active and getattr(trainer, key) is not None:
            yield (
                f"trainer.{key}={getattr(trainer, key)} counts passes over all tasks, and rollout.curriculum leaves "
                "some of them out; use trainer.total_steps, time_budget and save_every"
            )


def _changed(section: Section, key: str) -> bool:
    """Whether a key differs from its default; a run's own config.json sets every key."""
    return getattr(section, key) != type(section).model_fields[key].default
