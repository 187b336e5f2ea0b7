"""The index: it says what the file says, whatever the file's state."""

import json
import os

import pytest

from agentrl.config.errors import UserError
from agentrl.view import episode_index
from agentrl.view.episode_files import episode_file
from agentrl.view.episode_index import EpisodeIndex
from tests.view.conftest import append, hostile_episode, records_of


@pytest.fixture
def index(run):
    return run.index


def test_every_row_says_what_its_record_says(run, index):
    records = records_of(run.folder / "episodes.jsonl")
    rows = index.page(limit=500, descending=False).rows
    assert len(rows) == len(records) == 65
    for row, record in zip(rows, records, strict=True):
        nodes = record["trajectories"]["assistant"]["nodes"]
        assert (row["task"], row["reward"], row["stop"]) == (record["task_id"], record["reward"], record["stop_reason"])
        assert row["tokens"] == sum(sum(node["loss_mask"]) for node in nodes)
        assert (row["turns"], row["calls"], row["context"]) == (2, 1, sum(len(node["token_ids"]) for node in nodes))
        assert row["metrics"] == record["metrics"]
        assert episode_file(run.folder, "train").read(row["place"]) == record
    assert rows[-1]["failed"] and rows[-1]["error"].startswith("ValueError: <img")


def test_the_age_is_counted_from_the_step_that_trained_the_group(index):
    row = index.page(query="group:g0", limit=1).rows[0]  # version 0, trained in the step that begins at version 1
    assert (row["trained"], row["oldest"], row["age"]) == (1, 0, 1)
    hostile = index.page(query="group:g-hostile").rows[0]
    assert hostile["trained"] is None and hostile["age"] is None


