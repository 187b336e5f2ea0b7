"""Tool calls of a message: each is answered once, in order, whatever the model wrote and whatever the tool does."""

import asyncio
import errno
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, field_validator

from agentrl.core.infrastructure import InfrastructureError, infrastructure_failure
from agentrl.envkit.tools.tool import Tool, tool
from agentrl.envkit.tools.tool_calls import ToolEvent, ToolEventKind, run_tool_calls
from agentrl.host.worker_errors import WorkerCrashedError, WorkerTimeoutError
from agentrl.rewards.sandbox import SandboxUnavailableError

LONG = 20.0  # seconds until a test that hangs is ended


def call(name: Any, arguments: Any = "{}", id: Any = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def message(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


async def run(functions: list[Callable[..., Any]], *calls: Any, **options: Any) -> list[ToolEvent]:
    tools = [Tool.from_function(function) for function in functions]
    return await asyncio.wait_for(run_tool_calls(message(*calls), tools, **options), LONG)


async def run_one(function: Callable[..., Any], one: Any = None, **options: Any) -> ToolEvent:
    (event,) = await run([function], one or call(function.__name__), **options)
    return event


class Recorder:
    """Tools that remember whether they ran."""

    def __init__(self) -> None:
        self.ran: list[Any] = []

    async def add(self, a: int, b: int = 0) -> int:
        self.ran.append((a, b))
        return a + b

    async def look(self) -> str:
        self.ran.append("look")
        return "seen"

    @property
    def tools(self) -> list[Callable[..., Any]]:
        return [self.add, self.look]


async def test_an_answer_carries_the_call_s_id_and_the_result() -> None:
    event = await run_one(Recorder().add, call("add", '{"a": 1, "b": 2}', id="x7"))
    assert event.message == {"role": "tool", "tool_call_id": "x7", "name": "add", "content": "3"}
    assert (event.kind, event.name, event.call_id, event.result) == (ToolEventKind.OK, "add", "x7", 3)
    assert event.error is None
    assert event.seconds >= 0


@pytest.mark.parametrize("empty", [{}, {"tool_calls": None}, {"tool_calls": []}])
async def test_a_message_without_calls_gives_no_events(empty: dict[str, Any]) -> None:
    assert await run_tool_calls(empty, []) == []


BAD = ToolEventKind.UNPARSABLE, ToolEventKind.UNKNOWN_TOOL, ToolEventKind.WRONG_ARGUMENTS
UNPARSABLE, UNKNOWN, WRONG = BAD


@pytest.mark.parametrize(
    ("one", "kind", "words"),
    [
        (call("add", '{"a": 1'), UNPARSABLE, "add: the arguments are not valid JSON"),
        (call("add", "[1]"), UNPARSABLE, "want a JSON object as arguments, got [1]"),
        (call("add", [1]), UNPARSABLE, "want a JSON object as arguments, got [1]"),
        (call("add", ""), UNPARSABLE, "want a JSON object (required: a; optional: b)"),
        (call("add", None), UNPARSABLE, "want a JSON object (required: a; optional: b)"),
        (call("add", {1: 2}), UNPARSABLE, "not JSON values"),
        (call("add", {"a": object()}), UNPARSABLE, "not JSON values"),
        ("add", UNPARSABLE, 'a tool call must be an object, got "add"'),
        (None, UNPARSABLE, "a tool call must be an object, got null"),
        ({}, UNPARSABLE, "has no name (known tools: add, look)"),
        ({"function": "add"}, UNPARSABLE, "function must be an object"),
        (call(5), UNPARSABLE, "has no name"),
        (call("look") | {"error": "no closing\nbracket"}, UNPARSABLE, "cannot be read: no closing bracket"),
        (call("ad"), UNKNOWN, "no tool is called \"ad\", did you mean 'add'? (known tools: add, look)"),
        (call("\ud800\n"), UNKNOWN, r'no tool is called "\ud800\n"'),
        (call("add", "{}"), WRONG, 'argument "a": is missing'),
        (call("add", {"a": 1, "bb": 2}), WRONG, "argument \"bb\": is not known, did you mean 'b'?"),
        (call("look", '{"a": 1}'), WRONG, "it takes no arguments"),
    ],
)
async def test_a_call_that_is_wrong_is_explained_and_never_run(one: Any, kind: ToolEventKind, words: str) -> None:
    recorder = Recorder()
    (event,) = await run(recorder.tools, one)
    assert (event.kind, recorder.ran) == (kind, [])
    content = event.message["content"]
    assert content.startswith("Not run: ")
    assert words in content
    assert len(content.splitlines()) == 1
    assert event.error == content.removeprefix("Not run: ")


@pytest.mark.parametrize(
    "one",
    [
        {"name": "add", "arguments": '{"a": 1}'},
        {"function": {"name": "add", "arguments": {"a": 1}}},
        {"id": 7, "function": {"name": "add", "arguments": '{"a": 1}'}},
    ],
)
async def test_a_call_that_can_be_read_in_one_way_only_runs(one: Any) -> None:
    recorder = Recorder()
    (event,) = await run(recorder.tools, one)
    assert (event.kind, recorder.ran) == (ToolEventKind.OK, [(1, 0)])


@pytest.mark.parametrize("arguments", ["", None, "  ", "{}", {}])
async def test_a_tool_without_parameters_needs_no_arguments(arguments: Any) -> None:
    assert (await run_one(Recorder().look, call("look", arguments))).result == "seen"
    assert (await run_one(Recorder().look, {"function": {"name": "look"}})).result == "seen"


async def test_a_missing_id_is_made_up_and_taken_from_no_other_call() -> None:
    calls = [call("look", id=None), call("look", id="call_0"), call("look", id=7), call("look", id="")]
    events = await run(Recorder().tools, *calls)
    assert [event.call_id for event in events] == ["call_0_", "call_0", "7", "call_3"]


async def test_tool_calls_that_are_no_list_are_one_wrong_call() -> None:
    (event,) = await run_tool_calls({"tool_calls": {"name": "look"}}, [])
    assert event.kind is UNPARSABLE
    assert "(there are no tools)" in event.message["content"]


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["add", "look", '{"a": 1}']),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
call_like = st.fixed_dictionaries(
    {},
    optional={
        "id": json_like,
        "error": json_like,
        "name": json_like,
        "arguments": json_like,
        "function": json_like
        | st.fixed_dictionaries(
            {"name": st.sampled_from(["add", "look", "other"])},
            optional={"arguments": json_like | json_like.map(json.dumps) | st.just({"a": 1})},
        ),
    },
)


@settings(deadline=None)  # a busy machine is no failure
@given(calls=st.lists(call_like | json_like, max_size=5), max_chars=st.none() | st.integers(1, 50))
async def test_any_list_of_calls_gives_one_event_each(calls: list[Any], max_chars: int | None) -> None:
    recorder = Recorder()
    events = await run(recorder.tools, *calls, max_chars=max_chars)
    assert len(events) == len(calls)
    assert sum(event.kind is ToolEventKind.OK for event in events) == len(recorder.ran)
    assert {event.kind for event in events} <= {ToolEventKind.OK, *BAD}
    for event in events:
        assert event.message["role"] == "tool"
        assert event.message["tool_call_id"] == event.call_id != ""
        event.message["content"].encode()


async def test_calls_run_at_the_same_time_and_are_answered_in_order() -> None:
    second_ran = asyncio.Event()

    async def first() -> str:
        await second_ran.wait()
        return "first"

    async def second() -> str:
        second_ran.set()
        return "second"

    events = await run([first, second], call("first"), call("second"), call("nobody"))
    assert [event.name for event in events] == ["first", "second", "nobody"]
    assert [event.result for event in events] == ["first", "second", None]


async def test_sync_tools_run_at_the_same_time_in_threads() -> None:
    barrier = threading.Barrier(2, timeout=LONG)
    loop_ran = threading.Event()

    def meet() -> bool:
        barrier.wait()
        return loop_ran.wait(LONG)

    async def on_loop() -> None:
        loop_ran.set()

    events = await run([meet, on_loop], call("meet"), call("meet"), call("on_loop"))
    assert [event.message["content"] for event in events] == ["true", "true", "null"]


async def test_an_exception_stays_in_its_event() -> None:
    def divide(a: int) -> float:
        return a / 0

    async def silent() -> None:
        raise KeyError

    events = await run([divide, silent, Recorder().look], call("divide", {"a": 1}), call("silent"), call("look"))
    assert [event.kind for event in events] == [ToolEventKind.RAISED, ToolEventKind.RAISED, ToolEventKind.OK]
    assert [event.message["content"] for event in events] == ["ZeroDivisionError: division by zero", "KeyError", "seen"]
    assert "return a / 0" in str(events[0].error)


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), TimeoutError("own"), asyncio.CancelledError()])
@pytest.mark.parametrize("in_thread", [True, False])
async def test_exceptions_that_steer_python_or_asyncio_stay_in_their_event(
    error: BaseException, in_thread: bool
) -> None:
    def sync_tool() -> None:
        raise error

    async def async_tool() -> None:
        raise error

    event = await run_one(sync_tool if in_thread else async_tool, timeout=LONG)
    assert event.kind is ToolEventKind.RAISED
    assert type(error).__name__ in event.message["content"]


