"""Experts that servers name: read from their answers, and kept with the tokens that they belong to."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agentrl.core.experts import ExpertRows
from agentrl.inference.backend import Generation, InferenceError, SamplingParams
from agentrl.inference.kinds.sglang import SGLangBackend
from agentrl.inference.kinds.vllm import VLLMBackend
from agentrl.inference.routed_experts import read_array, read_numbers, rows_wanted
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate
from tests.inference.fakes import FakeBackend

WIDTH = 4
SETTINGS = SessionSettings(SamplingParams(max_new_tokens=20), 500, locked=True, model="m", experts=True)


def sglang(experts: NDArray[Any]) -> str:
    """As SGLang 0.5.23 encodes a tensor of an answer: int32, without its shape."""
    return base64.b64encode(experts.astype(np.int32).tobytes()).decode()


def vllm(experts: NDArray[Any]) -> str:
    """As vLLM 0.32 encodes an array of an answer: a NumPy file."""
    with io.BytesIO() as buffer:
        np.save(buffer, experts, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("experts", [4, 255, 256, 384])
def test_both_encodings_are_read(experts: int) -> None:
    """Layers without experts have rows of zeros; vLLM's numbers are as narrow as they can be."""
    drawn = np.random.default_rng(0).integers(0, experts, (5, 3, 2))
    drawn[0] = experts - 1
    expected = ExpertRows.of(drawn.reshape(5, 6))
    assert read_numbers(sglang(drawn), 5, "s") == expected
    assert read_array(vllm(drawn.astype(np.uint8 if experts <= 256 else np.uint16)), 5, "s") == expected
    assert (expected.array() == drawn.reshape(5, 6)).all()
    assert expected.size == (1 if experts <= 255 else 2)


@pytest.mark.parametrize("read", [read_numbers, read_array])
@pytest.mark.parametrize("data", [None, "", "%%%", base64.b64encode(b"abc").decode()])
def test_an_answer_without_its_experts_is_refused(read: Any, data: str | None) -> None:
    with pytest.raises(InferenceError, match="experts"):
        read(data, 5, "http://server")


def test_another_number_of_rows_is_refused() -> None:
    drawn = np.zeros((4, 3, 2), np.uint8)
    with pytest.raises(InferenceError, match="24 numbers for 5 tokens"):
        read_numbers(sglang(drawn), 5, "s")
    with pytest.raises(InferenceError, match="4 rows for 5 tokens"):
        read_array(vllm(drawn), 5, "s")
    assert read_numbers(None, 0, "s") is read_array(None, 0, "s") is None


def test_rows_are_those_of_computed_tokens() -> None:
    assert [rows_wanted(10, 3, 0), rows_wanted(10, 3, 10), rows_wanted(10, 1, 10)] == [12, 2, 0]


