"""``agentrl eval gsm8k`` on the embedded engine, from the command line to its reports, with a tiny model."""

import json
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.launch import bounded_run

PROBLEMS = [("Ann has 3 pens and buys 4 more.", 7), ("Tom has 9 apples and eats 2.", 7), ("Six eggs cost 3.", 3)]


def test_gsm8k_is_evaluated_on_the_embedded_engine(
    tmp_path: Path, roomy_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With files of the data set that ``$AGENTRL_GSM8K`` names; numbers of tokens are the engine's own."""
    data = tmp_path / "gsm8k"
    data.mkdir()
    for split in ("train", "test"):
        rows = [{"question": f"{said} How many?", "answer": f"{so}\n#### {so}"} for said, so in PROBLEMS]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("AGENTRL_GSM8K", str(data))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bounded_run, "end_within", lambda seconds, code: None)
    own = ["--model", str(roomy_model), "--n", "3", "--k", "2", "--output", "out"]
    settings = ["sampling.max_new_tokens=6", "inference.context_length=2048", "inference.threads=1"]
    with pytest.raises(SystemExit) as ended:
        main(["eval", "gsm8k", *own, *settings])
    out = capsys.readouterr().out
    assert ended.value.code == 0, out
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["eval/n"], result["eval/invalid"], result["eval/answer_tokens"]) == (6, 0, 6.0)
    assert result["eval/accuracy"] == 0.0 == result["eval/accuracy_low"] < result["eval/accuracy_high"]
    assert {f"eval/{name}" for name in ("pass@2", "pass^2", "stop/length", "turns")} <= result.keys()
    assert str(data) in result["setup"]["data"] and result["setup"]["env"]["id"] == "gsm8k"
    assert "power   3 tasks" in out and max(map(len, out.splitlines()[-20:])) <= 200
    for form in ("markdown", "leaderboard"):
        with pytest.raises(SystemExit) as ended:
            main(["eval", "export", "out", "--to", form])
        assert ended.value.code == 0
    assert "| gsm8k" in capsys.readouterr().out and (tmp_path / "out" / "report.md").is_file()
