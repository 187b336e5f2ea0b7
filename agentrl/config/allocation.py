"""Reads ``allocation=sglang.d4t2+fsdp.d8``: servers and trainer ranks in one word, as AReaL writes it.

Guarantees: the word only sets keys of the recipe, in the place of those of earlier files; one that is set otherwise
beside it or later is a contradiction; a part that this toolkit has no key for is refused with the reason.
"""

import re
from collections.abc import Mapping
from typing import Any

TRAINERS = ("fsdp", "fsdp2")
DIMENSIONS = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "s": "context", "e": "expert"}
REASONS = {
    "megatron": "the trainer is FSDP2: use fsdp",
    "archon": "the trainer is FSDP2: use fsdp",
    "ray": "launch.type=ray chooses the scheduler",
    "p": "the trainer has no pipeline stages: use d",
}  # what AReaL has and this toolkit does not
MESH = {"t": "tensor_parallel", "c": "context_parallel", "s": "context_parallel", "e": "expert_parallel"}


def replaced(data: Mapping[str, Any], word: Any) -> dict[str, Any]:
    """Returns the data of earlier files without the keys that a later ``allocation`` sets; all for a wrong one."""
    changed = dict(data)
    try:
        sections = {} if word is None else meaning(word)
    except ValueError:  # told when the whole is validated
        return changed
    for name, values in sections.items():
        section = changed.get(name)
        if isinstance(section, Mapping):
            changed[name] = {key: value for key, value in section.items() if key not in values}
    return changed


def with_range(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe's data with the keys that ``inference.servers=2..8`` stands for.

    Raises:
        ValueError: It cannot be read, or ``inference.max_servers`` says otherwise.
    """
    section = data.get("inference")
    return {**data, "inference": _with_range(section)} if isinstance(section, Mapping) else dict(data)


def expanded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe's data with the keys that ``allocation`` stands for.

    Raises:
        ValueError: A word cannot be read or carried out, or a key says otherwise.
    """
    changed = dict(data)
    word = changed.get("allocation")
    if word is None:
        return changed
    for section, values in meaning(word, _nodes(changed)).items():
        given = changed.get(section) or {}
        if not isinstance(given, Mapping):
            return changed  # the section's own check tells it
        for key, value in values.items():
            if given.get(key, value) != value:
                raise ValueError(f"allocation={word} means {section}.{key}={value}, but it is set to {given[key]}")
        changed[section] = {**given, **values}
    return changed


def _with_range(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reads ``servers: 2..8`` as ``servers: 2`` and ``max_servers: 8``."""
    text = section.get("servers")
    if not isinstance(text, str):
        return section
    match = re.fullmatch(r"([0-9]+)\.\.([0-9]+)", text.strip())
    if match is None:
        raise ValueError(f"inference.servers={text}: want a number, or LEAST..MOST")
    least, most = int(match[1]), int(match[2])
    if not 0 < least <= most:
        raise ValueError(f"inference.servers={text}: want 1 or more, and the smaller number first")
    if (given := section.get("max_servers")) not in (None, most):
        raise ValueError(f"inference.servers={text} means inference.max_servers={most}, but it is set to {given}")
    return {**section, "servers": least, "max_servers": most}


def _nodes(data: Mapping[str, Any]) -> int:
    trainer = data.get("trainer")
    nodes = trainer.get("nodes", 1) if isinstance(trainer, Mapping) else 1
    return nodes if isinstance(nodes, int) and nodes > 0 else 1


def meaning(word: Any, nodes: int = 1) -> dict[str, dict[str, Any]]:
    """Returns the keys that an allocation stands for, by section.

    Args:
        word: The allocation, e.g. ``sglang.d4t2+fsdp.d8``.
        nodes: ``trainer.nodes``, over which the trainer's ranks are spread.

    Raises:
        ValueError: It cannot be read or carried out.
    """
    if not isinstance(word, str):
        raise ValueError(f"allocation={word}: want text such as sglang.d4t2+fsdp.d8")
    found: dict[str, dict[str, Any]] = {}
    for part in re.split(r"\s*\+\s*", word.strip()):
        if "|" in part or "(" in part:
            raise ValueError(
                f"allocation={word}: | and (...) are not known: servers and trainer have GPUs of their own"
            )
        match = re.fullmatch(r"(\w+)(?:\[\w+\])?[.:](\w+)", part)  # AReaL also writes fsdp[actor]:d8
        name, sizes = match.groups() if match else (re.split(r"\W", part)[0], "")
        name = name.lower() if name.lower() in (*TRAINERS, *REASONS) else name
        if match is None or name in REASONS:
            reason = f" ({REASONS[name]})" if name in REASONS else ""
            raise ValueError(f"allocation={word}: {part!r} is not KIND.SIZES with a kind of server, or fsdp{reason}")
        values = _trainer(word, sizes, nodes) if name in TRAINERS else _servers(word, name, sizes)
        section = "trainer" if name in TRAINERS else "inference"
        if section in found:
            raise ValueError(f"allocation={word} names the {section} twice")
        found[section] = values
    return found


def _servers(word: str, engine: str, text: str) -> dict[str, Any]:
    sizes = _sizes(word, text)
    for letter in ("c", "s"):
        if letter in sizes:
            raise ValueError(f"allocation={word}: servers have no {DIMENSIONS[letter]} ranks")
    own = {"tp": sizes.get("t", 1), "pp": sizes.get("p", 1), "ep": sizes.get("e", 1)}
    return {"engine": engine, "servers": sizes.get("d", 1), **own}


def _trainer(word: str, text: str, nodes: int) -> dict[str, Any]:
    sizes = _sizes(word, text)
    if sizes.get("p", 1) > 1:
        raise ValueError(f"allocation={word}: p{sizes['p']} of the trainer is not possible: {REASONS['p']}")
    if "c" in sizes and "s" in sizes:
        raise ValueError(f"allocation={word}: c and s are the same here, ranks that share the tokens of a micro-batch")
    mesh = {"tensor_parallel": 1, "context_parallel": 1}  # d8 alone means eight ranks with rows of their own
    mesh |= {MESH[letter]: size for letter, size in sizes.items() if letter in MESH}
    ranks = sizes.get("d", 1) * sizes.get("t", 1) * sizes.get("c", sizes.get("s", 1))
    if ranks % nodes:
        raise ValueError(f"allocation={word}: {ranks} trainer ranks cannot be spread over trainer.nodes={nodes}")
    return {"nproc": ranks // nodes, **mesh}


def _sizes(word: str, text: str) -> dict[str, int]:
    found = re.findall(r"([a-z])([0-9]+)", text)
    if not found or "".join(letter + size for letter, size in found) != text:
        raise ValueError(f"allocation={word}: {text!r} is not a list of sizes such as d4t2")
    sizes = {letter: int(size) for letter, size in found}
    for letter, size in sizes.items():
        if letter not in DIMENSIONS:
            raise ValueError(f"allocation={word}: {letter} is not known; known: {', '.join(DIMENSIONS)}")
        if size == 0:
            raise ValueError(f"allocation={word}: {letter}0 is no size")
    if len(sizes) < len(found):
        raise ValueError(f"allocation={word}: a size stands twice in {text!r}")
    return sizes
