"""RecordEpisodes: whole lines, closed episodes."""

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.envkit.wrappers.record import append_line, plain
from agentrl.wrappers import RecordEpisodes, TimeLimit
from tests.envkit.wrappers.games import Echo, say


def lines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "episodes.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def test_an_episode_is_one_line_written_at_its_end(tmp_path: Path) -> None:
    env = RecordEpisodes(TimeLimit(Echo(), 3), tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    await env.reset(seed=5, options={"word": "x"})
    await env.step(say("a\u2028\ud800"))
    assert lines(folder) == []
    await env.step(say("nothing"))
    await env.step(say("b"))
    (line,) = lines(folder)
    assert line == {
        "env": "Echo",
        "task": {"word": "x"},
        "seed": 5,
        "messages": [
            {"role": "user", "content": "x"},
            say("a\u2028\ud800"),
            {"role": "user", "content": "a\u2028\ud800"},
            say("nothing"),
            {"role": "user", "content": "nothing"},
            say("b"),
            {"role": "user", "content": "b"},
        ],
        "rewards": [0.5, None, 0.5],
        "terminated": False,
        "truncated": True,
        "finished": True,
        "metrics": {"length": 1},
    }
    await env.close()
    assert len(lines(folder)) == 1


async def test_an_episode_that_is_left_is_marked(tmp_path: Path) -> None:
    env = RecordEpisodes(Echo(), tmp_path)
    await env.close()
    await env.reset(seed=1)
    await env.step(say("a"))
    await env.reset(seed=2)
    await env.close()
    assert [(line["seed"], line["finished"], line["rewards"]) for line in lines(tmp_path)] == [
        (1, False, [0.5]),
        (2, False, []),
    ]
    assert lines(tmp_path)[0]["task"]["word"], "a task that was drawn is recorded too"


async def test_what_was_said_is_kept_as_it_was(tmp_path: Path) -> None:
    env = RecordEpisodes(Echo(), tmp_path)
    observation, _ = await env.reset(options={"word": "x"})
    observation[0]["content"] = "changed"
    await env.close()
    assert lines(tmp_path)[0]["messages"] == [{"role": "user", "content": "x"}]


async def test_recording_does_not_change_the_episode(tmp_path: Path) -> None:
    assert await RecordEpisodes(Echo(), tmp_path).reset(seed=7) == await Echo().reset(seed=7)


def test_lines_of_many_writers_stay_whole(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    texts = [json.dumps([number] * 3000) for number in range(8)]
    threads = [threading.Thread(target=lambda text=text: [append_line(file, text) for _ in range(5)]) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(file.read_text().splitlines()) == sorted(texts * 5)


def test_half_a_line_of_a_killed_writer_spoils_no_other(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text('{"ok": 1}\n{"half')
    append_line(file, '{"ok": 2}')
    assert file.read_text().splitlines() == ['{"ok": 1}', '{"half', '{"ok": 2}']


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (math.nan, "nan"),
        (np.float32(0.5), 0.5),
        (np.array([[1, 2]]), [[1, 2]]),
        ({1: (2,)}, {"1": [2]}),
        (b"x", "b'x'"),
    ],
)
def test_everything_becomes_json(value: Any, want: Any) -> None:
    assert plain(value) == want
    json.dumps(plain(value), allow_nan=False)
