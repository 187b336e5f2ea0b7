"""An independent reference: transformers alone encodes whole conversations, and offsets say what was sampled.

Nothing of agentrl computes the expected ids: the whole conversation is rendered at once, encoded at once, and an id is
sampled if it begins behind the generation prompt of its turn and before the end of that turn, the end included.
"""

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentrl.core.episode import Message
from agentrl.core.message_shape import in_shape
from agentrl.inference.backend import Generation, SamplingParams
from agentrl.inference.client import ChatClient
from agentrl.inference.router import Router
from agentrl.inference.session import SessionSettings
from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.supervised.examples import Sample
from agentrl.supervised.tokens import Encoder
from tests.flat import Flat, flat_branches
from tests.inference.fakes import FakeBackend, answer
from tests.inference.test_template_zoo import FILES
from tests.inference.tokenizer_kinds import KINDS

# Template -> the tokens that end an assistant's turn, as their authors document them, and whether calls are made.
ENDS: dict[str, tuple[tuple[str, ...], bool]] = {
    "chatml_tools": (("<|im_end|>",), True),
    "qwen2_5": (("<|im_end|>",), True),
    "qwen3": (("<|im_end|>",), True),
    "qwen3_training": (("<|im_end|>",), True),
    "qwen3_coder": (("<|im_end|>",), True),
    "llama3_1": (("<|eot_id|>",), True),
    "phi3": (("<|end|>",), False),
    "gemma": (("<end_of_turn>",), False),
    "glm4moe": (("<|user|>", "<|observation|>"), True),
    "mistral_v7": (("</s>",), True),
    "mistral_v13": (("</s>",), True),
    "kimi_k2": (("<|im_end|>",), True),
    "granite_4": (("<|end_of_text|>",), True),
    "minimax_m2": (("[e~[",), True),
    "phi_4_mini": (("<|end|>",), True),
}
THINKS = {"qwen3": 1.0, "qwen3_training": 0.5, "minimax_m2": 1.0}  # share of answers with reasoning
KIND_NAMES = ("bytes", "bytes, both strips", "metaspace first")
MARKS = re.compile(r"<\|[A-Za-z_]+\|>|<｜[^｜]+｜>|\[[A-Z_/]{5,}\]|<(?:start|end)_of_turn>|\]~b\]|\[e~\[|\]~!b\[")  # noqa: RUF001
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}},
        },
    }
]
WORDS = ("yes", "the user says", "12 and more", "日本 é", "one\n\ntwo", "it's here.")
SETTINGS = SessionSettings(SamplingParams(max_new_tokens=900), 100_000, locked=True, model="m")


def load(name: str, kind: str, policy: Any = "append") -> ChatTemplate:
    source = FILES[name].read_text()
    tokenizer = KINDS[kind](sorted({*MARKS.findall(source), *ENDS[name][0]}))
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer, policy=policy)


@dataclass
class Talk:
    """A conversation: what stands before each answer, the answers, and which of them are cut off."""

    before: list[list[Message]] = field(default_factory=list)
    answers: list[Message] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)

    def messages(self, turns: int) -> list[Message]:
        """All messages up to the answer of this turn."""
        pairs = zip(self.before[:turns], self.answers[:turns], strict=True)
        return [message for before, said in pairs for message in (*before, said)]


