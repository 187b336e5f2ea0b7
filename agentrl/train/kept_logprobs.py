"""Keeps the trainer's logprobs of single tokens, for a few groups of each step.

Guarantees: what is kept was measured before the step's first update, so nothing is computed for it; groups are the
first ones of the batch of which a token was measured, whatever the ranks; a disk without room costs these lines alone,
and that is said once.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.core.columns import Columns
from agentrl.core.trainer_logprobs import FILE, Gaps, gaps_line
from agentrl.train.branches import Branch, TokenColumns, branches_of, tokens_of
from agentrl.train.measured import Measured
from agentrl.weights.collectives import shared_data


class KeptLogprobs:
    """Writer of the run's ``trainer-logprobs.jsonl``.

    Args:
        run_dir: Folder of the run.
        groups: Number of groups of each step.
        device: Device of the ranks' decisions.
    """

    def __init__(self, run_dir: Path, groups: int, device: torch.device) -> None:
        self._file = run_dir / FILE
        self._groups = groups
        self._device = device
        self._said = False

    def write(self, step: int, columns: Columns | None, measured: Measured) -> None:
        """Writes what was measured of the step's first groups; a collective.

        Args:
            step: Number of steps before this one.
            columns: The step's episodes on rank 0, ``None`` on the others.
            measured: What this rank measured.
        """
        if not self._groups:
            return
        there = measured.sequences()
        branches: list[Branch] = []
        if columns is not None:
            known = set(there)
            every = branches_of(columns)
            groups = list(dict.fromkeys(one.group for one in every if one.number in known))[: self._groups]
            branches = [one for one in every if one.group in groups]
        chosen = shared_data([one.number for one in branches], self._device)
        tokens = measured.of_sequences(chosen)
        if columns is not None and len(tokens):
            self._append(lines(step, columns, branches, tokens))

    def _append(self, text: str) -> None:
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            if not self._said:
                print(f"{self._file} cannot be written: {error.strerror}; training goes on without", flush=True)
            self._said = True


def lines(step: int, columns: Columns, branches: Sequence[Branch], tokens: NDArray[np.float64]) -> str:
    """Returns the lines of the episodes that some branches belong to.

    Args:
        step: Number of steps before this one.
        columns: The step's episodes.
        branches: Branches of whole groups.
        tokens: ``[measured, 3]`` number of the branch, position in it, logprob under the trainer.
    """
    all_tokens = TokenColumns.of(columns)
    gaps = np.full(all_tokens.total, np.nan)
    for branch in branches:
        found = tokens_of(branch, all_tokens)
        own = tokens[tokens[:, 0] == branch.number]
        at = np.searchsorted(found.positions, own[:, 1])  # positions ascend along a branch
        sampled = found.own[at]
        gaps[sampled] = columns.logprobs[sampled] - own[:, 2]
    starts, episodes = all_tokens.sampled_starts, dict[int, Gaps]()
    wanted = {branch.trajectory for branch in branches}
    for number, one in enumerate(columns.trajectories()):
        if number not in wanted:
            continue
        spans = {message - one.first: slice(*starts[message : message + 2]) for message in range(one.first, one.end)}
        kept = {message: gaps[span] for message, span in spans.items() if not np.isnan(gaps[span]).all()}
        if kept:
            episodes.setdefault(one.episode, {})[one.role] = kept
    return "".join(_line(step, columns.episodes[number], own) for number, own in episodes.items())


def _line(step: int, record: Any, gaps: Gaps) -> str:
    return gaps_line(step, record.group_id, record.index, gaps)
