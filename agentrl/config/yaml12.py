"""YAML text with the scalars of YAML 1.2: what a reader expects of ``1e-5``, ``on`` and ``010``.

Guarantees: the same rules in files and on the command line; what :func:`write_yaml` writes, :func:`read_yaml` reads
back; a key that stands twice is an error.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from agentrl.config.errors import ConfigError

_BOOL, _FLOAT, _INT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float", "tag:yaml.org,2002:int"
_REPLACED = {_BOOL, _FLOAT, _INT, "tag:yaml.org,2002:timestamp"}  # PyYAML's own follow YAML 1.1


_KEPT = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Loader(yaml.SafeLoader):
    """Reads without repeated keys."""

    yaml_implicit_resolvers = dict(_KEPT)  # noqa: RUF012 - PyYAML's own way to declare them

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} stands here twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the text that :class:`_Loader` would take for something else."""

    yaml_implicit_resolvers = dict(_KEPT)  # noqa: RUF012 - PyYAML's own way to declare them


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
    _class.add_implicit_resolver(_INT, re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
    _class.add_implicit_resolver(
        _FLOAT,
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    )


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))  # PyYAML's own reads 010 as octal


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(re.sub(r"\.(inf|nan)", r"\1", loader.construct_scalar(node).lower()))


_Loader.add_constructor(_INT, _construct_int)
_Loader.add_constructor(_FLOAT, _construct_float)


def read_yaml(text: str, source: str) -> Any:
    """``text`` as data.

    Args:
        text: YAML.
        source: Where it comes from, for the message.

    Raises:
        ConfigError: It is not YAML, or a key stands twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error


def write_yaml(value: Any) -> str:
    """``value`` on one line."""
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=1_000_000, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")
