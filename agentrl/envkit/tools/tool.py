"""Turns Python functions into OpenAI tools.

Guarantees: a tool's schema describes exactly the arguments of its function, and is plain JSON; a function that cannot
be described raises ``TypeError`` when the tool is made, not in an episode. Arguments reach the function only after
pydantic has validated them; unknown arguments are refused.

Arguments are validated as JSON in pydantic's lax mode: ``"5"`` and ``5.0`` pass for an ``int``, ``5.5`` and ``"five"``
do not, and ``5`` does not pass for a ``str``. For a strict parameter write ``Annotated[int, Field(strict=True)]``.
"""

import copy
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from pydantic import ValidationError

from agentrl.envkit.tools.tool_arguments import ToolArgumentError, UnparsableArgumentsError, decode, encode, explained
from agentrl.envkit.tools.tool_schema import Contract, contract_of
from agentrl.host.worker_threads import in_thread

__all__ = ["Tool", "ToolArgumentError", "UnparsableArgumentsError", "collect_tools", "tool", "tools_by_name"]

FunctionT = TypeVar("FunctionT")

NO_LIMIT = 86_400.0  # seconds; for a tool without a time limit, whose caller has one
_MARK = "__agentrl_tool__"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # names that OpenAI's API accepts


@dataclass(frozen=True)
class _Mark:
    """Settings that ``@tool`` attaches to a function."""

    name: str | None = None
    timeout: float | None = None


