"""Processes of ``agentrl bench engine``, its sides: each runs an engine or ``generate``, and measures on request.

``python -m agentrl.bench.engine_sides SIDE MODEL DEVICE SLOTS`` reads a line of JSON for each task from stdin and
answers with one line of JSON on stdout. Each side needs a process of its own, because two pools of OpenMP threads in
one process slow each other down at every operator.
"""

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.bench.sides import answer, requests

if TYPE_CHECKING:
    from agentrl.engine.engine import Engine
    from agentrl.engine.model import LoadedModel
    from agentrl.engine.request import Request

PROMPT_TOKENS = (50, 64)  # 57 on average
SHORT_PROMPT = (4, 12)  # to measure decoding without much prefill
RAGGED, RAGGED_TOKENS = 96, (10, 128)  # number of requests with different lengths, and the lengths of their answers

Prompt = tuple[int, ...]


def start(path: str, slots: int, device: str, *, compiled: bool, dtype: str = "auto") -> "Engine":
    """Starts an engine and waits until it is ready."""
    from agentrl.engine.engine import Engine
    from agentrl.engine.model import load_model
    from agentrl.engine.runner import ModelRunner

    def build() -> ModelRunner:
        return ModelRunner(load_model(path, dtype=dtype, device=device), slots, compiled=compiled)

    engine = Engine(build, max_running=slots, seed=0).start()
    engine.ready.result()
    return engine


def make_prompts(vocab_size: int, count: int, seed: int, lengths: tuple[int, int] = PROMPT_TOKENS) -> list[Prompt]:
    """Random prompts of different lengths."""
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
    from agentrl.engine.params import SamplingParams
    from agentrl.engine.request import Request

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
    """Seconds per token of answers of 10 to 128 tokens over those of answers that all have the mean length."""
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
    """Seconds from a request's arrival to its first token, while the other requests are decoding."""
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


def serve(side: str, path: str, device: str, slots: int) -> None:
    """Answer tasks: ``speed`` (tokens per second), ``ragged`` (:func:`ragged_cost`), ``first`` (first-token time)."""
    if side == "generate":
        from agentrl.engine.model import load_model

        loaded = load_model(path, device=device)
        vocab, name = loaded.vocab_size, "generate"
        work: dict[str, Callable[[Any], float]] = {
            "speed": lambda task: generate_speed(loaded, _prompts(task, vocab), task["new"])
        }
    else:
        engine = start(path, slots, device, compiled=side == "compiled")
        fast = engine.runner.fast
        vocab, name = engine.runner.loaded.vocab_size, fast.operators.name if fast is not None else "its own"
        work = {
            "speed": lambda task: tokens_a_second(engine, _prompts(task, vocab), [task["new"]] * task["count"]),
            "ragged": lambda task: ragged_cost(engine, vocab, task["seed"]),
            "first": lambda task: first_token_seconds(engine, _prompts(task, vocab)),
        }
    answer(operators=name)
    for task in requests():
        answer(value=work[task["what"]](task))


def _prompts(task: Any, vocab_size: int) -> list[Prompt]:
    return make_prompts(vocab_size, task["count"], task["seed"], tuple(task.get("lengths", PROMPT_TOKENS)))


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
