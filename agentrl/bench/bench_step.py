"""A whole GRPO step, and its update alone, beside ``trl.GRPOTrainer`` at equal work.

Guarantees: the same number of prompts (4 of 150 to 200 tokens), answers (8 each, 80 tokens), dtype (bfloat16 over
float32 parameters where the CPU has it, else float32) and optimizer; one update over all of them on both sides. Each
side runs in processes of its own, one at a time, interleaved; TRL takes the step that its ``train()`` takes, without
gradient checkpointing, which would only slow it down here.
"""

from agentrl.bench.report import default_model
from agentrl.bench.sides import Side


def run(model: str | None = None, repeats: int = 5, dtype: str = "auto") -> dict[str, list[float]]:
    """Measure ``repeats`` times.

    Args:
        model: Model folder; by default the 135M model of the recipes.
        repeats: Interleaved measurements, after one that warms up.
        dtype: ``float32``, ``bfloat16`` or ``auto``.

    Returns:
        ``step_vs_trl``, our seconds of a step over TRL's; ``tokens_vs_trl``, our trained tokens per second of an update
        over TRL's; ``memory_vs_trl``, our trainer's peak of memory over TRL's; and the seconds behind them.
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