@dataclass(frozen=True, eq=False)
class Tool:
    """A Python callable as an OpenAI tool; made with :meth:`from_function`.

    Attributes:
        name: Name by which the model calls the tool.
        description: Description that the model reads.
        parameters: JSON schema of an object with the arguments.
        timeout: Time limit of one call in seconds; ``None`` if the tool has no limit of its own.
        function: The function or coroutine function that runs.
        contract: Schema and validation of the arguments.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    timeout: float | None
    function: Callable[..., Any]
    contract: Contract

    @classmethod
    def from_function(cls, function: Callable[..., Any], *, name: str | None = None) -> "Tool":
        """Describe a function by its signature, type hints and docstring.

        In a Google-style docstring the text before the first section is the tool's description, and the lines under
        ``Args:`` describe the parameters; a ``Field(description=...)`` in a type hint overrides them.

        Args:
            function: A function or a bound method, sync or async. A sync one runs in a thread.
            name: The tool's name; by default the name given to ``@tool``, or the function's.

        Raises:
            TypeError: The function cannot be described: ``*args``, ``**kwargs``, a positional-only parameter, a
                parameter without a type hint or with one that has no JSON schema.
            ValueError: OpenAI's API does not accept the name.
        """
        mark = _find_mark(function) or _Mark()
        return cls._build(function, mark.name if name is None else name, mark.timeout)

    @classmethod
    def _build(cls, function: Callable[..., Any], name: str | None, timeout: float | None) -> "Tool":
        contract = contract_of(function)
        name = function.__name__ if name is None else name
        if not _NAME.fullmatch(name):
            raise ValueError(f"tool name {name!r}: want 1 to 64 of the characters a-z, A-Z, 0-9, _ and -; give name=")
        return cls(name, contract.description, copy.deepcopy(contract.parameters), timeout, function, contract)

    @property
    def in_thread(self) -> bool:
        """Whether a call runs in a thread, which cannot be stopped."""
        return not inspect.iscoroutinefunction(self.function)

    def schema(self) -> dict[str, Any]:
        """Returns the tool as an entry of a chat request's ``tools``."""
        function = {"name": self.name, "description": self.description, "parameters": copy.deepcopy(self.parameters)}
        return {"type": "function", "function": function}

    def usage(self) -> str:
        """Lists the names of required and optional arguments, for error messages."""
        required = self.parameters.get("required", [])
        optional = [name for name in self.parameters["properties"] if name not in required]
        parts = [
            f"{kind}: {', '.join(names)}" for kind, names in (("required", required), ("optional", optional)) if names
        ]
        return "; ".join(parts) or "it takes no arguments"

    def parse(self, arguments: str) -> dict[str, Any]:
        """Parse and validate arguments that the model wrote.

        Args:
            arguments: A JSON object as text. Empty text means ``{}`` if the tool needs none.

        Returns:
            Keyword arguments for :meth:`call`; omitted arguments keep the function's defaults.

        Raises:
            UnparsableArgumentsError: ``arguments`` is not a JSON object, or has a duplicate key.
            ToolArgumentError: The arguments do not fit the tool's parameters.
        """
        if not arguments.strip() and not self.parameters.get("required"):
            return {}
        if not arguments.strip():
            raise UnparsableArgumentsError(f"{self.name}: no arguments came, want a JSON object ({self.usage()})")
        return self.validate(decode(self.name, arguments))

    def validate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Validate arguments that are a dict of JSON values already; otherwise like :meth:`parse`."""
        try:
            model = self.contract.model.model_validate_json(encode(self.name, arguments))
        except ValidationError as error:
            raise explained(self.name, error, arguments, self.usage(), list(self.contract.names.values())) from error
        return {
            name: getattr(model, field)
            for field, name in self.contract.names.items()
            if field in model.model_fields_set or name not in self.contract.optional
        }

    async def call(self, arguments: dict[str, Any]) -> Any:
        """Run the function: on the event loop if it is async, otherwise in a thread.

        A thread cannot be stopped: if this call is cancelled, the function continues to its end and its result is
        dropped; other calls use other threads, see :func:`~agentrl.host.worker_threads.in_thread`.

        Args:
            arguments: Validated arguments, from :meth:`parse`.
        """
        if not self.in_thread:
            return await self.function(**arguments)
        limit = NO_LIMIT if self.timeout is None else self.timeout
        result = await in_thread(_run_in_thread, self.function, arguments, timeout=limit)
        return await result if inspect.isawaitable(result) else result


@overload
def tool(function: FunctionT, /) -> FunctionT: ...


@overload
def tool(*, name: str | None = None, timeout: float | None = None) -> Callable[[FunctionT], FunctionT]: ...


def tool(function: Any = None, /, *, name: str | None = None, timeout: float | None = None) -> Any:
    """Mark a method of an environment class as a tool, as ``@tool`` or ``@tool(name=..., timeout=...)``.

    The method itself is not changed. The tool calls of one message run concurrently, sync ones in threads: a method
    that changes the environment in several steps needs a lock, or must be async without an ``await`` in between.

    Args:
        function: The method.
        name: The tool's name; by default the method's.
        timeout: Time limit of one call in seconds; overrides the limit of
            :func:`~agentrl.envkit.tools.tool_calls.run_tool_calls`.
    """
    if timeout is not None and timeout <= 0:
        raise ValueError(f"@tool(timeout={timeout}): want more than 0 seconds")

    def mark(function: FunctionT) -> FunctionT:
        setattr(function, _MARK, _Mark(name, timeout))
        return function

    return mark if function is None else mark(function)


def collect_tools(instance: object) -> list[Tool]:
    """Collects the tools of an object: its bound methods marked with :func:`tool`.

    They are in order of definition, those of base classes first. A method that overrides a tool replaces it, with or
    without its own mark; ``name = None`` in a subclass removes the tool.

    Raises:
        TypeError: A method cannot be described, see :meth:`Tool.from_function`.
        ValueError: Two methods have the same tool name.
    """
    marks: dict[str, _Mark] = {}
    for base in reversed(type(instance).__mro__):
        for attribute, value in vars(base).items():
            mark = _find_mark(value)
            if mark is not None:
                marks[attribute] = mark
    tools: list[Tool] = []
    for attribute, mark in marks.items():
        method = getattr(instance, attribute)
        if method is not None:
            tools.append(Tool._build(method, attribute if mark.name is None else mark.name, mark.timeout))
    return list(tools_by_name(tools).values())


def tools_by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Maps names to tools.

    Raises:
        ValueError: Two tools have the same name.
    """
    table: dict[str, Tool] = {}
    for one in tools:
        if one.name in table:
            raise ValueError(f"two tools are called {one.name!r}; give one of them another name")
        table[one.name] = one
    return table


def _find_mark(function: Any) -> _Mark | None:
    # A classmethod or staticmethod may carry the mark itself or on the function inside it.
    for candidate in (function, getattr(function, "__func__", None)):
        mark = getattr(candidate, _MARK, None)
        if isinstance(mark, _Mark):
            return mark
    return None


def _run_in_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    except StopIteration as error:  # a future cannot hold StopIteration: the caller would wait for ever
        raise RuntimeError("the tool raised StopIteration") from error
