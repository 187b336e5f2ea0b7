"""Python as a tool, in the sandbox that this machine has."""

from typing import Any

import pytest

from agentrl.envs.python import Python
from agentrl.rewards.sandbox import SandboxUnavailableError

TASK = {"question": "What is the sum of the first 100 squares?", "answer": "#### 338350"}


def running(code: str) -> dict[str, Any]:
    function = {"name": "run_python", "arguments": {"code": code}}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print(sum(i * i for i in range(101)))", "338350"),
        ("x = 1", "[nothing was printed]"),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; print('a'); sys.exit(3)", "a\n[exit code 3]"),
        ("while True: pass", "[stopped: "),
    ],
)
@pytest.mark.usefixtures("needs_sandbox")
async def test_the_model_sees_what_its_program_printed(code: str, shown: str) -> None:
    env = Python(seconds=1.0)
    await env.reset(options=TASK)
    (result,), reward, terminated, truncated, _ = await env.step(running(code))
    assert shown in result["content"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    await env.close()


@pytest.mark.usefixtures("needs_sandbox")
async def test_a_right_last_line_earns_the_reward() -> None:
    env = Python()
    messages, info = await env.reset(options=TASK)
    assert "####" in messages[0]["content"] and info["tools"][0]["function"]["name"] == "run_python"
    assert (await env.step({"role": "assistant", "content": "So it is\n#### 338350"}))[1] == 1.0


def test_a_backend_that_is_not_there_is_refused_when_the_environment_is_made() -> None:
    with pytest.raises(SandboxUnavailableError, match="podman"):
        Python(backend="podman")
