"""Kinds of server by their names, and that their names stand with them alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.core.registry import registered
from agentrl.inference.backend import Backend
from agentrl.inference.kinds.kind import ServerKind, kinds_that, server_kind

ROOT = Path(__file__).parents[3]
HOME = ROOT / "agentrl" / "inference" / "kinds"
NAMES = {"embedded", "sglang", "vllm", "openai"}


def test_the_built_in_kinds_are_registered_and_one_file_each() -> None:
    assert set(registered("server")) == NAMES
    assert {file.stem for file in HOME.glob("*.py")} == NAMES | {"__init__", "kind"}
    for name in NAMES:
        assert type(server_kind(name)).__module__ == f"agentrl.inference.kinds.{name}"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_kind_overrides_what_its_capabilities_promise_and_no_more(name: str) -> None:
    kind = type(server_kind(name))
    can = kind.capabilities
    assert (kind.command is not ServerKind.command) == can.starts
    assert (kind.backend is not ServerKind.backend) == can.token_logprobs
    assert (kind.text_client is not ServerKind.text_client) == (not can.token_logprobs)
    if can.token_logprobs:
        backend = type(server_kind(name).backend("http://127.0.0.1:1", 1.0))
        assert (backend.score is not Backend.score) == can.scoring
        assert (backend.receive is not Backend.receive) == ("broadcast" in can.transports)
        assert (backend.load is not Backend.load) == bool({"shm", "disk"} & set(can.transports))


def test_kinds_are_found_by_what_they_can_do() -> None:
    assert kinds_that("scoring") == ["embedded", "sglang", "vllm"]
    assert kinds_that("adapters") == ["embedded"]


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(LookupError, match="did you mean 'sglang'"):
        server_kind("sglan")
    with pytest.raises(TypeError, match=r"subclass of .*kinds\.kind\.ServerKind"):
        server_kind("agentrl.inference.backend:Backend")


def test_no_other_module_asks_for_the_name_of_a_kind() -> None:
    found = {name for file in _others() for name in _asked(ast.parse(file.read_text()))}
    assert not found & NAMES, found & NAMES
    for code in ("x == 'vllm'", "x in ('vllm', 'y')", "{'vllm': 1}[x]", "match x:\n  case 'vllm': pass"):
        assert set(_asked(ast.parse(code))) & NAMES == {"vllm"}, code


def _others() -> list[Path]:
    links = {ROOT / "agentrl" / name for name in ("envs", "agents", "recipes")}
    links.add(ROOT / "agentrl" / "core" / "extras.py")  # extras of the distribution are named like what they install
    files = [file for folder in ("agentrl", "envs", "agents") for file in (ROOT / folder).rglob("*.py")]
    return [file for file in files if HOME not in file.parents and not links & {file, *file.parents}]


def _asked(tree: ast.AST) -> Iterator[str]:
    """Texts that something is compared with, or looked up by in a table."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            places: list[ast.AST] = [node]
        elif isinstance(node, ast.Dict):
            places = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.MatchValue):
            places = [node.value]
        else:
            continue
        for place in places:
            yield from (
                part.value for part in ast.walk(place) if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
