"""Episodes to learn from, each case about one subject; their logprobs are the tiny model's, and some way off.

A case's episodes are whole groups. Behavior logprobs differ from the policy's so much that every bound acts somewhere.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from agentrl.core.episode import NOT_SAMPLED, Episode, Node, StopReason, Trajectory
from tests.references.llama import distributions, shape_of, weights_of

VERSION = 3  # policy version that the step starts from
TEMPERATURE = 0.8


class Talk:
    """Writes one role's messages."""

    def __init__(self, rng: random.Random, prompt: Sequence[int]) -> None:
        self._rng = rng
        self.nodes: list[Node] = []
        self.read(None, prompt)

    def read(self, parent: int | None, ids: Sequence[int] | int) -> int:
        """Adds a message that no policy sampled: given ids, or so many random ones."""
        ids = self._ids(ids) if isinstance(ids, int) else ids
        return self._add(parent, list(ids), [0] * len(ids), None, None)

    def read_anew(self, follows: int, count: int) -> int:
        """Adds a first message of so many random ids, whose conversation goes on from an answer."""
        index = self.read(None, count)
        self.nodes[index] = self.nodes[index].model_copy(update={"follows": follows})
        return index

    def say(self, parent: int, mask: str, reward: float | None = None, *, finish: str = "stop") -> int:
        """Adds a message of the policy; ``mask`` is ``x`` for a sampled token and ``.`` for one that was put in."""
        return self._add(parent, self._ids(len(mask)), [int(one == "x") for one in mask], finish, reward)

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(3, 250) for _ in range(count)]

    def _add(
        self, parent: int | None, ids: list[int], mask: list[int], finish: str | None, reward: float | None
    ) -> int:
        versions = [self._rng.randint(0, VERSION) if one else NOT_SAMPLED for one in mask]
        self.nodes.append(
            Node(
                parent=parent, message={}, token_ids=ids, loss_mask=mask, logprobs=[0.0] * len(ids), versions=versions,
                finish_reason=finish, reward=reward,
            )
        )  # fmt: skip
        return len(self.nodes) - 1


class Groups:
    """Collects the episodes of a case; episodes of a group begin with the same prompt."""

    def __init__(self, name: str) -> None:
        self.rng = random.Random(name)
        self.episodes: list[Episode] = []
        self._name = name
        self._prompts: dict[str, list[int]] = {}

    def talk(self, group: str, role: str = "assistant") -> Talk:
        key = f"{group}/{role}"
        prompt = self._prompts.setdefault(key, [self.rng.randrange(3, 250) for _ in range(4)])
        return Talk(self.rng, prompt)

    def add(self, group: str, reward: float | None, stop: StopReason = StopReason.TERMINATED, /, **roles: Talk) -> None:
        self.episodes.append(
            Episode(
                group_id=f"{self._name}/{group}", task_id="t", index=len(self.episodes), seed=0, reward=reward,
                stop_reason=stop, tag=f"tag {ord(group[0]) % 2}",
                trajectories={role: Trajectory(nodes=talk.nodes) for role, talk in roles.items()},
            )
        )  # fmt: skip

    def answer(
        self, group: str, reward: float | None, mask: str, stop: StopReason = StopReason.TERMINATED,
        finish: str = "stop",
    ) -> None:  # fmt: skip
        """Adds an episode of one answer."""
        talk = self.talk(group)
        talk.say(0, mask, finish=finish)
        self.add(group, reward, stop, assistant=talk)


def complete() -> Groups:
    """Several turns, holes in the masks, missing step rewards; every sampled token has an advantage."""
    made = Groups("complete")
    for reward, masks, steps in (
        (0.9, (".xxxx.", "xx.x", "xxxxxxxxx"), (None, 0.25, None)),
        (0.2, (".xxxxxxx.", "xxx"), (0.5, -0.125)),
        (0.4, (".x.",), (None,)),
    ):
        talk, at = made.talk("long"), 0
        for mask, step in zip(masks, steps, strict=True):
            at = talk.read(talk.say(at, mask, step), 3)
        made.add("long", reward, assistant=talk)
    made.answer("short", 1.0, "xxx.")
    made.answer("short", 0.3, "xxxxx")
    made.answer("short", 0.35, "x")
    return made


