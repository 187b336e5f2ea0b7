"""TRL's losses as the recipes set them up, and what goes into a batch."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.config.errors import DataError
from agentrl.config.load import load_recipe
from agentrl.inference.template import ChatTemplate
from agentrl.supervised.__main__ import _export
from agentrl.supervised.batches import encode, encode_all, even_batch, micro_batch, pad_token, step_count
from agentrl.supervised.tokens import Encoder
from agentrl.supervised.trainers import arguments, dataset, dpo, rm, sft
from agentrl.train.policy import ModelRefused
from agentrl.train.router_balance import NoRouters
from tests.models import families
from tests.supervised.examples import settings, write_lines
from tests.tiny_mixture import build_tiny_mixture


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


def recipe_of(name: str, tiny_model: Path, tmp_path: Path, *more: str) -> Any:
    lines = write_lines(tmp_path / "lines")
    return load_recipe(f"gsm8k_{name}", settings(tiny_model, tmp_path, "x", lines, *more), device="cpu")


def outputs(chosen: float, rejected: float) -> Any:
    """What a policy says whose answers of one token have these log probabilities."""
    log_probs = torch.tensor([[0.0, chosen], [0.0, rejected]], requires_grad=True)
    zeros = torch.zeros(2, 2)
    return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


@pytest.mark.parametrize(
    ("loss_type", "margin", "published"),
    [("sigmoid", 1.0, 0.644397), ("sigmoid", -1.0, 0.744397), ("ipo", 1.0, 16.0), ("ipo", 5.0, 0.0)],
)
def test_dpo_has_its_published_losses(
    loss_type: str, margin: float, published: float, tiny_model: Path, tmp_path: Path, template: ChatTemplate
):
    recipe = recipe_of("dpo", tiny_model, tmp_path, "supervised.beta=0.1", f"supervised.loss_type={loss_type}")
    common = arguments(recipe, tmp_path, micro=1, total_steps=1, bfloat16=False)
    lines = encode_all(recipe, template)
    parts = {"train_dataset": dataset(lines.train.data), "processing_class": template.tokenizer}
    trainer = dpo(recipe, tiny_model, common, parts)
    trainer.precompute_ref_logps = True  # the reference's come with the batch
    batch = {
        "input_ids": torch.ones(2, 3, dtype=torch.long),
        "attention_mask": torch.ones(2, 3, dtype=torch.long),
        "completion_mask": torch.tensor([[0, 0, 1], [0, 0, 1]]),
        "ref_chosen_logps": torch.tensor([-3.0]),
        "ref_rejected_logps": torch.tensor([-2.0]),
    }

    def policy(**inputs: Any) -> Any:
        return outputs(-3.0 + margin, -2.0)

    assert float(trainer.compute_loss(policy, batch).detach()) == pytest.approx(published, abs=1e-6)


def test_a_dpo_batch_learns_the_answers_and_their_ends(tiny_model: Path, tmp_path: Path, template: ChatTemplate):
    recipe = recipe_of("dpo", tiny_model, tmp_path)
    lines = encode_all(recipe, template)
    common = arguments(recipe, tmp_path, micro=1, total_steps=1, bfloat16=False)
    parts = {"train_dataset": dataset(lines.train.data), "processing_class": template.tokenizer}
    batch = next(iter(dpo(recipe, tiny_model, common, parts).get_train_dataloader()))
    learned = [
        template.tokenizer.decode(ids[mask.bool()].tolist())
        for ids, mask in zip(batch["input_ids"], batch["completion_mask"], strict=True)
    ]
    assert learned[0][0] * 3 + "<|im_end|>" == learned[0]
    assert learned[1] == "zzz<|im_end|>"


def test_longer_lines_are_left_out_and_counted(tiny_model: Path, tmp_path: Path, template: ChatTemplate):
    recipe = recipe_of("sft", tiny_model, tmp_path, "supervised.max_length=25")
    from agentrl.supervised.examples import Sample

    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    long = [{"role": "user", "content": "a" * 30}, short[1]]
    encoder = Encoder(template)
    columns = encode([Sample(short, 1), Sample(long, 1), Sample(short, 1)], recipe, encoder, what="train")
    assert len(columns) == 2 and columns.left_out == 1 and columns.longest <= 25
    with pytest.raises(DataError, match=r"no train example fits supervised.max_length=25: the shortest of 1 has \d+"):
        encode([Sample(long, 1)], recipe, encoder, what="train")


def test_a_reward_model_pads_with_a_token_that_no_line_has(tiny_model: Path, tmp_path: Path):
    template = ChatTemplate.from_folder(tiny_model)
    tokenizer: Any = template.tokenizer
    recipe = recipe_of("rm", tiny_model, tmp_path)
    tokenizer.pad_token = tokenizer.eos_token
    assert pad_token(template, encode_all(recipe, template)) == "<|endoftext|>"


def test_a_batch_is_shared_out_without_a_rest(tiny_model: Path, tmp_path: Path):
    recipe = recipe_of("sft", tiny_model, tmp_path, "supervised.batch_size=12", "trainer.nproc=2")
    recipe = recipe.model_copy(
        update={"trainer": recipe.trainer.model_copy(update={"tokens_per_microbatch": 500, "epochs": 2})}
    )
    assert micro_batch(recipe, 100) == 3, "at most 5 fit, and 6 are a rank's"
    assert micro_batch(recipe, 5000) == 1
    assert even_batch(48, 5) == 4
    assert step_count(recipe, 25) == (6, 3)


@pytest.mark.parametrize("name", ["dpo", "rm"])
def test_what_compares_two_passes_has_no_dropout(
    name: str, tiny_model: Path, tmp_path: Path, template: ChatTemplate
) -> None:
    folder = tmp_path / "noisy"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    recipe = recipe_of(name, folder, tmp_path)
    tokenizer: Any = template.tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    encoded = encode_all(recipe, template)
    common = arguments(recipe, tmp_path / "out", micro=1, total_steps=1, bfloat16=False)
    made = {"dpo": dpo, "rm": rm}[name]
    parts = {"train_dataset": dataset(encoded.train.data), "processing_class": tokenizer}
    trainer = made(recipe, folder, common, parts)
    ids = torch.arange(5, 15)[None]
    for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
        expected = model.eval()(input_ids=ids).logits
        assert torch.equal(model.train()(input_ids=ids).logits, expected)


@pytest.mark.parametrize("name", ["sft", "dpo", "rm"])
def test_a_model_that_is_loaded_with_an_image_tower_is_refused(name: str, tiny_vision: Path, tmp_path: Path) -> None:
    recipe = recipe_of(name, tiny_vision, tmp_path)
    common = arguments(recipe, tmp_path / "out", micro=1, total_steps=1, bfloat16=False)
    with pytest.raises(ModelRefused, match=rf"trainer\.type={name}: .* supervised trainers learn from text"):
        {"sft": sft, "dpo": dpo, "rm": rm}[name](recipe, tiny_vision, common, {})


def test_weights_that_are_missing_are_not_drawn_but_for_the_score(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "deeper"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    for name, made in {"sft": sft, "dpo": dpo, "rm": rm}.items():
        recipe = recipe_of(name, folder, tmp_path / name)
        common = arguments(recipe, tmp_path / "out", micro=1, total_steps=1, bfloat16=False)
        with pytest.raises(ModelRefused, match=r"lacks weights .*layers\.2"):
            made(recipe, folder, common, {})


def made_from(name: str, folder: Path, tmp_path: Path, template: ChatTemplate, *more: str) -> Any:
    recipe = recipe_of(name, folder, tmp_path, *more)
    common = arguments(recipe, tmp_path / "out", micro=1, total_steps=1, bfloat16=False)
    parts = {
        "train_dataset": dataset(encode_all(recipe, template).train.data), "processing_class": template.tokenizer
    }  # fmt: skip
    return {"sft": sft, "dpo": dpo}[name](recipe, folder, common, parts)


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_a_mixture_is_balanced_only_by_the_recipes_key(
    name: str, tiny_model: Path, tmp_path: Path, template: ChatTemplate
) -> None:
    folder = build_tiny_mixture(tmp_path / "mixture")
    before = json.loads((folder / "config.json").read_text())
    assert before["router_aux_loss_coef"] > 0, "TRL alone would take it"
    assert not made_from(name, folder, tmp_path, template).aux_loss_enabled
    trainer = made_from(name, folder, tmp_path, template, "trainer.router_aux_loss=0.25")
    assert trainer.aux_loss_enabled and trainer.router_aux_loss_coef == 0.25
    _export(trainer, template.tokenizer, tmp_path / "run", folder, 1, False)
    after = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    keys = ("router_aux_loss_coef", "output_router_logits")
    assert [after.get(key) for key in keys] == [before.get(key) for key in keys]
    with pytest.raises(NoRouters, match=r"trainer\.router_aux_loss"):
        made_from(name, tiny_model, tmp_path, template, "trainer.router_aux_loss=0.25")


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_a_head_that_trl_does_not_know_is_refused(
    name: str, tiny_model: Path, tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families.SMALL, "vocab_size", len(template.tokenizer))
    folder = tmp_path / "capped"
    shutil.copytree(tiny_model, folder)
    families.small_model("recurrent_gemma").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["logits_soft_cap"] == 30.0
    (folder / "config.json").write_text(json.dumps({**config, "logits_soft_cap": 0.5}))
    with pytest.raises(ModelRefused, match=rf"trainer\.type={name}: TRL does not compute .* differ by"):
        made_from(name, folder, tmp_path, template)
