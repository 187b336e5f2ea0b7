# ruff: noqa: RUF001 - the wide bars are DeepSeek's own
"""Every text template that TRL ships, and ours: conversations with tools are continued as it renders them."""

import random
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentrl.core.episode import Message
from agentrl.core.extras import install_hint
from agentrl.inference.backend import SamplingParams
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate, TemplateError, built_in_templates, training_template
from tests.flat import flat_branches
from tests.inference.fakes import FakeBackend, answer
from tests.inference.test_template import REWRITING

_TRL = find_spec("trl")
assert _TRL is not None and _TRL.origin is not None, (
    f"TRL's templates are this test's material: {install_hint('train')}"
)
FOLDER = Path(_TRL.origin).parent / "chat_templates"
PICTURES = {"idefics3", "llava_next", "smolvlm"}  # take lists of parts only; agentrl's messages are text
NO_TOOLS = re.compile(
    r"cohere|deepseek_r1|^gemma(3|_|$)|lfm2(_training)?$|llama3(_training)?$|phi3|qwen2_5_vl|idefics|llava|smolvlm"
)
FILES = {file.stem: file for file in FOLDER.glob("*.jinja") if file.stem.removesuffix("_training") not in PICTURES}
FILES |= built_in_templates()
NAMES = sorted(FILES)
ENDS = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|end_of_text|>",
    "<|eot|>",
    "<turn|>",
    "</s>",
    "<|endoftext|>",
    "<｜end▁of▁sentence｜>",
    "<|user|>",
    "<|observation|>",
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}},
        },
    }
    for name in ("add", "look_up")
]


def load(name: str) -> ChatTemplate:
    """The template on a byte tokenizer that knows the end-of-turn tokens which the template names."""
    source = FILES[name].read_text()
    ends = [end for end in ENDS if end in source] or ["<EOS>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bytewise.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=ends[0], bos_token="<BOS>")
    tokenizer.add_special_tokens({"additional_special_tokens": ends[1:]})
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer, end_ids=tokenizer.convert_tokens_to_ids(ends), policy="append")


def conversation(rng: random.Random, template: str) -> list[list[Message]]:
    """What comes before each answer; answers are put between by the caller."""
    single = template.startswith("llama3")  # these take one call at a time
    turns: list[list[Message]] = [[{"role": "user", "content": "Hello, 1 + 1?"}]]
    for _ in range(3):
        if NO_TOOLS.search(template) or rng.random() < 0.4:
            turns.append([{"role": "user", "content": rng.choice(["more", "and ünïcode", "a\nb"])}])
            continue
        count = 1 if single else rng.randint(1, 3)
        names = [rng.choice(("add", "look_up")) for _ in range(count)]
        turns.append(
            [
                {"role": "tool", "tool_call_id": f"call0000{number}", "name": tool, "content": f"result {number}"}
                for number, tool in enumerate(names)
            ]
        )
    return turns


def said_before(turn: list[Message], as_text: bool) -> Message:
    """An assistant message that a turn may follow."""
    if turn[0]["role"] != "tool":
        return {"role": "assistant", "content": "yes"}
    calls = [
        {
            "id": result["tool_call_id"],
            "type": "function",
            "function": {"name": result["name"], "arguments": '{"a": "b"}' if as_text else {"a": "b"}},
        }
        for result in turn
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_added_is_what_the_template_renders_there(name: str, seed: int) -> None:
    template = load(name)
    messages: list[Message] = []
    for turn in conversation(random.Random(seed), name):
        if not messages:
            messages = list(turn)
            assert template.text(template.first(messages, TOOLS), special=True)
            continue
        answered = said_before(turn, as_text=name.startswith("deepseek"))
        added = template.following(turn, answered=answered, last_id=None, tools=TOOLS)  # the end of turn is put in
        if name.startswith(
            "deepseekv3"
        ):  # it marks the results of a conversation's first calls only: compare with those
            messages = messages[:1]
        messages += [answered, *turn]
        whole = template.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, tools=TOOLS
        )
        text = template.tokenizer.decode(added, skip_special_tokens=False)
        assert whole.endswith(text) and all(m["content"].split("\n")[0] in text for m in turn)


@pytest.mark.parametrize("name", [name for name in NAMES if NO_TOOLS.search(name)])
def test_a_template_without_tool_calls_says_so(name: str) -> None:
    turn: list[Message] = [{"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "2"}]
    with pytest.raises(TemplateError, match="does not render tool calls"):
        load(name).following(turn, answered=said_before(turn, as_text=False), last_id=None, tools=TOOLS)


def test_trls_training_template_keeps_what_qwen3s_own_drops() -> None:
    own = load("qwen3")
    follow: list[Message] = [{"role": "user", "content": "more"}]
    assert own.rewrites(follow)
    tokenizer: Any = own.tokenizer
    tokenizer.chat_template = training_template(tokenizer)
    assert not ChatTemplate(tokenizer).rewrites(follow)


def test_a_template_that_trl_does_not_know_is_refused() -> None:
    tokenizer: Any = load("qwen3").tokenizer
    tokenizer.chat_template = REWRITING
    with pytest.raises(TemplateError, match=r"model\.chat_template=training"):
        training_template(tokenizer)


@pytest.mark.parametrize("name", NAMES)
async def test_ids_only_grow_and_exactly_the_sampled_ones_are_trained(name: str) -> None:
    template = load(name)
    rng = random.Random(name)
    replies: list[list[int]] = []

    def script(ids: list[int], params: SamplingParams) -> Any:
        closed = rng.random() < 0.7
        reply = [*template.tokenizer.encode("no it is", add_special_tokens=False)][: rng.randint(0, 8)]
        replies.append([*reply, template.eos_id] if closed else reply or [5])
        return answer(replies[-1], finish="stop" if closed else "length")

    backend = FakeBackend(script)
    settings = SessionSettings(SamplingParams(max_new_tokens=20), 1_000_000, locked=True, model="m")
    session = ChatSession(backend, template, settings)
    messages: list[Any] = []
    for turn in ("one", "two", "three", "four"):
        messages.append({"role": "user", "content": turn})
        reply = await session.create(messages=messages)
        messages.append(reply.choices[0].message)
    for (before, _), sampled, (after, _) in zip(backend.requests, replies, backend.requests[1:], strict=False):
        assert after[: len(before) + len(sampled)] == before + sampled
    (flat,) = flat_branches(session.trajectory)
    trained = [token for token, mask in zip(flat.token_ids, flat.loss_mask, strict=True) if mask]
    assert trained == [token for reply in replies for token in reply]
