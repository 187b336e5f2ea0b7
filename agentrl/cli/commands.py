"""Answers a command that does not exist with the one that is meant.

Guarantees: names that other tools use for our commands are known; what was typed after the name is kept in the advice.
"""

from typing import Any

from typer.core import TyperGroup

MEANT = {
    "train": "recipe run",
    "run": "recipe run",
    "rl": "recipe run",
    "sft": "recipe run",
    "resume": "recipe run --resume",
    "recipes": "recipe list",
    "list": "recipe list",
    "show": "recipe show",
    "evaluate": "eval",
    "test": "eval",
    "bench-eval": "eval",
    "envs": "env list",
    "new": "env new",
    "init": "env new",
    "check": "env check",
    "play": "env play",
    "inference": "serve",
    "server": "serve",
    "diagnose": "doctor",
    "benchmark": "bench",
    "estimate": "plan",
    "memory": "plan",
    "explain": "plan --explain",
    "simulate": "sim",
    "predict": "sim",
}


class Commands(TyperGroup):
    """The commands of ``agentrl``, with advice for one that does not exist."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command that the arguments name, and fails with advice if there is none."""
        name = args[0]
        if name in MEANT and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}. Did you mean: {' '.join(['agentrl', MEANT[name], *args[1:]])}")
        return super().resolve_command(ctx, args)
