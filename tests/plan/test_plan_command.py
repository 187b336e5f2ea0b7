"""``agentrl plan``: its text, its JSON, and what it refuses."""

import json
from pathlib import Path

import pytest

from agentrl.bench.model_flops import PEAKS, peak_tflops
from agentrl.cli.main import main
from agentrl.config.errors import ConfigError
from agentrl.plan.cards import CARDS, find_card
from agentrl.plan.published import PUBLISHED


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    said = capsys.readouterr()
    assert ended.value.code == code, said
    return said.err if code else said.out


def data(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    return json.loads(planned(capsys, "gsm8k_grpo", "--json", *words))


def test_a_plan_names_memory_time_split_and_every_assumption(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, "gsm8k_grpo", "--gpus", "64", "--gpu", "h100", "model.name=Qwen/Qwen3-8B")
    for words in (
        "AdamW's two moments",
        "keys and values",
        "micro-batch",
        "context",
        "generation",
        "push",
        "agentrl sim",
    ):
        assert words in text
    found = data(capsys, "--gpus", "64", "model.name=Qwen/Qwen3-8B")
    for one in found["assumptions"]:
        assert f"{one['name']} " in text and one["source"], "every assumption stands in the text, with its source"
    mesh = found["best"]["mesh"]
    assert found["best"]["servers"] + mesh["shards"] == 64


def test_each_assumption_can_be_set_and_changes_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["trainer.kl_coef=0.1", "model.name=Qwen/Qwen3-8B", "--gpus", "16", "trainer.tensor_parallel=2"]
    settings += ["inference.max_running=1024", "rollout.max_concurrent=16384", "rollout.batch_size=512"]
    base = data(capsys, *settings)
    same = []
    for one in base["assumptions"]:
        value = max(0.01, one["value"] * 0.7) if one["value"] else 100.0
        value = {"gpus_per_machine": 4, "turns": 2, "memory_gb": 40}.get(one["name"], value)
        found = data(capsys, *settings, "--assume", f"{one['name']}={value}")
        (now,) = [other for other in found["assumptions"] if other["name"] == one["name"]]
        assert now["value"] == pytest.approx(value) and now["source"] == "--assume"
        keys = ("best", "tried", "largest_microbatch", "largest_context")
        if all(found[key] == base[key] for key in keys):
            same.append(one["name"])
    assert same == [], "an assumption that changes nothing is none"


def test_what_does_not_fit_is_said_with_changes_that_make_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    big = ["model.name=Qwen/Qwen3-8B", "--gpus", "4", "trainer.reshard_after_forward=false"]
    found = data(capsys, *big)
    assert not found["best"]["fits"]
    text = planned(capsys, "gsm8k_grpo", *big)
    assert "does not fit" in text and "TOO MUCH" in text
    offered = [line.strip() for line in found["change"] if line.endswith(", fits")]
    assert offered and any(line.startswith("trainer.reshard_after_forward=true") for line in offered)
    for line in offered:
        change = line.split(":")[0]
        words = change.split(",")[0].split()
        assert data(capsys, *big, *words)["best"]["fits"], f"{line}: and it does"


def test_the_mesh_is_that_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["trainer.replicas=2", "trainer.context_parallel=2", "trainer.tensor_parallel=2"]
    found = data(capsys, "--gpus", "32", *keys, "trainer.reshard_after_forward=true", "model.name=Qwen/Qwen3-8B")
    mesh = found["best"]["mesh"]
    assert {name: mesh[name] for name in ("replicas", "context", "tensor", "reshard")} == {
        "replicas": 2, "context": 2, "tensor": 2, "reshard": True,
    }  # fmt: skip
    assert mesh["replicas"] * mesh["shards"] * 4 + found["best"]["servers"] * found["best"]["server_gpus"] == 32
    experts = data(capsys, "--gpus", "16", "trainer.expert_parallel=4", "model.name=Qwen/Qwen3-30B-A3B")
    assert experts["best"]["mesh"]["expert"] == 4


def test_servers_have_the_cards_that_the_recipe_gives_them(capsys: pytest.CaptureFixture[str]) -> None:
    model = "model.name=Qwen/Qwen3-8B"
    assert data(capsys, model)["best"]["server_gpus"] == 1, "the fewest that hold the weights"
    assert data(capsys, model, "inference.tp=4")["best"]["server_gpus"] == 4
    assert data(capsys, model, "inference.dp=2")["best"]["server_gpus"] == 1, "replicas share no matrix"
    assert data(capsys, model, "inference.tp=4", "--server-gpus", "2")["best"]["server_gpus"] == 2
    found = data(capsys, model, "allocation=sglang.d4t2+fsdp.d8t2", "trainer.replicas=2")
    assert found["gpus"] == 4 * 2 + 8 * 2 and found["best"]["server_gpus"] == found["best"]["mesh"]["tensor"] == 2


def test_an_adapter_is_offered_where_a_single_card_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "--gpus", "2", "--gpu", "4090", "model.name=Qwen/Qwen2.5-1.5B-Instruct")
    assert any("trainer.lora_rank=32" in line and line.endswith("fits") for line in found["change"])


