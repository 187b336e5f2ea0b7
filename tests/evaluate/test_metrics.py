import itertools

import pytest

from agentrl.core.episode import Episode, StopReason
from agentrl.evaluate.intervals import proportion_interval
from agentrl.evaluate.metrics import summarize
from agentrl.evaluate.moments import Moments


def episode(task: int, accuracy: float | None, stop: StopReason = StopReason.TERMINATED) -> Episode:
    metrics = {} if accuracy is None else {"accuracy": accuracy}
    return Episode(
        group_id=str(task),
        task_id=f"test/{task}",
        index=0,
        seed=0,
        reward=accuracy,
        metrics=metrics,
        stop_reason=stop,
    )


def test_single_samples_give_the_proportion_and_its_interval():
    metrics = summarize([episode(i, float(i < 3)) for i in range(10)]).as_metrics()
    low, high = proportion_interval(3, 10)
    assert metrics["eval/accuracy"] == pytest.approx(0.3)
    assert metrics["eval/accuracy_low"] == pytest.approx(low)
    assert metrics["eval/accuracy_high"] == pytest.approx(high)
    assert metrics["eval/n"] == 10


def test_a_failed_episode_is_invalid_not_wrong():
    found = summarize([episode(0, 1.0), episode(1, None, StopReason.INFERENCE_ERROR), episode(2, None)])
    assert found.failed == 2
    assert found.as_metrics()["eval/accuracy"] == 1.0
    assert found.as_metrics()["eval/invalid"] == 2


def test_an_episode_out_of_context_is_wrong_not_invalid():
    overflowed = episode(1, None, StopReason.CONTEXT_OVERFLOW).model_copy(update={"reward": 0.2})
    found = summarize([episode(0, 1.0), overflowed, episode(2, None, StopReason.TIMEOUT)])
    metrics = found.as_metrics()
    assert (found.n, found.failed) == (2, 1)
    assert (metrics["eval/accuracy"], metrics["eval/reward"]) == (0.5, pytest.approx(0.6))
    assert metrics["eval/truncated"] == 0.5


def test_an_episode_that_used_up_its_turns_is_wrong_too():
    unjudged = episode(1, None, StopReason.TRUNCATED).model_copy(update={"reward": 0.0})
    assert summarize([episode(0, 1.0), unjudged]).as_metrics()["eval/accuracy"] == 0.5
    assert "accuracy" not in summarize([unjudged]).estimates, "no environment here reports it"


def test_a_metric_that_not_all_episodes_report_says_of_how_many_it_is():
    """Two kinds of tasks in one evaluation, of which one has no accuracy; the cut episode may be of either kind."""
    unjudged = episode(3, None, StopReason.CONTEXT_OVERFLOW).model_copy(update={"reward": 0.5})
    plain = [episode(number, None).model_copy(update={"reward": 1.0}) for number in (4, 5)]
    metrics = summarize([episode(0, 1.0), episode(1, 1.0), unjudged, *plain]).as_metrics()
    assert metrics["eval/n"] == 5 and metrics["eval/reward"] == pytest.approx(4.5 / 5)
    assert metrics["eval/accuracy"] == pytest.approx(2 / 3) and metrics["eval/accuracy_episodes"] == 3
    assert [name for name in metrics if name.endswith("_episodes")] == ["eval/accuracy_episodes"]
    alone = summarize([unjudged, *plain]).as_metrics()
    assert not [name for name in alone if "accuracy" in name], "nobody reports it, so nobody is wrong"


def test_an_overflow_counts_as_wrong_in_pass_at_k_where_others_report_accuracy():
    overflowed = episode(0, None, StopReason.CONTEXT_OVERFLOW).model_copy(update={"reward": 0.2})
    found = summarize([episode(0, 1.0), overflowed, episode(1, 0.0), episode(1, 0.0)])
    assert found.estimates["pass@1"].mean == pytest.approx(0.25)
    assert "eval/accuracy_episodes" not in found.as_metrics(), "of all episodes"


def test_a_first_prompt_that_does_not_fit_is_invalid():
    assert summarize([episode(0, 1.0), episode(1, None, StopReason.CONTEXT_OVERFLOW)]).failed == 1


def test_pass_at_k_asks_for_one_right_sample_a_task():
    samples = [(0, 1.0), (0, 0.0), (1, 0.0), (1, 0.0), (2, 1.0), (2, 1.0)]
    found = summarize([episode(task, accuracy) for task, accuracy in samples])
    assert found.samples == 2
    assert found.estimates["pass@2"].mean == pytest.approx(2 / 3)
    assert found.estimates["accuracy"].mean == pytest.approx(0.5)


def test_a_task_with_a_failed_sample_is_left_out_of_pass_at_k():
    failed = episode(0, None, StopReason.TIMEOUT)
    found = summarize([episode(0, 0.0), failed, episode(1, 1.0), episode(1, 0.0)])
    assert found.estimates["pass@2"].mean == 1.0
    assert found.estimates["pass@1"].mean == pytest.approx((0.0 + 0.5) / 2)  # its valid sample counts where it can
    metrics = found.as_metrics()
    assert (metrics["eval/pass@1_tasks"], metrics["eval/pass@2_tasks"]) == (2, 1)


def test_every_pass_at_k_is_estimated_from_all_valid_samples():
    valid = {0: [1, 0, 0, 0], 1: [0, 0, 0, 0], 2: [1, 1, 1, 0], 3: [1, 0, 0]}
    failed = episode(3, None, StopReason.TIMEOUT)
    found = summarize([*(episode(task, float(v)) for task, values in valid.items() for v in values), failed])
    for k in range(1, 5):
        enough = [values for values in valid.values() if len(values) >= k]
        drawn = [[max(some) for some in itertools.combinations(values, k)] for values in enough]
        expected = sum(sum(one) / len(one) for one in drawn) / len(drawn)
        assert found.estimates[f"pass@{k}"].mean == pytest.approx(expected)
        assert found.as_metrics()[f"eval/pass@{k}_tasks"] == len(enough)
    assert "pass@5" not in found.estimates
    assert found.per_task["pass@2"]["test/3"] == pytest.approx(2 / 3)
    assert found.per_task["accuracy"]["test/3"] == pytest.approx(1 / 3)


def test_single_samples_have_no_pass_at_k():
    assert not any(name.startswith("pass@") for name in summarize([episode(0, 1.0), episode(1, 0.0)]).estimates)


def test_equal_tasks_do_not_get_an_interval_without_width():
    found = summarize([episode(task, 0.0) for task in range(20) for _ in range(4)]).estimates["accuracy"]
    assert (found.low, found.high) == pytest.approx(proportion_interval(0, 20))


def test_a_single_task_gives_no_made_up_bounds():
    metrics = summarize([episode(0, 1.5)]).as_metrics()
    assert metrics["eval/reward"] == 1.5
    assert "eval/reward_low" not in metrics


def test_no_episodes_are_no_numbers():
    assert summarize([]).as_metrics() == {"eval/n": 0.0, "eval/invalid": 0.0, "eval/abandoned": 0.0}


def test_a_count_or_a_duration_has_no_bound_below_0() -> None:
    """Eight answers of which one is very long; a reward of the same values may be negative."""
    effort, reward = Moments(share=False), Moments()
    for value in (40.0, 45.0, 38.0, 52.0, 41.0, 47.0, 512.0, 44.0):
        effort.add_single(value)
        reward.add_single(value)
    assert effort.estimate().low == 0.0 and reward.estimate().low < 0.0
    assert effort.estimate().high == reward.estimate().high
