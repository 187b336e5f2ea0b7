"""Sessions for agents written with an SDK: openai's options, and openai's own client on a session."""

import asyncio
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from agentrl.core.agent import Chat, ContextOverflow, InferenceError, inference_error
from agentrl.core.episode import StopReason
from agentrl.core.workflow import LLM, Outcome
from agentrl.inference.session import ChatSession
from agentrl.inference.template import ChatTemplate, TemplateError
from tests.inference.fakes import FakeBackend, answer
from tests.inference.kinds.test_openai import USER, choices, serving
from tests.inference.test_session import HELLO, ids_of, make_session
from tests.rollout.test_episode_runner import Scripted, episode_of

NOTHING: list[dict[str, Any]] = [
    {"timeout": 30},
    {"timeout": openai.Timeout(30.0, connect=5.0)},
    {"timeout": openai.NOT_GIVEN},
    {"extra_headers": {"X-Title": "me"}},
    {"extra_query": {"api-version": "1"}},
    {"user": "me"},
    {"metadata": {"a": "b"}},
    {"store": True},
    {"service_tier": "flex"},
    {"safety_identifier": "x"},
    {"prompt_cache_key": "k"},
    {"prompt_cache_retention": "24h"},
    {"extra_body": {}},
    {"extra_body": {"metadata": {}, "min_p": 0.0, "chat_template_kwargs": {}}},
    {"frequency_penalty": 0, "presence_penalty": 0.0, "modalities": ["text"]},
    {"logprobs": True, "top_logprobs": 0},
    {"parallel_tool_calls": False},
    {"temperature": 1.0, "top_p": 1.0},
]


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


def saying(template: ChatTemplate, text: str = "abc", **more: Any) -> ChatSession:
    return make_session(template, lambda ids, params: answer([*ids_of(template, text), template.eos_id]), **more)


@pytest.mark.parametrize("options", NOTHING)
async def test_options_that_change_no_answer_pass_in_training(template: ChatTemplate, options: dict[str, Any]) -> None:
    for client in (saying(template), saying(template).client()):
        reply = await client.chat.completions.create(messages=[HELLO], model="any", **options)
        assert reply.choices[0].message.content == "abc"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"temperature": 0.5}, "behavior logprobs wrong"),
        ({"extra_body": {"top_k": 3}}, "behavior logprobs wrong"),
        ({"frequency_penalty": 0.5}, "changes the sampling distribution"),
        ({"extra_body": {"min_p": 0.1}}, "changes the sampling distribution"),
        ({"logit_bias": {"5": -100}}, "changes the sampling distribution"),
        ({"response_format": {"type": "json_object"}}, "evaluation only"),
        ({"reasoning_effort": "low"}, r"inference\.chat_template_kwargs\.reasoning_effort"),
        (
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
            r"chat_template_kwargs\.enable_thinking",
        ),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
        ({"modalities": ["text", "audio"]}, "text alone"),
        ({"verbosity": "low"}, "verbosity"),
    ],
)
async def test_what_changes_the_distribution_is_refused_with_the_reason(
    template: ChatTemplate, options: dict[str, Any], reason: str
) -> None:
    session = saying(template)
    with pytest.raises((TypeError, ValueError), match=reason):
        await session.create(messages=[HELLO], **options)
    with pytest.raises(openai.BadRequestError, match=reason):
        await session.client().chat.completions.create(messages=[HELLO], model="any", **options)
    assert not session.trajectory.nodes


async def test_the_runs_own_variables_of_the_template_pass(tiny_model: Path) -> None:
    template = ChatTemplate.from_folder(tiny_model, variables={"reasoning_effort": "low"})
    await saying(template).create(messages=[HELLO], reasoning_effort="low")
    with pytest.raises(ValueError, match="reasoning_effort='high'"):
        await saying(template).create(messages=[HELLO], reasoning_effort="high")


