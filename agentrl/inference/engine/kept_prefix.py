"""The beginning that the latest prompts have in common, kept with its keys and values.

Guarantees: what is kept was computed with the current weights (:meth:`KeptPrefix.forget` follows every change); at
least one token of a prompt is left to compute; memory is bounded by ``MOST`` tokens.

A system prompt, worked examples and a conversation so far come again with every request: only what follows them is new.
"""

from collections.abc import Sequence

from torch import Tensor

from agentrl.core.prefix_tree import common_prefix

LEAST = 16  # tokens: below this a copy and a mask cost as much as computing them
MOST = 4096  # tokens: 190 MB for a 135M model in float32


class KeptPrefix:
    """One prefix and its cache.

    Attributes:
        ids: Its tokens.
        keys: ``[kv_heads, tokens, head_dim]`` of each layer.
        values: The same shape, head_dim may differ.
    """

    def __init__(self) -> None:
        """Keep nothing yet."""
        self.ids: tuple[int, ...] = ()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._last: Sequence[int] = ()  # an earlier prompt: what the next one shares with it is worth keeping

    def shared(self, prompt: Sequence[int]) -> int:
        """Leading tokens of a prompt that need not be computed."""
        length = min(common_prefix(self.ids, prompt), len(prompt) - 1)
        return length if length >= LEAST else 0

    def worth(self, prompts: Sequence[Sequence[int]]) -> int:
        """Leading tokens of the prompts of a prefill to keep instead of what is kept; 0 to leave it.

        Args:
            prompts: In the order they came in.
        """
        common = min(common_prefix(self._last or prompts[0], prompt) for prompt in prompts)
        common = min(common, MOST)
        self._last = prompts[-1]
        covered = common <= len(self.ids) and common_prefix(self.ids, prompts[0]) >= common
        return 0 if common < LEAST or covered else common

    def keep(self, ids: Sequence[int], keys: list[Tensor], values: list[Tensor]) -> None:
        """Replace what is kept."""
        self.ids, self.keys, self.values = tuple(ids), keys, values

    def forget(self) -> None:
        """Drop it: the weights have changed, or memory is wanted back."""
        self.ids, self.keys, self.values, self._last = (), [], [], ()
