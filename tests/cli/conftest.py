"""What every test of a command needs."""

import pytest


@pytest.fixture(autouse=True)
def no_end_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command bounds the end of its process, which here is pytest's."""
    monkeypatch.setattr("agentrl.launch.bounded_run.end_within", lambda seconds, code: None)
