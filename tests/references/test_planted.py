"""Plants errors in agentrl, and expects a reference test to notice each."""

import subprocess
import sys

import pytest

from tests.references.planted import ERRORS, ROOT


def test_every_error_can_be_planted() -> None:
    for error in ERRORS:
        assert error.right != error.wrong and error.file(ROOT)


@pytest.mark.long
def test_every_planted_error_is_noticed() -> None:
    told = subprocess.run([sys.executable, "-m", "tests.references.planted"], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0 and len(told.stdout.splitlines()) == len(ERRORS), told.stdout + told.stderr
