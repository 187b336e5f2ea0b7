"""Declares the parts of the loss: the name, the formula and the presets of objectives and advantages.

Guarantees: declaring does not import torch, so ``recipe show`` can print formulas without it; a declared function stays
a plain function.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl.core.registry import load, register, registered

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Formula = Callable[[Any], str]  # trainer section -> line of text


@dataclass(frozen=True)
class Preset:
    """A published algorithm as values of the trainer section.

    Attributes:
        source: Paper or report.
        settings: Key -> value that the preset sets in the trainer section.
    """

    source: str
    settings: dict[str, Any] = field(default_factory=dict)


def objective(
    name: str | None = None,
    *,
    formula: str | Formula = "",
    zero_without_advantage: bool = False,
    whole_sequences: bool = False,
) -> Callable[[FunctionT], FunctionT]:
    """Declares a function as an objective, see :class:`agentrl.train.loss.Objective`.

    Args:
        name: Value of ``trainer.objective``; without one the function is named by its path.
        formula: Loss of one token, as ``recipe show`` prints it.
        zero_without_advantage: Whether loss and gradient are 0 for an advantage of 0; such tokens are not computed.
        whole_sequences: Whether the function needs all trained tokens of a sequence at once.
    """

    def declare(function: FunctionT) -> FunctionT:
        known: Any = function
        known.formula, known.zero_without_advantage = formula, zero_without_advantage
        known.whole_sequences = whole_sequences
        if name is not None:
            register(name, f"{function.__module__}:{function.__name__}", kind="objective")
        return function

    return declare


def advantage(
    name: str | None = None, *, formula: str | Formula = "", token_penalties: bool = False
) -> Callable[[FunctionT], FunctionT]:
    """Declares a function as an advantage, see :class:`agentrl.train.advantages.Advantage`.

    Args:
        name: Value of ``trainer.advantage``; without one the function is named by its path.
        formula: Formula of the advantage, as ``recipe show`` prints it.
        token_penalties: Whether the function reads the KL penalty of each token (``Turn.penalties``); for others the
            sum is subtracted from the episode's reward.
    """

    def declare(function: FunctionT) -> FunctionT:
        known: Any = function
        known.formula, known.token_penalties = formula, token_penalties
        if name is not None:
            register(name, f"{function.__module__}:{function.__name__}", kind="advantage")
        return function

    return declare


def preset(module: str, name: str, source: str, **settings: Any) -> Preset:
    """Declares a preset, which must be assigned to its name in capitals in ``module``.

    Args:
        module: ``__name__`` of the module.
        name: Value of ``trainer.preset``.
        source: Paper or report.
        settings: Keys and values that the preset sets in the trainer section.
    """
    register(name, f"{module}:{name.upper()}", kind="preset")
    return Preset(source, settings)


def find_preset(name: str) -> Preset:
    """Finds a preset by name, or by the path of your own (``file.py:NAME``).

    Raises:
        LookupError: There is no such preset.
    """
    return load("preset", name)


def preset_names() -> list[str]:
    """Returns the names of all declared presets, sorted."""
    return registered("preset")


def takes_token_penalties(name: str) -> bool:
    """Returns whether an advantage function reads the KL penalty of each token."""
    return getattr(load("advantage", name), "token_penalties", False)


def formula_of(kind: Any, name: str, config: Any) -> str:
    """Returns the declared formula of an objective or an advantage; empty if it declares none."""
    formula = getattr(load(kind, name), "formula", "")
    return str(formula(config) if callable(formula) else formula)
