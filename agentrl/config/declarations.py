"""What a part of the objective says of itself, beside its function: its name, its line of the formula, its presets.

Guarantees: declaring imports nothing heavy, so ``recipe show`` prints formulas without torch; a declared function stays
a plain function.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl.core.registry import load, register, registered

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Formula = Callable[[Any], str]  # from the trainer's section to a line of text


@dataclass(frozen=True)
class Preset:
    """A published combination of choices.

    Attributes:
        source: Paper or report.
        settings: Values of the trainer's section that it sets.
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
    """Declare a function as an objective, see :class:`agentrl.train.loss.Objective`.

    Args:
        name: Value of ``trainer.objective``; without one the function is named by its path.
        formula: Loss of one token, as ``recipe show`` prints it.
        zero_without_advantage: Loss and gradient are 0 wherever the advantage is 0: such tokens are not computed.
        whole_sequences: It looks at several tokens of a sequence, so it has to be given all of them at once.
    """

    def declare(function: FunctionT) -> FunctionT:
        known: Any = function
        known.formula, known.zero_without_advantage = formula, zero_without_advantage
        known.whole_sequences = whole_sequences
        if name is not None:
            register(name, f"{function.__module__}:{function.__name__}", kind="objective")
        return function

    return declare


def advantage(name: str | None = None, *, formula: str | Formula = "") -> Callable[[FunctionT], FunctionT]:
    """Declare a function as an advantage, see :class:`agentrl.train.advantages.Advantage`.

    Args:
        name: Value of ``trainer.advantage``; without one the function is named by its path.
        formula: The advantage, as ``recipe show`` prints it.
    """

    def declare(function: FunctionT) -> FunctionT:
        known: Any = function
        known.formula = formula
        if name is not None:
            register(name, f"{function.__module__}:{function.__name__}", kind="advantage")
        return function

    return declare


def preset(module: str, name: str, source: str, **settings: Any) -> Preset:
    """Declare a preset; assign it to ``NAME`` in capitals, in the module named.

    Args:
        module: ``__name__`` of the module.
        name: Value of ``trainer.preset``.
        source: Paper or report.
        settings: Values of the trainer's section that it sets.
    """
    register(name, f"{module}:{name.upper()}", kind="preset")
    return Preset(source, settings)


def find_preset(name: str) -> Preset:
    """A preset by its name, or by the path of one of your own (``file.py:NAME``).

    Raises:
        LookupError: There is none.
    """
    return load("preset", name)


def preset_names() -> list[str]:
    """Names of all declared presets, sorted."""
    return registered("preset")


def formula_of(kind: Any, name: str, config: Any) -> str:
    """The declared formula of an objective or an advantage; empty where it declares none."""
    formula = getattr(load(kind, name), "formula", "")
    return str(formula(config) if callable(formula) else formula)