async def test_a_validator_that_fails_in_its_own_way_stays_in_its_event() -> None:
    class Odd(BaseModel):
        x: int

        @field_validator("x")
        @classmethod
        def look_up(cls, value: int) -> int:
            return {}[value]

    async def take(odd: Odd) -> None:
        raise AssertionError("must not run")

    event = await run_one(take, call("take", '{"odd": {"x": 1}}'))
    assert (event.kind, event.message["content"]) == (ToolEventKind.RAISED, "KeyError: 1")


async def test_an_async_tool_is_ended_by_the_timeout() -> None:
    ended = asyncio.Event()

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    event = await run_one(wait_for_ever, timeout=0.01)
    assert event.kind is ToolEventKind.TIMEOUT
    assert event.message["content"] == "wait_for_ever did not finish within 0.01 s and was given up"
    assert ended.is_set()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_thread_is_given_up_at_the_timeout() -> None:
    release = threading.Event()

    def wait_for_release() -> bool:
        return release.wait(LONG)

    try:
        event = await run_one(wait_for_release, timeout=0.01)
    finally:
        release.set()
    assert event.kind is ToolEventKind.TIMEOUT
    assert event.message["content"].endswith("it may still be running")


async def test_a_tool_s_own_timeout_goes_before_the_common_one() -> None:
    @tool(timeout=0.01)
    async def short() -> None:
        await asyncio.Event().wait()

    assert (await run_one(short, timeout=LONG)).kind is ToolEventKind.TIMEOUT


