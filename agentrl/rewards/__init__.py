"""Verifiers: callables ``(answer, reference)`` that return a finite float, or a missing reward with its reason.

Importing this package is cheap: names are imported on first use, and neither sympy nor openai nor torch is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.rewards.code_tests import CodeTests, IOTest
    from agentrl.rewards.json_schema import JsonSchemaVerifier
    from agentrl.rewards.judge import Judge
    from agentrl.rewards.math_answer import math_reward, math_verdict
    from agentrl.rewards.numeric import final_number, has_answer_line, numeric_reward
    from agentrl.rewards.overlong import soft_overlong_penalty
    from agentrl.rewards.rubric import Criterion, Rubric
    from agentrl.rewards.text import choice_reward, exact_match_reward, final_choice, regex_reward
    from agentrl.rewards.trl_adapter import from_trl
    from agentrl.rewards.verdict import MissingReason, Reward, Verdict, judge_answer

_HOME = {
    "CodeTests": "code_tests",
    "Criterion": "rubric",
    "IOTest": "code_tests",
    "JsonSchemaVerifier": "json_schema",
    "Judge": "judge",
    "MissingReason": "verdict",
    "Reward": "verdict",
    "Rubric": "rubric",
    "Verdict": "verdict",
    "choice_reward": "text",
    "exact_match_reward": "text",
    "final_choice": "text",
    "final_number": "numeric",
    "from_trl": "trl_adapter",
    "has_answer_line": "numeric",
    "judge_answer": "verdict",
    "math_reward": "math_answer",
    "math_verdict": "math_answer",
    "numeric_reward": "numeric",
    "regex_reward": "text",
    "soft_overlong_penalty": "overlong",
}

__all__ = [
    "CodeTests",
    "Criterion",
    "IOTest",
    "JsonSchemaVerifier",
    "Judge",
    "MissingReason",
    "Reward",
    "Rubric",
    "Verdict",
    "choice_reward",
    "exact_match_reward",
    "final_choice",
    "final_number",
    "from_trl",
    "has_answer_line",
    "judge_answer",
    "math_reward",
    "math_verdict",
    "numeric_reward",
    "regex_reward",
    "soft_overlong_penalty",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name in _HOME:
        return getattr(importlib.import_module(f"agentrl.rewards.{_HOME[name]}"), name)
    raise AttributeError(f"module 'agentrl.rewards' has no attribute {name!r}")
