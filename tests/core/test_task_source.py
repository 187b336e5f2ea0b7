"""An environment's ``dataset`` line, and what ``reset`` draws from it."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl import Message, SingleTurnEnvironment
from agentrl.core.task_source import NoTasksError, tasks_of

LINES = [{"n": n} for n in range(12)]


class Echo(SingleTurnEnvironment):
    dataset: ClassVar[Any] = LINES

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        return [{"role": "user", "content": str(task["n"])}]

    def judge(self, task: dict[str, Any], answer: str) -> float:
        return 1.0


def test_every_fifth_line_of_a_list_is_held_out() -> None:
    train, where = tasks_of(LINES, "train")
    test, _ = tasks_of(LINES, "test")
    assert [task["n"] for task in test] == [4, 9]
    assert [task["n"] for task in train] == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11]
    assert "own list" in where
    with pytest.raises(NoTasksError, match="fewer than 5 holds none out"):
        tasks_of(LINES[:4], "test")
    with pytest.raises(NoTasksError, match="no split 'dev'"):
        tasks_of(LINES, "dev")


def test_splits_may_be_given(tmp_path: Path) -> None:
    source = {"train": LINES[:1], "test": LINES[1:2]}
    assert tasks_of(source, "test")[0] == [{"n": 1}]
    with pytest.raises(NoTasksError, match="no split 'dev'; it has train, test"):
        tasks_of(source, "dev")


def test_a_file_is_found_beside_the_environment(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps(line) for line in LINES) + "\n\n")
    assert len(tasks_of("tasks.jsonl", "train", folder=tmp_path)[0]) == 10
    with pytest.raises(LookupError, match=r"no file other\.jsonl, in .* or here"):
        tasks_of("other.jsonl", "train", folder=tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"n": 1}\nno\n')
    with pytest.raises(NoTasksError, match=r"bad\.jsonl, line 2 is not JSON"):
        tasks_of("bad.jsonl", "train", folder=tmp_path)
    (tmp_path / "list.jsonl").write_text("[1]\n")
    with pytest.raises(NoTasksError, match="must be a mapping"):
        tasks_of("list.jsonl", "train", folder=tmp_path)


def test_a_registered_dataset_is_its_loader() -> None:
    train, where = tasks_of("arithmetic", "train", {"max_operand": 9, "held_out": 10})
    assert len(train) == 90 and "operands 0 to 9" in where
    with pytest.raises(LookupError, match="not registered"):
        tasks_of("aritmetic", "train")


async def test_reset_draws_by_the_seed_and_goes_on_without_one() -> None:
    env = Echo()

    async def drawn(seed: int | None = None, options: dict[str, Any] | None = None) -> str:
        return (await env.reset(seed=seed, options=options))[0][0]["content"]

    first = [await drawn(seed=1), *[await drawn() for _ in range(20)]]
    again = [await drawn(seed=1), *[await drawn() for _ in range(20)]]
    assert first == again
    assert len(set(first)) > 4
    assert not {"4", "9"} & set(first), "drawn from what is held out"
    assert await drawn(options={"n": 99}) == "99"
    assert await drawn(seed=1, options={}) == first[0]


async def test_without_dataset_and_options_it_says_what_is_missing() -> None:
    class Bare(Echo):
        dataset: ClassVar[Any] = None

    with pytest.raises(NoTasksError, match=r"Bare\.reset needs options"):
        await Bare().reset(seed=0)