async def test_the_end_of_the_episode_ends_the_running_calls() -> None:
    started, ended = asyncio.Event(), asyncio.Event()
    release = threading.Event()

    async def wait_for_ever() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    def in_thread() -> bool:
        return release.wait(LONG)

    tools = [Tool.from_function(wait_for_ever), Tool.from_function(in_thread)]
    running = asyncio.create_task(run_tool_calls(message(call("in_thread"), call("wait_for_ever")), tools))
    await asyncio.wait_for(started.wait(), LONG)
    running.cancel()
    try:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, LONG)
    finally:
        release.set()
    assert ended.is_set()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@dataclass
class Point:
    x: int


class Page(BaseModel):
    title: str


class Shade(StrEnum):
    DARK = "dark"


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ("as it is\n", "as it is\n"),
        ("half \ud800 pair", "half \ufffd pair"),
        (Shade.DARK, "dark"),
        (None, "null"),
        (True, "true"),
        (["é", 1.5], '["é", 1.5]'),
        ({"point": Point(1), "page": Page(title="t")}, '{"point": {"x": 1}, "page": {"title": "t"}}'),
        (date(2024, 5, 1), '"2024-05-01"'),
    ],
)
async def test_a_result_becomes_text(result: Any, content: str) -> None:
    async def give() -> Any:
        return result

    event = await run_one(give)
    assert (event.kind, event.result, event.message["content"]) == (ToolEventKind.OK, result, content)


