"""Processes of ``agentrl bench step``: agentrl's engine and trainer, and TRL's trainer; each runs one step per request.

``python -m agentrl.bench.step_sides SIDE MODEL DTYPE`` reads a line of JSON for each step from stdin and answers with
one line of JSON on stdout; seconds and peak resident memory are those of the process.
"""

import itertools
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl.bench.sides import answer, requests

GROUPS, MEMBERS = 4, 8
PROMPT_TOKENS = (150, 200)
ANSWER_TOKENS = 80
ROWS_AT_ONCE = 8  # rows of one backward pass of TRL, its default
WORDS = [
    "apples",
    "boxes",
    "cost",
    "each",
    "farmer",
    "sells",
    "twice",
    "many",
    "days",
    "with",
    "left",
    "after",
    "price",
]


def make_prompts(tokenizer: Any, seed: int) -> list[str]:
    """Random texts of 150 to 200 tokens, one per group."""
    rng = random.Random(seed)
    found = []
    for _ in range(GROUPS):
        wanted, words = rng.randint(*PROMPT_TOKENS), ["Question:"]
        while len(tokenizer(" ".join(words))["input_ids"]) < wanted:
            words.append(rng.choice(WORDS))
        found.append(" ".join(words))
    return found


def peak_mib() -> float:
    """Peak resident memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def engine_side(model: str, dtype: str) -> None:
    """Samples one batch per request; answers with ids and logprobs."""
    from transformers import AutoTokenizer

    from agentrl.bench.engine_sides import make_request, start

    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = start(model, GROUPS * MEMBERS, "cpu", compiled=True, dtype=dtype)
    answer(ready=True)
    for seed in requests():
        prompts = [tuple(tokenizer(text)["input_ids"]) for text in make_prompts(tokenizer, seed)]
        begun = time.perf_counter()
        made = _sampled(engine, make_request, [prompt for prompt in prompts for _ in range(MEMBERS)])
        seconds = time.perf_counter() - begun
        answer(
            seconds=seconds,
            prompts=[list(request.prompt) for request in made],
            answers=[request.output for request in made],
            logprobs=[request.logprobs for request in made],
        )


def _sampled(engine: Any, make_request: Any, prompts: list[tuple[int, ...]]) -> list[Any]:
    import threading

    ended = threading.Semaphore(0)
    made = [
        make_request(f"{number}", prompt, ANSWER_TOKENS, lambda request: ended.release())
        for number, prompt in enumerate(prompts)
    ]
    engine.submit(made)
    for _ in made:
        ended.acquire()
    return made


def trainer_side(model: str, dtype: str) -> None:
    """Runs one GRPO update per request, with the default settings of a recipe on a CPU."""
    import torch
    import torch.distributed as dist

    from agentrl.bench.made_batch import TrainSequence, made_batch
    from agentrl.config.recipe import TrainerConfig
    from agentrl.train.__main__ import prepared
    from agentrl.train.learner import PolicyLearner
    from agentrl.train.mesh import RankMesh
    from agentrl.train.policy import Policy, load_model
    from agentrl.train.row_attention import choose_attention

    store = Path(tempfile.mkdtemp()) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    torch.set_flush_denormal(True)
    config = TrainerConfig.model_validate({"tokens_per_microbatch": 2048, "dtype": dtype})
    device = torch.device("cpu")
    loaded = load_model(Path(model))
    choose_attention(loaded, config, device)
    policy = Policy(loaded, 1.0, config.logprob_chunk)
    engine = PolicyLearner(prepared(policy, config, RankMesh.of_world(device), device), None, config, device)
    answer(ready=True)
    for batch in requests():
        rng = random.Random(0)
        sequences = [
            TrainSequence(
                prompt + ids, [0] * len(prompt) + [1] * len(ids), [0.0] * len(prompt) + logprobs,
                [rng.gauss(0, 1)] * (len(prompt) + len(ids)),
                1 / len(ids), group=number // MEMBERS,
            )
            for number, (prompt, ids, logprobs) in enumerate(
                zip(batch["prompts"], batch["answers"], batch["logprobs"], strict=True)
            )
        ]  # fmt: skip
        begun = time.perf_counter()
        metrics = engine.update(made_batch(sequences, len(sequences), 1.0), 1e-6)
        answer(seconds=time.perf_counter() - begun, tokens=metrics["train/tokens"], peak=peak_mib())


def trl_side(model: str, dtype: str) -> None:
    """Runs one step of TRL's trainer per request; the update's time is that of the step without generation."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = requests()
    state: dict[str, float] = {}

    class Pacer(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if not state:
                answer(ready=True)
            if next(lines, None) is None:
                sys.exit(0)
            state["begun"], state["generation"] = time.perf_counter(), 0.0

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds = time.perf_counter() - state["begun"]
            tokens = GROUPS * MEMBERS * ANSWER_TOKENS
            answer(seconds=seconds, update=seconds - state["generation"], tokens=tokens, peak=peak_mib())

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return super()._generate_and_score_completions(*args, **kwargs)
            finally:
                state["generation"] += time.perf_counter() - begun

    rng = random.Random(0)
    prompts = itertools.chain.from_iterable(make_prompts(tokenizer, seed) for seed in range(40))
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=ROWS_AT_ONCE,
        gradient_accumulation_steps=GROUPS * MEMBERS // ROWS_AT_ONCE, num_generations=MEMBERS, learning_rate=1e-6,
        max_completion_length=ANSWER_TOKENS, generation_kwargs={"min_new_tokens": ANSWER_TOKENS}, temperature=1.0,
        loss_type="grpo", use_cpu=True, bf16=dtype == "bfloat16", gradient_checkpointing=False, report_to=[],
        max_steps=1000, save_strategy="no", logging_strategy="no", shuffle_dataset=False, disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = Timed(
        model=model,
        reward_funcs=lambda completions, **_: [rng.gauss(0, 1) for _ in completions],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        callbacks=[Pacer()],
    )
    trainer.train()


if __name__ == "__main__":
    {"engine": engine_side, "trainer": trainer_side, "trl": trl_side}[sys.argv[1]](*sys.argv[2:])
