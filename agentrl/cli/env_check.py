"""``agentrl env check``: checks an environment before training on it."""

import json
import os
import sys
import threading
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.completion import complete_environment
from agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from agentrl.envkit.check.findings import Report

NAMES = "An id, a name in ./envs, a path such as mine.py or mine.py:Mine, or package.module:Mine."
STYLES = {"error": "bold red", "warning": "bold yellow", "hint": "bold cyan"}


def check(
    env: Annotated[str, typer.Argument(help=NAMES, metavar="ENV", autocompletion=complete_environment)],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Arguments of the environment.")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="One task as JSON. Default: the environment's own dataset.")
    ] = None,
    episodes: Annotated[int, typer.Option("--episodes", min=2, help="Episodes with sampled actions.")] = 4,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the first episode.")] = 0,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that one call may take.")] = 30.0,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check an environment: contract, reproducibility, blocking calls and leaked resources.

    The exit code is 1 if there is an error, otherwise 0. The environment's own output goes to standard error.
    """
    kwargs, options = read_settings(settings or []), read_task(task)
    from agentrl.core.registry import spec_of
    from agentrl.envkit.check.case import Settings
    from agentrl.envkit.check.checker import check_environment
    from agentrl.envkit.check.leaks import is_idle

    try:
        spec_of("env", env)
    except LookupError as error:
        raise ConfigError(str(error)) from error
    before = set(threading.enumerate())
    how = Settings(episodes=episodes, seed=seed, seconds=timeout, task=options)
    with redirect_stdout(sys.stderr):
        report = check_environment(env, kwargs=kwargs, settings=how)
    if strict:
        report = report.strict()
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        from rich.console import Console

        show(report, Console(highlight=False))
    code = 0 if report.ok else 1
    if not all(is_idle(thread) for thread in set(threading.enumerate()) - before):  # Python would wait for some of them
        leave_at_once(code)
    raise typer.Exit(code)


def read_settings(settings: list[str]) -> dict[str, Any]:
    """Parse ``key=value`` texts into arguments of the environment.

    Raises:
        ConfigError: A text has no ``=``, or a value is not YAML.
    """
    from agentrl.config.overrides import parse_override, set_key

    kwargs: dict[str, Any] = {}
    for text in settings:
        if "=" not in text:
            raise ConfigError(f"cannot read {text!r}: an argument of the environment looks like key=value")
        key, value = parse_override(f"env.kwargs.{text}")
        kwargs = set_key(kwargs, key.removeprefix("env.kwargs."), value)
    return kwargs


def read_task(text: str | None) -> dict[str, Any] | None:
    """Parse the task given with ``--task``.

    Raises:
        ConfigError: ``text`` is not a JSON object.
    """
    if text is None:
        return None
    try:
        task = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--task is not JSON: {error}") from error
    if not isinstance(task, dict) or not task:
        raise ConfigError(f'--task must be a JSON object, such as \'{{"question": "..."}}\', got {text}')
    return task


def show(report: "Report", console: "Console") -> None:
    """Print the findings, the most severe first, then the skipped rules, then one line of numbers."""
    from rich.padding import Padding
    from rich.text import Text

    for finding in report.findings:
        head = Text.assemble((finding.level.upper(), STYLES[finding.level]), f"  {finding.check}  ", finding.where)
        console.print(head)
        for label, text in (("", finding.message), ("why: ", finding.why), ("mend: ", finding.mend)):
            console.print(Padding(Text(label + text), (0, 0, 0, 4)))
        console.print()
    reasons: dict[str, list[str]] = {}
    for rule, reason in report.skipped.items():
        reasons.setdefault(reason, []).append(rule)
    for reason, rules in reasons.items():
        console.print(Text(f"not checked: {', '.join(rules)} ({reason})", style="dim"))
    found = {level: sum(one.level == level for one in report.findings) for level in STYLES}
    counts = ", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in found.items())
    numbers = f"{report.numbers['episodes']:g} episodes in {report.numbers['seconds']:.1f} s"
    console.print(
        Text(f"{report.name}: {len(report.passed)} checks passed, {len(report.skipped)} skipped, {counts} ({numbers})")
    )


def leave_at_once(code: int) -> None:
    """End the process without waiting for the threads that the environment has left running."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
