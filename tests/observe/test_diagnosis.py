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
    ("routing", {"routing/choices_differing": 0.4}, "in 40% of the layers"),
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
    ("too_old", {"dropped/tokens_share": 0.3}, "30% of the sampled tokens were dropped"),
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
    ("slow_rank", {"ranks/slowest": 3.0, "ranks/slowdown": 2.4}, "trainer rank 3 takes 2.4 times as long"),
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


@pytest.mark.parametrize(("name", "warned"), [("my_shop_grpo", set()), ("gsm8k_grpo_80_tokens", {"truncation"})])
def test_real_runs_are_warned_of_at_any_step_only_where_they_should(name: str, warned: set[str]) -> None:
    """Their metrics, as the rules read them, of runs on two CPU cores; 80 tokens cut half of the answers."""
    file = Path(__file__).parent / "real_runs" / f"{name}.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    found = {
        finding.kind
        for count in range(1, len(records) + 1)
        for finding in diagnose(records[:count], pause_mode="in_place")
        if finding.level == "warning"
    }
    assert found == warned


def test_ranks_that_take_turns_in_being_slowest_are_no_finding() -> None:
    turns = [HEALTHY | {"ranks/slowest": float(step % 2), "ranks/slowdown": 2.0} for step in range(6)]
    assert diagnose(turns) == []
    machine = [one | {"ranks/slow": 2.0} for one in turns]
    assert "2 trainer ranks take 2.0 times as long" in diagnose(machine)[0].symptom
    once = [HEALTHY | {"ranks/slowest": 1.0, "ranks/slowdown": ratio} for ratio in (3.0, 3.0, 3.0, 1.2)]
    assert diagnose(once) == []


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


def test_an_entropy_is_judged_only_where_something_was_trained() -> None:
    idle = {key: value for key, value in HEALTHY.items() if key != "train/entropy"} | {
        "train/tokens": 0.0, "train/signal": 0.0, "train/skipped": 1.0, "rollout/groups_with_signal": 0.0,
    }  # fmt: skip
    assert [finding.kind for finding in diagnose([idle] * 5)] == ["signal"]
    assert [finding.kind for finding in diagnose([{**idle, "train/entropy": 0.0}] * 5)] == ["signal"]
    gone = {**idle, "train/entropy": 0.001, "train/tokens": 900.0}
    assert {finding.kind for finding in diagnose([gone] * 5)} == {"signal", "entropy"}
    assert [finding.kind for finding in diagnose([gone] * 5 + [idle] * 3)] == ["signal"], "of an earlier step"


def test_the_end_of_a_decaying_learning_rate_is_no_fault() -> None:
    def run(last: float) -> list[dict[str, float]]:
        end = {**HEALTHY, "weights/unchanged": 0.9, "train/learning_rate": last}
        return [{**HEALTHY, "train/learning_rate": 2e-5}] * 9 + [end] * 3

    assert diagnose(run(1e-6)) == []
    assert [finding.kind for finding in diagnose(run(1e-5))] == ["weights"]


def test_a_push_after_no_update_is_no_fault() -> None:
    """The middle of ``calculator_grpo``: two of the last three steps had no group to learn from."""
    idle = {**HEALTHY, "train/skipped": 1.0, "train/tokens": 0.0, "train/signal": 0.0, "weights/unchanged": 1.0}
    updated = {**HEALTHY, "train/skipped": 0.0}
    assert "weights" not in {finding.kind for finding in diagnose([updated] * 8 + [idle] * 2)}
    frozen = [{**updated, "weights/unchanged": 0.9}, idle] * 4
    assert "weights" in {finding.kind for finding in diagnose(frozen)}


SOLVED = {
    "rollout/groups_with_signal": 0.05, "train/signal": 0.05, "rollout/all_solved": 0.9, "rollout/none_solved": 0.05,
    "train/entropy": 0.001, "metrics/accuracy": 0.93,
}  # fmt: skip


