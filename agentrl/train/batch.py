"""From a batch of episodes to sequences with advantages and weights.

Guarantees: failed episodes give nothing; advantages are per (group id, role); what the loss is divided by covers the
whole global batch, also the sequences whose advantage is 0 and which therefore need no computation. An episode's
branches share its weight: forks do not raise it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from agentrl.config.recipe import RewardConfig, TrainerConfig
from agentrl.core.episode import Episode, Node, StopReason, Trajectory
from agentrl.core.episode import Sequence as FlatSequence
from agentrl.core.registry import load
from agentrl.train.advantages import Advantage, Scored, Turn, spread, whitened
from agentrl.train.distill import taught
from agentrl.train.objective import skips_zero_advantages
from agentrl.train.packing import TrainSequence


@dataclass(frozen=True)
class TrainBatch:
    """What one trainer step works on.

    Attributes:
        sequences: Those that carry gradient.
        normalizer: The loss is the weighted sum over tokens divided by this; counts the whole global batch.
        signal: Share of the sequences whose advantage is not 0.
        version: Policy version that the step starts from.
        valued: What the critic learns from: all sequences, with values and returns; empty without a critic.
    """

    sequences: list[TrainSequence]
    normalizer: float
    signal: float
    version: int = 0
    valued: list[TrainSequence] = field(default_factory=list)


Penalty = Callable[[Sequence[TrainSequence]], Sequence[float]]
Values = Callable[[Sequence[TrainSequence]], Sequence[Sequence[float]]]


@dataclass(frozen=True)
class _Entry:
    """One role of one episode.

    Attributes:
        nodes: Of its trajectory.
        turns: Index of the node of each turn.
        advantages: ``[turns][sampled tokens]``.
    """

    scored: Scored
    branches: list[FlatSequence]
    nodes: list[Node]
    turns: list[int]
    advantages: list[list[float]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.scored.turns)

    @property
    def sampled(self) -> list[Node]:
        return [self.nodes[index] for index in self.turns]

    def along(self, branch: FlatSequence, of_turns: Sequence[Sequence[float]]) -> list[float]:
        """``[tokens]`` of a branch: numbers of the sampled tokens, 0 where it trains none."""
        known = dict(zip(self.turns, of_turns, strict=True))
        found: list[float] = []
        for index in branch.path:
            values = iter(known.get(index, ()))
            found += [next(values) if sampled else 0.0 for sampled in self.nodes[index].loss_mask]
        return [value if trained else 0.0 for value, trained in zip(found, branch.loss_mask, strict=True)]


def make_train_batch(
    episodes: Sequence[Episode],
    config: TrainerConfig,
    rewards: RewardConfig | None = None,
    *,
    version: int = 0,
    penalty: Penalty | None = None,
    values: Values | None = None,
) -> TrainBatch:
    """Advantages for every role of every episode, and their sequences.

    Args:
        episodes: Of whole groups.
        config: Names the advantage. Sequences with advantage 0 are kept where the loss needs them (KL, entropy, some
            objectives). With ``mask_truncated`` an episode that was cut off counts in its group's baseline only.
        rewards: How rewards are seen.
        version: Policy version that the step starts from.
        penalty: Gives what is taken off the reward for each of some sequences (KL in the reward).
        values: Gives the critic's value before each trained token of some sequences.

    Raises:
        ValueError: The advantage function gave something else than finite numbers for each entry, or a teacher has not
            scored what it should have.
    """
    seen = rewards or RewardConfig()
    entries = [
        _entry(episode, role, trajectory, seen)
        for episode in episodes
        if not episode.failed and episode.reward is not None
        for role, trajectory in episode.trajectories.items()
    ]
    if penalty is not None:
        entries = _penalised(entries, penalty)
    if values is not None:
        entries = _valued(entries, values)
    entries = _with_advantages(entries, config)
    kept = [entry for entry in entries if not (config.mask_truncated and not entry.scored.terminated)]
    groups = {entry.scored.group[0]: number for number, entry in enumerate(entries)}
    final = kept
    if config.distill_coef > 0:
        final = [replace(entry, advantages=taught(entry.advantages, entry.sampled, config)) for entry in final]
    if config.whiten == "batch":
        final = _whitened(final)
    sequences = [
        TrainSequence(
            token_ids=flat.token_ids,
            loss_mask=flat.loss_mask,
            logprobs=flat.logprobs,
            advantages=entry.along(flat, entry.advantages),
            weight=1.0 / entry.tokens if config.aggregation == "sequence" else 1.0,
            versions=flat.versions,
            group=groups[entry.scored.group[0]],
            **({} if values is None else _targets(plain, flat)),
        )
        for entry, plain in zip(final, kept, strict=True)
        for flat in entry.branches
    ]
    useful = [s for s in sequences if any(s.advantages)]
    return TrainBatch(
        sequences=useful if skips_zero_advantages(config) else sequences,
        normalizer=_normalizer(kept, config),
        signal=len(useful) / max(len(sequences), 1),
        version=version,
        valued=[] if values is None else sequences,
    )


def _with_advantages(entries: Sequence[_Entry], config: TrainerConfig) -> list[_Entry]:
    advantage: Advantage = load("advantage", config.advantage)
    credits = list(advantage([entry.scored for entry in entries], config))
    if len(credits) != len(entries):
        raise ValueError(f"trainer.advantage={config.advantage} gave {len(credits)} values for {len(entries)} entries")
    try:
        return [
            replace(entry, advantages=spread(credit, entry.scored))
            for entry, credit in zip(entries, credits, strict=True)
        ]
    except ValueError as error:
        raise ValueError(f"trainer.advantage={config.advantage} gave {error}") from None


def _whitened(entries: Sequence[_Entry]) -> list[_Entry]:
    flat = iter(whitened([value for entry in entries for turn in entry.advantages for value in turn]))
    return [replace(entry, advantages=[[next(flat) for _ in turn] for turn in entry.advantages]) for entry in entries]


def _penalised(entries: Sequence[_Entry], penalty: Penalty) -> list[_Entry]:
    """Entries whose rewards are lowered by the penalties of all their branches."""
    values = iter(penalty([_plain(flat) for entry in entries for flat in entry.branches]))
    return [
        replace(
            entry, scored=replace(entry.scored, reward=entry.scored.reward - sum(next(values) for _ in entry.branches))
        )
        for entry in entries
    ]


def _valued(entries: Sequence[_Entry], values: Values) -> list[_Entry]:
    """Entries whose turns carry the critic's values.

    The last branch of an episode that a limit cut off has a token put at its end, so that the critic is asked for the
    value of what would have followed.
    """
    asked: list[TrainSequence] = []
    for entry in entries:
        asked += [_plain(flat) for flat in entry.branches]
        if entry.branches and not entry.scored.terminated:
            last = asked[-1]
            asked[-1] = replace(last, token_ids=[*last.token_ids, 0], loss_mask=[*last.loss_mask, 1])
    answers = iter(values(asked))
    return [_with_values(entry, [next(answers) for _ in entry.branches]) for entry in entries]


def _with_values(entry: _Entry, answers: Sequence[Sequence[float]]) -> _Entry:
    of_node: dict[int, list[float]] = {}
    after: dict[int, float] = {}
    for number, (flat, answer) in enumerate(zip(entry.branches, answers, strict=True)):
        values = iter(answer)
        start = 0
        for index in flat.path:
            trained = flat.loss_mask[start : start + len(entry.nodes[index].token_ids)]
            start += len(trained)
            if any(trained):
                of_node[index] = [next(values) for one in trained if one]
        if number == len(entry.branches) - 1:
            last = next(index for index in reversed(flat.path) if index in entry.turns)
            after[last] = next(values, 0.0)
    turns = tuple(
        replace(turn, values=tuple(of_node[index]), after=after.get(index, 0.0))
        for turn, index in zip(entry.scored.turns, entry.turns, strict=True)
    )
    return replace(entry, scored=replace(entry.scored, turns=turns))


def _targets(entry: _Entry, branch: FlatSequence) -> dict[str, list[float]]:
    """What the critic said of a branch, and what it should have said: that plus the advantage."""
    values = [turn.values for turn in entry.scored.turns]
    returns = [
        [value + advantage for value, advantage in zip(*both, strict=True)]
        for both in zip(values, entry.advantages, strict=True)
    ]
    return {"values": entry.along(branch, values), "returns": entry.along(branch, returns)}


def _plain(flat: FlatSequence) -> TrainSequence:
    return TrainSequence(flat.token_ids, flat.loss_mask, flat.logprobs, ())


def _normalizer(entries: Sequence[_Entry], config: TrainerConfig) -> float:
    """What the weighted sum over tokens is divided by."""
    trained = [entry for entry in entries if entry.tokens]
    match config.aggregation:
        case "token":
            count = float(sum(entry.tokens for entry in trained))
        case "constant":
            count = float(len(trained) * (config.aggregation_length or 1))
        case _:  # sequence: the weights divide by each entry's length; sum: nothing does
            count = float(len(trained))
    return max(count, 1.0)


def _entry(episode: Episode, role: str, trajectory: Trajectory, rewards: RewardConfig) -> _Entry:
    assert episode.reward is not None
    nodes = trajectory.nodes
    turns = [index for index, node in enumerate(nodes) if any(node.loss_mask)]
    number = {index: place for place, index in enumerate(turns)}
    scored = Scored(
        group=(episode.group_id, role),
        reward=rewards.seen(episode.reward),
        turns=tuple(
            Turn(
                parent=next((number[i] for i in reversed(trajectory.path(index)[:-1]) if i in number), None),
                tokens=sum(nodes[index].loss_mask),
                reward=_scaled(nodes[index].reward, rewards),
            )
            for index in turns
        ),
        terminated=episode.stop_reason is StopReason.TERMINATED,
    )
    return _Entry(scored, trajectory.sequences(), nodes, turns)


def _scaled(reward: float | None, rewards: RewardConfig) -> float | None:
    return None if reward is None else rewards.scale * reward
