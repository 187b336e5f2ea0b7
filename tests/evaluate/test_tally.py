"""Episodes are counted as they end: the numbers do not depend on the order, and what is absent is not 0."""

import random

import pytest

from agentrl.core.episode import Episode, Node, StopReason, Trajectory
from agentrl.evaluate.intervals import proportion_interval
from agentrl.evaluate.measures import measures_of, usage_of
from agentrl.evaluate.metrics import summarize, summary_of
from agentrl.evaluate.prices import Price, price_of, table_path
from agentrl.evaluate.tally import Tally


def episode(task: int, index: int, accuracy: float | None, **fields: object) -> Episode:
    failed = {"stop_reason": StopReason.INFERENCE_ERROR} if accuracy is None else {"stop_reason": "terminated"}
    values = {
        **{"group_id": f"eval0-{task}", "task_id": f"test/{task}", "index": index, "seed": 0, "reward": accuracy},
        **{"metrics": {} if accuracy is None else {"accuracy": accuracy}, **failed},
    }
    return Episode(**(values | fields))


def some(seed: int) -> list[Episode]:
    rng = random.Random(seed)
    found = []
    for task in range(12):
        for index in range(4):
            accuracy = None if rng.random() < 0.1 else float(rng.random() < 0.4)
            tag = rng.choice(["easy", "hard"]) if task % 3 else None
            said = str(int(accuracy or 0) or rng.randint(2, 3))
            cut = {"metrics": {}, "stop_reason": "truncated"} if accuracy == 0 and rng.random() < 0.3 else {}
            found.append(episode(task, index, accuracy, tag=f"tag{task % 2}" if tag else None, answer=said, **cut))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_episodes_changes_nothing(seed: int) -> None:
    episodes = some(seed)
    expected = summarize(episodes)
    random.Random(seed).shuffle(episodes)
    tally, tasks = Tally(4, on_task=lambda one: tasks.append(one)), []
    for one in episodes:
        tally.add(one)
        tally.copy_closed()  # a look in between changes nothing
    tally.close()
    found = summary_of(tally)
    assert found.all_metrics() == pytest.approx(expected.all_metrics())
    assert {tag: one.all_metrics() for tag, one in found.tags.items()} == {
        tag: pytest.approx(one.all_metrics()) for tag, one in expected.tags.items()
    }
    assert len(tasks) == 12 and sum(one.failed for one in tasks) == found.failed


def test_tasks_without_an_accuracy_wait_until_one_is_told() -> None:
    tally = Tally(1)
    tally.add(episode(0, 0, 0.0, metrics={}, stop_reason="truncated"))
    assert "accuracy" not in tally.total.scores and "accuracy" not in tally.copy_closed().total.scores
    tally.add(episode(1, 0, 1.0))
    assert tally.total.scores["accuracy"].mean == 0.5


def test_bounds_are_what_the_numbers_were_if_all_invalid_ones_were_wrong_or_right() -> None:
    samples = {0: [1.0, None, 0.0], 1: [0.0, 0.0, 0.0], 2: [None, None, None], 3: [1.0, 1.0, None]}
    given = [episode(task, index, one) for task, own in samples.items() for index, one in enumerate(own)]
    found = summarize(given)
    for which, value in (("if_wrong", 0.0), ("if_right", 1.0)):
        filled = [
            episode(task, index, value if one is None else one)
            for task, own in samples.items()
            for index, one in enumerate(own)
        ]
        full = summarize(filled)
        for name in ("accuracy", "pass@1", "pass@2", "pass@3", "pass^1", "pass^2"):
            assert getattr(found.estimates[name], which) == pytest.approx(full.estimates[name].mean), name
    metrics = found.as_metrics()
    assert metrics["eval/accuracy_if_wrong"] == pytest.approx(1 / 4) and metrics["eval/invalid"] == 5
    assert not [name for name in summarize(given[3:6]).as_metrics() if "_if_" in name], "nothing is invalid there"