def test_tasks_that_are_solved_are_no_fault() -> None:
    """The end of ``arithmetic_grpo``: every answer reaches its limit of ten tokens, hardly a group has differences."""
    cut = {"tokens/truncated": 1.0, "rollout/ended_length": 1.0}
    assert diagnose([{**HEALTHY, **SOLVED, **cut}] * 20) == []
    start = {**HEALTHY, **cut, "metrics/accuracy": 0.13}
    assert diagnose([start] * 5) == [], "the right answers are cut like the others"
    assert [finding.kind for finding in diagnose([{**start, "metrics/accuracy": 0.0}] * 5)] == ["truncation"]
    early = {**start, "tokens/truncated": 0.89, "rollout/ended_length": 0.89}  # the first steps of ``arithmetic_grpo``
    earned = {"rollout/reward_truncated": 0.128, "rollout/reward_finished": 0.131}
    assert diagnose([{**early, **earned}] * 3) == [], "answers that were cut earn as much as those that ended"
    for harmful, enough in (
        ({"rollout/reward_truncated": 0.05}, 10),
        ({"rollout/reward_truncated": 0.01}, 3),
        ({"rollout/reward_truncated": 0.0, "rollout/reward_finished": 0.0}, 3),
    ):
        steps = [{**early, **earned, **harmful}] * enough
        assert [one.kind for one in diagnose(steps)] == ["truncation"] and diagnose(steps[:-1]) == []
    few = ((0.119, 0.15), (0.128, 0.538), (0.232, 0.408))  # one answer in eight had ended: chance
    named = [{"rollout/reward_truncated": cut_ones, "rollout/reward_finished": ended} for cut_ones, ended in few]
    assert diagnose([{**early, **one} for one in named]) == []
    unsolved = {**HEALTHY, **SOLVED, "rollout/all_solved": 0.05, "rollout/none_solved": 0.9}
    found = {finding.kind: finding for finding in diagnose([unsolved] * 20)}
    assert set(found) == {"signal", "entropy"} and "in 90% no answer is right" in found["signal"].symptom


def test_a_share_of_groups_is_judged_over_enough_of_them() -> None:
    """With four groups a step, three steps without differences are chance."""
    few = {**HEALTHY, "rollout/groups_drawn": 4.0}
    none = {**few, "rollout/groups_with_signal": 0.0, "train/signal": 0.0}
    assert diagnose([few] * 9 + [none] * 3) == []
    assert diagnose([none] * 9) == [], "36 groups"
    assert [finding.kind for finding in diagnose([none] * 10)] == ["signal"]


def rising(**last: float) -> list[dict[str, float]]:
    """Twenty steps whose reward rises from 0.1 to 0.3; the metrics named in ``last`` go from 0.02 to these values."""
    return [
        {
            **HEALTHY,
            "step": n + 1,
            "reward/mean_drawn": 0.1 + 0.2 * n / 19 + 0.01 * (-1) ** n,
            **{f"metrics/{name}": 0.02 + (value - 0.02) * n / 19 for name, value in last.items()},
        }
        for n in range(20)
    ]


def evaluations(before: float, after: float, half: float = 0.02) -> tuple[dict[str, float], dict[str, float]]:
    first, last = (
        {"step": step, "eval/accuracy": x, "eval/accuracy_low": x - half, "eval/accuracy_high": x + half}
        for step, x in ((0, before), (20, after))
    )
    return first, last


def test_a_reward_that_rises_without_success_is_a_finding() -> None:
    (found,) = diagnose(rising(accuracy=0.02))
    assert found.kind == "proxy" and found.level == "warning"
    assert "the reward rose from" in found.symptom and "accuracy went from 2.0% to 2.0%" in found.symptom
    (found,) = diagnose(rising(accuracy=0.02, tool_calls=3.0))
    assert found.kind == "proxy", "a number of calls explains no reward"
    (found,) = diagnose(rising(accuracy=0.02, brief=0.12))
    assert found.kind == "proxy", "a metric that rises by less explains no reward"


