"""Compares a whole GRPO step, and its update alone, with ``trl.GRPOTrainer`` on the same amount of work.

Guarantees: both sides have the same number of prompts (4 of 150 to 200 tokens) and answers (8 for each, 80 tokens), the
same dtype (by default bfloat16 over float32 parameters if the CPU has it, else float32) and optimizer, and make one
update over all answers. Each side runs in processes of its own, one at a time, interleaved; TRL's step is that of its
``train()``, without gradient checkpointing, which would only slow it down here.
"""

from agentrl.bench.report import default_model
from agentrl.bench.sides import Side


def run(model: str | None = None, repeats: int = 5, dtype: str = "auto") -> dict[str, list[float]]:
    """Measure ``repeats`` times.

    Args:
        model: Model folder; by default the 135M model of the recipes.
        repeats: Number of interleaved measurements, after one that warms up.
        dtype: ``float32``, ``bfloat16`` or ``auto``.

    Returns:
        Ratios of agentrl over TRL: ``step_vs_trl``, seconds of a step; ``tokens_vs_trl``, trained tokens per second of
        an update; ``memory_vs_trl``, peak memory of the trainer; and the seconds and MiB that they are computed from.
    """
    from agentrl.host.compute_dtype import resolved_dtype
    from agentrl.host.cpu_env import CPU_ENV

    path = model or default_model()
    names = ("engine", "trainer", "trl")
    computed = resolved_dtype(dtype, "cpu")
    sides = {name: Side("agentrl.bench.step_sides", name, path, computed, env=CPU_ENV) for name in names}
    figures: dict[str, list[float]] = {}
    try:
        for side in sides.values():
            side.hear()
        for repeat in range(repeats + 1):
            batch = sides["engine"].do(repeat)
            ours = sides["trainer"].do({key: batch[key] for key in ("prompts", "answers", "logprobs")})
            theirs = sides["trl"].do(repeat)
            if repeat == 0:
                continue
            measured = {
                "step_vs_trl": (batch["seconds"] + ours["seconds"]) / theirs["seconds"],
                "tokens_vs_trl": (ours["tokens"] / ours["seconds"]) / (theirs["tokens"] / theirs["update"]),
                "memory_vs_trl": ours["peak"] / theirs["peak"],
                "sampling_s": batch["seconds"],
                "update_s": ours["seconds"],
                "trl_sampling_s": theirs["seconds"] - theirs["update"],
                "trl_update_s": theirs["update"],
                "trainer_mib": ours["peak"],
                "trl_mib": theirs["peak"],
            }
            for key, value in measured.items():
                figures.setdefault(key, []).append(value)
    finally:
        for side in sides.values():
            side.end()
    return figures