def test_votes_and_tags_are_in_the_summary() -> None:
    said = [("7", 1.0), ("7", 1.0), ("8", 0.0)]
    found = summarize([episode(0, index, one, answer=text, tag="a") for index, (text, one) in enumerate(said)])
    assert found.estimates["maj@3"].mean == 1.0 and found.estimates["maj@1"].mean == pytest.approx(2 / 3)
    assert found.tags["a"].estimates["pass^2"].mean == pytest.approx(1 / 3)
    assert "maj@3" not in summarize([episode(0, index, 1.0) for index in range(3)]).estimates


def node(parent: int | None = 0, **fields: object) -> Node:
    values = {"message": {"role": "assistant", "content": "four"}, "finish_reason": "stop", "parent": parent}
    return Node(**(values | fields))


PROMPT = Node(parent=None, message={"role": "user", "content": "2+2"})


def test_tokens_are_the_apis_or_those_of_the_ids_and_else_absent() -> None:
    usage = {"prompt": 40, "completion": 5, "cached": 8}
    of_api = Trajectory(
        nodes=[PROMPT, node(usage=usage), node(), node(parent=1, usage={"prompt": 60, "completion": 7})]
    )
    found = measures_of(episode(0, 0, 1.0, trajectories={"assistant": of_api}, seconds=2.0), Price(1.0, 10.0, 0.5))
    assert found["turns"] == 3 and found["answer_chars"] == 12 and "tool_calls" not in found
    assert (found["prompt_tokens"], found["answer_tokens"], found["cached_tokens"]) == (100, 12, 8)
    assert found["cost"] == pytest.approx((92 * 1.0 + 8 * 0.5 + 12 * 10.0) / 1e6)
    ids = {"logprobs": [0.0] * 3, "versions": [0] * 3}
    asked = PROMPT.model_copy(update={"token_ids": [1, 2], "loss_mask": [0, 0], "logprobs": [0, 0], "versions": [0, 0]})
    sampled = node(token_ids=[3, 4, 5], loss_mask=[0, 1, 1], **ids)
    again = node(parent=1, token_ids=[6, 7, 8], loss_mask=[0, 1, 1], **ids)
    of_ids = episode(0, 0, 1.0, trajectories={"assistant": Trajectory(nodes=[asked, sampled, again])})
    assert usage_of(of_ids) == {"prompt": 3 + 6, "completion": 4}
    silent = episode(
        0, 0, 1.0, trajectories={"assistant": Trajectory(nodes=[PROMPT, node(usage=usage), node(parent=1)])}
    )
    assert "answer_tokens" not in measures_of(silent, Price(1, 1)) and "cost" not in measures_of(silent, Price(1, 1))


def test_a_constant_count_is_no_share_and_stop_reasons_are_shares_of_all_episodes() -> None:
    own = {"trajectories": {"assistant": Trajectory(nodes=[PROMPT, node()])}}
    stops = ["terminated"] * 6 + ["truncated"] * 2
    found = summarize([episode(task, 0, 1.0, stop_reason=stop, **own) for task, stop in enumerate(stops)])
    assert "eval/turns_low" not in found.all_metrics() and found.measures["turns"].mean == 1
    assert found.measures["stop/truncated"].mean == pytest.approx(0.25)
    assert (found.measures["stop/truncated"].low, found.measures["stop/truncated"].high) == pytest.approx(
        proportion_interval(2, 8)
    )
    assert "eval/turns" not in found.as_metrics(), "a training's metrics are scores"


def test_prices_come_from_the_recipe_or_the_users_table(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("AGENTRL_PRICES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert price_of("m") is None and table_path() == tmp_path / "agentrl" / "prices.yaml"
    table_path().parent.mkdir()
    table_path().write_text("org/m: {input: 2.5, output: 10, cached: 1.25}\nwrong: {input: cheap}\n")
    assert price_of("org/m") == Price(2.5, 10.0, 1.25) and price_of("other") is None
    assert price_of("org/m", {"input": 1, "output": 2}) == Price(1.0, 2.0)
    for name, given in (("wrong", None), ("m", {"input": -1, "output": 2}), ("m", {"input": 1})):
        with pytest.raises(Exception, match=r"want \{input: NUMBER"):
            price_of(name, given)