class Posted:
    """Answers a kind's calls, and remembers their bodies."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer, self.bodies = answer, list[dict[str, Any]]()

    async def post(self, path: str, body: dict[str, Any], **how: Any) -> dict[str, Any]:
        self.bodies.append(body)
        return self.answer


async def test_sglang_is_asked_from_a_position_and_its_rows_belong_to_the_computed_tokens() -> None:
    drawn = np.arange(4 * WIDTH).reshape(4, WIDTH)
    meta = {"output_token_logprobs": [[-1.0, 5], [-1.0, 6]], "finish_reason": {"type": "stop"}}
    backend = SGLangBackend("http://s", 1.0)
    backend._http = posted = Posted({"meta_info": meta | {"routed_experts": sglang(drawn)}})  # type: ignore[assignment]
    found = await backend.generate([1, 2, 3], SamplingParams(4, experts_from=0), request_id="a")
    assert found.experts == ExpertRows.of(drawn)
    assert (posted.bodies[0]["return_routed_experts"], posted.bodies[0]["routed_experts_start_len"]) == (True, 0)
    plain = await backend.generate([1, 2, 3], SamplingParams(4), request_id="b")
    assert plain.experts is None and "return_routed_experts" not in posted.bodies[1]
    backend._http = Posted({"meta_info": meta})  # type: ignore[assignment]
    with pytest.raises(InferenceError, match="--enable-return-routed-experts"):
        await backend.generate([1, 2, 3], SamplingParams(4, experts_from=0), request_id="c")


async def test_vllm_is_asked_from_a_position_and_its_rows_belong_to_the_computed_tokens() -> None:
    drawn = np.arange(2 * WIDTH, dtype=np.uint8).reshape(2, 2, WIDTH // 2)
    choice = {
        "token_ids": [5, 6], "finish_reason": "stop", "routed_experts": vllm(drawn),
        "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
        "weight_versions": [{"version": "0", "start": 0, "end": 2}],
    }  # fmt: skip
    backend = VLLMBackend("http://v", 1.0)
    backend._http = posted = Posted({"choices": [choice]})  # type: ignore[assignment]
    found = await backend.generate([1, 2, 3], SamplingParams(4, experts_from=2), request_id="a")
    assert found.experts == ExpertRows.of(drawn.reshape(2, WIDTH))
    assert posted.bodies[0]["sampling_params"]["routed_experts_prompt_start"] == 2
    backend._http = Posted({"choices": [choice | {"routed_experts": None}]})  # type: ignore[assignment]
    with pytest.raises(InferenceError, match="--enable-return-routed-experts"):
        await backend.generate([1, 2, 3], SamplingParams(4, experts_from=2), request_id="b")


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


def experts_at(positions: range) -> NDArray[np.int64]:
    """Experts that tell their position."""
    return np.array([[position % 200] * WIDTH for position in positions]).reshape(-1, WIDTH)


def answering(template: ChatTemplate, *parts: tuple[int, str]) -> FakeBackend:
    """Answers of so many tokens and their finish reasons, with the experts of all tokens that were asked for."""
    left = iter(parts)

    def script(ids: list[int], params: SamplingParams) -> Generation:
        count, finish = next(left)
        said = [40 + n for n in range(count)]
        if finish == "stop":
            said[-1] = template.eos_id
        assert params.experts_from is not None
        rows = range(params.experts_from, len(ids) + count - 1)
        experts = ExpertRows.of(experts_at(rows)) if count and len(rows) else None
        return Generation(said, [-1.0] * count, [0] * count, finish, experts)  # type: ignore[arg-type]

    return FakeBackend(script)


async def test_a_conversation_asks_for_each_token_once_and_keeps_its_experts(template: ChatTemplate) -> None:
    backend = answering(template, (3, "stop"), (5, "stop"))
    session = ChatSession(backend, template, SETTINGS)
    history: list[dict[str, Any]] = [{"role": "user", "content": "one"}]
    reply = await session.create(messages=history)
    history += [
        {"role": "assistant", "content": reply.choices[0].message.content}, {"role": "user", "content": "two"}
    ]  # fmt: skip
    await session.create(messages=history)
    first = len(backend.requests[0][0])
    assert [params.experts_from for _, params in backend.requests] == [0, first + 2], "the end token was not computed"
    position, nodes = 0, session.trajectory.nodes
    for number, node in enumerate(nodes):
        assert node.experts is not None
        expected = experts_at(range(position, position + len(node.token_ids)))
        if number == len(nodes) - 1:
            expected[-1] = -1  # nothing computed the last token
        assert (node.experts.array() == expected).all()
        position += len(node.token_ids)


async def test_an_answer_that_was_aborted_keeps_the_experts_of_both_parts(template: ChatTemplate) -> None:
    backend = answering(template, (0, "abort"), (3, "abort"), (2, "stop"))
    session = ChatSession(backend, template, SETTINGS)
    await session.create(messages=[{"role": "user", "content": "one"}])
    prompt = len(backend.requests[0][0])
    assert [params.experts_from for _, params in backend.requests] == [0, 0, prompt + 2]
    node = session.trajectory.nodes[-1]
    assert node.experts is not None
    assert node.experts.array()[:, 0].tolist() == [*range(prompt, prompt + 4), -1]


async def test_samples_of_one_turn_share_the_first_experts_of_their_prompt(template: ChatTemplate) -> None:
    backend = answering(template, (3, "stop"), (4, "stop"))
    session = ChatSession(backend, template, SETTINGS)
    await session.create(messages=[{"role": "user", "content": "one"}], n=2)
    prompt, *answers = session.trajectory.nodes
    assert prompt.experts is not None and len(prompt.experts.unknown) == 0
    assert [one.experts.unknown.tolist() for one in answers if one.experts is not None] == [[2], [3]]


async def test_they_are_no_part_of_the_record(template: ChatTemplate) -> None:
    session = ChatSession(answering(template, (3, "stop")), template, SETTINGS)
    await session.create(messages=[{"role": "user", "content": "one"}])
    assert "experts" not in session.trajectory.model_dump_json()