@pytest.mark.parametrize("chunk", [1500, 9000, 1 << 20])
def test_the_newest_are_read_first_and_then_the_rest_whatever_the_chunks(run, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(episode_index, "FIRST_CHUNK", chunk)
    monkeypatch.setattr(episode_index, "CHUNK", chunk)
    index = EpisodeIndex(run.folder, tmp_path / "other")
    left, seen = True, 0
    while left:
        left = index.update(1)
        page = index.page(limit=500)
        assert page.all >= seen
        seen = page.all
        if page.rows and left and chunk == 9000:
            assert page.rows[0]["group_id"] == "g-hostile"  # the last line of the file
    places = [row["place"] for row in index.page(limit=500, descending=False).rows]
    assert places == [row["place"] for row in run.index.page(limit=500, descending=False).rows]
    assert index.page().unread == 0


def test_a_living_file_is_followed_and_a_half_written_line_waits(run, index):
    file = run.folder / "episodes.jsonl"
    line = json.dumps(hostile_episode() | {"task_id": "train/new"}).encode()
    with file.open("ab") as opened:
        opened.write(line[: len(line) // 2])
    assert index.update() is False
    assert index.page(query="task:train/new").total == 0
    with file.open("ab") as opened:
        opened.write(line[len(line) // 2 :] + b"\n")
    index.update()
    assert index.page(query="task:train/new").total == 1
    assert index.page().all == 66


def test_only_what_is_new_is_read_where_that_is_asked(run, tmp_path, monkeypatch):
    monkeypatch.setattr(episode_index, "FIRST_CHUNK", 3000)
    monkeypatch.setattr(episode_index, "CHUNK", 3000)
    index = EpisodeIndex(run.folder, tmp_path / "other")
    index.update(1)
    before = index.page().all
    append(run.folder / "episodes.jsonl", hostile_episode())
    index.update(new_only=True)
    assert index.page().all == before + 1


def test_a_damaged_line_is_counted_and_the_others_are_there(run, index):
    with (run.folder / "episodes.jsonl").open("ab") as opened:
        opened.write(b'{"task_id": \n[1, 2]\n')
    append(run.folder / "episodes.jsonl", hostile_episode())
    index.update()
    page = index.page()
    assert (page.all, page.damaged, page.unread) == (66, 2, 0)


def test_a_file_that_was_replaced_or_shortened_is_read_anew(run, index):
    file = run.folder / "episodes.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:10]))
    index.update()
    assert index.page().all == 10
    file.write_bytes(b"".join(lines[20:40]))
    index.update()
    assert index.page().all == 20


def test_a_run_that_has_not_begun_has_no_episodes(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    index = EpisodeIndex(tmp_path / "run", tmp_path / "cache")
    assert index.update() is False
    assert index.page().rows == []
    (tmp_path / "run" / "episodes.jsonl").touch()
    append(tmp_path / "run" / "episodes.jsonl", hostile_episode())
    index.update()
    assert index.page().all == 1


def test_a_record_of_an_older_version_is_shown_with_what_it_has(run, index):
    append(run.folder / "episodes.jsonl", {"task_id": "train/old", "reward": 1.0, "trajectories": {}}, {"reward": 2.0})
    index.update()
    old = index.page(query="task:train/old").rows[0]
    assert (old["reward"], old["turns"], old["version"], old["stop"], old["answer"]) == (1.0, 0, None, None, "")
    assert index.page(query="reward=2").total == 1


def test_a_message_of_ten_megabytes_is_indexed_and_found(run, index):
    record = hostile_episode() | {"task_id": "train/big"}
    record["trajectories"]["assistant"]["nodes"][-1]["message"]["content"] = "x" * 10_000_000 + " the needle"
    append(run.folder / "episodes.jsonl", record, hostile_episode())
    index.update()
    assert index.page(query='"the needle"').total == 1
    assert len(index.page(query='"the needle"').rows[0]["answer"]) == 240


def test_rows_are_sorted_by_any_field_and_those_without_a_value_come_last(index):
    rewards = [row["reward"] for row in index.page(sort="reward", limit=500).rows]
    known = [value for value in rewards if value is not None]
    assert known == sorted(known, reverse=True) and rewards[-1] is None
    lengths = [row["tokens"] for row in index.page(sort="length", descending=False, limit=500).rows]
    assert lengths == sorted(lengths)
    by_metric = [
        row["metrics"].get("accuracy") for row in index.page(sort="accuracy", descending=False, limit=500).rows
    ]
    assert by_metric[:64] == sorted(by_metric[:64]) and by_metric[64] is None
    with pytest.raises(UserError, match="no field 'rewad' to sort by"):
        index.page(sort="rewad")


def test_pages_of_a_sorted_table_hold_each_row_once(index):
    places = [row["place"] for at in range(0, 70, 10) for row in index.page(sort="reward", offset=at, limit=10).rows]
    assert len(places) == len(set(places)) == 65


def test_a_place_between_two_episodes_is_refused(run):
    file = episode_file(run.folder, "train")
    with pytest.raises(UserError, match="no episode at byte 7"):
        file.read(7)
    with pytest.raises(UserError, match="no episode at byte"):
        file.read(file.size())


def test_two_indexes_of_one_run_agree(run, tmp_path):
    other = EpisodeIndex(run.folder, run.index.path.parent)
    append(run.folder / "episodes.jsonl", hostile_episode())
    other.update()
    run.index.update()
    assert run.index.page().all == other.page().all == 66


def test_an_index_of_another_format_is_built_anew(run, tmp_path):
    import sqlite3

    with sqlite3.connect(run.index.path) as db:
        db.execute("PRAGMA user_version = 1")
    db.close()
    index = EpisodeIndex(run.folder, run.index.path.parent)
    assert index.page().all == 0
    index.update()
    assert index.page().all == 65
    assert os.listdir(run.folder).count("cache") == 0


def test_packing_changes_no_place_and_no_row(run, index, tmp_path):
    from agentrl.core.packed_episodes import pack_parts

    file = run.folder / "episodes.jsonl"
    data = file.read_bytes()
    cuts = [data.index(b'{"group_id":"g2"'), data.index(b'{"group_id":"g5"')]
    before = index.page(limit=500, descending=False).rows
    records = [episode_file(run.folder, "train").read(row["place"]) for row in before]
    (run.folder / "episodes").mkdir()
    for number, part in enumerate((data[: cuts[0]], data[cuts[0] : cuts[1]])):
        (run.folder / "episodes" / f"{number:06d}.jsonl").write_bytes(part)
    file.write_bytes(data[cuts[1] :])
    for packed in (False, True):
        if packed:
            assert pack_parts(file) == 2
        index.update()
        assert index.page(limit=500, descending=False).rows == before
        anew = EpisodeIndex(run.folder, tmp_path / f"anew-{packed}")
        anew.update()
        assert anew.page(limit=500, descending=False).rows == before
        assert anew.page().unread == 0
        for row, record in zip(before, records, strict=True):
            found = episode_file(run.folder, "train").read(row["place"])
            assert (found["task_id"], found["seed"]) == (record["task_id"], record["seed"])
    with pytest.raises(UserError, match="no episode at byte 1"):
        episode_file(run.folder, "train").read(1)
    append(file, hostile_episode())
    index.update()
    assert index.page().all == 66
