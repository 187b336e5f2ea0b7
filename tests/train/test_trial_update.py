"""The trial of a first update: what it lets through learns, what it does not falls back or is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from agentrl.bench.made_batch import TrainSequence
from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.launch.resolve import resolve
from agentrl.train import row_attention
from agentrl.train.__main__ import build_trainer, make_critic, make_policy
from agentrl.train.layout_choice import layout_of
from agentrl.train.mesh import RankMesh
from agentrl.train.row_attention import is_packed
from tests.train.noisy_models import CONFIGS, write_model
from tests.train.test_rows import collated, random_sequences

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
SECONDS = 300  # longest wait for two ranks
KINDS = {
    "float32": ["trainer.dtype=float32"],
    "bfloat16": ["trainer.dtype=bfloat16"],
    "checkpointed": ["trainer.dtype=bfloat16", "trainer.gradient_checkpointing=true"],
    "padded": ["trainer.dtype=float32", "trainer.attention=padded"],
    "lora": ["trainer.dtype=float32", "trainer.lora_rank=2"],
}


def recipe_of(*more: str) -> Recipe:
    recipe = load_recipe("arithmetic_grpo", ["inference.context_length=32", "trainer.logprob_chunk=4", *more])
    return resolve(recipe, None)


def reference(folder: Path, sequences: list[TrainSequence], temperature: float) -> Tensor:
    """Float64 logprobs of all trained tokens: one plain forward pass a sequence, in evaluation mode."""
    how: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **how).eval()
    found = []
    for one in sequences:
        ids = torch.tensor(one.token_ids)
        logprobs = (model(input_ids=ids[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
        found += [logprobs[i - 1, ids[i]] for i, trained in enumerate(one.loss_mask) if trained]
    return torch.stack(found)


def small(sequences: list[TrainSequence]) -> list[TrainSequence]:
    return [TrainSequence([t % 64 for t in s.token_ids], s.loss_mask, s.logprobs) for s in sequences]


@pytest.mark.parametrize("name", CONFIGS)
def test_what_passes_trains_with_the_logprobs_of_the_plain_model(name: str, tmp_path: Path, mesh: DeviceMesh) -> None:
    folder = write_model(name, tmp_path)
    recipe = recipe_of("trainer.dtype=float32")
    policy = make_policy(recipe, folder, RankMesh.of_world(CPU), CPU)
    assert all(parameter.grad is None for parameter in policy.parameters())
    sequences = small(random_sequences(5, 6))
    batch = collated(sequences, 64, layout_of(policy.model))
    policy.train()
    logprobs, entropies = policy(batch)
    expected = reference(folder, sequences, recipe.sampling.temperature)[batch.places]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-4, rtol=1e-4)
    (logprobs.sum() + entropies.sum()).backward()


@pytest.mark.parametrize("name", ["gpt2", "falcon"])
def test_auto_falls_back_to_padded_rows_and_says_so(
    name: str, tmp_path: Path, mesh: DeviceMesh, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(name, tmp_path)
    policy = make_policy(recipe_of("trainer.attention=auto"), folder, RankMesh.of_world(CPU), CPU)
    assert not is_packed(policy.model)
    said = capsys.readouterr().out
    assert (f"trainer.attention=auto: {type(policy.model).__name__} cannot use packed rows" in said) == (name == "gpt2")


def test_packed_rows_that_a_model_cannot_use_are_refused_with_the_way_out(tmp_path: Path, mesh: DeviceMesh) -> None:
    folder = write_model("gpt2", tmp_path)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel cannot be trained: its first update fails .*padded"):
        make_policy(recipe_of("trainer.attention=packed"), folder, RankMesh.of_world(CPU), CPU)


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_train_passes_the_trial(kind: str, tiny_model: Path, mesh: DeviceMesh) -> None:
    policy = make_policy(recipe_of(*KINDS[kind]), tiny_model, RankMesh.of_world(CPU), CPU)
    assert all(parameter.grad is None for parameter in policy.parameters())
    if kind != "lora":
        make_critic(recipe_of(*KINDS[kind], "trainer.advantage=gae"), tiny_model, RankMesh.of_world(CPU), CPU)


def test_a_path_that_computes_something_else_is_refused(
    tiny_model: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = row_attention.tree_attention

    def shifted(queries: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
        return plain(queries, keys, values.roll(1, 0), *rest)

    monkeypatch.setattr(row_attention, "tree_attention", shifted)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot be trained: its logprobs differ from the plain"):
        make_policy(
            recipe_of("trainer.dtype=float32", "trainer.attention=packed"), tiny_model, RankMesh.of_world(CPU), CPU
        )


def test_a_backward_pass_that_fails_is_refused(
    tiny_model: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = row_attention.tree_attention

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, states: Tensor) -> Tensor:
            return states.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise NotImplementedError("no backward pass here")

    monkeypatch.setattr(row_attention, "tree_attention", lambda *given: Broken.apply(plain(*given)))
    with pytest.raises(ValueError, match=r"its first update fails \(NotImplementedError: no backward pass here\)"):
        make_policy(recipe_of("trainer.attention=packed"), tiny_model, RankMesh.of_world(CPU), CPU)


def test_policy_reference_and_critic_of_a_trainer_have_one_layout(tmp_path: Path, mesh: DeviceMesh) -> None:
    folder = write_model("gpt2", tmp_path / "model")
    recipe = recipe_of("trainer.preset=ppo", "trainer.kl_coef=0.1", "trainer.attention=auto")
    trainer = build_trainer(recipe, folder, tmp_path, CPU, None)
    learner = trainer.engine
    assert learner.reference is not None and learner.critic is not None
    for module in (learner.policy, learner.reference, learner.critic.critic):
        assert not is_packed(module.model)
        assert not [one for one in module.modules() if isinstance(one, torch.nn.Dropout) and one.p]
    trainer.publisher.close()


def test_all_ranks_come_to_the_same_answer(tmp_path: Path) -> None:
    folder = write_model("gpt2", tmp_path / "model")
    arguments = [sys.executable, "-m", "tests.train.trying", str(folder), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), "2", str(tmp_path)], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    first, second = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert first == second and first["auto"] is False and "GPT2LMHeadModel cannot be trained" in first["packed"]
    assert [text.count("its rows are padded") for text in said] == [1, 0]
