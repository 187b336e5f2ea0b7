"""Building the compiled operators, and what happens where that fails."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentrl.engine.native import build
from agentrl.engine.native.build import COMPILERS, SWITCH, largest_difference, native
from agentrl.engine.native.library import Native

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


@pytest.fixture(scope="module")
def operators() -> Native:
    with pytest.MonkeyPatch.context() as patch:  # the cache of this machine, if it has one
        patch.delenv("AGENTRL_CACHE", raising=False)
        native.cache_clear()
        found = native()
    assert found is not None
    return found


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 31, 64, 70])
@pytest.mark.parametrize("depth", [2, 32, 40, 64])
@pytest.mark.parametrize("moved", [0, 1])  # by an element: then nothing is aligned
def test_packing_transposes_panels_and_copies_the_weight(
    operators: Native, dtype: torch.dtype, columns: int, depth: int, moved: int
) -> None:
    if dtype not in operators.products:
        pytest.skip(f"this CPU does not multiply {dtype}, so there is nothing to pack")
    step = 1 if dtype == torch.float32 else 2  # a word is two bfloat16
    weight = torch.randn(columns, depth, generator=torch.Generator().manual_seed(0)).to(dtype)
    room = torch.full((columns * depth + 2,), 7.0, dtype=dtype)
    copy = room[moved * step :][: columns * depth].view(columns, depth)
    packed = operators.pack(weight, copy=copy)
    assert torch.equal(copy, weight)
    assert (room == 7.0).sum() == 2, "nothing is written beside it"
    panels = torch.nn.functional.pad(weight, (0, 0, 0, -columns % operators.panel))
    panels = panels.view(-1, operators.panel, depth // step, step).transpose(1, 2)
    assert torch.equal(packed, panels.flatten())
    assert torch.equal(operators.pack(weight), packed)


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
