"""A whole episode with tools: environment, agent, session and trajectory together."""

from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoTokenizer

from agentrl.core.environment import Info
from agentrl.core.episode import Message, StopReason, Task
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.envkit.language import LanguageEnvironment
from agentrl.envkit.tools.tool import collect_tools, tool
from agentrl.envkit.tools.tool_calls import ToolEventKind, run_tool_calls
from agentrl.inference.backend import SamplingParams
from agentrl.inference.client import ChatClient
from agentrl.inference.router import Router
from agentrl.inference.session import SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from tests.flat import flat_branches
from tests.inference.fakes import FakeBackend
from tests.inference.test_session import WITH_TOOLS, calling


class Adding(LanguageEnvironment):
    """The answer must be what the tool said."""

    seen: ClassVar[list[ToolEventKind]] = []

    @tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        self.tools = collect_tools(self)
        return [{"role": "user", "content": "1 + 2?"}], {"tools": [one.schema() for one in self.tools]}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        events = await run_tool_calls(action, self.tools)
        self.seen.extend(event.kind for event in events)
        if events:
            return [event.message for event in events], 0.0, False, False, {}
        return [], float(action["content"] == "3"), True, False, {}


async def test_calls_are_run_answered_and_rewarded_and_only_sampled_tokens_are_trained(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = WITH_TOOLS
    template = ChatTemplate(tokenizer)
    texts = [
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        '<tool_call>{"name": "ad", "argu</tool_call>',
        '<tool_call>{"name": "subtract", "arguments": {}}</tool_call>',
        "3",
    ]
    backend = FakeBackend(calling(template, *texts))
    settings = SessionSettings(SamplingParams(max_new_tokens=200), 5000, locked=True, model="m")
    client = ChatClient(Router([backend]), template, settings, settings)
    workflow = AgentEnvWorkflow(f"{__file__}:Adding")
    events: list[ToolEventKind] = workflow._env_class.seen
    episode = await run_episode(
        workflow, Task(id="t", data={}), client, group_id="g", index=0, seed=0, limits=Limits(60.0, 9.0),
        left=Abandoned(),
    )  # fmt: skip
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.TERMINATED, 1.0, None)
    assert events == [ToolEventKind.OK, ToolEventKind.UNPARSABLE, ToolEventKind.UNKNOWN_TOOL]
    (flat,) = flat_branches(episode.trajectories["assistant"])
    trained = [token for token, mask in zip(flat.token_ids, flat.loss_mask, strict=True) if mask]
    sampled = [[*tokenizer.encode(text, add_special_tokens=False), template.eos_id] for text in texts]
    assert trained == [token for ids in sampled for token in ids]
    prompt = tokenizer.decode(backend.requests[-1][0])
    assert "<|im_start|>tool\n3<|im_end|>" in prompt and 'no tool is called "subtract"' in prompt
