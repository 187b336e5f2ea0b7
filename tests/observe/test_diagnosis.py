"""Each fault seen in the numbers it leaves, and nothing seen in a healthy run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.observe.diagnosis import diagnose
from agentrl.observe.examine_run import examine

HEALTHY = {
    "rollout/episodes": 64.0, "rollout/failed": 0.0, "rollout/groups_with_signal": 0.8, "reward/mean_drawn": 0.5,
    "drift/special": 0.0, "tokens/completion_mean": 50.0, "tokens/truncated": 0.1, "staleness/max": 0.0,
    "rollout/ended_length": 0.1, "rollout/ended_context_overflow": 0.05,
    "train/signal": 0.8, "train/grad_norm": 0.5, "train/skipped": 0.0, "train/entropy": 0.7,
    "train/clip_fraction": 0.05, "train/measured_share": 0.9, "mismatch/ess": 0.999, "mismatch/kl": 1e-9,
    "mismatch/kl/age_0": 1e-9, "mismatch/tokens/age_0": 900.0, "mismatch/ratio_max": 1e-4,
    "mismatch/ratio_max/age_0": 1e-4, "mismatch/ratio_token/age_0": 17.0, "train/update_ratio_max": 0.3,
    "train/tokens": 900.0, "weights/unchanged": 0.0, "time/overhead_share": 0.1,
}  # fmt: skip
FAULTS: list[tuple[str, dict[str, float], str]] = [
    ("ratio", {"mismatch/ratio_max/age_0": 0.4}, "token id 17"),
    ("kl", {"mismatch/kl/age_0": 0.5}, "KL 0.500"),
    ("ess", {"mismatch/ess": 0.3}, "30% of its tokens"),
    ("masks", {"train/tokens": 0.0}, "no token"),
    (
        "failed",
        {"rollout/failed": 7.0, "rollout/failed_timeout": 7.0},
        "7 episodes drawn for the step failed (timeout 7)",
    ),
    (
        "filtered",
        {"rollout/groups_drawn": 40.0, "rollout/groups_filtered": 36.0, "rollout/filtered_all_solved": 27.0},
        "90% of the groups were dropped for equal rewards (75% of them all solved",
    ),
    ("drift", {"drift/special": 0.25}, "25.0%"),
    ("weights", {"weights/unchanged": 0.9}, "90%"),
    ("skipped", {"train/nonfinite": 1.0}, "not finite"),
    ("signal", {"rollout/groups_with_signal": 0.05, "train/signal": 0.05}, "5% of the groups"),
    ("entropy", {"train/entropy": 0.001, "rollout/groups_with_signal": 0.1}, "0.001 nats"),
    ("truncation", {"tokens/truncated": 0.9}, "90% of the answers"),
    ("truncation", {"rollout/ended_length": 0.8}, "80% of the last answers of episodes"),
    ("overflow", {"rollout/ended_context_overflow": 0.4}, "40% of the episodes run out of context"),
    ("clip", {"train/clip_fraction": 0.7}, "70% of the tokens"),
    ("critic", {"critic/explained": -0.4}, "-40%"),
    ("overhead", {"time/overhead_share": 0.5}, "50% of a step"),
]


def test_a_healthy_run_has_no_findings() -> None:
    assert diagnose([HEALTHY] * 20) == []
    assert diagnose([]) == [] and diagnose([{"eval/n": 3.0}]) == []


@pytest.mark.parametrize(("kind", "changes", "words"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_a_fault_is_found_with_cause_and_remedy(kind: str, changes: dict[str, float], words: str) -> None:
    found = {finding.kind: finding for finding in diagnose([HEALTHY] * 9 + [{**HEALTHY, **changes}] * 3)}
    assert kind in found and words in found[kind].symptom
    assert set(found) <= {kind, "signal"}, "one fault, one finding"
    assert found[kind].cause and found[kind].remedy


def test_steps_in_which_the_critic_alone_learns_are_not_judged() -> None:
    warm = {**HEALTHY, "critic/warmup": 1.0, "train/tokens": 0.0, "train/skipped": 1.0, "critic/explained": -3.0}
    assert diagnose([warm] * 20) == [] and diagnose([warm] * 20 + [HEALTHY] * 3) == []


def test_a_run_whose_episodes_are_all_cut_and_left_out_is_told_so() -> None:
    """``preset=dapo`` with answers that all reach their limit makes no update, and masking is not the remedy."""
    cut = {"train/tokens": 0.0, "train/signal": 0.0, "train/skipped": 1.0, "rollout/truncated": 1.0}
    (found,) = diagnose([{**HEALTHY, **cut, "tokens/truncated": 1.0}] * 3)
    assert found.kind == "all_cut" and "mask_truncated=false" in found.remedy
    (found,) = diagnose([{**HEALTHY, **cut, "tokens/truncated": 0.0}] * 3)
    assert found.kind == "all_cut", "the environment's limit cut them"
    idle = {**HEALTHY, **cut, "rollout/groups_with_signal": 0.0}
    assert [finding.kind for finding in diagnose([idle] * 3)] == ["signal"]


def test_a_slow_symptom_must_last() -> None:
    assert diagnose([HEALTHY] * 5 + [{**HEALTHY, "rollout/groups_with_signal": 0.0}]) == []


def test_groups_with_equal_rewards_are_no_finding_where_their_tokens_have_advantages() -> None:
    assert diagnose([{**HEALTHY, "rollout/groups_with_signal": 0.0}] * 5) == [], "PPO in groups of one, say"


def test_growing_answers_are_a_finding_only_where_the_reward_does_not_grow() -> None:
    def run(gain: float) -> list[dict[str, float]]:
        return [
            {**HEALTHY, "tokens/completion_mean": 50.0 + 5 * n, "reward/mean_drawn": 0.5 + gain * n} for n in range(20)
        ]

    assert [finding.kind for finding in diagnose(run(0.0))] == ["length"]
    assert diagnose(run(0.01)) == []
    assert diagnose([{**step, "reward/white/mean_drawn": 0.1} for step in run(0.0)]) == [], (
        "a zero-sum game: no sum grows"
    )


def test_what_two_types_round_differently_is_no_fault() -> None:
    rounded = {**HEALTHY, "mismatch/ratio_max/age_0": 0.4, "mismatch/kl/age_0": 2e-3}
    assert diagnose([rounded], "bfloat16") == []


def test_the_server_is_not_blamed_for_old_tokens_or_for_the_updates_of_the_step() -> None:
    own = {key: value for key, value in HEALTHY.items() if "/age_0" not in key}
    of_old = {"mismatch/kl": 0.2, "mismatch/ratio_max": 0.9}
    of_old |= {f"{key}/age_{age}": value for key, value in of_old.items() for age in ("1", "2+")}
    assert diagnose([{**own, "staleness/max": 2.0, **of_old}] * 5) == []
    assert diagnose([{**HEALTHY, "staleness/max": 2.0, **of_old}] * 5) == [], "those of age 0 are as they should be"
    assert diagnose([{**HEALTHY, "train/update_ratio_max": 1.4, "train/update_ratio_mean": 0.3}] * 5) == []


def test_tokens_over_the_cache_of_an_older_version_do_not_accuse_the_server() -> None:
    """With ``weights.pause_mode=in_place`` the current version goes on over keys and values of the one before."""
    mixed = {**HEALTHY, "staleness/max": 1.0, "mismatch/ratio_max/age_0": 0.4, "mismatch/kl/age_0": 0.5}
    assert diagnose([mixed] * 5, pause_mode="in_place") == []
    assert {f.kind for f in diagnose([mixed] * 5, pause_mode="retract")} == {"ratio", "kl"}
    fresh = {**mixed, "staleness/max": 0.0}
    assert {f.kind for f in diagnose([fresh] * 5, pause_mode="in_place")} == {"ratio", "kl"}


def test_a_kl_of_a_few_tokens_is_not_judged() -> None:
    assert diagnose([{**HEALTHY, "mismatch/kl/age_0": 0.5, "mismatch/tokens/age_0": 3.0}]) == []


def test_an_entropy_that_was_not_measured_is_not_gone() -> None:
    idle = {key: value for key, value in HEALTHY.items() if key != "train/entropy"} | {
        "train/tokens": 0.0, "train/signal": 0.0, "train/skipped": 1.0, "rollout/groups_with_signal": 0.0,
    }  # fmt: skip
    assert [finding.kind for finding in diagnose([idle] * 5)] == ["signal"]
    gone = {**idle, "train/entropy": 0.001}
    assert {finding.kind for finding in diagnose([gone] * 5)} == {"signal", "entropy"}


def episode(prompt: str) -> str:
    nodes = [
        {"message": {"role": "user", "content": prompt}, "loss_mask": [0]},
        {"message": {"role": "assistant", "content": "4"}, "loss_mask": [1]},
    ]
    return json.dumps({"trajectories": {"assistant": {"nodes": nodes}}})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, **HEALTHY}) + "\n" for n in range(5)) + '{"st'
    )
    (tmp_path / "config.json").write_text(json.dumps({"trainer": {"dtype": "float32"}}))
    (tmp_path / "episodes.jsonl").write_text(episode("2+2") + "\n" + episode("3+3") + "\n")
    (tmp_path / "eval-episodes.jsonl").write_text(episode("4+4") + "\n")
    return tmp_path


@pytest.mark.parametrize(("dtype", "found"), [("bfloat16", []), ("float32", ["ratio"])])
def test_a_run_is_judged_by_what_its_machine_computed_in(run_dir: Path, dtype: str, found: list[str]) -> None:
    (run_dir / "config.json").write_text(json.dumps({"trainer": {"dtype": dtype}}))
    off = {"step": 5, **HEALTHY, "mismatch/ratio_max/age_0": 0.4}
    (run_dir / "metrics.jsonl").write_text(json.dumps(off) + "\n")
    assert [finding.kind for finding in examine(run_dir)[0]] == found


def test_the_command_says_that_nothing_was_found(run_dir: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(run_dir)])
    assert result.exit_code == 0 and "nothing found" in result.output


def test_tasks_that_are_trained_on_and_evaluated_are_found(run_dir: Path) -> None:
    (run_dir / "eval-episodes.jsonl").write_text(episode("4+4") + "\n" + episode("3+3") + "\n")
    result = CliRunner().invoke(app, ["doctor", str(run_dir)])
    assert result.exit_code == 1 and "overlap" in result.output and "3+3" in result.output
    assert "remedy" in result.output


def test_a_prompt_with_brackets_is_shown_as_it_is(run_dir: Path) -> None:
    for name in ("episodes", "eval-episodes"):
        (run_dir / f"{name}.jsonl").write_text(episode("Close [/b], then [red]") + "\n")
    result = CliRunner().invoke(app, ["doctor", str(run_dir)])
    assert result.exit_code == 1 and "Close [/b], then [red]" in result.output


def test_what_cannot_be_judged_is_said(run_dir: Path) -> None:
    (run_dir / "eval-episodes.jsonl").unlink()
    (run_dir / "metrics.jsonl").write_text("")
    _, unjudged = examine(run_dir)
    assert len(unjudged) == 2 and "eval-episodes" in unjudged[1]


def test_a_run_that_learns_from_lines_is_said_to_be_one(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    (run_dir / "config.json").write_text(json.dumps({"trainer": {"type": "sft"}}))
    assert "trainer.type=sft learns from examples" in examine(run_dir)[1][0]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="is no run"):
        examine(tmp_path)


def invalid_evaluation(folder: Path, invalid: int, evaluated: bool = True) -> Path:
    """Writes a run whose last evaluation has so many invalid episodes of 10, and an earlier one with none."""
    evaluations = [
        {"step": 0, "eval/n": 10, "eval/invalid": 0},
        {"step": 5, "eval/n": 10 - invalid, "eval/invalid": invalid},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in evaluations))
    reasons = [("timeout", None), ("agent_error", "KeyError: 'choices'"), ("agent_error", "KeyError: 'choices'")]
    failed = [{"eval_step": 5, "stop_reason": stop, "error": error} for stop, error in reasons]
    old = [{"eval_step": 0, "stop_reason": "inference_error", "error": "an old one"}] * 9
    right = [{"eval_step": 5, "stop_reason": "terminated", "error": None, "reward": 1.0}] * 7
    if evaluated:
        lines = "".join(json.dumps(one) + "\n" for one in [*old, *right, *failed])
        (folder / "eval-episodes.jsonl").write_text(lines)
    return folder


def test_an_evaluation_with_many_invalid_episodes_is_named_with_its_most_frequent_reason(tmp_path: Path) -> None:
    (found,) = examine(invalid_evaluation(tmp_path, 3))[0]
    assert found.kind == "invalid" and "3 of 10 episodes of the evaluation at step 5 are invalid" in found.symptom
    assert "agent_error: KeyError: 'choices' (2 times)" in found.cause and "eval-episodes.jsonl" in found.remedy
    assert examine(invalid_evaluation(tmp_path, 2))[0] == [], "20% are no finding"


def test_without_episodes_an_invalid_evaluation_says_how_to_see_the_reason(tmp_path: Path) -> None:
    (found,) = examine(invalid_evaluation(tmp_path, 10, evaluated=False))[0]
    assert found.kind == "invalid" and "logging.episodes=true" in found.remedy


def test_an_earlier_evaluation_is_not_the_one_that_is_judged(tmp_path: Path) -> None:
    numbers = [{"eval/n": 1.0, "eval/invalid": 9.0}, {**HEALTHY, "eval/n": 9.0, "eval/invalid": 1.0}]
    assert diagnose(numbers) == []
    assert [finding.kind for finding in diagnose(numbers[::-1])] == ["invalid"], "the live view tells it too"
