"""agentrl: agentic reinforcement learning with Gymnasium's vocabulary.

Importing this package is cheap: names resolve on first use, and neither torch nor transformers is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

from agentrl.core.callable_package import make_callable
from agentrl.core.gymnasium_ids import announce_all
from agentrl.core.registry import gymnasium_names, provide, register

__version__ = "0.1.0"

if TYPE_CHECKING:
    from agentrl.config.errors import UserError
    from agentrl.core.agent import Agent
    from agentrl.core.environment import Environment
    from agentrl.core.episode import Episode, Message, StopReason, Task, Trajectory
    from agentrl.core.infrastructure import InfrastructureError
    from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
    from agentrl.envkit.language import LanguageEnvironment, SingleTurnEnvironment
    from agentrl.envkit.make import make
    from agentrl.envkit.tool_environment import ToolEnvironment
    from agentrl.envkit.tools.end_episode import EndEpisode
    from agentrl.envkit.tools.tool import tool
    from agentrl.envkit.tools.worked_call import worked_call
    from agentrl.launch.api import evaluate, train
    from agentrl.launch.results import EvalResult, Evaluation, ExitReason, RunFailed, RunStopped, TrainResult

_HOME = {
    "Agent": "agentrl.core.agent",
    "Environment": "agentrl.core.environment",
    "LanguageEnvironment": "agentrl.envkit.language",
    "SingleTurnEnvironment": "agentrl.envkit.language",
    "Episode": "agentrl.core.episode",
    "InfrastructureError": "agentrl.core.infrastructure",
    "Message": "agentrl.core.episode",
    "StopReason": "agentrl.core.episode",
    "Task": "agentrl.core.episode",
    "Trajectory": "agentrl.core.episode",
    "ToolEnvironment": "agentrl.envkit.tool_environment",
    "EndEpisode": "agentrl.envkit.tools.end_episode",
    "make": "agentrl.envkit.make",
    "tool": "agentrl.envkit.tools.tool",
    "worked_call": "agentrl.envkit.tools.worked_call",
    "LLM": "agentrl.core.workflow",
    "Outcome": "agentrl.core.workflow",
    "RolloutWorkflow": "agentrl.core.workflow",
    "EvalResult": "agentrl.launch.results",
    "Evaluation": "agentrl.launch.results",
    "ExitReason": "agentrl.launch.results",
    "RunFailed": "agentrl.launch.results",
    "RunStopped": "agentrl.launch.results",
    "TrainResult": "agentrl.launch.results",
    "UserError": "agentrl.config.errors",
}

__all__ = [
    "LLM",
    "Agent",
    "EndEpisode",
    "Environment",
    "Episode",
    "EvalResult",
    "Evaluation",
    "ExitReason",
    "InfrastructureError",
    "LanguageEnvironment",
    "Message",
    "Outcome",
    "RolloutWorkflow",
    "RunFailed",
    "RunStopped",
    "SingleTurnEnvironment",
    "StopReason",
    "Task",
    "ToolEnvironment",
    "TrainResult",
    "Trajectory",
    "UserError",
    "__version__",
    "evaluate",
    "make",
    "register",
    "tool",
    "train",
    "worked_call",
]

make_callable("agentrl.train", "agentrl.launch.api:train")  # a package and a function: agentrl.train.loss, too, is one
make_callable("agentrl.evaluate", "agentrl.launch.api:evaluate")

register("GSM8K-v0", "agentrl.envs.gsm8k:GSM8K")
register("Arithmetic-v0", "agentrl.envs.arithmetic:Arithmetic")
register("Calculator-v0", "agentrl.envs.calculator:Calculator")
register("Python-v0", "agentrl.envs.python:Python")
register("Retry-v0", "agentrl.envs.retry:Retry")
register("Shapes-v0", "agentrl.envs.shapes:Shapes")
register("chat", "agentrl.agents.chat:ChatAgent", kind="agent")
register("tool_loop", "agentrl.agents.tool_loop:ToolLoopAgent", kind="agent")
register("agent_env", "agentrl.envkit.agent_env:AgentEnvWorkflow", kind="workflow")
register("openai/gsm8k", "agentrl.data.gsm8k:load", kind="dataset")
register("arithmetic", "agentrl.data.arithmetic:load", kind="dataset")
register("calculation", "agentrl.data.calculation:load", kind="dataset")
register("shapes", "agentrl.data.shapes:load", kind="dataset")
register("jsonl", "agentrl.data.plain:load_folder", kind="dataset")
register("hub", "agentrl.data.plain:load_hub", kind="dataset")
provide("agentrl.train.loss", "objective", "preset")
provide("agentrl.train.advantages", "advantage", "preset")
register("grpo", "agentrl.train.trainer:Trainer", kind="trainer")
for _name in ("sft", "rm", "dpo"):
    register(_name, f"agentrl.supervised.trainers:{_name}", kind="trainer")
for _name, _class in (("embedded", "Embedded"), ("sglang", "SGLang"), ("vllm", "VLLM"), ("openai", "OpenAI")):
    register(_name, f"agentrl.inference.kinds.{_name}:{_class}", kind="server")
announce_all(gymnasium_names)  # to gymnasium, once it is loaded


def __getattr__(name: str) -> Any:
    """Resolve a public name on first use."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
