"""Speed of the embedded engine against transformers' ``generate``, and against itself under other loads.

Guarantees: all sides run in this process, interleaved, on the same prompts, dtype and threads, prefill included; the
engine additionally returns a logprob for each token and ``generate`` does not, so no ratio flatters the engine.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agentrl.bench.report import default_model

if TYPE_CHECKING:
    from agentrl.inference.engine.engine import Engine
    from agentrl.inference.engine.model import LoadedModel
    from agentrl.inference.engine.request import Request

PROMPT_TOKENS = (50, 64)  # 57 on average
SHORT_PROMPT = (4, 12)  # where decoding is meant, not prefilling
SLOTS, NEW_TOKENS = 32, 128  # against generate
CROWD, CROWD_TOKENS = 128, 64  # of the larger batch
RAGGED, RAGGED_TOKENS = 96, (10, 128)  # requests through 32 slots, and how long their answers are

Prompt = tuple[int, ...]


def run(model: str | None = None, repeats: int = 5, device: str = "auto") -> dict[str, list[float]]:
    """Measure everything ``repeats`` times.

    Args:
        model: Model folder; by default the 135M model of the recipes.
        repeats: Interleaved measurements.
        device: ``auto`` or a torch device name.

    Returns:
        ``decode_vs_generate`` (without a compiler) and ``decode_vs_generate_compiled`` (where there is one), tokens per
        second over those of ``generate`` with prompts of a few tokens; ``answers_vs_generate`` and its like with
        prompts of 57; ``throughput_128_vs_32``; ``ragged_cost``, seconds a token of ragged answers over those of equal
        ones; ``first_token_s``, from a request's arrival beside 31 running ones; and tokens per second.
    """
    from agentrl.inference.engine.model import load_model

    path = model or default_model()
    plain = load_model(path, device=device)
    bare = start(path, SLOTS, device, compiled=False)
    best = start(path, CROWD, device, compiled=True)
    compiled = best.runner.fast is not None and best.runner.fast.operators.name == "compiled"
    figures: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for key, value in values.items():
            figures.setdefault(key, []).append(value)

    try:
        for side in (bare, best):
            tokens_a_second(side, make_prompts(plain.vocab_size, SLOTS, -1), [2] * SLOTS)
        generate_speed(plain, make_prompts(plain.vocab_size, SLOTS, -1), 2)
        for repeat in range(repeats):
            for what, lengths in (("decode", SHORT_PROMPT), ("answers", PROMPT_TOKENS)):
                prompts = make_prompts(plain.vocab_size, SLOTS, repeat, lengths)
                theirs = generate_speed(plain, prompts, NEW_TOKENS)
                ours = tokens_a_second(bare, prompts, [NEW_TOKENS] * SLOTS)
                note(**{f"{what}_vs_generate": ours / theirs, f"{what}_tokens_s": ours})
                note(**{f"{what}_generate_tokens_s": theirs})
                if compiled:
                    ours = tokens_a_second(best, prompts, [NEW_TOKENS] * SLOTS)
                    note(**{f"{what}_vs_generate_compiled": ours / theirs, f"{what}_compiled_tokens_s": ours})
            many = make_prompts(plain.vocab_size, CROWD, 1000 + repeat)
            few = tokens_a_second(best, many[:SLOTS], [CROWD_TOKENS] * SLOTS)
            note(throughput_128_vs_32=tokens_a_second(best, many, [CROWD_TOKENS] * CROWD) / few)
            note(ragged_cost=ragged_cost(bare, plain.vocab_size, repeat))
            note(first_token_s=first_token_seconds(bare, make_prompts(plain.vocab_size, SLOTS, 3000 + repeat)))
    finally:
        for side in (bare, best):
            side.stop(timeout=60)
    return figures


def start(path: str, slots: int, device: str, *, compiled: bool, dtype: str = "auto") -> "Engine":
    """A ready engine."""
    from agentrl.inference.engine.engine import Engine
    from agentrl.inference.engine.model import load_model
    from agentrl.inference.engine.runner import ModelRunner

    def build() -> ModelRunner:
        return ModelRunner(load_model(path, dtype=dtype, device=device), slots, compiled=compiled)

    engine = Engine(build, max_running=slots, seed=0).start()
    engine.ready.result()
    return engine


def make_prompts(vocab_size: int, count: int, seed: int, lengths: tuple[int, int] = PROMPT_TOKENS) -> list[Prompt]:
    """Random prompts of ragged lengths."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(vocab_size) for _ in range(rng.randint(*lengths))) for _ in range(count)]


def tokens_a_second(engine: "Engine", prompts: Sequence[Prompt], lengths: Sequence[int]) -> float:
    """New tokens per second of the engine, sampling at temperature 1 with logprobs."""
    ended = threading.Semaphore(0)
    requests = [
        make_request(f"bench-{index}", prompt, length, lambda request: ended.release())
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    begun = time.perf_counter()
    engine.submit(requests)
    for _ in requests:
        ended.acquire()
    return sum(len(request.logprobs) for request in requests) / (time.perf_counter() - begun)


def make_request(
    rid: str, prompt: Prompt, length: int, on_update: "Callable[[Request], None]", *, stream: bool = False
) -> "Request":
    """A request that runs to its full length."""
    from agentrl.inference.engine.params import SamplingParams
    from agentrl.inference.engine.request import Request

    return Request(
        rid=rid,
        prompt=prompt,
        params=SamplingParams(max_new_tokens=length, ignore_eos=True),
        limit=length,
        stop_ids=frozenset(),
        on_update=on_update,
        rng=random.Random(rid),
        stream=stream,
    )


def ragged_cost(engine: "Engine", vocab_size: int, seed: int) -> float:
    """Seconds a token of answers of 10 to 128 tokens over those of answers that all have the mean length."""
    shortest, longest = RAGGED_TOKENS
    lengths = [shortest + round(index * (longest - shortest) / (RAGGED - 1)) for index in range(RAGGED)]
    random.Random(seed).shuffle(lengths)
    even = [round(sum(lengths) / RAGGED)] * RAGGED
    prompts = [make_prompts(vocab_size, RAGGED, 2000 + 2 * seed + side) for side in (0, 1)]
    ragged_speed, even_speed = (
        tokens_a_second(engine, prompts[side], counts) for side, counts in enumerate((lengths, even))
    )
    return even_speed / ragged_speed


def first_token_seconds(engine: "Engine", prompts: Sequence[Prompt]) -> float:
    """Seconds from a request's arrival to its first token, beside all other slots decoding."""
    busy, came = threading.Event(), threading.Event()

    def decoding(request: "Request") -> None:
        if len(request.output) > 4:
            busy.set()

    others = [
        make_request(f"other-{index}", prompt, 64, decoding, stream=True) for index, prompt in enumerate(prompts[1:])
    ]
    late = make_request("late", prompts[0], 2, lambda request: came.set(), stream=True)
    engine.submit(others)
    busy.wait()
    begun = time.perf_counter()
    engine.submit([late])
    came.wait()
    seconds = time.perf_counter() - begun
    engine.abort(everything=True).result()
    return seconds


def generate_speed(loaded: "LoadedModel", prompts: Sequence[Prompt], new_tokens: int) -> float:
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
