"""The dry run of a supervised recipe shows its first example as the trainer encodes it."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.recipe import _print_plan
from agentrl.config.errors import DataError
from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.launch.first_example import example_lines
from agentrl.launch.first_prompt import PromptError

TALK = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "two"}] * 2


def recipe(model: Path, folder: Path, example: dict[str, Any], kind: str = "sft", *settings: str) -> Recipe:
    """A recipe that learns from one example, without an environment."""
    (folder / "train.jsonl").write_text(json.dumps(example) + "\n")
    more = ["env.id=none", f"train_dataset.path={folder}", "train_dataset.name=env", f"valid_dataset.path={folder}"]
    more += ["valid_dataset.name=env", f"model.name={model}", "train_dataset.kwargs={}", "valid_dataset.kwargs={}"]
    return load_recipe(f"gsm8k_{kind}", [*more, *settings], device="cpu")


def test_an_example_is_shown_with_the_tokens_that_are_learned(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recipe(tiny_model, tmp_path, {"messages": TALK})
    whole, learned = example_lines(made, tiny_model)
    turn = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    assert whole.startswith("example    ") and whole.endswith(f"tokens: {turn + chr(10) + turn!r}")
    assert learned == "learned    8 of them: 'two<|im_end|>' 'two<|im_end|>'"
    _print_plan(made)
    said = capsys.readouterr().out
    assert f"{whole}\n{learned}" in said and "prompt     " not in said


def test_all_of_it_can_be_learned(tiny_model: Path, tmp_path: Path) -> None:
    example = {"prompt": "1?", "completion": "one"}
    made = recipe(tiny_model, tmp_path, example, "sft", "supervised.completion_only=false")
    whole, learned = example_lines(made, tiny_model)
    count, text = whole.split()[1], whole.partition(": ")[2]
    assert learned == f"learned    {count} of them: {text}"


def test_a_pair_is_shown_with_both_answers(tiny_model: Path, tmp_path: Path) -> None:
    pair = {"prompt": "1 + 1?", "chosen": "two", "rejected": "three"}
    lines = example_lines(recipe(tiny_model, tmp_path, pair, "dpo"), tiny_model)
    assert [line.split()[0] for line in lines] == ["example", "chosen", "rejected"]
    assert lines[0].endswith("'<|im_start|>user\\n1 + 1?<|im_end|>\\n<|im_start|>assistant\\n'")
    assert lines[1:] == ["chosen     4 tokens: 'two<|im_end|>'", "rejected   6 tokens: 'three<|im_end|>'"]


def test_what_the_trainer_would_refuse_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(PromptError, match=r"first example: .*does not render tools"):
        example_lines(recipe(tiny_model, tmp_path, {"messages": TALK, "tools": [tool]}), tiny_model)
    with pytest.raises(DataError, match="needs examples with messages"):
        example_lines(recipe(tiny_model, tmp_path, {"text": "x"}), tiny_model)
