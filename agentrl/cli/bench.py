"""``agentrl bench``: measures speed ratios on this machine."""

from pathlib import Path
from typing import Annotated

import typer

_PREFIX = "bench_"  # agentrl bench NAME runs agentrl/bench/bench_NAME.py


def benchmark_names() -> list[str]:
    """Lists the names of the benchmarks, sorted."""
    folder = Path(__file__).resolve().parent.parent / "bench"
    return sorted(file.stem.removeprefix(_PREFIX) for file in folder.glob(f"{_PREFIX}*.py"))


def complete_benchmark(incomplete: str) -> list[str]:
    """Lists benchmark names that start with ``incomplete``, for shell completion."""
    return [name for name in benchmark_names() if name.startswith(incomplete)]


def bench(
    name: Annotated[str, typer.Argument(help="Name of the benchmark.", autocompletion=complete_benchmark)],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line instead of a table.")] = False,
) -> None:
    """Measure speed ratios on this machine.

    At least 5 repeats, interleaved; prints median and spread.
    """
    import importlib

    from rich.console import Console

    from agentrl.config.errors import ConfigError
    from agentrl.core.registry import nearest
    from agentrl.launch.needed_packages import SERVING, require_packages

    names = benchmark_names()
    if name not in names:
        raise ConfigError(f"no benchmark {name!r}{nearest(name, names) or '.'} Known: {', '.join(names)}")
    require_packages(dict.fromkeys(SERVING, f"agentrl bench {name}"))
    results = importlib.import_module(f"agentrl.bench.{_PREFIX}{name}").run()
    from agentrl.bench.report import json_line, table

    if as_json:
        typer.echo(json_line(results))
    else:
        Console().print(table(results, f"agentrl bench {name}"))
