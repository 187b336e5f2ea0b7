"""Record of requests and answers, and sessions that are answered from it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.experts import ExpertRows
from agentrl.core.writer_thread import WriterThread
from agentrl.inference import traffic
from agentrl.inference.backend import Generation, InferenceError, SamplingParams, ServerUnreachable
from agentrl.inference.replayed import NOT_SENT, RecordedSampler
from agentrl.inference.traffic import WORKER_FILE, Exchange, TrafficLog, common_prefix, read_traffic


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=4, seed=seed)


def generation(*ids: int, version: int = 0) -> Generation:
    return Generation(list(ids), [-0.1 * one for one in ids], [version] * len(ids), "stop")


EXPERTS = ExpertRows.of(np.array([[0, 300], [2, 1], [-1, -1]]))
FIRST = replace(generation(4, 5, version=2), experts=EXPERTS)
SECOND = Generation([9, 8, 7], [-1.0, -2.0, -0.1234567890123], [2, 2, 3], "length")


def log_conversation(path: Path, writer: WriterThread | None = None) -> None:
    log = TrafficLog(path, writer)
    one = log.episode(7, evaluation=False)
    one.add([1, 2, 3], params(10), FIRST)
    one.add([1, 2, 3, 4, 5, 6], params(11), SECOND)
    if writer is not None:
        writer.close()
    log.close()


def test_what_was_sent_and_got_is_read_back(tmp_path: Path) -> None:
    log_conversation(tmp_path / "traffic.jsonl")
    found = read_traffic(tmp_path / "traffic.jsonl", [7])
    assert found == {7: {10: Exchange([1, 2, 3], FIRST), 11: Exchange([1, 2, 3, 4, 5, 6], SECOND)}}


def test_a_conversation_stands_once_in_the_file(tmp_path: Path) -> None:
    log_conversation(tmp_path / "traffic.jsonl")
    records = [json.loads(line) for line in (tmp_path / "traffic.jsonl").read_text().splitlines()]
    assert [one["prompt"] for one in records] == [[1, 2, 3], [6]]
    assert records[1]["shared"] == 5


def test_episodes_at_once_and_evaluations_do_not_mix(tmp_path: Path) -> None:
    log = TrafficLog(tmp_path / "t")
    one, two = log.episode(1, evaluation=False), log.episode(2, evaluation=False)
    same = log.episode(1, evaluation=True)
    one.add([1], params(5), generation(2))
    same.add([3], params(5), generation(4))
    two.add([1, 2], params(5), generation(6))
    one.add([1, 2, 9], params(6), generation(7))
    log.close()
    found = read_traffic(tmp_path / "t", [1])
    assert found == {1: {5: Exchange([1], generation(2)), 6: Exchange([1, 2, 9], generation(7))}}


def test_the_latest_run_of_an_episode_counts(tmp_path: Path) -> None:
    for answer in (4, 5):
        log = TrafficLog(tmp_path / "t")  # as a resumed run opens it
        log.episode(1, evaluation=False).add([1, answer], params(5), generation(answer))
        log.close()
    log = TrafficLog(tmp_path / "t")
    first, retry = (log.episode(2, evaluation=False) for _ in range(2))
    first.add([1], params(5), ServerUnreachable("gone"))
    retry.add([1], params(5), generation(6))
    log.close()
    found = read_traffic(tmp_path / "t", [1, 2])
    assert found == {1: {5: Exchange([1, 5], generation(5))}, 2: {5: Exchange([1], generation(6))}}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_episode_that_was_tried_again_in_another_worker_has_its_latest_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    """Workers write files of their own, and which one was tried last says no name."""
    clock = iter([100.0, 101.0, 102.0])
    monkeypatch.setattr(traffic.time, "time", lambda: next(clock))
    TrafficLog(tmp_path / "traffic.jsonl").close()
    first, second = (TrafficLog(tmp_path / WORKER_FILE.format(index)) for index in order)
    first.episode(1, evaluation=False).add([1], params(5), generation(4))
    retry = second.episode(1, evaluation=False)
    retry.add([1], params(5), generation(6))
    retry.add([1, 6, 2], params(7), generation(8))
    first.close()
    second.close()
    found = read_traffic(tmp_path / "traffic.jsonl", [1])
    assert found == {1: {5: Exchange([1], generation(6)), 7: Exchange([1, 6, 2], generation(8))}}


@pytest.mark.parametrize("resumed", [False, True])
def test_requests_of_an_earlier_run_that_the_latest_did_not_send_are_not_its_own(tmp_path: Path, resumed: bool) -> None:
    """What was aborted by a push, or came after another answer, has a seed that the later run never asks with."""
    log = TrafficLog(tmp_path / "t")
    first = log.episode(1, evaluation=False)
    first.add([1], params(5), generation(4))
    first.add([1, 4, 2], params(9), ServerUnreachable("gone"))
    if resumed:
        log.close()
        log = TrafficLog(tmp_path / "t")
    log.episode(1, evaluation=False).add([1], params(5), generation(6))
    log.close()
    assert read_traffic(tmp_path / "t", [1]) == {1: {5: Exchange([1], generation(6))}}


def test_an_error_is_kept_as_one(tmp_path: Path) -> None:
    log = TrafficLog(tmp_path / "t")
    log.episode(1, evaluation=False).add([1, 2], params(5), InferenceError("refused"))
    log.close()
    assert read_traffic(tmp_path / "t", [1]) == {1: {5: Exchange([1, 2], None, "refused")}}


@pytest.mark.parametrize("kept", [1, 30])
def test_a_torn_last_line_is_skipped_and_removed(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "t"
    log_conversation(path)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[: first + kept])
    assert list(read_traffic(path, [7])[7]) == [10]
    TrafficLog(path).close()
    assert path.read_bytes() == whole[:first]


def test_a_thread_writes_the_same_lines(tmp_path: Path) -> None:
    log_conversation(tmp_path / "at_once")
    writer = WriterThread("logs")
    log_conversation(tmp_path / "beside", writer)
    without_time = [
        [json.loads(line) | {"at": 0, "run": 0} for line in (tmp_path / name).read_text().splitlines()]
        for name in ("at_once", "beside")
    ]
    assert without_time[0] == without_time[1] and len(without_time[0]) == 2


def test_a_full_disk_leaves_a_line_out_and_the_rest_is_read_right(tmp_path: Path) -> None:
    log = TrafficLog(tmp_path / "t")
    one = log.episode(7, evaluation=False)
    one.add([1, 2, 3], params(10), FIRST)
    write, log._lines.add = log._lines.add, lambda line: False  # type: ignore[method-assign]
    one.add([1, 2, 3, 4, 5, 6], params(11), SECOND)
    log._lines.add = write  # type: ignore[method-assign]
    one.add([1, 2, 3, 4, 5, 6, 9, 8, 7, 1], params(12), FIRST)
    log.close()
    found = read_traffic(tmp_path / "t", [7])[7]
    assert found == {10: Exchange([1, 2, 3], FIRST), 12: Exchange([1, 2, 3, 4, 5, 6, 9, 8, 7, 1], FIRST)}


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    log_conversation(tmp_path / "t")
    text = (tmp_path / "t").read_text()
    (tmp_path / "t").write_text(text.replace("{", "[", 1))
    with pytest.raises(ValueError, match=r"t:1: no record"):
        read_traffic(tmp_path / "t", [7])


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(first: list[int], second: list[int]) -> None:
    expected = 0
    while expected < min(len(first), len(second)) and first[expected] == second[expected]:
        expected += 1
    assert common_prefix(first, second) == expected


async def test_the_record_answers_and_tells_what_differs() -> None:
    sampler = RecordedSampler(
        {5: Exchange([1, 2], FIRST), 6: Exchange([1, 2, 4, 5, 6], SECOND), 7: Exchange([9], None)}
    )
    assert await sampler.generate([1, 2], params(5), request_id="a") == FIRST
    assert sampler.differences == []
    assert await sampler.generate([1, 2, 4, 5, 3, 3], params(6), request_id="b") == SECOND
    assert [(one.request, one.at) for one in sampler.differences] == [(1, 4)]
    assert sampler.unsent == 1
    with pytest.raises(InferenceError, match=NOT_SENT):
        await sampler.generate([1], params(99), request_id="c")
    assert (sampler.differences[-1].recorded, sampler.differences[-1].now) == ([], [1])
