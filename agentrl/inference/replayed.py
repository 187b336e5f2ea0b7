"""Sessions that are answered from a run's record instead of a server.

Guarantees: a request gets the answer that the run got for the same request (the same call of the same role of the same
episode), also if its prompt has become another one; each difference between the prompts is noted. No server is asked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from agentrl.inference.backend import Generation, InferenceError, SamplingParams
from agentrl.inference.client import EpisodeLLM
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.inference.traffic import Exchange, common_prefix

NOT_SENT = "the run sent no such request"


@dataclass(frozen=True)
class PromptDifference:
    """Prompt that is not the recorded one.

    Attributes:
        request: Number of the request in its episode, from 0.
        at: Position of the first token that differs; the length of the shorter prompt if one is the beginning of the
            other.
        recorded: ``[tokens]`` prompt that the run sent; empty if it sent no such request.
        now: ``[tokens]`` prompt that was sent now.
    """

    request: int
    at: int
    recorded: list[int]
    now: list[int]


class RecordedSampler:
    """Sampler of one episode that answers from the record.

    Args:
        exchanges: Seed of a request -> what the run sent and got.

    Attributes:
        differences: Prompts that are not the recorded ones, in the order of the requests.
        asked: Seeds of the requests so far.
    """

    url = "the record of the run"

    def __init__(self, exchanges: Mapping[int | None, Exchange]) -> None:
        self._exchanges = exchanges
        self.differences: list[PromptDifference] = []
        self.asked: list[int | None] = []

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Returns the recorded answer.

        Raises:
            InferenceError: The request failed in the run, or the run sent no such request.
        """
        number = len(self.asked)
        self.asked.append(params.seed)
        found = self._exchanges.get(params.seed)
        if found is None:
            self.differences.append(PromptDifference(number, 0, [], token_ids))
            raise InferenceError(NOT_SENT)
        if found.prompt != token_ids:
            at = common_prefix(found.prompt, token_ids)
            self.differences.append(PromptDifference(number, at, found.prompt, token_ids))
        if found.answer is None:
            raise InferenceError(found.error)
        return found.answer

    @property
    def unsent(self) -> int:
        """Number of the run's requests that were not sent now."""
        return len(set(self._exchanges) - set(self.asked))


class ReplayClient:
    """Gives episodes sessions that are answered from the record.

    Args:
        template: The model's chat template.
        settings: Settings of training sessions.
        traffic: Seed of the episode -> seed of the request -> exchange.

    Attributes:
        samplers: Seed of the episode -> its sampler.
    """

    def __init__(
        self,
        template: ChatTemplate,
        settings: SessionSettings,
        traffic: Mapping[int, Mapping[int | None, Exchange]],
    ) -> None:
        self.template = template
        self._settings = settings
        self._traffic = traffic
        self.samplers: dict[int, RecordedSampler] = {}

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        """Returns a handle for an episode, and a function that does nothing."""
        sampler = self.samplers[seed] = RecordedSampler(self._traffic.get(seed, {}))
        settings = replace(self._settings, sampling=replace(self._settings.sampling, seed=seed))
        make_session = partial(ChatSession, sampler, self.template, settings)
        return EpisodeLLM(make_session, sampling=settings.as_record()), _nothing


def _nothing() -> None:
    """Does nothing."""
