"""Running requests on an engine and comparing them with the plain model."""

import random
import threading
from collections.abc import Callable, Sequence

import torch

from agentrl.engine.engine import Engine
from agentrl.engine.model import LoadedModel
from agentrl.engine.params import SamplingParams
from agentrl.engine.request import Request, StopText

SECONDS = 60  # longest wait for anything; a test that needs it has failed


class Driver:
    """Runs requests on an engine and waits for their end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._made = 0

    @property
    def loaded(self) -> LoadedModel:
        return self.engine.runner.loaded

    def make(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        on_token: Callable[[Request], None] | None = None,
        logprob_start: int = -1,
    ) -> Request:
        """A request; ``on_token`` runs in the loop thread after each of its tokens.

        One without a seed gets its number as one, so that each run of a test samples the same tokens.
        """
        params = params or SamplingParams(max_new_tokens=8, ignore_eos=True)
        self._made += 1
        ended = threading.Event()

        def on_update(request: Request) -> None:
            if request.finish:
                ended.set()
            elif on_token:
                on_token(request)

        request = Request(
            rid=f"r{self._made}",
            prompt=tuple(prompt),
            params=params,
            limit=min(params.max_new_tokens, self.loaded.context_length - len(prompt)),
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.loaded.eos_ids),
            on_update=on_update,
            rng=random.Random(self._made if params.sampling_seed is None else params.sampling_seed),
            stop_text=StopText(params.stop, self.loaded.tokenizer.decode) if params.stop else None,
            stream=on_token is not None,
            logprob_start=logprob_start,
        )
        request.ended = ended  # type: ignore[attr-defined]
        return request

    def run(self, *requests: Request) -> tuple[Request, ...]:
        self.engine.submit(requests)
        return self.wait(*requests)

    def wait(self, *requests: Request) -> tuple[Request, ...]:
        for request in requests:
            assert request.ended.wait(SECONDS), f"{request.rid} did not end"  # type: ignore[attr-defined]
        return requests


def reference_logprobs(model: torch.nn.Module, request: Request, temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of a request's output under the plain model, float64 [output]."""
    ids = torch.tensor([[*request.prompt, *request.output]])
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0].double() / temperature
    rows = logits[len(request.prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(request.output)[:, None]).squeeze(-1)
