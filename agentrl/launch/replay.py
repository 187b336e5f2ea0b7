"""Runs the episodes of a recorded training step once more, without a server, and compares them with the record.

Guarantees: workflow, environment, rewards, parsing, masks, advantages and (where the weights are there) the update are
this code's own; the model's answers are those of the run's ``traffic.jsonl``. What an environment, a tool or a judge
asks others for, beside the policy, is asked again. Nothing in the run's folder is changed.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from agentrl.config.errors import UserError
from agentrl.config.load import recipe_of_run
from agentrl.config.recipe import Recipe
from agentrl.core.columns import Columns, concatenate
from agentrl.core.episode import Episode, StopReason, Task
from agentrl.core.workflow import RolloutWorkflow
from agentrl.data.models import resolve_model
from agentrl.inference.replayed import PromptDifference, ReplayClient
from agentrl.inference.traffic import FILE, read_traffic
from agentrl.launch.bounded_run import bounded_run
from agentrl.observe.sinks import METRICS_FILE, read_metrics
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.age_bound import AgeBound
from agentrl.rollout.assemble import make_settings, make_workflow
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from agentrl.rollout.journal import read_episodes
from agentrl.rollout.journal_proof import valid_outcomes
from agentrl.train.batch import Batch
from agentrl.train.checkpoint_state import STATE_FILE

AT_ONCE = 64  # episodes
_LAYOUT = frozenset({"train/microbatches", "train/rows_tokens"})  # metrics that follow from the number of ranks
_NAMES_A_TOKEN = ("ratio_token",)  # parts of the names of metrics that say which token was the worst
_NOT_ITS_OWN = frozenset(  # stop reasons that a replay cannot give again: the clock's, other episodes', the machine's
    {
        *(StopReason.TIMEOUT, StopReason.STALE, StopReason.CANCELLED),
        *(StopReason.INFRASTRUCTURE_ERROR, StopReason.WORKER_LOST),
    }
)


@dataclass(frozen=True)
class EpisodeReplay:
    """An episode as it was recorded, and as it runs now.

    Attributes:
        recorded: The record.
        now: The record of the replay.
        prompts: Prompts that are not the recorded ones, in the order of the requests.
        unsent: Number of the run's requests that were not sent now.
        what: The first thing that differs, in words; empty if all is the same.
    """

    recorded: Episode
    now: Episode
    prompts: list[PromptDifference]
    unsent: int
    what: str


@dataclass(frozen=True)
class StepReplay:
    """A training step as it runs now.

    Attributes:
        step: Number of the step, as in ``metrics.jsonl``: from 1.
        episodes: The episodes that can be replayed, by group and index.
        left_out: Why episodes were left out -> their number.
        whole: Whether every episode that the run trained is among them.
        advantages: Largest difference between the advantages of the record and those of the replay; ``None`` where they
            cannot be compared.
        why_none: Why they cannot.
        update: Name of a metric of the update -> its value in the run and now; empty if it was not computed.
        why_no_update: Why it was not.
    """

    step: int
    episodes: list[EpisodeReplay]
    left_out: dict[str, int] = field(default_factory=dict)
    whole: bool = True
    advantages: float | None = None
    why_none: str = ""
    update: dict[str, tuple[float, float]] = field(default_factory=dict)
    why_no_update: str = ""

    @property
    def differing(self) -> list[EpisodeReplay]:
        """Episodes that are not what the run recorded."""
        return [one for one in self.episodes if one.what]


class Replay:
    """Replays the training steps of a run that was recorded with ``logging.record=true``.

    Args:
        run_dir: Folder of the run.

    Raises:
        UserError: The run has no record, or its model is not here.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        if not (run_dir / "config.json").is_file():
            raise UserError(f"{run_dir} is no run's folder: it has no config.json")
        self.recipe: Recipe = recipe_of_run(run_dir)
        if not (run_dir / FILE).is_file():
            raise UserError(f"{run_dir} has no {FILE}: record a run with logging.record=true")
        if not (run_dir / "episodes.jsonl").is_file():
            raise UserError(f"{run_dir} has no episodes.jsonl: a run is replayed with logging.episodes=true")
        self.model = resolve_model(self.recipe.model.name).path
        self.template, self._settings, _ = make_settings(self.recipe, self.model)
        metrics = run_dir / METRICS_FILE
        self._recorded_metrics = read_metrics(metrics) if metrics.is_file() else []

    def steps(self) -> list[int]:
        """Returns the steps that can be replayed, as ``metrics.jsonl`` counts them."""
        return sorted({one["step"] + 1 for one in valid_outcomes(self.run_dir) if one["outcome"] == "trained"})

    def run(self, step: int) -> StepReplay:
        """Runs the episodes of a step once more, and compares them.

        Raises:
            UserError: The run has not trained such a step.
        """
        draws = [one["draw"] for one in valid_outcomes(self.run_dir) if _trained_at(one, step - 1)]
        if not draws:
            steps = self.steps()
            known = f"it trained steps {steps[0]} to {steps[-1]}" if steps else "it trained none"
            raise UserError(f"{self.run_dir} has not trained step {step}: {known}")
        recorded = self._recorded(draws)
        traffic = read_traffic(self.run_dir / FILE, {one.seed for one in recorded})
        usable, left_out = _usable(recorded, {seed for seed, found in traffic.items() if found})
        client = ReplayClient(self.template, self._settings, traffic)
        workflow, limits = make_workflow(self.recipe), Limits.of(self.recipe.rollout)
        now = bounded_run(_run_all(workflow, usable, client, limits), limits.teardown)
        pairs = [self._compared(before, after, client) for before, after in zip(usable, now, strict=True)]
        replayed = {(one.group_id, one.index) for one in usable}
        whole = all(one.failed or (one.group_id, one.index) in replayed for one in recorded)
        largest, why = self._advantages(pairs, step)
        return StepReplay(step, pairs, left_out, whole, advantages=largest, why_none=why)

    def update(self, replayed: StepReplay) -> StepReplay:
        """Returns a replayed step with the metrics of its update, where the weights that it started from are there."""
        step, checkpoint = replayed.step, None
        if not replayed.whole:
            return replace(replayed, why_no_update="episodes are missing")
        if step > 1:
            checkpoint = self.run_dir / "checkpoints" / f"step-{step - 1:06d}"
            if not (checkpoint / STATE_FILE).is_file():
                return replace(replayed, why_no_update=f"the run has no checkpoint after step {step - 1}")
        known = self._metrics(step)
        if "train/learning_rate" not in known:
            return replace(replayed, why_no_update=f"metrics.jsonl has no learning rate of step {step}")
        columns = self._batch(replayed.episodes, "now", step)
        trained = known.get("rollout/episodes", len(columns.episodes))
        if len(columns.episodes) != trained:  # a full disk leaves lines out of episodes.jsonl
            why = f"{len(columns.episodes)} of the {trained:.0f} episodes that the run trained are there"
            return replace(replayed, why_no_update=why)
        from agentrl.train.replay_update import replay_update  # torch.distributed

        rate, oldest = known["train/learning_rate"], self._oldest(step)
        found = replay_update(self.recipe, self.model, checkpoint, step - 1, columns, rate, oldest)
        names = [name for name in sorted(found) if name in known and _compares(name)]
        return replace(replayed, update={name: (known[name], found[name]) for name in names})

    def _metrics(self, step: int) -> dict[str, float]:
        return next((one for one in self._recorded_metrics if one["step"] == step), {})

    def _recorded(self, draws: Sequence[int]) -> list[Episode]:
        """Returns the latest records of some groups' episodes, by group and index."""
        groups = {f"g{draw}": number for number, draw in enumerate(draws)}
        found = {
            (groups[one.group_id], one.index): one
            for one in read_episodes(self.run_dir / "episodes.jsonl")
            if one.group_id in groups
        }
        return [found[key] for key in sorted(found)]

    def _compared(self, recorded: Episode, now: Episode, client: ReplayClient) -> EpisodeReplay:
        sampler = client.samplers[recorded.seed]
        now = _as_recorded(now, recorded)
        what = _prompt_words(sampler.differences) or episode_difference(recorded, now)
        if not what and sampler.unsent:
            what = f"{sampler.unsent} of the run's requests were not sent"
        return EpisodeReplay(recorded, now, sampler.differences, sampler.unsent, what)

    def _bound(self, step: int) -> AgeBound | None:
        """Returns the bound of the age that was in force in a step; ``None`` for a run that did not record it."""
        bound = self._metrics(step).get("staleness/bound")
        if bound is None:
            return None
        found = AgeBound.of(self.recipe.rollout, int(bound))
        found.advance(step - 1)
        return found

    def _oldest(self, step: int) -> int | None:
        """Returns the oldest version whose tokens carried a loss in a step; ``None``: all did."""
        bound = self._bound(step)
        return bound.oldest if bound is not None and bound.policy == "mask" else None

    def _batch(self, pairs: Sequence[EpisodeReplay], side: str, step: int) -> Columns:
        """Returns the columns of a step's batch, from the records or from the replay: what the run trained of each."""
        bound, groups = self._bound(step), dict[str, list[Episode]]()
        for one in pairs:
            if not one.recorded.failed:
                groups.setdefault(one.recorded.group_id, []).append(getattr(one, side))
        parts = [Columns.of(episodes) for episodes in groups.values()]
        if bound is not None:
            parts = [part.select([not old for old in bound.stale(part)]) for part in parts]
        return concatenate(parts) if parts else Columns.of([])

    def _advantages(self, pairs: Sequence[EpisodeReplay], step: int) -> tuple[float | None, str]:
        """Compares the advantages of the sampled tokens; returns the largest difference, or why there is none."""
        trainer = self.recipe.trainer
        if trainer.advantage == "gae":
            return None, "trainer.advantage=gae takes the critic's values"
        if trainer.kl_coef > 0 and trainer.kl_in == "reward":
            return None, "trainer.kl_in=reward takes logprobs of two policies"
        oldest = self._oldest(step)
        found = [
            Batch(self._batch(pairs, side, step), trainer, self.recipe.reward)
            .train_batch(version=step - 1, oldest=oldest)
            .tokens.sampled["advantages"]
            for side in ("recorded", "now")
        ]
        if not len(found[0]):
            return None, "no episode that the run trained can be replayed"
        if found[0].shape != found[1].shape:
            return None, f"the run sampled {len(found[0])} tokens, the replay {len(found[1])}"
        return float(np.abs(found[0] - found[1]).max(initial=0.0)), ""