def call(call_id: str, value: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": {"a": value}}}


def talk(rng: random.Random, name: str) -> Talk:
    """Draws a conversation of users' messages, calls, results and answers."""
    found, waiting = Talk(), 0
    for turn in range(4):
        before: list[Message] = [{"role": "user", "content": rng.choice(WORDS)}]
        if waiting:
            last = found.answers[-1]["tool_calls"]
            before = [
                {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": rng.choice(WORDS)}
                for call in last
            ]
        elif turn == 0 and name not in ("gemma",) and rng.random() < 0.5:
            before.insert(0, {"role": "system", "content": "Be brief."})
        said: Message = {"role": "assistant", "content": rng.choice(WORDS)}
        waiting = 0
        if ENDS[name][1] and rng.random() < 0.5 and turn < 3:
            waiting = 1 if name.startswith("llama") else rng.randint(1, 2)
            ids = [f"functions.add:{n}" if name == "kimi_k2" else f"call{turn}000{n}" for n in range(waiting)]
            calls = [call(one, rng.choice(WORDS[:3])) for one in ids]
            said = {"role": "assistant", "content": "", "tool_calls": calls}
        if rng.random() < THINKS.get(name, 0):
            said["reasoning_content"] = rng.choice(WORDS)
        found.before.append(before)
        found.answers.append(said)
        found.cut.append(not waiting and turn > 0 and rng.random() < 0.3)
    found.before.append([{"role": "user", "content": "end"}])
    return found


@dataclass
class Expected:
    """Ids of a whole conversation, and for each answer the places of its ids; its end comes last."""

    ids: list[int]
    spans: list[list[int]]

    def flat(self, cut: Sequence[bool], since: int = 0) -> tuple[list[int], list[int]]:
        """Ids up to the last sampled one and their loss mask; answers before ``since`` are not trained."""
        sampled = {
            place
            for turn, span in enumerate(self.spans)
            if turn >= since
            for place in (span[:-1] if cut[turn] else span)
        }
        size = max(sampled) + 1
        return self.ids[:size], [int(place in sampled) for place in range(size)]


def rendered(template: ChatTemplate, messages: list[Message], tools: Any, *, generation: bool) -> str:
    return template.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation, tools=tools or None
    )


def reference(
    template: ChatTemplate, name: str, given: Talk, turns: int, tools: Any, since: int = 0
) -> Expected | None:
    """Encodes a conversation of this many answers as a whole.

    Returns:
        The expected ids; ``None`` where no ids can be equal to those of single turns: the template renders an earlier
        turn differently, or a token crosses the border of an answer.
    """
    messages = given.messages(turns)
    whole = rendered(template, messages, tools, generation=False)
    last = rendered(template, [*given.messages(turns - 1), *given.before[turns - 1]], tools, generation=True)
    if _end(whole, len(last), name) == len(whole.rstrip()) and not whole.rstrip().endswith(ENDS[name][0]):
        whole = rendered(template, [*messages, *given.before[turns]], tools, generation=True)
    tokenizer: Any = template.tokenizer
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in encoded["offset_mapping"]]
    spans = []
    for turn in range(turns):
        prompt = rendered(template, [*given.messages(turn), *given.before[turn]], tools, generation=True)
        if turn < since:
            spans.append([])
            continue
        said = rendered(template, given.messages(turn + 1), tools, generation=False)
        if not whole.startswith(prompt) or not whole.startswith(said[: _end(said, len(prompt), name)]):
            return None
        end = _end(whole, len(prompt), name)
        span = [place for place, start in enumerate(starts) if len(prompt) <= start < end]
        if not span or encoded["input_ids"][: span[0]] != tokenizer.encode(prompt, add_special_tokens=False):
            return None  # a token crosses the border
        spans.append(span)
    return Expected(encoded["input_ids"], spans)


def _end(text: str, start: int, name: str) -> int:
    """Position after the first end of a turn from a position on; the end of the text, if what follows ends the turn."""
    found = [at + len(word) for word in ENDS[name][0] if (at := text.find(word, start)) >= 0]
    return min(found, default=len(text.rstrip()))


class Player:
    """A server that says the planned answers, and an agent that has the planned conversation.

    Args:
        template: Template of the session.
        name: Its name.
        given: The planned conversation.
        tools: Tools of all calls.
    """

    def __init__(self, template: ChatTemplate, name: str, given: Talk, tools: Any) -> None:
        self.template, self.name, self.given, self.tools = template, name, given, tools
        self.turn = 0
        self.sample = 0
        self.other: list[int] = []  # what a second sample of each call says

    def answer(self, ids: list[int], params: SamplingParams) -> Generation:
        self.sample += 1
        if self.sample == 2:
            return answer(self.other)
        expected = reference(self.template, self.name, self.given, self.turn + 1, self.tools, since=self.turn)
        assert expected is not None
        span = [expected.ids[place] for place in expected.spans[-1]]
        return answer(span[:-1], finish="length") if self.given.cut[self.turn] else answer(span)

    async def play(self, session: Any, *, n: int = 1, turns: int = 4) -> None:
        messages: list[Any] = []
        options = {"tools": self.tools} if self.tools else {}
        for self.turn in range(turns):
            before = [dict(message) for message in self.given.before[self.turn]]
            made = getattr(messages[-1], "tool_calls", None) if messages else None
            for message, one in zip(before, made or (), strict=False):
                message["tool_call_id"] = one.id
            messages += before
            self.sample = 0
            reply = await session.chat.completions.create(messages=messages, n=n, **options)
            messages.append(reply.choices[0].message)


def client(template: ChatTemplate, answers: Any) -> Any:
    llm, _ = ChatClient(Router([FakeBackend(answers)]), template, SETTINGS, SETTINGS).acquire(evaluation=False, seed=1)
    return llm


def pairs(flats: list[Flat]) -> list[tuple[list[int], list[int]]]:
    return [(flat.token_ids, flat.loss_mask) for flat in flats]


def segments(given: Talk, turns: int) -> list[int]:
    """Turns at which a template that rewrites is rendered again: those that a user's message begins."""
    return [turn for turn in range(turns) if turn == 0 or given.before[turn][0]["role"] != "tool"]


def tools_of(name: str) -> list[dict[str, Any]]:
    return TOOLS if ENDS[name][1] else []


def drawn(name: str, kind: str) -> Talk:
    return talk(random.Random(f"{name} {kind}"), name)


