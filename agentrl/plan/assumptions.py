"""The assumptions of a plan: each a number with a unit and a source, and each can be set.

Guarantees: whatever a plan computes with beside the recipe and the model's ``config.json`` stands here; a value that
was set says so, one that was measured says how; an unknown name is refused.
"""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from agentrl.config.errors import ConfigError
from agentrl.config.recipe import Recipe
from agentrl.plan.cards import Card

SHARES = (
    "mfu",
    "prefill_mfu",
    "decode_mfu",
    "mbu",
    "link_share",
    "server_share",
    "signal",
    "distinct",
    "distinct_rows",
)
MAY_BE_ZERO = (
    "decode_step_ms", "reserve_gb", "controller_s_per_mtoken", "answer", "sigma", "prompt", "shared", "observation",
    "outside", "signal", "distinct", "distinct_rows",
)  # fmt: skip


@dataclass(frozen=True)
class Assumption:
    """A number that a plan computes with.

    Attributes:
        name: Name in ``--assume name=value``.
        value: The number.
        unit: Unit of the value.
        meaning: Explanation in a few words.
        source: Where it comes from.
    """

    name: str
    value: float
    unit: str
    meaning: str
    source: str


class Assumptions(Mapping[str, float]):
    """Assumptions by name; indexing gives the value.

    Args:
        found: The assumptions, in the order in which they are shown.
    """

    def __init__(self, found: Iterable[Assumption]) -> None:
        self._found = {one.name: one for one in found}

    def __getitem__(self, name: str) -> float:
        """Returns the value of an assumption."""
        return self._found[name].value

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names."""
        return iter(self._found)

    def __len__(self) -> int:
        """Returns their number."""
        return len(self._found)

    def all(self) -> list[Assumption]:
        """Returns the assumptions in order."""
        return list(self._found.values())

    def source(self, name: str) -> str:
        """Returns where an assumption comes from."""
        return self._found[name].source

    def replaced(self, values: Mapping[str, float], source: str | Mapping[str, str]) -> "Assumptions":
        """Returns the assumptions with other values.

        Args:
            values: New values by name.
            source: Source of all of them, or of each by name.

        Raises:
            ConfigError: There is no assumption of a name, or a value is none that can be computed with.
        """
        for name, value in values.items():
            if name not in self._found:
                near = difflib.get_close_matches(name, self._found, n=1)
                hint = f"; did you mean {near[0]}?" if near else "."
                raise ConfigError(f"--assume {name}: no such assumption{hint} Known: {', '.join(self._found)}")
            if not 0 <= value < math.inf:
                raise ConfigError(f"--assume {name}={value:g}: want a number that is not negative, and finite")
            if value == 0 and name not in MAY_BE_ZERO:
                raise ConfigError(f"--assume {name}=0: a plan divides by it; want a number above 0")

        def one(old: Assumption) -> Assumption:
            if old.name not in values:
                return old
            text = source if isinstance(source, str) else source[old.name]
            return Assumption(old.name, values[old.name], old.unit, old.meaning, text)

        return Assumptions(map(one, self.all()))


def parse_assumed(given: Iterable[str]) -> dict[str, float]:
    """Parses ``name=value`` texts.

    Raises:
        ConfigError: One is not of this form, a share is above 1, or a machine has no whole number of cards.
    """
    found: dict[str, float] = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError as error:
            raise ConfigError(f"--assume {text}: want NAME=NUMBER, e.g. --assume mfu=0.35") from error
        if not equals:
            raise ConfigError(f"--assume {text}: want NAME=NUMBER, e.g. --assume mfu=0.35")
    for name, one in found.items():
        if name in SHARES and one > 1:
            raise ConfigError(f"--assume {name}={one:g}: a share, at most 1 (0.4 is 40%)")
        if name == "gpus_per_machine" and (one < 1 or one % 1):
            raise ConfigError(f"--assume gpus_per_machine={one:g}: want a whole number, 1 or more")
    return found


def assumed(card: Card, recipe: Recipe) -> Assumptions:
    """Returns what a plan assumes unless told or measured otherwise.

    Args:
        card: The accelerator.
        recipe: Recipe with resolved dtypes.
    """
    return Assumptions([*_of_card(card, recipe), *_of_software(card), *_of_episodes(recipe)])


def _of_card(card: Card, recipe: Recipe) -> list[Assumption]:
    published = card.source
    train, serve = recipe.trainer.dtype, recipe.inference.dtype
    return [
        Assumption("peak_tflops", card.peak_tflops(train), "TFLOP/s", f"peak of the card in {train}", published),
        Assumption("serving_tflops", card.peak_tflops(serve), "TFLOP/s", f"peak in the servers' {serve}", published),
        Assumption("memory_gb", card.memory_gb, "GB", "memory of the card", published),
        Assumption("bandwidth_gbs", card.bandwidth_gbs, "GB/s", "its memory bandwidth", published),
        Assumption("link_gbs", card.link_gbs, "GB/s", "one direction between cards of a machine", published),
        Assumption("network_gbs", card.network_gbs, "GB/s", "one direction between machines, per card", published),
        Assumption("host_gbs", card.host_gbs, "GB/s", "one direction between card and host", published),
        Assumption("gpus_per_machine", 1 if card.name == "cpu" else 8, "", "cards of a machine", "usual"),
    ]


def _of_software(card: Card) -> list[Assumption]:
    ours = "ours on Zen 4: docs/performance.md" if card.name == "cpu" else ""
    mfu = ours or "Llama 3 report, 2407.21783, table 4: 0.38-0.43 on H100; ours unmeasured on GPUs"
    mbu = ours or "assumed: serving systems report 0.5-0.85; ours unmeasured on GPUs"
    guess = "assumed, unmeasured"
    step = Assumption("decode_step_ms", 5.0 if ours else 2.0, "ms", "a decode step beside products", ours or guess)
    return [
        Assumption("mfu", 0.55 if ours else 0.4, "", "share of the peak that an update reaches", mfu),
        Assumption("prefill_mfu", 0.55 if ours else 0.4, "", "the same for prompts and scoring", mfu),
        Assumption("decode_mfu", 0.55 if ours else 0.4, "", "the same for decoding many sequences", mfu),
        Assumption("mbu", 0.6, "", "share of the memory bandwidth that decoding reaches", mbu),
        step,
        Assumption("link_share", 0.7, "", "share of link, network and host bandwidth that is reached", guess),
        Assumption("reserve_gb", 1.0 if ours else 4.0, "GB", "runtime, buffers and gaps in each process", guess),
        Assumption(
            "server_share", 1.0 if ours else 0.88, "", "share of a card's memory that a server may take",
            "the embedded engine takes what it needs" if ours else "SGLang's usual default",
        ),
        Assumption(
            "controller_s_per_mtoken", 0.23, "s", "controller and rank 0 for 10^6 tokens",
            "cpu_per_million_tokens in docs/performance.md, Zen 3",
        ),
    ]  # fmt: skip


def _of_episodes(recipe: Recipe) -> list[Assumption]:
    longest = recipe.sampling.max_new_tokens
    room = max(1, recipe.inference.context_length - longest)
    return [
        Assumption("answer", longest / 2, "tokens", "mean sampled in an episode", "half of sampling.max_new_tokens"),
        Assumption("sigma", 0.8, "", "spread of its lognormal distribution", "as agentrl sim"),
        Assumption(
            "prompt", room / 2, "tokens", "mean prompt", "half of inference.context_length - sampling.max_new_tokens"
        ),
        Assumption("shared", 0.0, "tokens", "beginning that all prompts have, computed once", "the most work"),
        Assumption("turns", 1.0, "", "answers of an episode", "one turn"),
        Assumption("observation", 0.0, "tokens", "tool results in an episode, not sampled", "one turn"),
        Assumption("outside", 0.0, "s", "environment and tools in an episode", "one turn"),
        Assumption("signal", 1.0, "", "share of groups with unequal rewards, which are computed", "the most work"),
        Assumption("distinct", 1.0, "", "share of an update's tokens left where answers begin alike", "the most work"),
        Assumption("distinct_rows", 1.0, "", "share of decoded rows that differ", "the most work"),
    ]
