"""The pure scheduler: slots, groups and order."""

import random

from agentrl.engine.params import SamplingParams
from agentrl.engine.request import Finish, Request
from agentrl.engine.scheduler import Scheduler


def request(rid: str, *prompt: int) -> Request:
    return Request(rid, prompt, SamplingParams(), 8, frozenset(), lambda r: None, random.Random(0), created=int(rid))


def test_the_head_takes_its_duplicates_along_as_far_as_slots_reach() -> None:
    scheduler = Scheduler(max_running=2)
    scheduler.add([request("1", 5), request("2", 6), request("3", 5), request("4", 5)])
    group = scheduler.next_group()
    assert [r.rid for r in group] == ["1", "3"]
    assert [r.rid for r in scheduler.waiting] == ["2", "4"]
    assert [scheduler.place(r) for r in group] == [0, 1]
    assert scheduler.next_group() == []


def test_a_released_slot_is_filled_by_the_last_request() -> None:
    scheduler = Scheduler(max_running=3)
    a, b, c = request("1", 1), request("2", 2), request("3", 3)
    for r in (a, b, c):
        scheduler.place(r)
    assert scheduler.release(0) == 2
    assert scheduler.running == [c, b]
    assert scheduler.release(1) == 1
    assert scheduler.running == [c]


def test_retracted_requests_go_before_newer_ones_and_run_over_what_they_have() -> None:
    scheduler = Scheduler(max_running=3)
    old, older, new = request("2", 1, 2), request("1", 9), request("3", 7)
    for r in (old, older):
        scheduler.place(r)
    scheduler.add([new])
    old.append(4, -1.0, "0")
    scheduler.retract()
    assert [r.rid for r in scheduler.waiting] == ["1", "2", "3"]
    assert old.prefix == (1, 2, 4)
    assert old.retractions == 1


def test_a_request_finishes_once_and_spans_cover_its_tokens() -> None:
    r = request("1", 1)
    for version in ("a", "a", "b"):
        r.append(0, 0.0, version)
    assert [(s.version, s.start, s.end) for s in r.spans] == [("a", 0, 2), ("b", 2, 3)]
    r.end(Finish("abort", message="first"))
    r.end(Finish("length"))
    assert r.finish == Finish("abort", message="first")
