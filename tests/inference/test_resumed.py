"""An answer that a weight push cut in two: its stop text is found where one server would have found it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.inference.backend import Generation, SamplingParams
from agentrl.inference.resumed import stopped_at_text
from agentrl.inference.session import ChatSession
from agentrl.inference.template import ChatTemplate
from tests.inference.fakes import FakeBackend
from tests.inference.test_session import HELLO, SETTINGS, ids_of

TEXT = "look it up\n### 日本 and more"
STOPS = ("\n###", "本 ")


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


class Cut(FakeBackend):
    """Samples ``TEXT``, and is aborted after some tokens; sees the stop texts of each request alone."""

    def __init__(self, template: ChatTemplate, cuts: list[int]) -> None:
        ids = ids_of(template, TEXT)
        self.start = -1
        cut = iter([*cuts, len(ids)])

        def script(prompt: list[int], params: SamplingParams) -> Generation:
            self.start = len(prompt) if self.start < 0 else self.start
            taken, end = len(prompt) - self.start, next(cut)
            assert prompt[self.start :] == ids[:taken]
            for count in range(taken + 1, end + 1):
                if any(stop in template.text(ids[taken:count], special=True) for stop in params.stop):
                    return _part(ids, taken, count, "stop")
            return _part(ids, taken, end, "abort" if end < len(ids) else "length")

        super().__init__(script)


def _part(ids: list[int], start: int, end: int, finish: Any) -> Generation:
    return Generation(ids[start:end], [-float(at) for at in range(start, end)], [start] * (end - start), finish)


@pytest.mark.parametrize("stop", STOPS)
async def test_a_stop_text_is_found_wherever_the_answer_was_cut(template: ChatTemplate, stop: str) -> None:
    ids = ids_of(template, TEXT)
    whole = stopped_at_text(_part(ids, 0, len(ids), "length"), (stop,), 0, lambda some: template.text(some))
    assert 3 < len(whole.token_ids) < len(ids) and whole.finish_reason == "stop"
    for first in range(len(ids)):
        for cuts in ([first], [first, min(first + 1, len(ids) - 1)]):
            backend = Cut(template, cuts)
            session = ChatSession(backend, template, replace(SETTINGS, sampling=SamplingParams(400, stop=(stop,))))
            choice = (await session.create(messages=[HELLO])).choices[0]
            node = session.trajectory.nodes[-1]
            assert (node.token_ids, node.finish_reason) == (whole.token_ids, "stop"), cuts
            assert node.logprobs == whole.logprobs and len(node.versions) == len(node.token_ids)
            assert choice.message.content == TEXT.partition(stop)[0] and choice.finish_reason == "stop"
            assert len(backend.requests) <= 1 + sum(cut < len(whole.token_ids) for cut in cuts), "one request too many"


async def test_without_the_stop_text_an_answer_stays_as_it_is(template: ChatTemplate) -> None:
    ids = ids_of(template, TEXT)
    for stops in ((), ("nowhere",)):
        answer = _part(ids, 0, len(ids), "length")
        assert stopped_at_text(answer, stops, 0, template.text) is answer
    session = ChatSession(Cut(template, [4]), template, replace(SETTINGS, sampling=SamplingParams(400)))
    await session.create(messages=[HELLO])
    assert session.trajectory.nodes[-1].token_ids == ids