def episode_difference(recorded: Episode, now: Episode) -> str:
    """Says what differs first between an episode and its replay; empty if nothing does.

    Times, and the words of errors, are not compared.
    """
    for role in [*recorded.trajectories, *(role for role in now.trajectories if role not in recorded.trajectories)]:
        before, after = recorded.trajectories.get(role), now.trajectories.get(role)
        if before is None or after is None:
            return f"role {role} {'is new' if before is None else 'did not speak'}"
        for number, (old, new) in enumerate(zip(before.nodes, after.nodes, strict=False)):
            for name in ("parent", "token_ids", "loss_mask", "message", "reward", "finish_reason", "follows", "tools"):
                if getattr(old, name) != getattr(new, name):
                    return f"role {role}, message {number}: {name}{_shown(getattr(old, name), getattr(new, name))}"
        if len(before.nodes) != len(after.nodes):
            return f"role {role}: {len(before.nodes)} messages in the run, {len(after.nodes)} now"
        if before.tools != after.tools:
            return f"role {role}: tools"
    for name in ("stop_reason", "reward", "role_rewards", "metrics", "tag"):
        if getattr(recorded, name) != getattr(now, name):
            return f"{name}{_shown(getattr(recorded, name), getattr(now, name))}"
    return ""


def _shown(old: object, new: object) -> str:
    """Returns how two values differ: at which position, if they are lists."""
    if isinstance(old, list) and isinstance(new, list):
        at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        found = [str(side[at]) if at < len(side) else "no more" for side in (old, new)]
        return f" at token {at}: {found[0]} in the run, {found[1]} now"
    return f": {str(old)!s:.200} in the run, {str(new)!s:.200} now"


