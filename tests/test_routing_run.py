"""Router replay in a run of all real processes: the server names experts, and the update takes them."""

import json
from pathlib import Path

import pytest

from tests.end_to_end import metrics, overrides, run
from tests.tiny_mixture import build_tiny_mixture

pytestmark = pytest.mark.long


def test_a_mixture_trains_with_the_experts_that_its_server_chose(tmp_path: Path) -> None:
    model = build_tiny_mixture(tmp_path / "model")
    settings = overrides(model, tmp_path, "routed", "trainer.replay_routing=true", "logging.record=true")
    result = run("recipe", "run", "arithmetic_grpo", *settings)
    assert result.returncode == 0, result.stdout
    steps = [one for one in metrics(tmp_path / "routed") if "mismatch/kl" in one]
    assert len(steps) == 3
    for step in steps:
        assert step["routing/recorded"] == 1 and step["routing/choices_differing"] < 0.01
        assert step["mismatch/log_ratio"] < 1e-4
    replayed = run("replay", str(tmp_path / "routed"), "--step", "1", "--json")
    assert replayed.returncode == 0 and json.loads(replayed.stdout.splitlines()[-1])["same"], replayed.stdout


def test_a_model_without_experts_ends_the_run_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    settings = overrides(tiny_model, tmp_path, "dense", "trainer.replay_routing=true")
    result = run("recipe", "run", "arithmetic_grpo", *settings)
    assert result.returncode == 2, result.stdout
    assert "trainer.replay_routing" in result.stdout and "no layer of LlamaForCausalLM" in result.stdout
    assert "Traceback" not in result.stdout
