"""agentrl: agentic reinforcement learning with Gymnasium's vocabulary.

Importing this package is cheap: names resolve on first use, and neither torch nor transformers is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

from agentrl.core.registry import register

__version__ = "0.1.0"

if TYPE_CHECKING:
    from agentrl.core.agent import Agent
    from agentrl.core.environment import Environment, LanguageEnvironment, SingleTurnEnvironment
    from agentrl.core.episode import Episode, Message, StopReason, Task, Trajectory
    from agentrl.core.tool_env import ToolEnvironment
    from agentrl.core.tools import tool
    from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow

_HOME = {
    "Agent": "agentrl.core.agent",
    "Environment": "agentrl.core.environment",
    "LanguageEnvironment": "agentrl.core.environment",
    "SingleTurnEnvironment": "agentrl.core.environment",
    "Episode": "agentrl.core.episode",
    "Message": "agentrl.core.episode",
    "StopReason": "agentrl.core.episode",
    "Task": "agentrl.core.episode",
    "Trajectory": "agentrl.core.episode",
    "ToolEnvironment": "agentrl.core.tool_env",
    "tool": "agentrl.core.tools",
    "LLM": "agentrl.core.workflow",
    "Outcome": "agentrl.core.workflow",
    "RolloutWorkflow": "agentrl.core.workflow",
}

__all__ = [
    "LLM",
    "Agent",
    "Environment",
    "Episode",
    "LanguageEnvironment",
    "Message",
    "Outcome",
    "RolloutWorkflow",
    "SingleTurnEnvironment",
    "StopReason",
    "Task",
    "ToolEnvironment",
    "Trajectory",
    "__version__",
    "register",
    "tool",
]

register("gsm8k", "agentrl.envs.gsm8k:GSM8K")
register("arithmetic", "agentrl.envs.arithmetic:Arithmetic")
register("chat", "agentrl.agents.chat:ChatAgent", kind="agent")
register("agent_env", "agentrl.core.agent_env:AgentEnvWorkflow", kind="workflow")
register("openai/gsm8k", "agentrl.data.gsm8k:load", kind="dataset")
register("arithmetic", "agentrl.data.arithmetic:load", kind="dataset")


def __getattr__(name: str) -> Any:
    """Resolve a public name on first use."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