def small_groups() -> Groups:
    """Groups of one, of equal and of nearly equal rewards; failed episodes; an answer without tokens."""
    made = Groups("small_groups")
    made.answer("one", 0.75, "xxxx")
    for mask in ("xxx", "xxxxx"):
        made.answer("equal", 0.5, mask)
    for reward, mask in ((0.5, "xx"), (0.50002, "xxxx"), (0.49999, "xxx")):
        made.answer("nearly", reward, mask)
    made.answer("failed", 1.0, "xxxxxxxxxxxx")
    made.answer("failed", 0.0, "xxxxxxxx")
    made.answer("failed", None, "xxx", StopReason.TIMEOUT)
    made.answer("failed", None, "xx")
    made.answer("gone", None, "xx", StopReason.AGENT_ERROR)
    made.add("silent", 0.25, assistant=made.talk("silent"))
    made.answer("silent", 1.0, "xxxxxxxxxxxxxxxxxxxxxxxxxx")
    return made


def forks() -> Groups:
    """A fork below the prompt and one below a turn, in episodes of different lengths."""
    made = Groups("forks")
    talk = made.talk("a")
    first = talk.say(0, "xx.x", 0.5)
    talk.say(0, "xxxxx", 0.25)
    heard = talk.read(first, 2)
    talk.say(heard, "xxx", 0.0)
    talk.read(talk.say(heard, "x.xx", 0.25), 2)
    made.add("a", 1.0, assistant=talk)
    made.answer("a", 0.0, "xxxxxxx")
    made.answer("a", 0.25, "xx")
    return made


def roots() -> Groups:
    """Several roots in an episode: turns that are rendered anew, with step rewards and with one for all."""
    made = Groups("roots")
    for steps, reward in (((0.0, 0.0, 1.0), 1.0), ((0.0, 0.25, 0.0), 0.25), ((None, None, None), 0.5)):
        talk = made.talk("a")
        talk.say(0, "xxx", steps[0])
        for step in steps[1:]:
            talk.say(talk.read(None, 5), "xx.xx", step)
        made.add("a", reward, assistant=talk)
    return made


def chosen() -> Groups:
    """Two samples of a call, and a conversation rendered anew that goes on from one of them; then again."""
    made = Groups("chosen")
    for taken, steps, reward in ((1, (0.0, 0.25, 1.0), 1.25), (0, (0.5, 0.0, 0.25), 1.0), (1, (None, None, None), 0.5)):
        talk = made.talk("a")
        samples = [talk.say(0, "xxx", steps[0]), talk.say(0, "xx")]
        for step in steps[1:]:
            prompt = talk.read_anew(samples[taken], 4)
            samples = [talk.say(prompt, "xx.x", step), talk.say(prompt, "x")]
        made.add("a", reward, assistant=talk)
    return made


def roles() -> Groups:
    """Two roles with one reward; one episode lacks the second role."""
    made = Groups("roles")
    for reward, first, second in ((1.0, "xxx", "xx"), (0.25, "xxxxx", "x"), (0.0, "xx", None)):
        talks = {"solver": made.talk("a", "solver")}
        talks["solver"].say(0, first)
        if second is not None:
            talks["critic"] = made.talk("a", "critic")
            talks["critic"].say(0, second)
            talks["critic"].say(talks["critic"].read(1, 2), "xxxx")
        made.add("a", reward, **talks)
    return made


def own_rewards() -> Groups:
    """A game of two roles for a sum that does not change: each has rewards of its own."""
    made = Groups("own_rewards")
    for white, black in ((1.0, 0.0), (0.0, 1.0), (0.25, 0.75)):
        talks = {"white": made.talk("a", "white"), "black": made.talk("a", "black")}
        talks["white"].say(0, "xxx", white)
        talks["black"].say(0, "xxxx", black)
        made.add("a", white + black, **talks)
        made.episodes[-1] = made.episodes[-1].model_copy(update={"role_rewards": {"white": white, "black": black}})
    return made


