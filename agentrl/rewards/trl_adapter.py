"""Adapts reward functions written for TRL's trainers to verifiers.

Guarantees: the function gets a batch of one in TRL's shape, and the number it returns is checked like any verifier's;
TRL's ``None`` ("skip this example") becomes a missing reward. ``trl`` itself is not needed.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.rewards.verdict import Verdict, as_verdict, is_async


@dataclass(frozen=True)
class TRLVerifier:
    """A TRL reward function as ``(answer, reference)``; see :func:`from_trl`."""

    function: Callable[..., Any]
    column: str = "solution"
    conversational: bool = True

    def __call__(
        self,
        answer: str,
        reference: Any,
        *,
        prompt: str = "",
        completion_ids: Sequence[int] | None = None,
        **columns: Any,
    ) -> Any:
        """Call the function for one answer.

        Args:
            answer: The completion.
            reference: The value of the dataset's column.
            prompt: The question, for functions that read it.
            completion_ids: The answer's token ids, for functions that depend on its length.
            columns: Further columns of the dataset.

        Returns:
            A verdict; an awaitable verdict if the function is async.

        Raises:
            TypeError: The function did not return a list of one number or one ``None``.
        """
        arguments = {name: [value] for name, value in {self.column: reference, **columns}.items()}
        arguments["prompts"] = [self._messages("user", prompt)]
        arguments["completions"] = [self._messages("assistant", answer)]
        if completion_ids is not None:
            arguments["completion_ids"] = [list(completion_ids)]
        returned = self.function(**arguments)
        return self._awaited(returned) if inspect.isawaitable(returned) else self._verdict(returned)

    def _messages(self, role: str, text: str) -> Any:
        return [{"role": role, "content": text}] if self.conversational else text

    async def _awaited(self, returned: Any) -> Verdict:
        return self._verdict(await returned)

    def _verdict(self, returned: Any) -> Verdict:
        if not isinstance(returned, list | tuple) or len(returned) != 1:
            raise TypeError(f"{self.function!r} returned {returned!r} for one answer; want a list of one number")
        return as_verdict(returned[0], self.function)


@dataclass(frozen=True)
class AsyncTRLVerifier(TRLVerifier):
    """A :class:`TRLVerifier` for an ``async`` function, which runs on the event loop."""

    async def __call__(self, answer: str, reference: Any, **options: Any) -> Verdict:
        """See :meth:`TRLVerifier.__call__`."""
        returned = super().__call__(answer, reference, **options)
        return await returned if inspect.isawaitable(returned) else returned


def from_trl(function: Callable[..., Any], *, column: str = "solution", conversational: bool = True) -> TRLVerifier:
    """Turn ``(prompts, completions, **columns) -> list[float | None]`` into ``(answer, reference)``.

    Args:
        function: The reward function, sync or async. It is called with keywords only and must take ``**kwargs``, as
            TRL requires; it gets ``completion_ids`` only if the caller passes them.
        column: Keyword argument for the reference; TRL's own functions use ``solution``.
        conversational: Whether prompts and completions are lists of messages, as in TRL's own functions, or strings.
    """
    return (AsyncTRLVerifier if is_async(function) else TRLVerifier)(function, column, conversational)
