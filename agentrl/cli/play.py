"""Lets a person act as the agent, in the terminal.

Guarantees: the environment gets messages of the same shape as a model's; its messages are shown in full;
it is always closed at the end.
"""

import json
from typing import Any

from rich.console import Console
from rich.markup import escape

from agentrl.core.contract import checked_reset, checked_reward, checked_step
from agentrl.core.environment import Environment
from agentrl.core.episode import Message
from agentrl.host.worker_threads import in_thread
from agentrl.observe.message_view import message_text

THINKING = 86_400.0  # seconds that a person may take for an answer
HELP = "Type an answer, or several lines ended by a line with a single dot after a first line of <<. /quit ends."


async def play_episode(
    env: Environment[Any, Any],
    *,
    seed: int | None,
    options: dict[str, Any] | None,
    console: Console | None = None,
) -> float | None:
    """Play one episode.

    Args:
        env: The environment; closed at the end.
        seed: Seed of ``reset``.
        options: The task; ``None`` for one that the environment draws.
        console: Console to print to.

    Returns:
        The sum of the rewards; ``None`` if one was missing or the player quit.
    """
    out = console or Console(highlight=False)
    try:
        observation, info = checked_reset(await env.reset(seed=seed, options=options), env)
        total: float | None = 0.0
        _show_tools(out, info)
        out.print(HELP, style="dim")
        while True:
            for message in observation:
                out.print(message_text(message))
            action = await in_thread(_ask, out, timeout=THINKING)  # a daemon thread: Ctrl-C need not wait for Enter
            if action is None:
                return None
            observation, reward, terminated, truncated, info = checked_step(await env.step(action), env)
            total = None if reward is None or total is None else total + checked_reward(reward, env)
            shown = "missing" if reward is None else f"{reward:g}"
            numbers = "  ".join(f"{name} {value:g}" for name, value in info.get("metrics", {}).items())
            out.print(escape(f"reward {shown}  {numbers}"), style="bold")
            if terminated or truncated:
                for message in observation:
                    out.print(message_text(message))
                end = "missing" if total is None else f"{total:g}"
                out.print(f"{'terminated' if terminated else 'truncated'}; reward of the episode: {end}")
                return total
    finally:
        await env.close()


def read_action(text: str, number: int = 0) -> Message:
    """Turns typed text into an assistant message: ``/tool {...}`` lines are tool calls, the other lines its text."""
    said: list[str] = []
    calls: list[dict[str, Any]] = []
    for line in text.split("\n"):
        name, _, rest = line[1:].partition(" ")
        if line.startswith("/") and name:
            function = {"name": name, "arguments": rest.strip() or "{}"}
            calls.append({"id": f"call_{number}_{len(calls)}", "type": "function", "function": function})
        else:
            said.append(line)
    message: Message = {"role": "assistant", "content": "\n".join(said)}
    return message | ({"tool_calls": calls} if calls else {})


def _ask(console: Console) -> Message | None:
    first = console.input("[bold]you:[/bold] ")
    if first.strip() == "/quit":
        return None
    if first.strip() != "<<":
        return read_action(first)
    lines: list[str] = []
    while (line := console.input("")) != ".":
        lines.append(line)
    return read_action("\n".join(lines))


def _show_tools(console: Console, info: dict[str, Any]) -> None:
    for tool in info.get("tools", []):
        function = tool["function"]
        example = {name: f"<{what.get('type', 'any')}>" for name, what in _properties(function).items()}
        text = f"/{function['name']} {json.dumps(example)}  {function.get('description', '').partition(chr(10))[0]}"
        console.print(escape(text), style="dim")


def _properties(function: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return function.get("parameters", {}).get("properties", {})
