import json
from collections import Counter
from pathlib import Path

import pytest

from agentrl.config.errors import DataError
from agentrl.config.recipe import DatasetConfig
from agentrl.data import gsm8k
from agentrl.data.datasets import load_tasks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, size in (("train", 6), ("test", 3)):
        lines = [json.dumps({"question": f"{split} {i}?", "answer": f"#### {i}"}) for i in range(size)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def ids(config: DatasetConfig, seed: int = 0) -> list[str]:
    return [task.id for task in load_tasks(config, seed=seed).tasks]


def test_pairs_with_a_one_digit_operand_can_come_more_often_in_training_only():
    kwargs = {"max_operand": 12, "held_out": 20}
    plain, more = (
        [
            load_tasks(DatasetConfig(name="arithmetic", split=split, kwargs=kwargs | extra), seed=0).tasks
            for split in ("train", "test")
        ]
        for extra in ({}, {"one_digit_repeats": 3})
    )
    assert [task.data for task in plain[1]] == [task.data for task in more[1]]
    counts = Counter((task.data["a"], task.data["b"]) for task in more[0])
    assert set(counts) == {(task.data["a"], task.data["b"]) for task in plain[0]}
    assert all(count == (3 if min(pair) < 10 else 1) for pair, count in counts.items())
    assert len({task.id for task in more[0]}) == len(more[0])


def test_arithmetic_splits_all_ordered_pairs_without_overlap():
    parts = {s: load_tasks(DatasetConfig(name="arithmetic", split=s), seed=0).tasks for s in ("train", "test")}
    pairs = {s: {(t.data["a"], t.data["b"]) for t in tasks} for s, tasks in parts.items()}
    assert len(pairs["test"]) == 200
    assert not pairs["train"] & pairs["test"]
    assert pairs["train"] | pairs["test"] == {(a, b) for a in range(51) for b in range(51)}
    assert all(int(t.data["answer"]) == t.data["a"] + t.data["b"] for t in parts["train"])


def test_a_seed_orders_training_tasks_but_not_validation_tasks():
    train, test = DatasetConfig(name="arithmetic"), DatasetConfig(name="arithmetic", split="test", limit=20)
    assert ids(train, 0) == ids(train, 0) != ids(train, 1)
    assert ids(test, 0) == ids(test, 1)


def test_the_limit_is_taken_after_the_shuffle(folder):
    config = DatasetConfig(name="openai/gsm8k", path=str(folder))
    limited = DatasetConfig(name="openai/gsm8k", path=str(folder), limit=2)
    assert ids(limited, 3) == ids(config, 3)[:2]


def test_without_shuffle_ids_follow_the_file(folder):
    loaded = load_tasks(DatasetConfig(name="openai/gsm8k", path=str(folder), shuffle=False), seed=0)
    assert [task.id for task in loaded.tasks] == [f"train/{i}" for i in range(6)]
    assert loaded.tasks[4].data == {"question": "train 4?", "answer": "#### 4"}
    assert str(folder) in loaded.source


def test_gsm8k_reads_the_folder_of_the_environment_variable(folder, monkeypatch):
    monkeypatch.setenv(gsm8k.VARIABLE, str(folder))
    assert len(ids(DatasetConfig(name="openai/gsm8k", split="test"))) == 3


def test_a_wrong_path_says_where_it_looked(tmp_path):
    with pytest.raises(DataError, match="there is no such folder") as caught:
        load_tasks(DatasetConfig(name="openai/gsm8k", path=str(tmp_path / "no")), seed=0)
    assert str(tmp_path / "no" / "train.jsonl") in str(caught.value)


def test_a_line_that_is_not_json_is_named(folder):
    (folder / "train.jsonl").write_text('{"question": "q", "answer": "1"}\n{oops\n')
    with pytest.raises(DataError, match=r"train.jsonl:2 is not JSON"):
        load_tasks(DatasetConfig(name="openai/gsm8k", path=str(folder)), seed=0)


def test_offline_and_without_a_folder_problems_are_generated_and_said_so(monkeypatch):
    pytest.importorskip("reasoning_gym")
    monkeypatch.delenv(gsm8k.VARIABLE, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    parts = {s: load_tasks(DatasetConfig(name="openai/gsm8k", split=s), seed=0) for s in ("train", "test")}
    assert "reasoning_gym" in parts["train"].source
    assert "HF_HUB_OFFLINE" in parts["train"].source
    questions = {s: {t.data["question"] for t in loaded.tasks} for s, loaded in parts.items()}
    assert len(questions["train"]) > 900
    assert not questions["train"] & questions["test"]
    assert all(t.data["answer"].startswith("#### ") for t in parts["test"].tasks)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "gsm8k"}, "did you mean 'openai/gsm8k'"),
        ({"name": "arithmetic", "kwargs": {"x": 1}}, "unexpected keyword argument 'x'"),
        ({"name": "arithmetic", "split": "valid"}, "no split 'valid'"),
        ({"name": "arithmetic", "kwargs": {"held_out": 0}}, "held_out"),
        ({"name": "arithmetic", "path": "x"}, "reads no path"),
    ],
)
def test_a_dataset_that_cannot_be_loaded_is_explained(config, words):
    with pytest.raises(DataError, match=words):
        load_tasks(DatasetConfig(**config), seed=0)
