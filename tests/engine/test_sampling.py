"""The sampler against the exact distribution."""

import random

import pytest
import torch

from agentrl.engine.native.build import native
from agentrl.engine.native.library import Native
from agentrl.engine.params import SamplingParams
from agentrl.engine.request import Request
from agentrl.engine.sampling import Sampled, sample


@pytest.fixture(autouse=True, params=["torch", "compiled"])
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it holds for the compiled sampler as well."""
    if request.param == "compiled" and native() is None:
        pytest.skip("there is no C++ compiler here")
    monkeypatch.setitem(COMPILED, "native", native() if request.param == "compiled" else None)


COMPILED: dict[str, Native | None] = {}


def draw(logits: torch.Tensor, requests: list[Request]) -> Sampled:
    return sample(logits, requests, COMPILED["native"])


def rows(count: int, stop_ids: frozenset[int] = frozenset(), **params: object) -> list[Request]:
    made = SamplingParams(**params)  # type: ignore[arg-type]
    return [
        Request(str(i), (0,), made, 8, stop_ids, lambda request: None, random.Random(f"seed {i}")) for i in range(count)
    ]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Statistic over its degrees of freedom, in standard deviations from what chance gives."""
    expected = probabilities * counts.sum()
    keep = expected >= 5
    statistic = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    freedom = keep.sum() - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_plain_rows_follow_the_softmax(temperature: float) -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 2
    count = 20_000
    drawn = draw(logits.repeat(count, 1), rows(count, temperature=temperature))
    exact = (logits.double() / temperature).softmax(-1)
    counts = torch.bincount(torch.tensor(drawn.tokens), minlength=500).double()
    assert abs(chi_square(counts, exact)) < 4
    got, want = torch.tensor(drawn.logprobs, dtype=torch.float64), exact.log()[torch.tensor(drawn.tokens)]
    assert (got - want).abs().max() < 1e-5


def test_tiny_probabilities_are_reached_exactly() -> None:
    logits = torch.full((1, 1000), -20.0)
    logits[0, 3] = 0.0
    request = rows(1)[0]

    class High:  # the last double below one
        def random(self) -> float:
            return 1 - 2**-53

    request.rng = High()  # type: ignore[assignment]
    exact = logits[0].double().softmax(-1)
    drawn = draw(logits.clone(), [request])
    assert drawn.tokens == [999]
    assert drawn.logprobs[0] == pytest.approx(float(exact.log()[999]), abs=1e-5)


@pytest.mark.parametrize("neighbour", [1, 2])
def test_a_rare_token_beside_a_likely_one_keeps_its_share(neighbour: int) -> None:
    """In one block, where a float32 sum would swallow it."""
    logits = torch.full((1, 128), float("-inf"))
    logits[0, 0], logits[0, neighbour] = 0.0, -21.0
    rare = float(logits[0].double().softmax(-1)[neighbour])
    request = rows(1)[0]
    for uniform, token in ((1 - rare * 1.01, 0), (1 - rare * 0.99, neighbour)):
        request.rng = type("Fixed", (), {"random": lambda self, value=uniform: value})()  # type: ignore[assignment]
        assert draw(logits.clone(), [request]).tokens == [token]


def test_truncated_rows_keep_only_what_they_may_and_report_the_whole_softmax() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 3
    exact = logits.double().softmax(-1)
    order = exact.argsort(descending=True)
    count = 10_000
    cases = {
        "top_k": ({"top_k": 5}, order[:5]),
        "top_p": ({"top_p": 0.8}, order[: int((exact[order].cumsum(0) < 0.8).sum()) + 1]),
        "min_p": ({"min_p": 0.1}, order[exact[order] >= 0.1 * exact.max()]),
    }
    for name, (params, kept) in cases.items():
        drawn = draw(logits.repeat(count, 1), rows(count, **params))
        tokens = torch.tensor(drawn.tokens)
        assert set(drawn.tokens) == set(kept.tolist()), name
        shares = torch.zeros(300, dtype=torch.float64)
        shares[kept] = exact[kept] / exact[kept].sum()
        assert abs(chi_square(torch.bincount(tokens, minlength=300).double(), shares)) < 4, name
        assert (torch.tensor(drawn.logprobs).double() - exact.log()[tokens]).abs().max() < 1e-5, name


def test_greedy_rows_take_the_argmax_and_report_temperature_one() -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(2))
    requests = rows(1, temperature=0.0) + rows(1, top_k=1, temperature=3.0) + rows(1)
    drawn = draw(logits.clone(), requests)
    exact = logits.double().log_softmax(-1)
    assert drawn.tokens[:2] == logits[:2].argmax(-1).tolist()
    assert drawn.logprobs == pytest.approx([float(exact[i, t]) for i, t in enumerate(drawn.tokens)], abs=1e-5)


def test_banned_ids_are_not_sampled_and_do_not_change_the_reported_logprob() -> None:
    logits = torch.zeros(50)
    logits[7] = 10.0
    drawn = draw(logits.repeat(500, 1), rows(500, stop_ids=frozenset({7}), min_new_tokens=2))
    assert 7 not in drawn.tokens
    assert len(set(drawn.tokens)) == 49
    exact = logits.double().log_softmax(-1)
    assert drawn.logprobs[0] == pytest.approx(float(exact[drawn.tokens[0]]), abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_is_reported_and_its_neighbours_are_sampled(bad: float) -> None:
    logits = torch.zeros(3, 130)
    logits[1, 4] = bad
    drawn = draw(logits, rows(3))
    assert drawn.broken == [1]
    assert len(drawn.tokens) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_samplers_draw_the_same_tokens_from_the_same_numbers(dtype: torch.dtype) -> None:
    found = native()
    if found is None:
        pytest.skip("there is no C++ compiler here")
    generator = torch.Generator().manual_seed(5)
    for vocab in (7, 128, 300, 5000):
        logits = (torch.randn(200, vocab, generator=generator) * 3).to(dtype)
        plain = sample(logits.float().clone(), rows(200, temperature=0.7))
        compiled = sample(logits.clone(), rows(200, temperature=0.7), found)
        same = [one == two for one, two in zip(plain.tokens, compiled.tokens, strict=True)]
        assert same.count(False) <= 1, "a number at a token's very edge may fall to its neighbour"
        for one, two, alike in zip(plain.logprobs, compiled.logprobs, same, strict=True):
            assert not alike or one == pytest.approx(two, abs=1e-5)
