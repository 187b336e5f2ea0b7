"""Record of the requests that episodes sent to their servers, and of the answers: ``traffic.jsonl`` of a run.

Guarantees: one line for each request that ended, with everything that the session got: ids, logprobs, versions, finish
reason, or the error; the log's writer makes and writes it (:mod:`agentrl.core.writer_thread`). A prompt stands as the
number of leading ids that it shares with the episode's previous request and its answer, and the rest, so a conversation
is stored once; reading gives the whole prompt. A full disk leaves whole lines out and fails no episode; a line that was
not written to its end is skipped.

A request is found by the seeds of its episode and of itself, which no two requests of an episode share
(:mod:`agentrl.inference.random_streams`). Of an episode that ran twice (a retry, a resume) only the run that began last
is read: an earlier one may have sent more. Worker processes write files of their own beside it; they are read as one.
"""

import base64
import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from agentrl.core.experts import ExpertRows
from agentrl.core.whole_lines import WholeLines
from agentrl.core.writer_thread import AtOnce, Writer
from agentrl.inference.backend import Generation, InferenceError, SamplingParams

FILE = "traffic.jsonl"
BYTES = 16  # of a token that waits to be written, about
WORKER_FILE = "traffic-worker-{}.jsonl"


@dataclass(frozen=True)
class Exchange:
    """A request and what came back.

    Attributes:
        prompt: ``[tokens]`` ids that were sent.
        answer: The answer; ``None`` if the request failed.
        error: Message of the error; empty if there is an answer.
    """

    prompt: list[int]
    answer: Generation | None
    error: str = ""


class TrafficLog:
    """Writes the traffic of a run.

    Args:
        path: File to append to.
        writer: Makes and writes the lines, of which it has none left when the file is closed.
    """

    def __init__(self, path: Path, writer: Writer | None = None) -> None:
        self.writer = writer or AtOnce()
        self._lines = WholeLines(path)
        self._runs = time.time_ns()  # a resumed run opens the file again, and its numbers are others

    def episode(self, seed: int, *, evaluation: bool) -> "EpisodeTraffic":
        """Returns the log of one run of an episode."""
        self._runs += 1
        return EpisodeTraffic(self, seed, self._runs, evaluation=evaluation)

    def write(self, record: dict[str, Any]) -> bool:
        """Appends one line; returns whether it is in the file: a full disk leaves lines out, and no episode fails."""
        return self._lines.add(orjson.dumps(record) + b"\n")

    def close(self) -> None:
        """Closes the file; later lines are lost."""
        self._lines.close()


@dataclass
class EpisodeTraffic:
    """Writes the traffic of one run of an episode.

    Attributes:
        log: Log of the training run.
        seed: Seed of the episode.
        number: Number of this run of it, unique in the file.
        evaluation: Whether the episode is part of an evaluation.
    """

    log: TrafficLog
    seed: int
    number: int
    evaluation: bool
    _said: list[int] = field(default_factory=list)  # the previous request's prompt and answer

    def add(self, prompt: list[int], params: SamplingParams, outcome: Generation | InferenceError) -> None:
        """Records a request that ended.

        Args:
            prompt: ``[tokens]`` ids that were sent; they may not change any more, nor may the outcome.
            params: Sampling parameters of the request.
            outcome: The answer, or the error.
        """
        tokens = len(prompt) + (len(outcome.token_ids) if isinstance(outcome, Generation) else 1)
        self.log.writer.add(self._write_all, (prompt, params.seed, outcome, round(time.time(), 3)), BYTES * tokens)

    def _write_all(self, ended: Sequence["_Ended"]) -> None:
        for one in ended:
            self._write(*one)

    def _write(self, prompt: list[int], request: int | None, outcome: Generation | InferenceError, at: float) -> None:
        shared = common_prefix(self._said, prompt)
        record: dict[str, Any] = {"episode": self.seed, "run": self.number, "request": request, "at": at}
        record |= {"shared": shared, "prompt": prompt[shared:]}
        if self.evaluation:
            record["evaluation"] = True
        said = prompt
        if isinstance(outcome, Generation):
            said = prompt + outcome.token_ids
            versions = [[version, len(list(run))] for version, run in groupby(outcome.versions)]
            record |= {"ids": outcome.token_ids, "logprobs": outcome.logprobs, "versions": versions}
            record["finish"] = outcome.finish_reason
            if (experts := outcome.experts) is not None:
                record["experts"] = [base64.b64encode(experts.data).decode(), experts.width, experts.size]
        else:
            record["error"] = str(outcome)
        if self.log.write(record):  # else the next line says what it shares with the one before
            self._said = said


_Ended = tuple[list[int], int | None, Generation | InferenceError, float]  # prompt, seed of the request, outcome, time


def common_prefix(first: list[int], second: list[int]) -> int:
    """Returns how many leading elements two lists share."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def read_traffic(path: Path, episodes: Collection[int]) -> dict[int, dict[int | None, Exchange]]:
    """Reads the training traffic of some episodes.

    Args:
        path: ``traffic.jsonl`` of a run; the files of its workers lie beside it.
        episodes: Seeds of the episodes.

    Returns:
        Seed of the episode -> seed of the request -> the latest such exchange of the episode's latest run.

    Raises:
        ValueError: A line, not the last one, is no record.
    """
    found: dict[int, dict[int | None, Exchange]] = {seed: {} for seed in episodes}
    latest: dict[int, tuple[float, tuple[Path, int]]] = {}  # episode -> first answer of its latest run, and that run
    begun: set[tuple[Path, int, int]] = set()
    for file in [path, *sorted(path.parent.glob(WORKER_FILE.format("*")))]:
        for record, exchange in _exchanges(file, found):
            seed, run, at = record["episode"], (file, record["run"]), record["at"]
            if (*run, seed) not in begun:
                begun.add((*run, seed))
                if at >= latest.get(seed, (at, run))[0]:
                    latest[seed], found[seed] = (at, run), {}
            if latest[seed][1] == run:
                found[seed][record["request"]] = exchange
    return found


def _exchanges(path: Path, episodes: Collection[int]) -> Iterator[tuple[dict[str, Any], Exchange]]:
    """Yields the training requests of some episodes in a file, with their records."""
    said: dict[tuple[int, int], list[int]] = {}
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            record = orjson.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: no record of a request: {error}") from error
        if record["episode"] not in episodes or record.get("evaluation"):
            continue
        key = record["episode"], record["run"]
        prompt = said.get(key, [])[: record["shared"]] + record["prompt"]
        answer = _answer(record)
        said[key] = prompt + (answer.token_ids if answer is not None else [])
        yield record, Exchange(prompt, answer, record.get("error", ""))


def _answer(record: dict[str, Any]) -> Generation | None:
    if "error" in record:
        return None
    versions = [version for version, count in record["versions"] for _ in range(count)]
    data, width, size = record.get("experts") or ("", 0, 0)
    experts = ExpertRows(base64.b64decode(data), width, size) if data else None
    return Generation(record["ids"], record["logprobs"], versions, record["finish"], experts)


def _whole_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield line