def test_a_reward_that_rises_with_success_or_hardly_at_all_is_none() -> None:
    assert diagnose(rising(accuracy=0.22)) == []
    assert diagnose(rising()) == [], "nothing measures success"
    assert diagnose(rising(accuracy=0.02)[:8]) == [], "too short to tell"
    noisy = [{**step, "reward/mean_drawn": 0.5 * (n % 3)} for n, step in enumerate(rising(accuracy=0.02))]
    assert diagnose(noisy) == [], "no clear gain"


def test_held_out_success_that_stays_is_a_finding_and_one_that_rises_is_none() -> None:
    first, last = evaluations(0.02, 0.02)
    (found,) = diagnose([first, *rising(accuracy=0.22), last])
    assert found.kind == "proxy" and "held-out accuracy went from 2.0% to 2.0%" in found.symptom
    (found,) = diagnose([first, *rising(accuracy=0.22, format=0.95), last])
    assert found.kind == "proxy" and "memorised" in found.cause, "sampled success rises: it is not the form alone"
    first, last = evaluations(0.02, 0.02, half=0.1)
    assert diagnose([first, *rising(accuracy=0.22), last]) == [], "too few tasks to tell"
    first, last = evaluations(0.02, 0.3)
    assert diagnose([first, *rising(accuracy=0.02), last]) == []


def test_a_form_that_is_learned_is_a_note_and_no_warning(tmp_path: Path) -> None:
    steps = rising(accuracy=0.02, format=0.95)
    (found,) = diagnose(steps)
    assert (found.kind, found.level) == ("form", "note") and "format rose from" in found.cause
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 0 and "form (note)" in result.output


def shrinking(last: float, **more: float) -> list[dict[str, float]]:
    return [{**HEALTHY, "tokens/completion_mean": 63 + (last - 63) * n / 19, **more} for n in range(20)]


def test_answers_that_collapse_in_length_are_a_finding() -> None:
    (found,) = diagnose(shrinking(5.0, **{"metrics/accuracy": 0.02}))
    assert found.kind == "collapse" and "from 60 to 8 tokens while accuracy went from 2.0% to 2.0%" in found.symptom
    (found,) = diagnose(shrinking(5.0))
    assert found.kind == "collapse", "without a measure of success"


def test_answers_that_become_shorter_are_none_if_they_stop_rambling_or_stay_answers() -> None:
    assert diagnose(shrinking(30.0, **{"metrics/accuracy": 0.02})) == []
    solving = [{**step, "metrics/accuracy": n / 20} for n, step in enumerate(shrinking(5.0))]
    assert diagnose(solving) == []
    short = [{**HEALTHY, "tokens/completion_mean": 10.0 - n / 2} for n in range(20)]
    assert diagnose(short) == []


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


def test_failed_episodes_are_named_with_their_most_frequent_kinds(tmp_path: Path) -> None:
    step = {"step": 1, "rollout/episodes": 8, "rollout/failed": 2, "rollout/failed_agent_error": 2}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    (found,) = [one for one in examine(tmp_path)[0] if one.kind == "failed"]
    assert "controller.log" in found.remedy
    kinds = ["agent_error: KeyError in Mine.step (mine.py:3)"] * 2 + [
        "timeout: no end within N s in Mine.reset (mine.py:9)"
    ]
    (tmp_path / "failed-episodes.jsonl").write_text("".join(json.dumps({"kind": kind}) + "\n" for kind in kinds))
    (found,) = [one for one in examine(tmp_path)[0] if one.kind == "failed"]
    assert f"{kinds[0]} (2 times); {kinds[2]} (1 times)" in found.remedy


def test_the_folder_that_was_named_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from agentrl.cli.main import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "runs/nothing"])
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("agentrl: runs/nothing is no run")
