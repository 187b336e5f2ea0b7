"""Compares the embedded engine's speed with transformers' ``generate``, and with its own speed under other loads.

Guarantees: all sides have the same prompts, dtype and threads; prefill is included; sides are interleaved, each in a
process of its own (:mod:`agentrl.bench.engine_sides`). The engine also returns a logprob for each token, which
``generate`` does not, so the ratios never favour the engine.
"""

from agentrl.bench.engine_sides import PROMPT_TOKENS, SHORT_PROMPT
from agentrl.bench.report import default_model
from agentrl.bench.sides import Side

SLOTS, NEW_TOKENS = 32, 128  # requests and new tokens in the comparison with generate
CROWD, CROWD_TOKENS = 128, 64  # requests and new tokens of the larger batch
KINDS = {"decode": SHORT_PROMPT, "answers": PROMPT_TOKENS}


def run(model: str | None = None, repeats: int = 5, device: str = "auto") -> dict[str, list[float]]:
    """Measure everything ``repeats`` times.

    Args:
        model: Model folder; by default the 135M model of the recipes.
        repeats: Number of interleaved measurements.
        device: ``auto`` or a torch device name.

    Returns:
        ``decode_vs_generate`` (without a compiler) and ``decode_vs_generate_compiled`` (if there is a compiler): tokens
        per second over those of ``generate``, with prompts of 4 to 12 tokens; ``answers_vs_generate`` and
        ``answers_vs_generate_compiled``: the same with prompts of 57 tokens; ``throughput_128_vs_32``: tokens per
        second with 128 requests over those with 32; ``ragged_cost``: seconds per token of answers of different lengths
        over those of equal ones; ``first_token_s``: seconds from a request's arrival to its first token, beside 31
        running requests; and the tokens per second of each side.
    """
    from agentrl.host.cpu_env import CPU_ENV

    path = model or default_model()
    slots = {"generate": 0, "torch": SLOTS, "compiled": CROWD}
    sides = {
        name: Side("agentrl.bench.engine_sides", name, path, device, str(count), env=CPU_ENV if count else None)
        for name, count in slots.items()
    }
    figures: dict[str, list[float]] = {}

    def ask(side: str, **task: object) -> float:
        return sides[side].do(task)["value"]

    def note(**values: float) -> None:
        for key, value in values.items():
            figures.setdefault(key, []).append(value)

    try:
        best = {name: side.hear()["operators"] for name, side in sides.items()}["compiled"]
        others = ["torch", "compiled"] if best == "compiled" else ["torch"]
        for name in sides:
            ask(name, what="speed", count=SLOTS, seed=-1, new=2)
        for repeat in range(repeats):
            for kind, lengths in KINDS.items():
                task = {"what": "speed", "count": SLOTS, "seed": repeat, "lengths": lengths, "new": NEW_TOKENS}
                theirs = ask("generate", **task)
                note(**{f"{kind}_generate_tokens_s": theirs})
                for name in others:
                    ours, suffix = ask(name, **task), "_compiled" if name == "compiled" else ""
                    note(**{f"{kind}_vs_generate{suffix}": ours / theirs, f"{kind}{suffix}_tokens_s": ours})
            crowd = {"what": "speed", "seed": 1000 + repeat, "new": CROWD_TOKENS}
            few = ask("compiled", count=SLOTS, **crowd)
            note(throughput_128_vs_32=ask("compiled", count=CROWD, **crowd) / few)
            note(ragged_cost=ask("torch", what="ragged", seed=repeat))
            note(first_token_s=ask("torch", what="first", count=SLOTS, seed=3000 + repeat))
    finally:
        for side in sides.values():
            side.end()
    return figures
