"""The design's package table, held against the imports that really stand in the files."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "core": set(),
    "host": set(),
    "models": {"core"},
    "envkit": {"core", "host"},
    "config": {"core"},
    "inference": {"core", "host"},
    "weights": {"core", "config", "inference"},
    "engine": {"core", "host", "models", "weights"},
    "rollout": {"core", "config", "inference", "weights"},
    "sim": {"core", "config", "inference", "observe", "rollout", "weights"},
    "train": {"core", "config", "host", "models", "weights"},
    "rewards": {"core", "host", "envkit", "inference"},
    "data": {"core", "host", "config", "envkit"},
    "evaluate": {"core", "config", "data", "inference", "rollout", "rewards"},
    "observe": {"core", "host", "config"},
    "plan": {"core", "host", "config", "data", "inference", "launch", "models", "observe", "rollout"},
    "supervised": {
        "core",
        "host",
        "config",
        "data",
        "envkit",
        "inference",
        "models",
        "train",
        "evaluate",
        "observe",
        "weights",
    },
}
ALL = {*ALLOWED, "launch", "bench"}
ALLOWED |= {
    "launch": ALL - {"bench"},  # it puts a run together: its modules are the processes' entry points
    "bench": ALL,
    "view": ALL - {"bench"},
    "cli": {*ALL, "view"},
}
USER_CODE = ("envs", "agents", "recipes")
_PRIVATE = ("launch", "cli", "train", "supervised", "rollout", "sim", "plan", "bench")
PRIVATE_TO_USERS = {f"agentrl.{name}" for name in _PRIVATE}
HEAVY = {"torch", "transformers", "trl", "gymnasium", "openai", "scipy", "pydantic", "datasets", "matplotlib"}


def real_imports(file: Path) -> set[str]:
    """Modules a file imports anywhere, those for type checking alone left out."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        waiting += list(ast.iter_child_nodes(node))
    return found


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_what_the_table_allows(package):
    wrong = []
    for file in (ROOT / "agentrl" / package).rglob("*.py"):
        for name in real_imports(file):
            parts = name.split(".")
            if parts[0] == "agentrl" and len(parts) > 2 and parts[1] not in ALLOWED[package] | {package}:
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not wrong


@pytest.mark.parametrize("folder", USER_CODE)
def test_user_folders_import_what_a_user_would(folder):
    for file in (ROOT / folder).rglob("*.py"):
        names = {".".join(name.split(".")[:2]) for name in real_imports(file)}
        assert not names & PRIVATE_TO_USERS, file
        assert not {name.split(".")[0] for name in names} & set(USER_CODE), f"{file}: say agentrl.{folder}"


@pytest.mark.parametrize("package", ["core", "host", "config", "inference", "envkit", "rollout", "sim", "plan"])
def test_rooms_without_torch_do_not_import_it(package):
    for file in (ROOT / "agentrl" / package).rglob("*.py"):
        assert not {name.split(".")[0] for name in real_imports(file)} & {"torch"}, file


def test_no_module_imports_itself_through_others():
    """Imports inside functions count too: a circle is a circle wherever it is closed."""
    modules = {_module(file): file for folder in ("agentrl", *USER_CODE) for file in _sources(folder)}
    graph = {name: sorted(_targets(file, modules) - {name}) for name, file in modules.items()}
    with pytest.raises(CycleError):
        TopologicalSorter({"a": ["b"], "b": ["a"]}).prepare()
    TopologicalSorter(graph).prepare()  # a CycleError names the modules


def _sources(folder):
    links = {ROOT / "agentrl" / name for name in USER_CODE}
    return [file for file in (ROOT / folder).rglob("*.py") if not links & set(file.parents)]


def _module(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "agentrl" else ("agentrl", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _targets(file, modules):
    found = set()
    for name in real_imports(file):
        found |= {name} & set(modules) or {name.rpartition(".")[0]} & set(modules)
    return found


def test_every_package_stands_in_the_table():
    found = {path.parent.name for path in (ROOT / "agentrl").glob("*/__init__.py")} - set(USER_CODE)
    assert found <= set(ALLOWED)


@pytest.mark.parametrize("code", ["import agentrl", "from agentrl.cli.main import main; main(['--help'])"])
def test_importing_and_help_stay_light(code):
    probe = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n"
        "print('LOADED', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(result.stdout.rpartition("LOADED")[2].split())
    assert "agentrl" in loaded
    assert not loaded & HEAVY
