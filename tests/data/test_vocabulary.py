"""Whether a teacher's ids mean what the policy's mean."""

import json
from pathlib import Path

import pytest

from agentrl.config.errors import DataError
from agentrl.data.vocabulary import disagreements, vocabulary


@pytest.fixture
def changed(tiny_model: Path, tmp_path: Path):
    """Writes a copy of the tiny model's tokenizer with some tokens renamed or added."""
    plain = json.loads((tiny_model / "tokenizer.json").read_text())

    def write(renamed: dict[str, str], added: tuple[str, ...] = ()) -> Path:
        text = json.loads(json.dumps(plain))
        text["model"]["vocab"] = {renamed.get(token, token): i for token, i in text["model"]["vocab"].items()}
        size = len(vocabulary(tiny_model / "tokenizer.json"))
        like = text["added_tokens"][0]
        text["added_tokens"] += [{**like, "id": size + i, "content": token} for i, token in enumerate(added)]
        text["model"]["merges"] = []
        (tmp_path / "tokenizer.json").write_text(json.dumps(text))
        return tmp_path / "tokenizer.json"

    return write


def test_special_tokens_are_counted_and_a_teacher_may_know_more(tiny_model: Path, changed) -> None:
    ours = tiny_model / "tokenizer.json"
    assert "<|im_end|>" in vocabulary(ours)
    more = changed({}, ("<think>",))
    assert disagreements(ours, more) == []
    assert disagreements(more, ours) == [("<think>", len(vocabulary(ours)), None)]


def test_tokens_that_changed_places_are_named_by_id(tiny_model: Path, changed) -> None:
    ours = vocabulary(tiny_model / "tokenizer.json")
    found = disagreements(tiny_model / "tokenizer.json", changed({"a": "b", "b": "a"}))
    assert found == [("a", ours["a"], ours["b"]), ("b", ours["b"], ours["a"])]


def test_a_folder_without_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        vocabulary(tmp_path / "tokenizer.json")