def truncated() -> Groups:
    """Episodes that the environment, the context or the clock ended."""
    made = Groups("truncated")
    made.answer("a", 1.0, "xxxx")
    made.answer("a", 0.25, "xxxxx", StopReason.TRUNCATED)
    made.answer("a", 0.75, "xxxxxx", StopReason.TIMEOUT)
    made.answer("a", 0.0, "xxx", StopReason.CONTEXT_OVERFLOW)
    talk = made.talk("a")
    talk.say(talk.read(talk.say(0, "xx", 0.5), 3), "xxx")
    made.add("a", 0.5, StopReason.TRUNCATED, assistant=talk)
    return made


def cut_by_length() -> Groups:
    """Episodes that the environment calls terminated although the last answer ended at its limit."""
    made = Groups("cut_by_length")
    made.answer("a", 1.0, "xxxx")
    made.answer("a", 0.25, "xxxxx", finish="length")
    talk = made.talk("a")
    talk.say(talk.read(talk.say(0, "xx", finish="length"), 2), "xxx")
    made.add("a", 0.5, assistant=talk)
    made.answer("a", 0.0, "xx", finish="length")
    return made


def cut_forks() -> Groups:
    """Several answers to the last prompt: all of them cut, one of them, aborted ones; and a prompt that did not fit."""
    made = Groups("cut_forks")
    for reward, finishes in (
        (1.0, ("length", "length")),
        (0.25, ("length", "stop")),
        (0.5, ("stop", "abort", "length")),
    ):
        talk = made.talk("a")
        heard = talk.read(talk.say(0, "xx", 0.125, finish="length"), 2)
        for number, finish in enumerate(finishes):
            talk.say(heard, "xxx"[: number + 1], finish=finish)
        made.add("a", reward, assistant=talk)
    talk = made.talk("a")
    heard = talk.read(talk.say(0, "xxx"), 2)
    talk.say(heard, "x", finish="abort")
    talk.read(talk.say(heard, "xx"), 4)
    made.add("a", 0.0, StopReason.CONTEXT_OVERFLOW, assistant=talk)
    return made


def empty_answers() -> Groups:
    """Episodes whose last answer has no token: the turn before it is where they were cut, or ended."""
    made = Groups("empty_answers")
    for reward, stop, finish in (
        (1.0, StopReason.TRUNCATED, "stop"), (0.25, StopReason.TERMINATED, "length"),
        (0.5, StopReason.CONTEXT_OVERFLOW, "stop"), (0.0, StopReason.TERMINATED, "stop"),
    ):  # fmt: skip
        talk = made.talk("a")
        heard = talk.read(talk.say(0, "xx.x", 0.25), 2)
        talk.say(heard, "", finish=finish)
        made.add("a", reward, stop, assistant=talk)
    return made


CASES = {
    make.__name__: make
    for make in (
        complete,
        small_groups,
        forks,
        roots,
        chosen,
        roles,
        own_rewards,
        truncated,
        cut_by_length,
        cut_forks,
        empty_answers,
    )
}


def episodes_of(cases: Sequence[str], folder: Path) -> list[Episode]:
    """Makes the episodes of some cases, one after the other, with behavior and teacher logprobs of the given model."""
    found = [episode for name in cases for episode in CASES[name]().episodes]
    rng, shape, weights = random.Random("logprobs"), shape_of(folder), weights_of(folder)
    for trajectory in (t for episode in found for t in episode.trajectories.values()):
        for leaf in trajectory.leaves():
            nodes = [trajectory.nodes[index] for index in trajectory.path(leaf)]
            ids = [token for node in nodes for token in node.token_ids]
            with torch.no_grad():
                rows = distributions(weights, shape, ids, TEMPERATURE)
            at = 0
            for node in nodes:
                node.teacher_logprobs = [0.0] * len(node.token_ids)
                for place, sampled in enumerate(node.loss_mask):
                    if sampled:
                        own = rows[at - 1, ids[at]].item()
                        node.logprobs[place] = own + rng.gauss(0, 0.2) + (rng.random() < 0.15) * rng.gauss(0, 2)
                        node.teacher_logprobs[place] = own + rng.gauss(0, 0.5)
                    at += 1
    return found
