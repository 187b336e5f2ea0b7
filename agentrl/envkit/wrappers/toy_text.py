"""Texts for Gymnasium's toy-text environments: names of actions, rules, and observations in words.

Guarantees: the rules contain no advice, only facts of the environment's own documentation. Names are in the order of
the environments' ``Discrete`` action spaces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_STOPS = (("R", 0, 0), ("G", 0, 4), ("Y", 4, 0), ("B", 4, 3))  # Taxi's four places: letter, row, column


@dataclass(frozen=True)
class Game:
    """Texts of a toy-text environment.

    Attributes:
        actions: Names of the actions, in the order of their numbers.
        rules: Rules of the game, part of the first message.
        describe: Function from an observation to text; ``None`` if the drawing is enough.
    """

    actions: tuple[str, ...]
    rules: str
    describe: Callable[[Any], str] | None = None


def _taxi(observation: Any) -> str:
    rest, goal = divmod(int(observation), 4)
    rest, passenger = divmod(rest, 5)
    row, column = divmod(rest, 5)
    where = "in the taxi" if passenger == 4 else "at " + _stop(passenger)
    return f"Taxi at row {row}, column {column}. Passenger {where}. Destination: {_stop(goal)}."


def _stop(index: int) -> str:
    letter, row, column = _STOPS[index]
    return f"{letter} (row {row}, column {column})"


def _blackjack(observation: Any) -> str:
    total, dealer, ace = (int(one) for one in observation)
    shown = "an ace" if dealer == 1 else str(dealer)
    return f"Your cards add up to {total}, with{'' if ace else 'out'} a usable ace. The dealer shows {shown}."


def _cliff(observation: Any) -> str:
    row, column = divmod(int(observation), 12)
    return f"You are at row {row}, column {column}."


_LAKE = Game(
    ("left", "down", "right", "up"),
    "Cross the frozen lake from S to G. F is ice that holds, H is a hole that ends the game. [ ] marks your place. "
    "The ice may be slippery: a step may then go to the side.",
)
_CLIFF = Game(
    ("up", "right", "down", "left"),
    "Walk from the bottom left corner (row 3, column 0) to T (row 3, column 11). x is you, C is the cliff: whoever "
    "steps into it is back at the start. Each step costs 1, the cliff 100.",
    _cliff,
)
GAMES = {
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "CliffWalking": _CLIFF,
    "CliffWalkingSlippery": _CLIFF,
    "Taxi": Game(
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "Drive the taxi to the passenger, pick the passenger up, drive to the destination and drop the passenger off. "
        "Row 0 is in the north, column 0 in the west; | is a wall, : is none. Each step costs 1, a wrong pickup or "
        "dropoff 10; a right dropoff earns 20.",
        _taxi,
    ),
    "Blackjack": Game(
        ("stick", "hit"),
        "Get closer to 21 than the dealer, without going over. An ace counts 1 or 11, a face card 10.",
        _blackjack,
    ),
}
"""Maps ids without version to texts."""
