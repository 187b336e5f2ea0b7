"""From episodes to sequences with advantages."""

from agentrl.core.episode import Episode, Node, StopReason, Trajectory
from agentrl.train.batch import make_train_batch


def episode(group: str, reward: float | None, answer: list[int], **changes: object) -> Episode:
    count = len(answer)
    nodes = [
        Node(
            parent=None, message={"role": "user"}, token_ids=[1, 2], loss_mask=[0, 0],
            logprobs=[0, 0], versions=[-1, -1],
        ),
        Node(
            parent=0, message={"role": "assistant"}, token_ids=answer, loss_mask=[1] * count,
            logprobs=[-1.0] * count, versions=[0] * count, finish_reason="stop",
        ),
    ]  # fmt: skip
    fields = {"stop_reason": StopReason.TERMINATED, "trajectories": {"assistant": Trajectory(nodes=nodes)}}
    return Episode(group_id=group, task_id="t", index=0, seed=0, reward=reward, **(fields | changes))  # type: ignore[arg-type]


def test_failed_episodes_enter_neither_the_baseline_nor_the_tokens() -> None:
    good = [episode("g", 1.0, [5]), episode("g", 0.0, [6, 7])]
    bad = [episode("g", None, [8]), episode("g", None, [9], stop_reason=StopReason.TIMEOUT)]
    with_bad = make_train_batch([*good, *bad], scale="group", keep_zero=False)
    assert with_bad == make_train_batch(good, scale="group", keep_zero=False)
    assert with_bad.loss_tokens == 3


def test_sequences_without_advantage_count_as_tokens_but_are_not_computed() -> None:
    episodes = [episode("g", 1.0, [5]), episode("g", 0.0, [6]), episode("h", 1.0, [7, 7]), episode("h", 1.0, [8])]
    batch = make_train_batch(episodes, scale="group", keep_zero=False)
    assert (len(batch.sequences), batch.loss_tokens, batch.signal) == (2, 5, 0.5)
    assert len(make_train_batch(episodes, scale="group", keep_zero=True).sequences) == 4
