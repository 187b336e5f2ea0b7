"""The words that say how to install what is missing, and the table behind them."""

import re
import tomllib
from pathlib import Path

import pytest

from agentrl.core.extras import DISTRIBUTION, ON_INDEX, PACKAGES, extra_of, install_hint, missing_packages

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
SUFFIXES = {"", ".ipynb", ".md", ".py", ".sh", ".toml", ".txt", ".yaml"}
INSTALLS = re.compile(r"pip\d? +install\b[^\n`\"]*")
FOREIGN = re.compile(r"""(?:^|[\s'"(`])agentrl(?:\[[\w,-]*\])?(?=$|[\s'")`,=<>])""")


def texts() -> dict[str, str]:
    """The repository's text files."""
    folders = ("agentrl", "agents", "docs", "envs", "recipes", "scripts", "tests", ".ci")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".pre-commit-config.yaml", *ROOT.glob("*.md")]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files if file.is_file()}


def foreign_installs(text: str) -> list[str]:
    """Commands of a text that would install the package that has the name ``agentrl`` on the index."""
    commands = INSTALLS.findall(text)
    return [one for one in commands if FOREIGN.search(one.split("in a checkout of agentrl")[0])]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pip install agentrl", True),
        ("run pip install 'agentrl[train]', or", True),
        ("pip install -U agentrl[lora,rewards]", True),
        ("pip install -e '.[train]' in a checkout of agentrl", False),
        ("pip install agentrl-toolkit", False),
        ("pip install --no-deps tests/servers/sglang_cpu", False),
    ],
)
def test_the_search_knows_the_foreign_package(text: str, wrong: bool) -> None:
    assert bool(foreign_installs(text)) is wrong


def test_no_text_installs_the_foreign_package_of_our_name() -> None:
    own = "tests/core/test_extras.py"
    found = {name: wrong for name, text in texts().items() if name != own and (wrong := foreign_installs(text))}
    assert found == {}


def test_every_extra_that_a_text_names_exists() -> None:
    named = {
        (name, extra)
        for name, text in texts().items()
        for pattern in (r"""install -e ['"]?\.\[([\w,-]+)\]""", r"""install_hint\(['"](\w+)['"]\)""")
        for group in re.findall(pattern, text)
        for extra in group.split(",")
    }
    assert {extra for _, extra in named} >= {"train", "lora", "rewards"}
    assert [one for one in named if one[1] not in EXTRAS] == []


def test_the_table_is_that_of_pyproject() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    for extra, packages in PACKAGES.items():
        listed = {re.split(r"[<>=\[]", requirement)[0].replace("-", "_") for requirement in EXTRAS[extra]}
        assert {ON_INDEX.get(package, package) for package in packages} == listed - {DISTRIBUTION.replace("-", "_")}, (
            extra
        )


def test_an_extra_that_builds_on_another_names_our_distribution() -> None:
    ours = [one for extra in EXTRAS.values() for one in extra if "agentrl" in one]
    assert ours
    for one in ours:
        match = re.fullmatch(rf"{DISTRIBUTION}\[(\w+)\]", one)
        assert match is not None and match[1] in EXTRAS, one


def test_the_words_say_how_to_install_from_a_checkout() -> None:
    assert install_hint("train") == "pip install -e '.[train]' in a checkout of agentrl"
    assert install_hint() == "pip install -e '.' in a checkout of agentrl"
    assert (extra_of("torch.nn"), extra_of("peft"), extra_of("rich")) == ("train", "lora", None)


def test_what_is_missing_is_found_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "train", ("json", "no_such_package_of_anybody"))
    assert missing_packages("train") == ["no_such_package_of_anybody"]
