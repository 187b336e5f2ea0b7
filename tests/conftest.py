"""Fixtures that several packages' tests share."""

from pathlib import Path

import pytest

from agentrl.envs.python import require_sandbox
from agentrl.rewards.sandbox import SandboxUnavailableError
from tests.tiny import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random model."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def needs_sandbox() -> None:
    """Skip where the machine offers no isolation at all, with what was tried."""
    try:
        require_sandbox("auto")
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
