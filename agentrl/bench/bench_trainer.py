"""Compares a GRPO update with ``trl.GRPOTrainer``: the figures of :mod:`agentrl.bench.bench_step` about updates."""

from agentrl.bench import bench_step

KEYS = ("tokens_vs_trl", "memory_vs_trl", "update_s", "trl_update_s", "trainer_mib", "trl_mib")


def run(model: str | None = None, repeats: int = 5) -> dict[str, list[float]]:
    """Measure ``repeats`` times; see :func:`agentrl.bench.bench_step.run`."""
    figures = bench_step.run(model, repeats)
    return {key: figures[key] for key in KEYS}
