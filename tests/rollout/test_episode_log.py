"""Episodes of a long run are packed beside it, and read as if they were not."""

import json
import random
import zipfile

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


@pytest.mark.parametrize("there", [True, False])
def test_texts_that_the_runs_tokenizer_says_are_written_once(tmp_path, tiny_model, there):
    from transformers import AutoTokenizer

    name = str(tiny_model) if there else str(tmp_path / "gone")
    (tmp_path / "config.json").write_text(json.dumps({"model": {"name": name}}))
    said = "Both numbers: 12 + 30 = 42, so the café's answer is 42."
    ids = AutoTokenizer.from_pretrained(str(tiny_model)).encode(said, add_special_tokens=False)
    record = made_episode(0, random.Random(0))
    node = record["trajectories"]["assistant"]["nodes"][1]
    node["message"]["content"] = said
    node |= {"token_ids": ids, "loss_mask": [1] * len(ids), "versions": [0] * len(ids), "logprobs": [-1.0] * len(ids)}
    log = EpisodeLog(tmp_path / "episodes.jsonl", 10)
    log.add_all([orjson.dumps(record) + b"\n"])
    log.close()
    (part,) = earlier_parts(tmp_path / "episodes.jsonl")
    with zipfile.ZipFile(part) as packed:
        assert (said.encode() not in packed.read("episodes.jsonl")) == there
    (found,) = read_episodes(tmp_path / "episodes.jsonl")
    assert found.trajectories["assistant"].nodes[1].message["content"] == said


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
