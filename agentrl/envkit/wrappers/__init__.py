"""Wrappers of environments, and Gymnasium's environments for language agents.

Guarantees: a function that returns a wrapped environment can be used as an environment by its path:
``file.py:make_env``.
"""

from agentrl.envkit.wrappers.context_limit import ContextLimit
from agentrl.envkit.wrappers.gymnasium_env import GymnasiumEnvironment, StepTimeoutError
from agentrl.envkit.wrappers.record import RecordEpisodes
from agentrl.envkit.wrappers.space_text import ParseError, UnsupportedSpaceError
from agentrl.envkit.wrappers.time_limit import TimeLimit
from agentrl.envkit.wrappers.tool_budget import ToolBudget
from agentrl.envkit.wrappers.transform import ScaleReward, TransformAction, TransformObservation, TransformReward
from agentrl.envkit.wrappers.wrapper import Wrapper

__all__ = [
    "ContextLimit",
    "GymnasiumEnvironment",
    "ParseError",
    "RecordEpisodes",
    "ScaleReward",
    "StepTimeoutError",
    "TimeLimit",
    "ToolBudget",
    "TransformAction",
    "TransformObservation",
    "TransformReward",
    "UnsupportedSpaceError",
    "Wrapper",
]
