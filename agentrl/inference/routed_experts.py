"""Reads the experts that servers name with an answer.

Guarantees: an answer that was asked for experts and has a sampled token has one row for each token that was computed,
or is refused; what it names is plain numbers, nothing is unpickled.

SGLang 0.5.23 (``return_routed_experts``) sends int32 numbers of all decoder layers, those without experts included, and
vLLM 0.32 (``--enable-return-routed-experts``) a NumPy file of the same shape in the narrowest dtype; both in base64,
and both without the last sampled token.
"""

import base64
import binascii
import io

import numpy as np

from agentrl.core.experts import ExpertRows
from agentrl.inference.backend import InferenceError


def rows_wanted(prompt: int, sampled: int, start: int) -> int:
    """Returns the number of tokens whose experts an answer names.

    Args:
        prompt: Number of tokens of the prompt.
        sampled: Number of sampled tokens.
        start: First position that was asked for.
    """
    return max(0, prompt + sampled - 1 - start)


def read_numbers(data: str | None, rows: int, server: str) -> ExpertRows | None:
    """Reads int32 numbers in base64, as SGLang and the embedded engine send them.

    Args:
        data: What the answer holds.
        rows: Number of tokens that it must name.
        server: URL of the server and how it is started with experts, for messages.

    Raises:
        InferenceError: There are no such rows.
    """
    if not rows:
        return None
    try:
        numbers = np.frombuffer(base64.b64decode(_present(data, server), validate=True), "<i4")
        if not len(numbers) or len(numbers) % rows:
            raise ValueError(f"{len(numbers)} numbers for {rows} tokens")
        return ExpertRows.of(numbers.reshape(rows, -1))
    except (binascii.Error, ValueError, TypeError) as error:
        raise InferenceError(f"{server}: routed_experts of the answer: {error}") from error


def read_array(data: str | None, rows: int, server: str) -> ExpertRows | None:
    """Reads a NumPy file ``[tokens, layers, chosen]`` in base64, as vLLM sends it; arguments as of `read_numbers`."""
    if not rows:
        return None
    try:
        found = np.load(io.BytesIO(base64.b64decode(_present(data, server), validate=True)), allow_pickle=False)
        if len(found) != rows:
            raise ValueError(f"{len(found)} rows for {rows} tokens")
        return ExpertRows.of(found.reshape(rows, -1).astype(np.int64))
    except (binascii.Error, ValueError, TypeError, EOFError) as error:
        raise InferenceError(f"{server}: routed_experts of the answer: {error}") from error


def _present(data: str | None, server: str) -> str:
    if not data:
        raise InferenceError(
            f"{server}: the answer names no experts, which trainer.replay_routing needs; is the model a mixture of "
            "experts?"
        )
    return data
