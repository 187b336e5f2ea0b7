import pytest

from agentrl.config.errors import UserError
from agentrl.config.load import load_recipe
from agentrl.host.compute_dtype import resolved_dtype
from agentrl.launch.dry_run import memory, plan
from agentrl.launch.model_shape import model_shape
from agentrl.launch.resolve import resolve

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
QWEN25_15B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def test_parameters_are_counted_as_published():
    assert model_shape(SMOLLM2).parameters == 134_515_008
    assert model_shape(QWEN25_15B).parameters == 1_543_714_304


def test_memory_adds_up_what_lasts():
    recipe = load_recipe(
        "gsm8k_grpo",
        [
            "inference.dtype=float32",
            "trainer.dtype=float32",
            "inference.max_running=64",
            "inference.context_length=512",
        ],
        device="cpu",
    )
    shape = model_shape(SMOLLM2)
    items = {item.what.split(",")[0]: item.nbytes for item in memory(resolve(recipe, shape), shape)}
    assert items["weights"] == 4 * 134_515_008
    assert items["KV cache at most"] == 64 * 512 * 2 * 30 * 3 * 64 * 4
    assert items["prefix cache at most"] == 16384 * 2 * 30 * 3 * 64 * 4
    assert items["weights once more"] == 4 * 134_515_008
    assert items["parameters"] == 16 * 134_515_008


def test_an_adapter_takes_the_memory_of_its_own_parameters():
    settings = ["trainer.dtype=float32", "trainer.lora_rank=16", "trainer.kl_coef=0.1", "trainer.nproc=2"]
    settings += ["trainer.lora_push=adapter"]
    shape = model_shape(SMOLLM2)
    found = memory(resolve(load_recipe("gsm8k_grpo", settings, device="cpu"), shape), shape)
    items = {item.what.split(",")[0]: item.nbytes for item in found}
    assert items["frozen parameters in float32"] == 4 * 134_515_008 // 2
    assert items["adapters at most"] == 16 * 4_884_480 // 2  # PEFT's count for rank 16 on all linear layers
    assert "parameters" not in items and "reference model" not in items
    assert items["weights for the servers"] == 2 * 4 * 4_884_480


def test_the_plan_names_processes_tokens_and_memory():
    settings = ["rollout.batch_size=8", "rollout.group_size=8"]
    text = "\n".join(plan(load_recipe("gsm8k_grpo", settings, device="cpu"), SMOLLM2, "a model")[1])
    for word in ("inference server, embedded", "rollout controller", "trainer rank, grpo", "64 episodes", "135M"):
        assert word in text


def test_the_plan_says_how_sequences_are_computed_and_refuses_what_cannot_be_trained():
    recipe = load_recipe("gsm8k_grpo", device="cpu")
    assert "rows       prefix trees: common beginnings" in "\n".join(plan(recipe, SMOLLM2, "a model")[1])
    text = "\n".join(plan(recipe, {**SMOLLM2, "model_type": "mamba2"}, "a model")[1])
    assert f"agentrl model check {recipe.model.name} tries which" in text
    quantised = {**SMOLLM2, "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UserError, match=r"cannot be trained.*quantised \(fp8\)"):
        plan(recipe, quantised, "a model")
    text = "\n".join(plan(load_recipe("gsm8k_grpo", ["trainer.type=null"], device="cpu"), quantised, "a model")[1])
    assert "rows  " not in text, "an evaluation computes none"


def test_an_unknown_model_is_planned_without_memory():
    text = "\n".join(plan(load_recipe("gsm8k_grpo", device="cuda"), None, "a model")[1])
    assert "memory     not estimated" in text
    assert "not estimated" in "\n".join(plan(load_recipe("gsm8k_grpo", device="cuda"), {}, "a model")[1])


def test_auto_is_bfloat16_where_it_is_native(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("flags : avx512f")
    assert resolved_dtype("auto", "cpu", info) == "float32"
    info.write_text("flags : avx512f avx512_bf16")
    assert resolved_dtype("auto", "cpu", info) == "bfloat16"
    assert resolved_dtype("auto", "cuda", info) == "bfloat16"
    assert resolved_dtype("float32", "cuda", info) == "float32"


def test_several_ranks_are_told_where_their_memory_is_counted():
    one, two = (load_recipe("gsm8k_grpo", [f"trainer.nproc={ranks}"], device="cpu") for ranks in (1, 2))
    said = ["\n".join(plan(recipe, SMOLLM2, "here")[1]) for recipe in (one, two)]
    assert ["whole gradients" in text for text in said] == [False, True] and "agentrl plan" in said[1]
