"""Fixtures of the reference tests."""

from pathlib import Path

import pytest

from tests.tiny import build_tiny_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of two tiny models: ``policy`` and ``reference``."""
    folder = tmp_path_factory.mktemp("reference-models")
    build_tiny_model(folder / "policy")
    build_tiny_model(folder / "reference", seed=3)
    return folder