def _prompt_words(differences: Sequence[PromptDifference]) -> str:
    if not differences:
        return ""
    first = differences[0]
    if not first.recorded:
        return f"request {first.request}: the run sent no such request"
    return f"request {first.request}: token {first.at} of the prompt"


def _compares(name: str) -> bool:
    """Whether a metric of the update is the same for any number of ranks."""
    return name not in _LAYOUT and not any(part in name for part in _NAMES_A_TOKEN)


def _trained_at(record: dict[str, object], step: int) -> bool:
    return record["outcome"] == "trained" and record["step"] == step


def _usable(recorded: Sequence[Episode], heard: set[int]) -> tuple[list[Episode], dict[str, int]]:
    """Splits episodes into those that can be replayed, and counts why others cannot."""
    usable: list[Episode] = []
    left_out: dict[str, int] = {}
    for one in recorded:
        why = ""
        if one.stop_reason in _NOT_ITS_OWN:
            why = f"not ended by itself ({one.stop_reason})"
        elif one.seed not in heard and one.trajectories:
            why = f"no requests in {FILE}"
        if why:
            left_out[why] = left_out.get(why, 0) + 1
        else:
            usable.append(one)
    return usable, left_out


async def _run_all(
    workflow: RolloutWorkflow, recorded: Sequence[Episode], client: ReplayClient, limits: Limits
) -> list[Episode]:
    room, left = asyncio.Semaphore(AT_ONCE), Abandoned()

    async def run(one: Episode) -> Episode:
        async with room:
            return await run_episode(
                workflow,
                Task(id=one.task_id, data=one.task),
                client,
                group_id=one.group_id,
                index=one.index,
                seed=one.seed,
                limits=limits,
                left=left,
                version=one.version,
            )

    return list(await asyncio.gather(*map(run, recorded)))


def _as_recorded(now: Episode, recorded: Episode) -> Episode:
    """Returns an episode as it is read from a file, with its experts and the teacher's logprobs of the record."""
    read = Episode.model_validate_json(now.model_dump_json())
    for role, trajectory in read.trajectories.items():
        for new, ran in zip(trajectory.nodes, now.trajectories[role].nodes, strict=True):
            new.experts = ran.experts  # no file of episodes holds them
        known = recorded.trajectories.get(role)
        for new, old in zip(trajectory.nodes, known.nodes if known else (), strict=False):
            if new.token_ids == old.token_ids:
                new.teacher_logprobs = old.teacher_logprobs
    return read
