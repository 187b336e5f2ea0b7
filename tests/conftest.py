"""Fixtures that several packages' tests share."""

from pathlib import Path

import pytest

from tests.tiny import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random model."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny-model"))
