from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from agentrl.data.plain import load_hub
from agentrl.supervised.examples import sample_of


def line(name: str, arguments: dict[str, str], note: str | None) -> dict:
    call = {"function": {"name": name, "arguments": arguments}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    return {"messages": messages, "note": note}


def test_a_call_has_the_arguments_of_its_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table = pyarrow.Table.from_pylist([line("f", {"a": "1"}, None), line("g", {"b": "2"}, "x")])
    parquet.write_table(table, tmp_path / "train.parquet")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = list(load_hub("train", None, str(tmp_path))[0])
    said = []
    for row in rows:
        sample = sample_of(row)
        assert sample is not None
        said += [call["function"]["arguments"] for call in sample.messages[1]["tool_calls"]]
    assert said == ['{"a": "1"}', '{"b": "2"}']
    assert [row["note"] for row in rows] == [None, "x"], "other columns are as they are"
