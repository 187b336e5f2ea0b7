"""Decode throughput of the embedded engine against transformers' ``generate``.

Guarantees: both sides run in this process, interleaved, on the same prompts, dtype and threads, prefill included; the
engine additionally returns a logprob for each token and ``generate`` does not, so the ratio never flatters the engine.
"""

import random
import threading
import time
from typing import TYPE_CHECKING

from agentrl.bench.report import default_model

if TYPE_CHECKING:
    from agentrl.inference.engine.engine import Engine
    from agentrl.inference.engine.model import LoadedModel

PROMPTS = 32
PROMPT_TOKENS = (50, 64)  # 57 on average
NEW_TOKENS = 64


def run(model: str | None = None, repeats: int = 5, device: str = "auto") -> dict[str, list[float]]:
    """Measure both sides ``repeats`` times.

    Args:
        model: Model folder; by default the 135M model of the recipes.
        repeats: Interleaved measurements.
        device: ``auto`` or a torch device name.

    Returns:
        ``decode_vs_generate`` (engine over generate, tokens per second) and both sides in tokens per second.
    """
    from agentrl.inference.engine.engine import Engine
    from agentrl.inference.engine.model import load_model
    from agentrl.inference.engine.runner import ModelRunner

    path = model or default_model()
    plain = load_model(path, device=device)
    engine = Engine(lambda: ModelRunner(load_model(path, device=device), PROMPTS), seed=0).start()
    engine.ready.result()
    figures: dict[str, list[float]] = {"decode_vs_generate": [], "engine_tokens_s": [], "generate_tokens_s": []}
    try:
        for repeat in range(-1, repeats):
            prompts = make_prompts(plain.vocab_size, repeat)
            new_tokens = NEW_TOKENS if repeat >= 0 else 2  # the first round only warms up
            theirs = generate_speed(plain, prompts, new_tokens)
            ours = engine_speed(engine, prompts, new_tokens)
            if repeat >= 0:
                figures["decode_vs_generate"].append(ours / theirs)
                figures["engine_tokens_s"].append(ours)
                figures["generate_tokens_s"].append(theirs)
    finally:
        engine.stop(timeout=60)
    return figures


def make_prompts(vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """Random prompts of ragged lengths."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(vocab_size) for _ in range(rng.randint(*PROMPT_TOKENS))) for _ in range(PROMPTS)]


def engine_speed(engine: "Engine", prompts: list[tuple[int, ...]], new_tokens: int) -> float:
    """Tokens per second of the engine, sampling at temperature 1 with logprobs."""
    from agentrl.inference.engine.params import SamplingParams
    from agentrl.inference.engine.request import Request

    ended = threading.Semaphore(0)
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    requests = [
        Request(
            rid=f"bench-{index}",
            prompt=prompt,
            params=params,
            limit=new_tokens,
            stop_ids=frozenset(),
            on_update=lambda request: ended.release(),
            rng=random.Random(index),
        )
        for index, prompt in enumerate(prompts)
    ]
    start = time.perf_counter()
    engine.submit(requests)
    for _ in requests:
        ended.acquire()
    return sum(len(request.logprobs) for request in requests) / (time.perf_counter() - start)


def generate_speed(loaded: "LoadedModel", prompts: list[tuple[int, ...]], new_tokens: int) -> float:
    """Tokens per second of ``generate`` on one left-padded batch, sampling at temperature 1."""
    import torch

    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    start = time.perf_counter()
    with torch.inference_mode():
        output = loaded.model.generate(  # type: ignore[operator]
            torch.tensor(padded, device=loaded.device),
            attention_mask=torch.tensor(mask, device=loaded.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
    return (output.shape[1] - longest) * len(prompts) / (time.perf_counter() - start)
