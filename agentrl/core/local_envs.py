"""Environments in ``./envs`` of the working folder, found without running their code.

Guarantees: files are parsed, never imported here; a class counts where one of its bases ends in a name that an
environment's class has, or is such a class of the same file.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast

FOLDER = Path("envs")
MAKER = "make_env"
_BASES = {"Environment", "LanguageEnvironment", "SingleTurnEnvironment", "ToolEnvironment", "GymnasiumEnvironment"}


def local_files() -> list[Path]:
    """Python files in ``./envs``, sorted; private ones and tests left out."""
    if not FOLDER.is_dir():
        return []
    return sorted(file for file in FOLDER.glob("*.py") if not file.name.startswith(("_", "test_")))


def classes_in(file: Path) -> list[str]:
    """Names of the environment classes that a file defines, in their order; where it has ``make_env``, only that.

    Empty where the file cannot be read or parsed; :func:`check_syntax` says why.
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
            return [MAKER]  # it wraps the file's classes
    return found


def check_syntax(file: Path) -> None:
    """Raises an error with the line where a file cannot be parsed.

    Raises:
        LookupError: The file is not valid Python.
    """
    import ast  # only here: agentrl is imported often, files are parsed rarely

    try:
        ast.parse(file.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise LookupError(f"{file}:{error.lineno} cannot be parsed: {error.msg}") from error
    except ValueError as error:
        raise LookupError(f"{file} cannot be read: {error}") from error


def names_in(file: Path) -> list[str] | None:
    """Names that a file binds outside its functions and classes; ``None`` where these cannot be known."""
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
