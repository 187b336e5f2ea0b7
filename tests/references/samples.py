"""What a batch of episodes gives to learn from, token by token, as the issue and docs say it.

Failed episodes give nothing. A role's sampled tokens lie on the paths from its roots to its leaves; one that several
paths share is trained on the first of them only. An episode is cut if the environment or the context ended it, or if
its last sampled message (where several answer one prompt: all of them) ended at its limit.

A turn is followed by the turns that continue it on its path; where its role first speaks below another root, by the
turn there. Several such turns are a fork: samples of one call, whose returns are averaged.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from agentrl.core.episode import Episode, StopReason, Trajectory

WITHOUT_REWARD = ("environment_error", "agent_error", "inference_error", "infrastructure_error", "cancelled")


@dataclass(eq=False)
class Sampled:
    """One sampled token; what is computed for it is filled in on the way."""

    behavior: float
    version: int
    teacher: float
    advantage: float = 0.0
    value: float = 0.0
    goal: float = 0.0
    start: float = 0.0  # logprob under the policy that the step starts from
    entropy: float = 0.0  # of that policy
    reference: float = 0.0
    weight: float = 1.0
    kept: bool = True  # has a surrogate loss
    held: bool = False  # has the penalty of KL-Cov
    cuts: dict[str, bool] = field(default_factory=dict)  # whether a bound cuts it, by the bound's name


@dataclass(eq=False)
class Path:
    """All tokens from a root to a leaf, and the sampled ones that are trained here, by position."""

    ids: list[int]
    trained: dict[int, Sampled] = field(default_factory=dict)


@dataclass(eq=False)
class Answer:
    """One role's part of an episode.

    Attributes:
        group: Group and role.
        tag: Tag of the task.
        reward: The role's reward, as the trainer sees it.
        steps: Step reward of each sampled message, in the order of time.
        followers: Numbers of the turns that follow each turn.
        turns: Tokens of each sampled message, in the order of time.
        paths: Paths in the order of their leaves.
        ends: Path of each turn that the answer ends with, by its number: the last one, and others that answer the
            same prompt and are not followed.
        cut: Whether the episode was cut off.
    """

    group: tuple[str, str]
    tag: str | None
    reward: float
    steps: list[float]
    followers: list[list[int]]
    turns: list[list[Sampled]]
    paths: list[Path]
    ends: dict[int, Path]
    cut: bool

    @property
    def tokens(self) -> list[Sampled]:
        return [token for turn in self.turns for token in turn]


def answers_of(episodes: Sequence[Episode], scale: float, seen: Callable[[float], float]) -> list[Answer]:
    """Lists every role of every episode that did not fail.

    Args:
        episodes: Whole groups.
        scale: Factor on step rewards.
        seen: Function of a reward that returns what the trainer sees of it.
    """
    usable = [one for one in episodes if one.stop_reason not in WITHOUT_REWARD and one.reward is not None]
    return [
        _answer(one, role, trajectory, rewards_of(one)[role], scale, seen)
        for one in usable
        for role, trajectory in one.trajectories.items()
    ]


def rewards_of(episode: Episode) -> dict[str, float]:
    """Returns each role's reward: its own where it has one, else the episode's."""
    assert episode.reward is not None
    return {role: episode.role_rewards.get(role, episode.reward) for role in episode.trajectories}


def _answer(
    episode: Episode, role: str, trajectory: Trajectory, reward: float, scale: float, seen: Callable[[float], float]
) -> Answer:
    nodes = trajectory.nodes
    tokens: dict[int, dict[int, Sampled]] = {}  # node -> place in it -> token
    for index, node in enumerate(nodes):
        teacher = node.teacher_logprobs or [0.0] * len(node.token_ids)
        own = {
            place: Sampled(node.logprobs[place], node.versions[place], teacher[place])
            for place in range(len(node.token_ids))
            if node.loss_mask[place]
        }
        if own:
            tokens[index] = own
    paths, found, seen_nodes = [], {}, set()
    for leaf in range(len(nodes)):
        if any(node.parent == leaf for node in nodes):
            continue
        path = Path([])
        for index in _upwards(trajectory, leaf):
            start = len(path.ids)
            path.ids += nodes[index].token_ids
            if index in tokens and index not in seen_nodes:
                path.trained |= {start + place: token for place, token in tokens[index].items()}
            if index in tokens:
                found.setdefault(index, path)  # where it is trained
            seen_nodes.add(index)
        if path.trained:
            paths.append(path)
    ended = episode.stop_reason in (StopReason.TRUNCATED, StopReason.CONTEXT_OVERFLOW, StopReason.TIMEOUT)
    answers = [index for index, node in enumerate(nodes) if index in tokens or node.finish_reason is not None]
    last = [one for one in answers if nodes[one].parent == nodes[answers[-1]].parent]
    last = [one for one in last if not any(one in _upwards(trajectory, other)[:-1] for other in answers)]
    cut = ended or (bool(last) and all(nodes[one].finish_reason in ("length", "abort") for one in last))
    spoken = [[index for index in _upwards(trajectory, one) if index in tokens] for one in last]
    ends = {list(tokens).index(one[-1]): found[one[-1]] for one in spoken if one}
    steps = [scale * (nodes[index].reward or 0.0) for index in tokens]
    turns = [list(own.values()) for own in tokens.values()]
    return Answer(
        (episode.group_id, role), episode.tag, seen(reward), steps, _followers(trajectory, tokens), turns, paths, ends,
        cut,
    )  # fmt: skip


def _followers(trajectory: Trajectory, tokens: Iterable[int]) -> list[list[int]]:
    messages = list(tokens)
    chains = [_in_time(trajectory, message) for message in messages]
    place = [(chain[0], max((m for m in chain[:-1] if m in messages), default=None)) for chain in chains]
    found = []
    for now, message in enumerate(messages):
        later = range(now + 1, len(messages))
        own = [turn for turn in later if place[turn] == (place[now][0], message)]
        other = next((turn for turn in later if place[turn][0] != place[now][0]), None)
        if other is not None and (not own or other < own[0]):
            own = [turn for turn in later if turn >= other and place[turn] == place[other]]
        found.append(own)
    return found


def _in_time(trajectory: Trajectory, leaf: int) -> list[int]:
    """Goes on above a first message, to the answer that its conversation is known to follow."""
    chain = _upwards(trajectory, leaf)
    follows = trajectory.nodes[chain[0]].follows
    return chain if follows is None else [*_in_time(trajectory, follows), *chain]


def _upwards(trajectory: Trajectory, leaf: int) -> list[int]:
    found: list[int] = []
    at: int | None = leaf
    while at is not None:
        found.insert(0, at)
        at = trajectory.nodes[at].parent
    return found
