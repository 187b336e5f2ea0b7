"""Tasks come from tables: every format gives the same rows, columns are checked first, and names are mapped."""

import json
from datetime import date, datetime
from decimal import Decimal
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


ODD = ("007", "NA", "null", "2026-01-02", "1,000", "5", "12345678901234567890123", "1e5", "True")


@pytest.mark.parametrize("name", ["odd.csv", "odd.tsv", "csv", "odd.jsonl", "odd.json", "jsonl"])
@pytest.mark.parametrize("texts", [ODD, ODD[:1], ODD[3:4], ODD[5:6], ODD[8:]])
def test_what_an_environment_reads_as_a_text_is_that_of_the_file(
    name: str, texts: tuple[str, ...], tmp_path: Path
) -> None:
    """huggingface/datasets#4467: 'null' became None; so did 'NA', and 007 became 7, a date a timestamp."""
    rows = [{"question": f"{at}?", "answer": text} for at, text in enumerate(texts)]
    for folder in ("csv", "jsonl"):
        (tmp_path / folder).mkdir()
    mark = "\ufeff"  # as Windows' editors write it
    table = "question,answer\r\n" + "".join(f'{row["question"]},"{row["answer"]}"\r\n' for row in rows)
    (tmp_path / "odd.csv").write_text(mark + table, newline="")
    (tmp_path / "csv" / "test.csv").write_text(table, newline="")
    tabs = "question\tanswer\n" + "".join(f"{row['question']}\t{row['answer']}\n" for row in rows)
    (tmp_path / "odd.tsv").write_text(tabs)
    lines = "\r\n\r\n".join(json.dumps(row) for row in rows)
    (tmp_path / "odd.jsonl").write_text(mark + lines, newline="")
    (tmp_path / "jsonl" / "test.jsonl").write_text(lines)
    (tmp_path / "odd.json").write_text(json.dumps(rows, indent=1))
    found = load_tasks(ValidDatasetConfig(name=str(tmp_path / name)), seed=0, env=ARITHMETIC).tasks
    assert {task.id: task.data for task in found} == {f"test/{at}": row for at, row in enumerate(rows)}


def test_numbers_of_json_stay_whole_and_an_empty_cell_is_a_gap(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"question": "a", "answer": 7, "n": 3}\n{"question": "b", "answer": 5.5}\n'
        '{"question": "c", "answer": 12345678901234567890123, "n": 12345678901234567890123}'
    )
    (tmp_path / "a.csv").write_text("question,answer,n\na,7,3\nb,,\n")
    lines, table = (
        {
            task.data["question"]: task.data
            for task in load_tasks(ValidDatasetConfig(name=str(tmp_path / name)), seed=0, env=ARITHMETIC).tasks
        }
        for name in ("a.jsonl", "a.csv")
    )
    assert [lines[name]["answer"] for name in "abc"] == ["7", "5.5", "12345678901234567890123"]
    assert lines["a"]["n"] == 3 and lines["c"]["n"] == 12345678901234567890123
    assert table["a"]["answer"] == "7" and table["b"] == {"question": "b", "answer": None, "n": None}


def test_dates_and_decimals_of_a_parquet_file_are_texts(tmp_path: Path) -> None:
    row = {"question": "a", "answer": Decimal("1.50"), "day": date(2026, 1, 2), "at": datetime(2026, 1, 2, 3)}
    Dataset.from_list([row]).to_parquet(tmp_path / "a.parquet")
    (task,) = load_tasks(ValidDatasetConfig(name=str(tmp_path / "a.parquet")), seed=0, env=ARITHMETIC).tasks
    assert task.data == {"question": "a", "answer": "1.50", "day": "2026-01-02", "at": "2026-01-02T03:00:00"}


def test_a_file_that_changes_meanwhile_changes_no_task(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"question": "a", "answer": "1"}\n{"question": "b", "answer": "2"}\n')
    found = load_tasks(ValidDatasetConfig(name=str(file)), seed=0, env=ARITHMETIC).tasks
    file.write_text("other")
    assert sorted(task.data["answer"] for task in found) == ["1", "2"]