@pytest.mark.parametrize("of_the_client", [False, True])
async def test_a_call_that_takes_longer_than_its_timeout_raises_openais_error(
    template: ChatTemplate, of_the_client: bool
) -> None:
    session = saying(template)
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    backend.held = asyncio.Event()
    start = time.monotonic()
    with pytest.raises(openai.APITimeoutError):
        if of_the_client:
            await session.client().with_options(timeout=0.01).chat.completions.create(messages=[HELLO], model="any")
        else:
            await session.create(messages=[HELLO], timeout=0.01)
    assert time.monotonic() - start < 5 and session.last_sampled is None
    backend.held.set()
    reply = await session.create(messages=[HELLO], timeout=60)
    assert reply.choices[0].message.content == "abc"


async def test_an_api_that_takes_longer_than_the_calls_timeout_raises_openais_error() -> None:
    async with serving(
        choices({"role": "assistant", "content": "1"}), choices({"role": "assistant", "content": "2"})
    ) as (llm, _, _sent):
        session: Any = llm.session()
        with pytest.raises(openai.APITimeoutError):
            await session.create(messages=[USER], timeout=1e-9)


async def test_a_client_records_the_same_tokens_as_the_session(template: ChatTemplate) -> None:
    direct, through = saying(template), saying(template)
    messages = [HELLO]
    for _ in range(2):
        await direct.create(messages=messages)
        client = through.client()
        reply = await client.chat.completions.create(messages=messages, model="any")
        await client.close()
        messages = [*messages, reply.choices[0].message.model_dump(), HELLO]  # type: ignore[list-item]
    one, other = ([node.model_copy(update={"at": None}) for node in s.trajectory.nodes] for s in (direct, through))
    assert one == other and [node.parent for node in one] == [None, 0, 1, 2]
    assert through._backend.requests == direct._backend.requests  # type: ignore[attr-defined]


async def test_a_client_is_openais_own_with_all_that_libraries_use(template: ChatTemplate) -> None:
    session = saying(template)
    client = session.client()
    assert type(client) is AsyncOpenAI and str(client.base_url).startswith("http")
    for one in (client.with_options(timeout=5, max_retries=2), client.copy(default_headers={"a": "b"})):
        reply = await one.chat.completions.create(messages=[HELLO], model="any")
        assert reply.choices[0].message.content == "abc" and reply.usage is not None
    raw = await client.chat.completions.with_raw_response.create(messages=[HELLO], model="any")
    assert raw.status_code == 200 and raw.parse().choices[0].message.content == "abc"
    parsed = await client.chat.completions.parse(messages=[HELLO], model="any")
    assert parsed.choices[0].message.content == "abc"
    assert [model.id async for model in client.models.list()] == ["policy"]
    assert (await client.models.retrieve("mine")).id == "mine"
    assert len(session.trajectory.nodes) == 5, "one prompt, four samples"


async def test_a_client_streams(template: ChatTemplate) -> None:
    session = saying(template)
    stream = await session.client().chat.completions.create(
        messages=[HELLO], model="any", stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "abc"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None, "stop"]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 4
    async with session.client().chat.completions.stream(messages=[HELLO], model="any") as events:
        assert (await events.get_final_completion()).choices[0].message.content == "abc"


async def test_a_schema_is_parsed_in_evaluation() -> None:
    class Found(BaseModel):
        number: int

    async with serving(choices({"role": "assistant", "content": '{"number": 4}'})) as (llm, _, sent):
        client = llm.session().client()
        reply = await client.chat.completions.parse(messages=[USER], model="any", response_format=Found)
        assert reply.choices[0].message.parsed == Found(number=4)
        assert sent[0]["response_format"]["type"] == "json_schema" and sent[0]["model"] == "m"
    assert [node.message["role"] for node in llm.trajectories()["assistant"].nodes] == ["user", "assistant"]


