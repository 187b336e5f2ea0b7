"""The end of a turn: found in every template, sent to every server, kept once; text where no token ends a turn."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from agentrl.config.load import load_recipe
from agentrl.core.episode import Message
from agentrl.inference.backend import Backend, SamplingParams
from agentrl.inference.kinds.embedded import EmbeddedBackend
from agentrl.inference.kinds.sglang import SGLangBackend
from agentrl.inference.kinds.vllm import VLLMBackend
from agentrl.inference.options import ChatOptions
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.assemble import make_client
from tests.flat import flat_branches
from tests.inference.fakes import FakeBackend, answer
from tests.inference.scripted import scripted
from tests.inference.test_template_zoo import FILES
from tests.inference.tokenizer_kinds import KINDS
from tests.tiny import CHATML

ENDS = {  # of a turn of text, and of a turn of tool calls
    "chatml_tools": ("<|im_end|>", "<|im_end|>"),
    "cohere": ("<|END_OF_TURN_TOKEN|>", None),
    "cohere2": ("<|END_OF_TURN_TOKEN|>", None),
    "deepseek_r1_distill": ("<｜end▁of▁sentence｜>", None),  # noqa: RUF001
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>", None),
    "gemma4_v2": ("<turn|>", "<turn|>"),
    "gemma4_v5": ("<turn|>", "<|tool_response>"),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "lfm2_2_5": ("<|im_end|>", "<|im_end|>"),
    "llama3": ("<|eot_id|>", None),
    "llama3_1": ("<|eot_id|>", "<|eot_id|>"),
    "muse_glimmer": ("<|eot|>", "<|eot|>"),
    "nemotron_3_nano": ("<|im_end|>", "<|im_end|>"),
    "phi3": ("<|end|>", None),
    "qwen2_5": ("<|im_end|>", "<|im_end|>"),
    "qwen3": ("<|im_end|>", "<|im_end|>"),
    "qwen3_5_think": ("<|im_end|>", "<|im_end|>"),
}
INSIDE = [  # special tokens that end nothing
    *(
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|END_THINKING|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|start|>",
    ),
    *("<tool_call|>", "<|tool_call_end|>", "<|system|>", "<|assistant|>", "<|im_start|>", "<|end_header_id|>"),
    "<|start|>",
]
PLAIN = (
    "{% for m in messages %}{{ {'user': 'User', 'assistant': 'Bot', 'tool': 'Tool'}[m.role] + ': ' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Bot:{% endif %}"
)
USER: Message = {"role": "user", "content": "the user"}
SETTINGS = SessionSettings(SamplingParams(max_new_tokens=20), 10_000, locked=True, model="m")


def load(source: str, special: list[str], kind: str = "bytes", **more: Any) -> ChatTemplate:
    """The template under a tokenizer whose own end is ``</s>``, as a base model's."""
    tokenizer = KINDS[kind](special)
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer, policy="append", **more)


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_turn_is_found_where_the_model_names_another(name: str) -> None:
    source = FILES[name].read_text()
    known = dict.fromkeys(end for ends in ENDS.values() for end in ends if end)
    template = load(source, [word for word in (*known, *INSIDE) if word in source])
    tokenizer: Any = template.tokenizer
    ids = tokenizer.convert_tokens_to_ids
    ends = tuple(None if end is None else ids(end) for end in ENDS[name])
    assert (template.turn_ends.closing, template.turn_ends.calling) == ends
    assert template.stop_ids == tuple(dict.fromkeys(end for end in ends if end is not None))
    assert template.stop_texts == () and not any("ends an assistant's turn" in note for note in template.notes)


def test_an_end_that_the_model_names_is_not_sent_again() -> None:
    """Cohere's models end at the second of two tokens; a stop at the first would lose the second."""
    tokenizer = KINDS["bytes"](["<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"])
    tokenizer.chat_template = FILES["cohere2"].read_text()
    assert ChatTemplate(tokenizer, end_ids=[tokenizer.convert_tokens_to_ids("<|END_OF_TURN_TOKEN|>")]).stop_ids == ()


def test_a_token_between_calls_ends_no_turn() -> None:
    source = (
        "{% for m in messages %}<|r|>{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}<|c|>{% endfor %}{% endfor %}"
    )
    template = load(source, ["<|r|>", "<|c|>"])
    tokenizer: Any = template.tokenizer
    assert tokenizer.convert_ids_to_tokens(list(template.stop_ids)) == ["<|r|>"]


GENERATED = {
    "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 7, None], [-0.25, 9, None]]},
    "choices": [
        {
            "token_ids": [7, 9],
            "finish_reason": "stop",
            "weight_versions": [{"version": "0", "start": 0, "end": 2}],
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}], "token_logprobs": [-0.5, -0.25]},
        }
    ],
}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("made", [EmbeddedBackend, SGLangBackend, VLLMBackend])
async def test_every_server_is_told_the_ends_and_its_answer_keeps_them(
    made: Callable[[str, float], Backend], old: bool
) -> None:
    sent: list[Any] = []

    def handler(path: str, body: bytes) -> web.Response:
        if old and path == "/inference/v1/generate":
            return web.Response(status=404)
        if path in ("/v1/models", "/weight_info"):
            return web.json_response({"data": [{"id": "m"}], "weight_version": "0"})
        sent.append(json.loads(body))
        return web.json_response(GENERATED)

    params = SamplingParams(max_new_tokens=4, stop=("\n\nUser:",), stop_token_ids=(9, 8))
    async with scripted(handler, made) as server:
        found = await server.generate([1, 2], params, request_id="r")
    (body,) = sent
    told = body.get("sampling_params", body)
    assert (told["stop"], told["stop_token_ids"]) == (["\n\nUser:"], [9, 8])
    assert (found.token_ids, found.finish_reason) == ([7, 9], "stop")