circle: list[Any] = []
circle.append(circle)


@pytest.mark.parametrize("result", [object(), float("nan"), circle, b"\xff", {"a": {1: threading.Lock()}}])
async def test_a_result_that_is_no_json_is_an_error_of_the_tool(result: Any) -> None:
    async def give() -> Any:
        return result

    event = await run_one(give)
    assert event.kind is ToolEventKind.RAISED
    assert f"the result of give, a {type(result).__name__}, cannot be turned" in event.message["content"]


@pytest.mark.parametrize(
    ("max_chars", "content"),
    [
        (None, "0123456789"),
        (10, "0123456789"),
        (5, "012\n[5 characters left out]\n89"),
        (1, "0\n[9 characters left out]\n"),
    ],
)
async def test_a_long_answer_is_cut_in_the_middle(max_chars: int | None, content: str) -> None:
    async def digits() -> str:
        return "0123456789"

    async def fail() -> None:
        raise ValueError("0123456789")

    event = await run_one(digits, max_chars=max_chars)
    assert (event.result, event.message["content"]) == ("0123456789", content)
    failed = await run_one(fail, max_chars=12)
    assert failed.message["content"] == "ValueE\n[10 characters left out]\n456789"


@pytest.mark.parametrize("limit", ["timeout", "max_chars"])
async def test_a_limit_that_leaves_nothing_is_an_error(limit: str) -> None:
    with pytest.raises(ValueError, match=limit):
        await run_tool_calls(message(), [], **{limit: 0})


async def test_tools_of_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="two tools are called 'look'"):
        await run([Recorder().look, Recorder().add, Recorder().look])


@pytest.mark.parametrize("arguments", ['{"text": "a\\ud83d"}', {"text": "a\ud83d"}])
async def test_half_a_surrogate_pair_is_no_argument_and_is_replaced_in_an_answer(arguments: Any) -> None:
    got: list[str] = []

    def echo(text: str) -> str:
        """Say it again, and half a pair."""
        got.append(text)
        return text + "\udfff"

    refused = await run_one(echo, call("echo", arguments))
    assert got == [] and refused.kind is not ToolEventKind.OK
    refused.message["content"].encode()
    event = await run_one(echo, call("echo", '{"text": "a"}'))
    assert event.message["content"] == "a\ufffd"


async def test_a_failure_of_the_infrastructure_goes_through_and_a_broken_connection_is_told_to_the_policy() -> None:
    def gone() -> None:
        raise InfrastructureError("the sandbox's host is gone")

    def refused() -> None:
        raise ConnectionRefusedError("shop.example")

    with pytest.raises(ExceptionGroup) as caught:  # calls run side by side
        await run_one(gone)
    assert isinstance(infrastructure_failure(caught.value), InfrastructureError)
    assert (await run_one(refused)).kind is ToolEventKind.RAISED


def test_failures_of_the_infrastructure_are_told_from_faults_of_code() -> None:
    def caused(cause: BaseException) -> RuntimeError:
        error = RuntimeError("the step failed")
        error.__cause__ = cause
        return error

    machines = [
        InfrastructureError("x"),
        ConnectionResetError(),
        WorkerCrashedError("x"),
        OSError(errno.ENOSPC, "full"),
    ]
    for error in [*machines, SandboxUnavailableError("x")]:
        assert infrastructure_failure(error) is error and infrastructure_failure(caused(error)) is error
    for error in (TimeoutError(), FileNotFoundError(errno.ENOENT, "x"), WorkerTimeoutError("x"), KeyError("x"), None):
        assert infrastructure_failure(error) is None