async def test_what_a_session_does_not_have_is_said(template: ChatTemplate) -> None:
    session = saying(template)
    for name in ("with_options", "with_raw_response", "parse", "responses", "base_url"):
        with pytest.raises(AttributeError, match=r"session\.client\(\).*openai\.AsyncOpenAI"):
            getattr(session, name)
    with pytest.raises(AttributeError, match="no attribute 'contents'"):
        session.contents  # noqa: B018
    client = session.client()
    with pytest.raises(openai.NotFoundError, match=r"POST /responses is not supported.*chat completions"):
        await client.responses.create(model="any", input="hello")
    with pytest.raises(openai.NotFoundError, match="POST /embeddings"):
        await client.embeddings.create(model="any", input="hello")


async def test_errors_are_those_that_an_api_has(template: ChatTemplate) -> None:
    small = saying(template, context=10).client().with_options(max_retries=2)
    with pytest.raises(openai.BadRequestError, match="does not fit") as caught:
        await small.chat.completions.create(messages=[HELLO] * 5, model="any")
    assert caught.value.code == "context_length_exceeded"
    assert isinstance(inference_error(caught.value), ContextOverflow)

    def broken(ids: list[int], params: Any) -> Any:
        raise InferenceError("the server is broken")

    session = make_session(template, broken)
    with pytest.raises(openai.InternalServerError, match="the server is broken") as failed:
        await session.client().with_options(max_retries=2).chat.completions.create(messages=[HELLO], model="any")
    assert len(session._backend.requests) == 1, "what a session refuses is not asked for again"  # type: ignore[attr-defined]
    assert str(inference_error(failed.value)) == "the server is broken"


def test_the_sessions_error_is_found_behind_those_of_libraries() -> None:
    def raised(how: Any) -> BaseException:
        try:
            how()
        except BaseException as error:
            return error
        raise AssertionError

    ours = ContextOverflow("too long")

    def wrapped() -> None:
        try:
            raise ours
        except ContextOverflow as error:
            raise RuntimeError("the library says") from error

    def fault() -> None:
        try:
            raise ours
        except ContextOverflow:
            raise KeyError("the agent's own fault")  # noqa: B904

    assert inference_error(raised(wrapped)) is ours
    assert inference_error(BaseExceptionGroup("tasks", [raised(wrapped)])) is ours
    assert inference_error(raised(fault)) is None and inference_error(ValueError("no")) is None
    circle = ValueError("a")
    circle.__cause__ = KeyError("b")
    circle.__cause__.__cause__ = circle
    assert inference_error(circle) is None


async def through_library(llm: Chat, messages: list[Any]) -> None:
    try:
        await llm.client().chat.completions.create(messages=messages, model="any")
    except openai.APIError as error:
        raise RuntimeError("the library gives up") from error


async def test_an_episode_whose_library_lets_an_overflow_through_keeps_what_it_earned(template: ChatTemplate) -> None:
    async def play(llm: LLM) -> Outcome:
        await through_library(llm.session(), [HELLO])
        llm.reward(0.5)
        await through_library(llm.session(), [HELLO] * 200)
        raise AssertionError("not reached")

    episode = await episode_of(template, Scripted(play))
    assert (episode.stop_reason, episode.reward) == (StopReason.CONTEXT_OVERFLOW, 0.5)


async def test_an_episode_whose_server_fails_behind_a_library_is_an_inference_error(template: ChatTemplate) -> None:
    def broken(ids: list[int], params: Any) -> Any:
        raise InferenceError("the server is broken")

    async def play(llm: LLM) -> Outcome:
        await through_library(llm.session(), [HELLO])
        raise AssertionError("not reached")

    episode = await episode_of(template, Scripted(play), script=broken)
    assert (episode.stop_reason, episode.error) == (StopReason.INFERENCE_ERROR, "the server is broken")


async def test_what_a_template_refuses_fails_the_episode_with_its_words(template: ChatTemplate) -> None:
    class Strict(ChatSession):
        async def create(self, *, messages: Any, **given: Any) -> Any:
            raise TemplateError("the template leaves out the role developer")

    session = saying(template)
    strict = Strict(session._backend, template, session._settings)
    with pytest.raises(openai.BadRequestError, match="leaves out the role developer"):
        await strict.client().chat.completions.create(messages=[HELLO], model="any")
