"""The same batch through TRL's GRPO loss: the same loss and gradient for every variant that both have."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from agentrl.bench.made_batch import TrainSequence, made_batch
from agentrl.config.recipe import TrainerConfig
from agentrl.train.learner import PolicyLearner
from agentrl.train.policy import Policy, load_model, shard

CPU = torch.device("cpu")
TEMPERATURE, LONGEST = 0.8, 9
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # TRL's settings, ours
    "grpo": ({"loss_type": "grpo"}, {}),
    "clip higher": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"aggregation": "token", "clip_eps_high": 0.28}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "constant", "aggregation_length": LONGEST}),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregation": "token"}),
    "dual clip": ({"loss_type": "grpo", "delta": 1.5}, {"objective": "dual_clip", "dual_clip": 1.5}),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"ratio": "sequence"}),
    "gspo by tokens": (
        {"loss_type": "bnpo", "importance_sampling_level": "sequence"}, {"ratio": "sequence", "aggregation": "token"},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, {"preset": "cispo", "clip_eps_high": 0.3}),
    "sapo": ({"loss_type": "sapo"}, {"preset": "sapo"}),
    "kl": (
        {"loss_type": "bnpo", "beta": 0.01, "use_bias_correction_kl": False},
        {"aggregation": "token", "kl_coef": 0.01, "kl_gradient": "plain"},
    ),
    "kl weighed by the ratio": (
        {"loss_type": "bnpo", "beta": 0.01}, {"aggregation": "token", "kl_coef": 0.01, "kl_gradient": "weighted"},
    ),
    "entropy": ({"loss_type": "bnpo", "entropy_coef": 0.2}, {"aggregation": "token", "entropy_coef": 0.2}),
}  # fmt: skip


def batch_of(model: Any, seed: int = 0) -> tuple[list[TrainSequence], list[list[int]]]:
    """Prompts and answers with behavior logprobs some way off the model's; no two answers equal."""
    rng = random.Random(seed)
    sequences, prompts = [], []
    for _ in range(8):
        prompt = [rng.randrange(3, 200) for _ in range(rng.randint(2, 6))]
        answer = [rng.randrange(3, 200) for _ in range(rng.randint(1, LONGEST))]
        ids = prompt + answer
        with torch.no_grad():
            logprobs = (model(torch.tensor([ids])).logits[0] / TEMPERATURE).log_softmax(-1)
        own = [logprobs[i - 1, ids[i]].item() for i in range(len(prompt), len(ids))]
        behavior = [value + rng.gauss(0, 0.4) for value in own]
        mask = [0] * len(prompt) + [1] * len(answer)
        sequences.append(TrainSequence(ids, mask, [0.0] * len(prompt) + behavior, [rng.gauss(0, 1)] * len(ids)))
        prompts.append(prompt)
    return sequences, prompts


def ours(folder: Path, mesh: DeviceMesh, sequences: list[TrainSequence], choices: dict[str, Any]) -> tuple[float, dict]:
    config = TrainerConfig.model_validate({"logprob_chunk": 16, "tokens_per_microbatch": 40, **choices})

    def policy(seed_folder: Path) -> Policy:
        made = Policy(load_model(seed_folder), TEMPERATURE, 16)
        shard(made, mesh, torch.float32)
        return made

    reference = policy(folder.parent / "reference") if config.kl_coef else None
    engine = PolicyLearner(policy(folder), reference, config, CPU)
    found: dict[str, torch.Tensor] = {}

    def capture(_: bool) -> dict[str, float]:
        for name, parameter in engine.policy.model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            found[name] = parameter.grad.full_tensor()
        return {}

    engine._apply_gradients = capture  # type: ignore[method-assign]
    lengths = [sum(s.loss_mask) for s in sequences]
    weighed = sequences
    normalizer = float(
        {"token": sum(lengths), "constant": len(sequences) * LONGEST}.get(config.aggregation, len(sequences))
    )
    if config.aggregation == "sequence":
        weighed = [
            TrainSequence(s.token_ids, s.loss_mask, s.logprobs, s.advantages, 1 / n)
            for s, n in zip(sequences, lengths, strict=True)
        ]
    loss = engine.update(made_batch(weighed, normalizer, 1.0), 0.0)["train/loss"]
    return loss, found


def theirs(
    folder: Path, sequences: list[TrainSequence], prompts: list[list[int]], settings: dict[str, Any], output: Path
) -> tuple[float, dict]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    arguments = GRPOConfig(
        output_dir=str(output), per_device_train_batch_size=8, num_generations=2, temperature=TEMPERATURE, report_to=[],
        use_cpu=True, bf16=False, max_completion_length=LONGEST, gradient_checkpointing=False, **settings,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * 8),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.current_gradient_accumulation_steps = 1
    answers = [list(s.token_ids[len(p) :]) for s, p in zip(sequences, prompts, strict=True)]
    inputs = {
        "prompt_ids": padded(prompts, left=True), "prompt_mask": padded([[1] * len(p) for p in prompts], left=True),
        "completion_ids": padded(answers), "completion_mask": padded([[1] * len(a) for a in answers]),
        "advantages": torch.tensor([s.advantages[-1] for s in sequences]),
        "old_per_token_logps": padded([list(s.logprobs[-len(a) :]) for s, a in zip(sequences, answers, strict=True)]),
        "num_items_in_batch": torch.tensor(float(sum(map(len, answers)))),
    }  # fmt: skip
    if settings.get("beta"):
        inputs["ref_per_token_logps"] = padded(reference_logprobs(folder.parent / "reference", sequences, prompts))
    model.train()
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def padded(rows: list[list[Any]], *, left: bool = False) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows])


@torch.no_grad()
def reference_logprobs(folder: Path, sequences: list[TrainSequence], prompts: list[list[int]]) -> list[list[float]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for sequence, prompt in zip(sequences, prompts, strict=True):
        ids = list(sequence.token_ids)
        logprobs = (model(torch.tensor([ids])).logits[0] / TEMPERATURE).log_softmax(-1)
        rows.append([logprobs[i - 1, ids[i]].item() for i in range(len(prompt), len(ids))])
    return rows


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny import build_tiny_model

    parent = tmp_path_factory.mktemp("models")
    build_tiny_model(parent / "reference", seed=3)
    return build_tiny_model(parent / "policy")


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_are_trls(name: str, folders: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    settings, choices = VARIANTS[name]
    sequences, prompts = batch_of(AutoModelForCausalLM.from_pretrained(folders, dtype=torch.float32))
    loss, gradient = ours(folders, mesh, sequences, choices)
    expected, their_gradient = theirs(folders, sequences, prompts, settings, tmp_path)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert gradient.keys() == their_gradient.keys() and gradient
    for key, value in gradient.items():
        torch.testing.assert_close(value, their_gradient[key], atol=2e-6, rtol=1e-3)
    assert max(value.abs().max().item() for value in gradient.values()) > 1e-3, "no gradient: nothing is compared"
