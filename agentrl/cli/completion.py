"""Lists what completes a word, for the shell.

Guarantees: a name that is offered can be used as it is; a key ends in ``=`` and a section in ``.``, as more follows
both; nothing of a user is imported.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.core.registry import Kind


def complete_recipe(incomplete: str) -> list[str]:
    """Lists recipe names that start with ``incomplete``."""
    from agentrl.config.load import recipe_names

    return _begun(recipe_names(), incomplete)


def complete_environment(incomplete: str) -> list[str]:
    """Lists environments that start with ``incomplete``: registered ones, and those in ``./envs``."""
    return _begun(environments(), incomplete)


def complete_evaluated(incomplete: str) -> list[str]:
    """Lists recipes and environments that start with ``incomplete``."""
    return [*complete_recipe(incomplete), *complete_environment(incomplete)]


def complete_evaluated_or_override(incomplete: str) -> list[str]:
    """Lists recipes, environments, and keys that start with ``incomplete``."""
    return [*complete_evaluated(incomplete), *complete_override(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Lists runs in ``./runs`` whose names start with ``incomplete``."""
    return _begun(runs(), incomplete)


def complete_override(incomplete: str) -> list[str]:
    """Lists keys that start with ``incomplete``, or a key's values when there is a ``=``."""
    from agentrl.config.keys import fields, section_of

    key, equals, begun = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in _begun(values_of(key), begun)]
    offered: dict[str, None] = {}
    for name, field in fields().items():
        if not name.startswith(incomplete) or section_of(field) is not None:
            continue
        rest = name[len(incomplete) :]
        section, dot, _ = rest.partition(".")
        offered[incomplete + section + dot if dot else f"{name}="] = None
    return list(offered)


def environments() -> list[str]:
    """Lists the names of all environments, without versions where a name is enough."""
    from agentrl.core.local_envs import classes_in, local_files
    from agentrl.core.registry import registered

    ids = [id.rpartition("-v")[0].lower() or id for id in registered("env")]
    local: list[str] = []
    for file in local_files():
        classes = classes_in(file)
        local += [file.stem] if len(classes) == 1 else [f"{file}:{name}" for name in classes]
    return sorted({*ids, *local})


def runs() -> list[str]:
    """Lists the names of the runs in ``./runs``."""
    return sorted(file.parent.name for file in Path("runs").glob("*/config.json"))


def values_of(key: str) -> list[str]:
    """Lists the values that a key may have, as far as they can be listed."""
    import typing

    from agentrl.config.keys import choices, fields
    from agentrl.core.registry import registered

    if key == "env.id":
        return environments()
    if key == "name":
        return runs()
    if key in _REGISTERED:
        return [*registered(_REGISTERED[key]), *_BESIDE.get(key, ())]
    field = fields().get(key)
    found: list[str] = []
    for choice in choices(field) if field is not None else ():
        if typing.get_origin(choice) is typing.Literal:
            found += [str(value) for value in typing.get_args(choice)]
        elif choice is bool:
            found += ["true", "false"]
        elif choice is type(None):
            found.append("null")
    return [*found, *_BESIDE.get(key, ())]


_REGISTERED: dict[str, "Kind"] = {
    "agent.id": "agent",
    "workflow.id": "workflow",
    "train_dataset.name": "dataset",
    "valid_dataset.name": "dataset",
    "inference.engine": "server",
    "teacher.engine": "server",
    "trainer.type": "trainer",
    "trainer.objective": "objective",
    "trainer.advantage": "advantage",
    "trainer.preset": "preset",
}
_BESIDE = {
    "train_dataset.name": ("env",),
    "valid_dataset.name": ("env",),
    "trainer.type": ("null",),
    "model.chat_template": ("chatml_tools", "training"),
}


def _begun(names: list[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
