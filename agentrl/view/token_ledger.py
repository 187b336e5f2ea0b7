"""The ledger of an episode's tokens: what is known of each, and what the run did not record.

Guarantees: only what the record holds is shown; a text is the tokenizer's, which is looked for on this machine alone;
where none is found, tokens are shown by their ids and the reason is said.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl.config.errors import UserError
from agentrl.core.episode import Trajectory
from agentrl.core.packed_texts import Pieces
from agentrl.core.trainer_logprobs import Gaps
from agentrl.inference.local_tokenizer import local_tokenizer
from agentrl.inference.token_bytes import TokenBytes
from agentrl.observe.shown_text import quoted
from agentrl.observe.token_view import Token, read_blocks

MOST_TOKENS = 50_000  # of one answer to the page


class Tokenizers:
    """Tokenizers of the shown runs, each loaded once."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Pieces | None, frozenset[int], str]] = {}

    def of_run(self, folder: Path, config: Mapping[str, Any]) -> tuple[Pieces | None, frozenset[int], str]:
        """Returns the bytes of an id, the special ids, and what was found or why nothing was.

        Args:
            folder: Folder of the run.
            config: Resolved recipe of the run.
        """
        key = str(folder)
        if key not in self._found:
            tokenizer, said = local_tokenizer(folder, config)
            if tokenizer is None:
                self._found[key] = None, frozenset(), f"texts of tokens are not shown: {said}"
            else:
                self._found[key] = TokenBytes(tokenizer), frozenset(tokenizer.all_special_ids), said
        return self._found[key]


def ledger(
    record: Mapping[str, Any], pieces: Pieces | None, special: frozenset[int], trained: int | None, gaps: Gaps
) -> dict[str, Any]:
    """Returns the tokens of each message, role by role, and what is not recorded.

    Args:
        record: The episode's record.
        pieces: Bytes of an id; ``None`` without a tokenizer.
        special: Ids of special tokens.
        trained: Policy version that the step which trained the episode began from; ``None`` if no step did.
        gaps: Gaps to the trainer's logprobs that the run kept of the episode.

    Raises:
        UserError: The messages are of another version of agentrl.
    """
    roles: dict[str, Any] = {}
    shown, teacher = 0, False
    for role, given in (record.get("trajectories") or {}).items():
        trajectory = read_trajectory(given)
        blocks = []
        for block in read_blocks(trajectory, 0, pieces or _as_id, special):
            node = trajectory.nodes[block.node]
            teacher = teacher or bool(node.teacher_logprobs)
            kept = block.tokens[: max(0, MOST_TOKENS - shown)]
            shown += len(kept)
            blocks.append(
                {
                    "node": block.node,
                    "left_out": len(block.tokens) - len(kept),
                    "ids": [token.id for token in kept],
                    "texts": [_text(token.data) for token in kept],
                    "origins": [token.origin.value for token in kept],
                    "special": [at for at, token in enumerate(kept) if token.special],
                    "mask": [token.mask for token in kept],
                    "logprobs": [token.logprob if token.mask else None for token in kept],
                    "versions": [token.version if token.mask else None for token in kept],
                    "teacher": node.teacher_logprobs[: len(kept)],
                    "trainer": _under_trainer(kept, gaps.get(role, {}).get(block.node)),
                    "start": block.tokens[0].index if block.tokens else 0,
                }
            )
        roles[role] = blocks
    return {"roles": roles, "trained": trained, "not_recorded": _not_recorded(trained, teacher, bool(gaps), shown)}


def read_trajectory(given: Mapping[str, Any]) -> Trajectory:
    """Reads the messages of a role.

    Raises:
        UserError: They are of another version of agentrl.
    """
    try:
        return Trajectory.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"the tokens are of another version of agentrl: {where}: {first['msg']}") from error


def _as_id(token: int) -> bytes:
    return f"{token} ".encode()


def _text(data: bytes) -> str:
    """Returns a token's text; bytes that are no UTF-8 by themselves are escaped."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return quoted(data)


def _under_trainer(tokens: Sequence[Token], gaps: Iterable[float] | None) -> list[float | None]:
    """Returns the trainer's logprob of each token, ``None`` where there is none; empty where there is none at all."""
    if gaps is None:
        return []
    own = iter(gaps)  # one for each sampled token
    found = [(token.logprob - float(next(own, math.nan))) if token.mask else math.nan for token in tokens]
    return [None if math.isnan(one) else one for one in found]


def _not_recorded(trained: int | None, teacher: bool, trainer: bool, shown: int) -> list[str]:
    if not shown:
        return ["tokens: the server returned no ids (an API in text mode)"]
    found = []
    if not trainer:
        found.append(
            "logprob under the trainer: it is kept for logging.trainer_logprobs groups of each step (1), and this is "
            "none of them; means over all tokens are the curves mismatch/*"
        )
    if not teacher:
        found.append("logprob under a teacher: no teacher scored this episode")
    if trained is None:
        found.append("age: the run's journal names no step that trained this group")
    return found
