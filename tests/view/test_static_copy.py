"""The static copy: one file, which loads nothing and holds what was selected."""

import json
import re

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.config.errors import UserError
from agentrl.view.static_copy import write_copy
from tests.view.conftest import HOSTILE


def _data(file):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', file.read_text(), re.DOTALL)
    return json.loads(found[1])


def test_it_holds_the_selection(runs, tmp_path):
    count = write_copy(runs, tmp_path / "copy.html", query="reward<0.5", limit=10)
    data = _data(tmp_path / "copy.html")
    rows = data["answers"]["/api/runs/first/episodes?kind=train"]["rows"]
    assert 0 < len(rows) <= 10 and all(row["reward"] < 0.5 for row in rows)
    for row in rows:
        assert data["answers"][f"/api/runs/first/train/{row['place']}"]["reward"] == row["reward"]
        assert f"/api/runs/first/train/{row['place']}/tokens" in data["answers"]
        assert f"/api/runs/first/group?kind=train&id={row['group_id']}" in data["answers"]
    assert count == sum(len(v["rows"]) for k, v in data["answers"].items() if "/episodes?" in k)


def test_what_a_model_said_cannot_end_the_script(runs, tmp_path):
    write_copy(runs, tmp_path / "copy.html", query="group:g-hostile")
    text = (tmp_path / "copy.html").read_text()
    assert text.count("</script>") == 2  # of the data and of the code
    assert "<img src=x" not in text
    assert HOSTILE in json.dumps(_data(tmp_path / "copy.html"), ensure_ascii=False).replace('\\"', '"')


def test_it_may_load_nothing(runs, tmp_path):
    write_copy(runs, tmp_path / "copy.html")
    text = (tmp_path / "copy.html").read_text()
    assert "default-src 'none'" in text and not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=.(?!data:)", text)


def test_a_file_that_cannot_be_written_is_said(runs, tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        write_copy(runs, tmp_path / "no" / "copy.html")


def test_the_command_writes_it(runs_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    result = CliRunner().invoke(
        app,
        ["view", "first", "--run-dir", str(runs_folder), "--html", str(tmp_path / "c.html"), "--filter", "tag:hard"],
    )
    assert result.exit_code == 0 and "episodes of first" in result.output
