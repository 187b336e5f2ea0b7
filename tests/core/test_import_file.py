"""What a user's file or module raises while it is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.core.import_file import UserFileError, import_file, import_module
from tests.end_to_end import ROOT


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import math\nimport no_such_thing\n", r"^mine\.py:2: No module named 'no_such_thing'$"),
        ("from math import no_such_name\n", r"^mine\.py:1: cannot import name 'no_such_name'"),
        ("x = 1\ny = undefined\n", r"^mine\.py:2: NameError: name 'undefined' is not defined$"),
        ("import helper_of_mine\n", r"^helper_of_mine\.py:3: ValueError: half$"),
        ("def f():\n    return {}['k']\nf()\n", r"^mine\.py:2: KeyError: 'k'$"),
        ("x = (\n", r"^mine\.py:1: cannot be parsed: '\(' was never closed$"),
        ("import json\njson.loads('{')\n", r"^mine\.py:2: JSONDecodeError: "),
    ],
)
def test_the_error_names_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "helper_of_mine.py").write_text("\n\nraise ValueError('half')\n")
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UserFileError, match=message):
        import_file(Path("mine.py"))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(UserFileError, match=message):
        import_module("mine")


def test_a_package_of_an_extra_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # Python's way to say that it is not there
    (tmp_path / "mine.py").write_text("import torch.nn\n")
    with pytest.raises(UserFileError, match=r"mine\.py:1: .*torch.*; it comes with pip install -e '\.\[train\]'"):
        import_file(tmp_path / "mine.py")


def test_a_missing_module_is_not_called_a_failing_one() -> None:
    for name in ("no_such_package.sub", "math.no_such_sub"):
        with pytest.raises(ModuleNotFoundError, match=r"no module '\w+.*looked in"):
            import_module(name)


def test_modules_of_the_working_folder_are_found_by_a_console_script(tmp_path: Path) -> None:
    (tmp_path / "shop_pkg").mkdir()
    (tmp_path / "shop_pkg" / "__init__.py").touch()
    (tmp_path / "shop_pkg" / "prices.py").write_text("PEN = 2\n")
    (tmp_path / "mine.py").write_text("from shop_pkg.prices import PEN\n")
    script = tmp_path / "bin" / "script.py"  # as pip's scripts are: the first entry of sys.path is their folder
    script.parent.mkdir()
    script.write_text(
        "from pathlib import Path\nfrom agentrl.core.import_file import import_file, import_module\n"
        "print(import_file(Path('mine.py')).PEN, import_module('shop_pkg.prices').PEN)\n"
    )
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    result = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.stdout == "2 2\n", result.stderr
