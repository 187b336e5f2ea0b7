"""Finds environments in ``./envs`` of the working folder without running their code.

Guarantees: files are parsed, never imported; a class is an environment if a base has the name of one of agentrl's
environment classes, or is an environment of the same file.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast

FOLDER = Path("envs")
MAKER = "make_env"
_BASES = {"Environment", "LanguageEnvironment", "SingleTurnEnvironment", "ToolEnvironment", "GymnasiumEnvironment"}


def local_files() -> list[Path]:
    """Returns the Python files in ``./envs``, sorted, without private files and tests."""
    if not FOLDER.is_dir():
        return []
    return sorted(file for file in FOLDER.glob("*.py") if not file.name.startswith(("_", "test_")))


def classes_in(file: Path) -> list[str]:
    """Returns the environment classes that a file defines, in order; only ``make_env`` if it has that function.

    The list is empty if the file cannot be read or parsed; :func:`check_syntax` raises the error.
    """
    import ast  # only here: agentrl is imported often, files are parsed rarely

    tree = _parsed(file)
    if tree is None:
        return []
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = {_last_name(base) for base in node.bases}
            if bases & (_BASES | set(found)):
                found.append(node.name)
        elif isinstance(node, ast.FunctionDef) and node.name == MAKER:
            return [MAKER]  # make_env wraps the file's classes
    return found


def check_syntax(file: Path) -> None:
    """Raises an error with the line number if a file cannot be parsed.

    Raises:
        LookupError: The file is not valid Python or cannot be read.
    """
    import ast  # only here: agentrl is imported often, files are parsed rarely

    try:
        ast.parse(file.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise LookupError(f"{file}:{error.lineno} cannot be parsed: {error.msg}") from error
    except ValueError as error:
        raise LookupError(f"{file} cannot be read: {error}") from error


def names_in(file: Path) -> list[str] | None:
    """Returns the names that a file binds at module level; ``None`` if they cannot be known without running it."""
    import ast  # only here: agentrl is imported often, files are parsed rarely

    tree = _parsed(file)
    if tree is None:
        return None
    found: list[str] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
        waiting += ast.iter_child_nodes(node)
    return None if {"*", "__getattr__"} & set(found) or "globals" in file.read_text(encoding="utf-8") else found


def _parsed(file: Path) -> "ast.Module | None":
    import ast

    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _last_name(node: "ast.expr") -> str:
    import ast

    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
