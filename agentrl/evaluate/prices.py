"""Prices of a model's tokens, from the recipe or from the user's table.

Guarantees: without a price there is no cost, and never one of 0; a table that cannot be read is refused with its path.
The table is ``prices.yaml`` in the user's configuration folder (``$XDG_CONFIG_HOME/agentrl``, by default
``~/.config/agentrl``), or the file that ``$AGENTRL_PRICES`` names. A line is ``MODEL: {input: 2.5, output: 10, cached:
1.25}``, in any currency, for a million tokens.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.errors import ConfigError

VARIABLE = "AGENTRL_PRICES"
_MILLION = 1e6


@dataclass(frozen=True)
class Price:
    """Price of a million tokens.

    Attributes:
        input: Price of a million tokens of prompts.
        output: Price of a million tokens of answers; those of the reasoning are among them.
        cached: Price of a million tokens of prompts that the API had in its cache; ``None``: that of all prompts.
    """

    input: float
    output: float
    cached: float | None = None

    def of(self, usage: Mapping[str, int]) -> float | None:
        """Returns the cost of tokens, ``None`` if their numbers are not known."""
        if "prompt" not in usage or "completion" not in usage:
            return None
        cached = min(usage.get("cached", 0), usage["prompt"])
        of_cached = self.input if self.cached is None else self.cached
        fresh = usage["prompt"] - cached
        return (fresh * self.input + cached * of_cached + usage["completion"] * self.output) / _MILLION


def price_of(model: str, given: Mapping[str, float] | None = None) -> Price | None:
    """Returns the price of a model's tokens.

    Args:
        model: Name of the model, as the API knows it.
        given: The price that the recipe names (``eval.price``); it goes first.

    Returns:
        The price; ``None`` if neither the recipe nor the user's table has one.

    Raises:
        ConfigError: The price or the table cannot be read.
    """
    if given is not None:
        return _price(given, "eval.price")
    path = table_path()
    if not path.is_file():
        return None
    from agentrl.config.overrides import read_file

    table = read_file(path)
    return None if model not in table else _price(table[model], f"{path}: {model}")


def table_path() -> Path:
    """Returns the path of the user's table, whether it exists or not."""
    named = os.environ.get(VARIABLE)
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(named or f"{base}/agentrl/prices.yaml").expanduser()


def _price(given: Any, where: str) -> Price:
    want = "want {input: NUMBER, output: NUMBER}, and cached: NUMBER where it differs, for a million tokens"
    if not isinstance(given, Mapping) or not {"input", "output"} <= set(given) <= {"input", "output", "cached"}:
        raise ConfigError(f"{where}: {given!r:.80}: {want}")
    if any(isinstance(one, bool) or not isinstance(one, int | float) or not one >= 0 for one in given.values()):
        raise ConfigError(f"{where}: {given!r:.80}: {want}")
    return Price(**{name: float(one) for name, one in given.items()})
