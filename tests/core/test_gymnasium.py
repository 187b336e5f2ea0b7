"""Gymnasium's own checker and vector environments on every shipped environment."""

import asyncio
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

import agentrl
from agentrl import Message, SingleTurnEnvironment
from agentrl.core.registry import registered
from agentrl.envkit.gymnasium_bridge import GymnasiumBridge

SHIPPED = registered("env")
ORDERS = ["import agentrl, gymnasium", "import gymnasium, agentrl", "import agentrl.envkit.gymnasium_bridge, gymnasium"]


@pytest.fixture(autouse=True)
def problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """A few problems of our own: GSM8K's files are not part of the project."""
    for split in ("train", "test"):
        lines = [f'{{"question": "{n} + 1?", "answer": "#### {n + 1}"}}' for n in range(20)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("AGENTRL_GSM8K", str(tmp_path))
    agentrl.core.environment._TASKS.clear()
    yield
    agentrl.core.environment._TASKS.clear()


def need_what_it_needs(id: str, request: pytest.FixtureRequest) -> None:
    if id.startswith("Python"):
        request.getfixturevalue("needs_sandbox")


@pytest.mark.parametrize("id", SHIPPED)
def test_check_env_passes_without_a_warning(id: str, request: pytest.FixtureRequest) -> None:
    need_what_it_needs(id, request)
    env = gymnasium.make(f"agentrl/{id}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    env.close()


@pytest.mark.parametrize("id", SHIPPED)
def test_vector_environments_run(id: str, request: pytest.FixtureRequest) -> None:
    need_what_it_needs(id, request)
    envs = SyncVectorEnv([lambda: gymnasium.make(f"agentrl/{id}")] * 3)
    first, _ = envs.reset(seed=0)
    again, _ = envs.reset(seed=0)
    assert first == again and len(first) == 3
    for _ in range(3):
        observations, rewards, *_ = envs.step(envs.action_space.sample())
        assert len(observations) == 3 and rewards.shape == (3,)
    envs.close()


def test_async_vector_environments_run_in_processes() -> None:
    envs = AsyncVectorEnv([lambda: gymnasium.make("agentrl/Arithmetic-v0")] * 2, shared_memory=False)
    first, _ = envs.reset(seed=0)
    assert [len(messages) for messages in first] == [1, 1]
    sums = [messages[0]["content"].split("is ")[1].split("?")[0] for messages in first]
    right = tuple({"role": "assistant", "content": str(eval(one))} for one in sums)
    _, rewards, terminated, *_ = envs.step(right)
    assert rewards.tolist() == [1.0, 1.0] and terminated.all()
    envs.close()


def test_the_bridge_works_inside_a_running_loop_and_renders_what_was_said() -> None:
    async def play() -> str:
        env = gymnasium.make("agentrl/Calculator-v0", render_mode="ansi")
        env.reset(seed=0)
        function = {"name": "calculate", "arguments": '{"expression": "6 * 7"}'}
        calls = [{"id": "a", "type": "function", "function": function}]
        env.step({"role": "assistant", "content": "", "tool_calls": calls})
        text = env.render()
        env.close()
        env.close()
        return str(text)

    text = asyncio.run(play())
    assert '[assistant] calculate({"expression": "6 * 7"})\n[tool] 42' in text


def test_without_a_seed_the_next_episode_differs_and_is_reproducible() -> None:
    env = GymnasiumBridge("Arithmetic-v0")

    def episodes() -> list[str]:
        first, _ = env.reset(seed=5)
        return [first[0]["content"], *(env.reset()[0][0]["content"] for _ in range(5))]

    assert episodes() == episodes()
    assert len(set(episodes())) > 3


class Missing(SingleTurnEnvironment):
    dataset = ({"n": 1},)

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        return [{"role": "user", "content": "?"}]

    def judge(self, task: dict[str, Any], answer: str) -> None:
        return None


class Hanging(Missing):
    async def reset(self, **_: Any) -> Any:
        await asyncio.Event().wait()


def test_a_missing_reward_is_an_error_and_a_hanging_environment_ends() -> None:
    env = GymnasiumBridge(Missing())
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"Missing\.step has no reward"):
        env.step({"role": "assistant", "content": ""})
    with pytest.raises(TimeoutError):
        GymnasiumBridge(Hanging(), agentrl_timeout=0.01).reset()


@pytest.mark.parametrize("code", ORDERS)
def test_the_order_of_imports_does_not_matter(code: str) -> None:
    check = f"{code}\nassert 'agentrl/GSM8K-v0' in gymnasium.registry\nassert gymnasium.make('CartPole-v1')"
    subprocess.run([sys.executable, "-W", "error", "-c", check], check=True)


def test_an_environment_registered_later_is_known_too() -> None:
    agentrl.register("Missing-v3", f"{__name__}:Missing")
    try:
        assert "agentrl/Missing-v3" in gymnasium.registry
        agentrl.register("Missing-v3", f"{__name__}:Missing")  # once more, without a warning
        agentrl.register("missing_without_version", f"{__name__}:Missing")
        assert not any("missing_without" in id for id in gymnasium.registry)
    finally:
        from agentrl.core import registry

        for id in ("Missing-v3", "missing_without_version"):
            del registry._SPECS["env"][id]
        del gymnasium.registry["agentrl/Missing-v3"]


class Blocking(Missing):
    release = threading.Event()

    async def step(self, action: Any) -> Any:
        self.release.wait()
        return [], 1.0, True, False, {}


class Nested(Missing):
    """Uses a bridge inside of a bridge."""

    def judge(self, task: dict[str, Any], answer: str) -> float:  # type: ignore[override]
        inner = GymnasiumBridge("Arithmetic-v0")
        inner.reset(seed=0)
        return inner.step({"role": "assistant", "content": answer})[1]


def test_an_environment_that_blocks_ends_its_call_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.envkit.gymnasium_bridge.GRACE", 0.01)
    env = GymnasiumBridge(Blocking(), agentrl_timeout=0.01)
    env.reset(seed=0)
    with pytest.raises(TimeoutError, match=r"Blocking blocked its event loop for over 0\.01 s"):
        env.step({"role": "assistant", "content": ""})
    other = GymnasiumBridge("Arithmetic-v0")
    other.reset(seed=0)
    assert other.step({"role": "assistant", "content": ""})[1] == 0.0
    Blocking.release.set()


def test_a_bridge_works_inside_of_a_bridge() -> None:
    env = GymnasiumBridge(Nested(), agentrl_timeout=60)
    env.reset(seed=0)
    assert env.step({"role": "assistant", "content": "no"})[1] == 0.0


def test_make_vec_works_and_arguments_reach_the_environment() -> None:
    envs = gymnasium.make_vec("agentrl/Arithmetic-v0", num_envs=2, vectorization_mode="sync", digit_reward=0.25)
    assert [env.unwrapped.env.digit_reward for env in envs.envs] == [0.25, 0.25]
    assert len(envs.reset(seed=0)[0]) == 2
    envs.close()


@pytest.mark.parametrize(
    "code",
    [
        "import importlib.util, agentrl\nimportlib.util.find_spec('gymnasium')\nimport gymnasium",
        "import sys, agentrl, gymnasium\n"
        "for n in [n for n in sys.modules if n.startswith('gymnasium')]: del sys.modules[n]\n"
        "import gymnasium",
    ],
    ids=["looked for first", "loaded twice"],
)
def test_gymnasium_is_told_whenever_it_is_loaded(code: str) -> None:
    subprocess.run([sys.executable, "-c", f"{code}\nassert 'agentrl/GSM8K-v0' in gymnasium.registry"], check=True)
