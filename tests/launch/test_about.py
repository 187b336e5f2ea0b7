"""What a run was started with stands in its folder, without secrets."""

import json
import subprocess
import sys

from agentrl.launch.about import FILE, git_state, note_start


def test_each_start_adds_a_record_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["agentrl", "recipe", "run", "x", "agent.kwargs.api_key=sk-123"])
    note_start(tmp_path)
    note_start(tmp_path)
    text = (tmp_path / FILE).read_text()
    first, second = json.loads(text)["starts"]
    assert "sk-123" not in text and first["command"][:4] == ["agentrl", "recipe", "run", "x"]
    assert second["packages"]["numpy"] and second["python"].startswith("3.")
    assert second["machine"]["cores"] >= 1 and second["machine"]["memory_gb"] > 0


def test_a_damaged_record_of_before_is_replaced(tmp_path):
    (tmp_path / FILE).write_text('{"starts": [')
    note_start(tmp_path)
    assert len(json.loads((tmp_path / FILE).read_text())["starts"]) == 1


def test_the_git_state_names_commit_and_changes(tmp_path):
    assert git_state(tmp_path / "nowhere") is None
    run = lambda *words: subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)  # noqa: E731
    run("init", "-b", "trunk")
    run("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "one")
    run("remote", "add", "origin", "https://me:pass@host/repo")
    (tmp_path / "new.py").touch()
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40 and state["branch"] == "trunk"
    assert state["changed"] == ["?? new.py"] and "pass" not in state["remote"]
