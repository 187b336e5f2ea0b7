"""Tasks come from tables: every format gives the same rows, columns are checked first, and names are mapped."""

import json
from pathlib import Path

import pytest
from datasets import Dataset

from agentrl.config.errors import DataError
from agentrl.config.load import load_recipe
from agentrl.config.recipe import ComponentConfig, ValidDatasetConfig
from agentrl.data.datasets import TableTasks, load_tasks

ROWS = [{"prompt": f"What is {number} + 1?", "answer": str(number + 1), "level": number} for number in range(12)]
ARITHMETIC = ComponentConfig(id="arithmetic")
COLUMNS = {"question": "prompt"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    table = Dataset.from_list(ROWS)
    table.to_csv(tmp_path / "rows.csv")
    table.to_parquet(tmp_path / "rows.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "test.jsonl").write_text(lines)
    (tmp_path / "both" / "train.jsonl").write_text(lines[: lines.index("\n") + 1])
    return tmp_path


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "rows.jsonl", "both"])
def test_every_format_gives_the_same_tasks_in_the_same_order(name: str, folder: Path) -> None:
    section = ValidDatasetConfig(name=str(folder / name), columns=COLUMNS)
    found = load_tasks(section, seed=0, env=ARITHMETIC)
    assert len(found.tasks) == 12 and isinstance(found.tasks, TableTasks), "made when they are asked for"
    for task in found.tasks:
        row = ROWS[int(task.id.removeprefix("test/"))]
        assert {name: str(value) for name, value in task.data.items()} == {
            "question": row["prompt"], "answer": row["answer"], "level": str(row["level"]),
        }  # fmt: skip
    plain = load_tasks(
        ValidDatasetConfig(name="jsonl", path=str(folder / "both"), columns=COLUMNS), seed=0, env=ARITHMETIC
    )
    assert [task.id for task in found.tasks] == [task.id for task in plain.tasks]
    assert found.tasks[2:5][1] == found.tasks[3] == plain.tasks[3]


def test_a_column_that_is_missing_is_told_with_those_that_there_are(folder: Path) -> None:
    path = str(folder / "rows.parquet")
    with pytest.raises(
        DataError,
        match=r"a column 'question', which.*prompt, answer, level.*valid_dataset.columns.question=COLUMN",
    ):
        load_tasks(ValidDatasetConfig(name=path), seed=0, env=ARITHMETIC)
    with pytest.raises(DataError, match=r"lacks column 'promt'\. Its columns: prompt, answer, level"):
        load_tasks(ValidDatasetConfig(name=path, columns={"question": "promt"}), seed=0, env=ARITHMETIC)
    (folder / "both" / "test.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n')
    with pytest.raises(DataError, match="row 1 lacks a column 'answer'"):
        load_tasks(ValidDatasetConfig(name="jsonl", path=str(folder / "both"), columns=COLUMNS), seed=0, env=ARITHMETIC)


def test_what_is_not_there_or_broken_is_refused_in_a_line(folder: Path) -> None:
    (folder / "broken.jsonl").write_text('{"a": 1}\n{"a": \n')
    (folder / "empty.jsonl").write_text("")
    (folder / "head.csv").write_text("question,answer\n")
    cases = {"none.csv": "no such file", "broken.jsonl": "broken.jsonl"}
    for name, told in (*cases.items(), ("empty.jsonl", "it has no rows"), ("head.csv", "it has no rows")):
        with pytest.raises(DataError, match=told) as caught:
            load_tasks(ValidDatasetConfig(name=str(folder / name)), seed=0, env=ARITHMETIC)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="did you mean 'openai/gsm8k'"):
        load_tasks(ValidDatasetConfig(name="openai/gsm8"), seed=0, env=ARITHMETIC)


def test_the_mapping_is_a_key_of_the_command() -> None:
    recipe = load_recipe("arithmetic_grpo", ["valid_dataset.columns.question=prompt", "valid_dataset.name=x.csv"])
    assert recipe.valid_dataset.columns == {"question": "prompt"}
