from pathlib import Path

import pytest

from agentrl.data.plain import load_hub
from agentrl.supervised.examples import sample_of

LINES = """
{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "1"}}}]}], "note": null}
{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": {"b": "2"}}}]}], "note": "x"}
"""  # noqa: E501 - lines of a dataset


def test_a_call_has_the_arguments_of_its_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.jsonl").write_text(LINES.strip())
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = list(load_hub("train", None, str(tmp_path))[0])
    said = []
    for row in rows:
        sample = sample_of(row)
        assert sample is not None
        said += [call["function"]["arguments"] for call in sample.messages[1]["tool_calls"]]
    assert said == ['{"a": "1"}', '{"b": "2"}']
    assert [row["note"] for row in rows] == [None, "x"], "other columns are as they are"
