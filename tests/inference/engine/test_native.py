"""Building the compiled operators, and what happens where that fails."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.inference.engine.native import build
from agentrl.inference.engine.native.build import COMPILERS, SWITCH, largest_difference, native

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler here, and the engine does without"
)


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(SWITCH, raising=False)
    native.cache_clear()
    yield
    native.cache_clear()


@needs_compiler
def test_it_is_compiled_once_and_computes_what_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = native()
    assert found is not None and largest_difference(found) < 1e-4
    (library,) = (tmp_path / "cache" / "native").iterdir()
    native.cache_clear()
    monkeypatch.setattr(build, "FLAGS", build.FLAGS)  # the same: found again
    before = library.stat().st_mtime_ns
    assert native() is not None and library.stat().st_mtime_ns == before
    native.cache_clear()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    assert native() is not None and len(list(library.parent.iterdir())) == 2, "other flags, another library"


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("products.h", "sums[r][1] += second", "sums[r][1] += first"),
        ("attention.h", "second * cos + first * sin", "second * cos - first * sin"),
        ("attention.h", "t < length; ++t)\n        for (int part", "t + 1 < length; ++t)\n        for (int part"),
        ("sampling.h", "running > target", "running > target + 0.1"),
    ],
)
def test_code_that_computes_something_else_is_not_used(
    change: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, right, changed = change
    shutil.copytree(build.HERE, tmp_path / "wrong")
    header = tmp_path / "wrong" / file
    assert right in header.read_text()
    header.write_text(header.read_text().replace(right, changed))
    monkeypatch.setattr(build, "HERE", header.parent)
    monkeypatch.setattr(build, "SOURCE", header.parent / "operators.cpp")
    with caplog.at_level(logging.WARNING):
        assert native() is None
    assert "not used" in caplog.text


@needs_compiler
def test_what_does_not_compile_is_said_and_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "operators.cpp"
    broken.write_text("this is no C++")
    monkeypatch.setattr(build, "SOURCE", broken)
    with caplog.at_level(logging.WARNING):
        assert native() is None
    assert "cannot be compiled" in caplog.text and "this" in caplog.text
    assert not [file for file in (tmp_path / "cache" / "native").iterdir() if file.suffix == ".so"]


def test_a_compiler_that_is_none_and_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "nobody"))
    assert native() is None
    native.cache_clear()
    monkeypatch.delenv("CXX")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "file" / "below"))
    assert native() is None


def test_without_a_compiler_or_when_switched_off_torch_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert native() is None
    native.cache_clear()
    monkeypatch.undo()
    monkeypatch.setitem(os.environ, SWITCH, "0")
    assert native() is None
