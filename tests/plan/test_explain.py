"""Prediction beside measurement of a run, and what is named as its bottleneck."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe
from agentrl.plan.assumptions import assumed
from agentrl.plan.cards import find_card
from agentrl.plan.explain import Compared, account, bottleneck, layout_of
from agentrl.plan.recorded import common, distinct_rows, episode_figures, read_steps
from agentrl.plan.times import Case, decode_seconds
from agentrl.plan.work import work_of
from tests.plan.planned import SMOL, STEP, decoder, made_run

FIRST = STEP | {"time/step": 99.0, "time/wait_batch": 90.0}


def test_the_figures_of_episodes_are_counted_by_hand(tmp_path: Path) -> None:
    found = episode_figures(made_run(tmp_path, [STEP]))
    assert found == {
        "prompt": 4.0, "shared": 3.0, "answer": 6.0, "sigma": 0.0, "turns": 2.0, "observation": 3.0,
        "outside": pytest.approx(1.0), "distinct_rows": pytest.approx((1 + 1 + 2 + 2 + 2 + 2) / 12),
    }  # fmt: skip


def test_equal_beginnings_are_decoded_once() -> None:
    same = [{"group": "a", "sampled": [1, 2, 3]}, {"group": "a", "sampled": [1, 2, 4]}]
    assert distinct_rows(same) == pytest.approx(3 / 6), "two tokens differ at the third place, which is no row's input"
    others = [{"group": "a", "sampled": [1, 2, 3]}, {"group": "b", "sampled": [1, 2, 4]}]
    assert distinct_rows(others) == 1.0
    assert common([[1, 2, 3], [1, 2], [1, 2, 9]]) == 2 and common([[1, 2]]) == 0


def test_both_sides_have_the_work_of_the_run(tmp_path: Path) -> None:
    folder = made_run(tmp_path, [FIRST, STEP, STEP])
    steps = read_steps(folder)
    assert len(steps) == 2, "the first step loads and compiles"
    recipe = load_recipe("arithmetic_grpo", ["trainer.dtype=float32", "inference.dtype=float32"], device="cpu")
    recipe = recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"device": "cpu"})})
    known = assumed(find_card("cpu"), recipe).replaced(episode_figures(folder), "run")
    found = account(recipe, decoder(SMOL), known, steps)
    assert found.work.computed == pytest.approx(300.0) and found.work.signal == 0.5
    parts = {part.name: part for part in found.parts}
    assert (parts["generation"].measured, parts["update"].measured, parts["push"].measured) == (6.0, 3.0, 0.5)
    assert parts["rest"].measured == pytest.approx(0.5)
    assert found.step.measured == 10.0 and found.bottleneck == "generation"
    predicted = sum(parts[name].predicted or 0.0 for name in ("generation", "update", "push"))
    assert found.step.predicted == pytest.approx(predicted)
    case = Case(recipe, decoder(SMOL), work_of(recipe, found.assumptions), found.assumptions)
    assert (parts["generation"].predicted or 0.0) > 5 * decode_seconds(case, 128)


def part(name: str, measured: float) -> Compared:
    return Compared(name, None, measured, "")


@pytest.mark.parametrize(
    ("waited", "overlap", "named"), [(3.0, True, "generation"), (0.1, True, "update"), (0.0, False, "update")]
)
def test_a_trainer_that_waits_names_the_servers(waited: float, overlap: bool, named: str) -> None:
    parts = [part("waiting for a batch", waited), part("update", 6.0), part("push", 1.0), part("generation", 0.0)]
    assert bottleneck(parts, part("step", 10.0), overlap=overlap) == named


@pytest.mark.parametrize(
    ("change", "named", "advised"),
    [
        ({"time/update": 30.0, "time/step": 40.0}, "update", "trainer.tokens_per_microbatch=128"),
        ({"time/publish": 30.0, "time/step": 40.0}, "push", "weights.transport"),
        ({"time/wait_evaluation": 30.0, "time/step": 40.0}, "waiting for an evaluation", "eval.on_push"),
        ({"time/save": 30.0, "time/step": 40.0}, "save", "trainer.save_seconds"),
        ({"time/step": 40.0}, "rest", "the trainer's log"),
        ({}, "generation", "inference.max_running=128"),
    ],
)
def test_the_bottleneck_has_a_next_change(
    change: dict[str, float], named: str, advised: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["trainer.tokens_per_microbatch=64", "inference.max_running=64"]
    made_run(tmp_path / "mine", [STEP | change], *small)
    found = explained(capsys, str(tmp_path / "mine"), "--json")
    assert json.loads(found)["bottleneck"] == named
    assert any(advised in line for line in json.loads(found)["next"])
    text = explained(capsys, str(tmp_path / "mine"))
    assert f"bottleneck {named}" in text and advised in text


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--explain", *words])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    return said.out


def test_a_part_that_differs_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(tmp_path / "mine", [STEP])
    data: dict[str, Any] = json.loads(explained(capsys, str(tmp_path / "mine"), "--json"))
    factor = next(one["factor"] for one in data["parts"] if one["name"] == "update")
    right = ["--assume", f"mfu={0.55 / factor:g}"]
    assert "!" not in update_line(explained(capsys, str(tmp_path / "mine"), *right))
    wrong = ["--assume", f"mfu={0.55 / factor / 3:g}"]
    assert "!" in update_line(explained(capsys, str(tmp_path / "mine"), *wrong))


def update_line(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("  update "))


def test_beside_training_generation_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(tmp_path / "mine", [STEP | {"time/wait_batch": 0.1, "time/step": 4.0}], "rollout.max_staleness=1")
    data = json.loads(explained(capsys, str(tmp_path / "mine"), "--json"))
    parts = {one["name"]: one for one in data["parts"]}
    assert parts["generation"]["measured"] is None and parts["waiting for a batch"]["measured"] == 0.1
    assert data["bottleneck"] == "update"


def test_on_one_cpu_all_processes_share_the_cores() -> None:
    recipe = load_recipe("arithmetic_grpo", ["trainer.nproc=2", "launch.device=cpu"], device="cpu")
    assert layout_of(recipe).shared and layout_of(recipe).mesh.ranks == 1
    far = load_recipe("gsm8k_grpo", ["trainer.nproc=4", "launch.device=cuda", "inference.servers=2"], device="cuda")
    assert (layout_of(far).servers, layout_of(far).mesh.shards, layout_of(far).shared) == (2, 4, False)
    sizes = ["inference.engine=sglang", "inference.tp=2", "inference.dp=3", "inference.servers=2"]
    wide = load_recipe("gsm8k_grpo", [*sizes, "launch.device=cuda"], device="cuda")
    assert (layout_of(wide).servers, layout_of(wide).server_cards) == (6, 2), "replicas share no matrix"


def test_a_run_without_steps_is_refused(tmp_path: Path) -> None:
    folder = made_run(tmp_path, [])
    with pytest.raises(ConfigError, match="no step yet"):
        read_steps(folder)


def test_a_run_without_episodes_is_explained_where_their_lengths_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(tmp_path / "mine", [STEP])
    (tmp_path / "mine" / "episodes.jsonl").unlink()
    told = ["--assume", "prompt=40", "--assume", "answer=20"]
    data = json.loads(explained(capsys, str(tmp_path / "mine"), "--json", *told))
    assert data["work"]["prompt"] == 40 and data["bottleneck"] == "generation"
    with pytest.raises(SystemExit):
        main(["plan", "--explain", str(tmp_path / "mine")])
    assert "--assume prompt=..." in capsys.readouterr().err
