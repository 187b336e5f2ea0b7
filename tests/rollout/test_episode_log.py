"""Episodes of a long run are packed beside it, and read as if they were not."""

import random

import orjson
import pytest

from agentrl.bench.made_run import made_episode
from agentrl.core.packed_episodes import earlier_parts
from agentrl.rollout.episode_log import EpisodeLog
from agentrl.rollout.journal import read_episodes


@pytest.fixture
def lines():
    drawn = random.Random(0)
    return [orjson.dumps(made_episode(number, drawn)) + b"\n" for number in range(24)]


def test_a_file_becomes_a_packed_part_at_its_size(tmp_path, lines):
    log = EpisodeLog(tmp_path / "episodes.jsonl", sum(map(len, lines[:10])))
    for line in lines:
        log.add_all([line])
    log.close()
    parts = earlier_parts(tmp_path / "episodes.jsonl")
    assert len(parts) == 2 and parts[0].suffix == ".zip"
    found = list(read_episodes(tmp_path / "episodes.jsonl"))
    assert [one.seed for one in found] == list(range(24))
    assert (
        found[3].trajectories["assistant"].nodes[1].token_ids
        == orjson.loads(lines[3])["trajectories"]["assistant"]["nodes"][1]["token_ids"]
    )


def test_a_run_that_goes_on_adds_further_parts(tmp_path, lines):
    for half in (lines[:12], lines[12:]):
        log = EpisodeLog(tmp_path / "episodes.jsonl", sum(map(len, lines[:11])))
        for line in half:
            log.add_all([line])
        log.close()
    assert [part.stem for part in earlier_parts(tmp_path / "episodes.jsonl")] == ["000000", "000001"]
    assert [one.seed for one in read_episodes(tmp_path / "episodes.jsonl")] == list(range(24))


def test_without_a_size_nothing_is_packed(tmp_path, lines):
    log = EpisodeLog(tmp_path / "episodes.jsonl")
    for line in lines:
        log.add_all([line])
    log.close()
    assert (tmp_path / "episodes.jsonl").read_bytes() == b"".join(lines) and not (tmp_path / "episodes").exists()


def test_a_folder_that_cannot_be_made_leaves_the_file(tmp_path, lines, caplog):
    (tmp_path / "episodes").write_text("in the way")
    log = EpisodeLog(tmp_path / "episodes.jsonl", 10)
    for line in lines:
        log.add_all([line])
    log.close()
    assert (tmp_path / "episodes.jsonl").read_bytes() == b"".join(lines)
    assert caplog.text.count("is not packed") == 1


def test_there_is_nothing_to_read_without_a_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_episodes(tmp_path / "episodes.jsonl"))