async def test_a_sampled_end_is_trained_and_stands_there_once() -> None:
    template = load(CHATML, ["<|im_start|>", "<|im_end|>"])
    (end,) = template.stop_ids
    reply = [*template.encode("yes"), end]
    backend = FakeBackend(lambda ids, params: answer(reply))
    session = ChatSession(backend, template, SETTINGS)
    said = (await session.create(messages=[USER])).choices[0].message
    await session.create(messages=[USER, said, USER])
    assert said.content == "yes"
    (flat,) = flat_branches(session.trajectory)
    assert template.tokenizer.decode(flat.token_ids).count("yes<|im_end|>\n<|im_start|>user") == 1
    assert flat.token_ids == [*template.first([USER, {"role": "assistant", "content": "yes"}, USER]), *reply]
    trained = [token for token, mask in zip(flat.token_ids, flat.loss_mask, strict=True) if mask]
    assert trained == reply * 2


@pytest.mark.parametrize(
    ("source", "stops", "told"),
    [
        (PLAIN, ("\n\nUser:", "\n\nTool:"), r"with no token: answers stop at the text '\\n\\nUser:' or '\\n\\nTool:'"),
        (CHATML, ("<|im_end|>",), r"with '<\|im_end\|>', which is no token of the model's tokenizer \(\d+ ids\)"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", (), "marks no end of an assistant's turn"),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", (), ""),
    ],
)
def test_a_turn_that_no_token_ends_is_told_and_ended_by_text(source: str, stops: tuple[str, ...], told: str) -> None:
    template = load(source, [])
    assert template.stop_texts == stops and template.stop_ids == ()
    assert re.search(told, "; ".join(template.notes)) and bool(template.notes) == bool(told)


@pytest.mark.parametrize("source", [PLAIN, CHATML, CHATML.replace("<|im_end|>", "\n### end")])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("word pieces", "unigram", "Python")])
async def test_text_that_ended_a_turn_is_kept_once_and_the_conversation_goes_on_behind_it(
    kind: str, source: str
) -> None:
    """By itself, in the middle of a token, cut off, or at the model's own end token."""
    template = load(source, [], kind)
    stop = template.stop_texts[0]
    text = f"\n{stop}" if stop.startswith("#") else stop
    replies = [f"yes{text}", f"12.{text} ", "yes more"]
    given = iter(replies)

    def script(ids: list[int], params: SamplingParams) -> Any:
        said = next(given)
        return answer(template.encode_after("a", said), finish="stop" if stop in said else "length")

    backend = FakeBackend(script)
    sampling = replace(SETTINGS.sampling, stop=template.stop_texts)
    session = ChatSession(backend, template, replace(SETTINGS, sampling=sampling))
    messages: list[Any] = []
    for _ in replies:
        messages.append(USER)
        messages.append((await session.create(messages=messages)).choices[0].message)
    backend.script = lambda ids, params: answer([*template.encode_after("a", "no"), template.eos_id])
    await session.create(messages=[*messages, USER])
    prompt = template.tokenizer.decode(backend.requests[-1][0])
    said = [message.content.rstrip() for message in messages if not isinstance(message, dict)]
    assert said == ["yes", "12.", "yes more"]
    whole = [m if isinstance(m, dict) else {"role": "assistant", "content": m.content.rstrip()} for m in messages]
    rendered = template.render([*whole, USER], generation=True)
    assert prompt.replace(" ", "") == rendered.replace("Bot: ", "Bot:").replace(" ", "")


@pytest.mark.parametrize("source", [PLAIN, CHATML])
def test_a_users_text_that_looks_like_an_end_is_not_taken_for_one(source: str) -> None:
    """All up to a struck-out word was lost, as if the answer's end stood there."""
    template = load(source, [])
    more: Message = {"role": "user", "content": "<s>the user</s> says more"}
    added = template.following([more], answered={}, answer_ids=[*template.encode("yes"), template.eos_id])
    assert "<s>the user</s> says more" in template.tokenizer.decode(added)


def test_an_agents_own_stop_does_not_replace_the_end_of_the_turn() -> None:
    base = SamplingParams(max_new_tokens=4, stop=("\n\nUser:",))
    for given, expected in (({}, ()), ({"stop": "x"}, ("x",)), ({"stop": ["x", "y"], "max_tokens": 2}, ("x", "y"))):
        assert ChatOptions.read(given).sampling(base, locked=True).stop == ("\n\nUser:", *expected)


def test_the_text_that_ends_a_turn_is_sent_in_training_and_evaluation(tmp_path: Any) -> None:
    tokenizer = KINDS["bytes"]([])
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(tmp_path)
    client = make_client(load_recipe("arithmetic_grpo", [], device="cpu"), tmp_path, [])
    assert {client._settings[one].sampling.stop for one in (False, True)} == {("\n\nUser:", "\n\nTool:")}