COMPARED: set[tuple[str, str]] = set()  # what `test_a_session_...` could compare, see the last test


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("kind", KIND_NAMES)
async def test_a_session_has_the_ids_and_the_mask_of_the_whole(kind: str, name: str) -> None:
    template, given, tools = load(name, kind), drawn(name, kind), tools_of(name)
    expected = reference(template, name, given, 4, tools)
    if expected is None:
        return
    COMPARED.add((kind, name))
    player = Player(template, name, given, tools)
    session = client(template, player.answer).session()
    await player.play(session)
    assert pairs(flat_branches(session.trajectory)) == [expected.flat(given.cut)]


@pytest.mark.parametrize("name", ["qwen3", "glm4moe"])
@pytest.mark.parametrize("kind", KIND_NAMES)
async def test_with_branches_each_users_message_begins_a_whole_of_its_own(kind: str, name: str) -> None:
    template, given, tools = load(name, kind, "branch"), drawn(name, kind), tools_of(name)
    starts = segments(given, 4)
    expected = []
    for start, end in zip(starts, [*starts[1:], 4], strict=True):
        whole = reference(template, name, given, end, tools, since=start)
        assert whole is not None
        expected.append(whole.flat(given.cut, start))
    player = Player(template, name, given, tools)
    session = client(template, player.answer).session()
    await player.play(session)
    assert pairs(flat_branches(session.trajectory)) == expected


@pytest.mark.parametrize("name", ["qwen2_5", "phi3", "glm4moe"])
@pytest.mark.parametrize("kind", KIND_NAMES)
async def test_second_samples_are_branches_and_each_sampled_id_is_trained_once(kind: str, name: str) -> None:
    template, given, tools = load(name, kind), drawn(name, kind), tools_of(name)
    expected = reference(template, name, given, 4, tools)
    assert expected is not None
    player = Player(template, name, given, tools)
    player.other = [*template.encode_after("a", "other"), template.eos_id]
    session = client(template, player.answer).session()
    await player.play(session, n=2)
    ids, mask = expected.flat(given.cut)
    flats = flat_branches(session.trajectory)
    others = [[*ids[: span[0]], *player.other] for span in expected.spans]
    assert sorted(flat.token_ids for flat in flats) == sorted([ids, *others])
    assert sum(sum(flat.loss_mask) for flat in flats) == sum(mask) + 4 * len(player.other)
    for flat in flats:
        if flat.token_ids != ids:
            assert flat.loss_mask[-len(player.other) :] == [1] * len(player.other)
        own = mask if flat.token_ids == ids else [*mask[: len(flat.token_ids) - len(player.other)], *[1] * 9]
        assert all(one <= other for one, other in zip(flat.loss_mask, own, strict=False))


@pytest.mark.parametrize("name", ["qwen2_5", "mistral_v13"])
async def test_roles_that_talk_at_once_keep_their_own_ids(name: str) -> None:
    template, tools = load(name, "bytes"), tools_of(name)
    talks = [talk(random.Random(seed), name) for seed in (1, 2, 3)]
    for at, given in enumerate(talks):
        given.before[0][-1]["content"] = f"talk {at}"
    players = [Player(template, name, given, tools) for given in talks]
    heads = [template.first(given.before[0], tools) for given in talks]

    def answers(ids: list[int], params: SamplingParams) -> Generation:
        (player,) = (one for one, head in zip(players, heads, strict=True) if ids[: len(head)] == head)
        return player.answer(ids, params)

    llm = client(template, answers)
    await asyncio.gather(*(one.play(llm.session(f"role {at}")) for at, one in enumerate(players)))
    for at, given in enumerate(talks):
        expected = reference(template, name, given, 4, tools)
        assert expected is not None
        assert pairs(flat_branches(llm.session(f"role {at}").trajectory)) == [expected.flat(given.cut)]


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("kind", KIND_NAMES)
def test_learned_examples_have_the_ids_and_the_mask_of_the_whole(kind: str, name: str) -> None:
    template, given, tools = load(name, kind), drawn(name, kind), tools_of(name)
    sample = Sample(shaped(given.messages(4)), 0, tools)
    expected = reference(template, name, given, 4, tools)
    if expected is None:
        prompts = [rendered(template, [*given.messages(n), *given.before[n]], tools, generation=True) for n in range(4)]
        whole = rendered(template, given.messages(4), tools, generation=False)
        if not all(whole.startswith(prompt) for prompt in prompts):
            with pytest.raises(TemplateError, match="renders earlier turns differently"):
                Encoder(template).sample(sample)
        return
    encoded = Encoder(template).sample(sample)
    assert (encoded.ids, encoded.learned) == expected.flat([False] * 4)


def shaped(messages: list[Message]) -> list[Message]:
    return [in_shape(message) for message in messages]


def test_the_reference_compares_most() -> None:
    """Runs after the sessions of this file; alone it has nothing to look at."""
    assert not COMPARED or len(COMPARED) >= 0.85 * len(ENDS) * len(KIND_NAMES)