def test_one_card_takes_turns(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "--gpus", "1", "--gpu", "h200")
    assert found["best"]["shared"] and not found["best"]["overlap"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gsm8k_grpo", "--gpu", "h10"], "did you mean h100?"),
        (["gsm8k_grpo", "--assume", "mfo=1"], "did you mean mfu?"),
        (["gsm8k_grpo", "--assume", "mfu"], "want NAME=NUMBER"),
        (["gsm8k_grpo", "--assume", "mfu=fast"], "want NAME=NUMBER"),
        (["gsm8k_grpo", "--assume", "mfu=-1"], "not negative"),
        (["gsm8k_grpo", "--assume", "mfu=0"], "divides by it"),
        (["gsm8k_grpo", "--assume", "network_gbs=0"], "divides by it"),
        (["gsm8k_grpo", "--assume", "answer=inf"], "finite"),
        (["gsm8k_grpo", "--assume", "mfu=40"], "a share, at most 1"),
        (["gsm8k_grpo", "--assume", "gpus_per_machine=0.5"], "a whole number"),
        (["gsm8k_grpo", "--gpus", "4", "--server-gpus", "4"], "no split of 4 cards"),
        (["gsm8k_grpo", "--gpus", "9", "--server-gpus", "3"], "12 attention heads and 2 key heads"),
        (["gsm8k_grpo", "inference.tp=8"], "inference.tp=8: a server's cards share"),
        (["gsm8k_grpo", "--gpus", "16", "trainer.tensor_parallel=3"], "no split of 16 cards"),
        (["gsm8k_grpo", "--gpus", "9", "trainer.tensor_parallel=3"], "num_key_value_heads=2"),
        (["gsm8k_grpo", "--gpus", "9", "trainer.expert_parallel=2"], "the model has no experts"),
        (["gsm8k_grpo", "trainer.replicas=2", "trainer.nproc=3"], "does not divide the 3 ranks"),
        (["gsm8k_grpo", "--probe", "10"], "it has no GPU"),
        (["gsm8k_sft"], "training on episodes"),
        ([], "name a recipe"),
        (["gsm8k_grpo", "--from", "no-such-run"], "no recorded episodes"),
        (["--explain", "no-such-run"], "no config.json"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = planned(capsys, *words, code=2)
    assert said in text and len(text.splitlines()) == 1


def test_a_folder_with_a_config_alone_is_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen/Qwen3-30B-A3B"]))
    text = planned(capsys, "gsm8k_grpo", f"model.name={tmp_path}")
    assert "30.53 x 10^9 parameters" in text


@pytest.mark.parametrize("name", CARDS)
def test_cards_agree_with_the_benchmark_and_with_themselves(name: str) -> None:
    card = CARDS[name]
    assert card.source and card.bandwidth_gbs > card.link_gbs >= card.network_gbs
    words = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200", "b200": "NVIDIA B200", "l40s": "NVIDIA L40S",
             "a100": "NVIDIA A100-SXM4-80GB", "a100-40": "NVIDIA A100-SXM4-40GB"}  # fmt: skip
    if name in words:
        assert peak_tflops(words[name]) == card.bfloat16_tflops
    assert PEAKS


def test_cards_are_found_by_the_names_that_people_use() -> None:
    assert [find_card(name).name for name in ("H100", "NVIDIA A100-80GB", "RTX 4090", "AMD MI300X", "a100_40gb")] == [
        "h100", "a100", "4090", "mi300x", "a100-40",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="no such card"):
        find_card("v100")
