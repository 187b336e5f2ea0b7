"""Tokens and logprobs against the plain Hugging Face forward."""

import random
import resource
import sys
from pathlib import Path

import pytest
import torch

from agentrl.engine.params import SamplingParams
from agentrl.engine.slots import zeros
from tests.engine.driving import Driver, reference_logprobs

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)


def ragged_prompts(count: int, longest: int = 60) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(260) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def test_greedy_tokens_equal_the_plain_model(driver: Driver, reference: torch.nn.Module) -> None:
    (request,) = driver.run(driver.make(ragged_prompts(1)[0], GREEDY))
    ids = list(request.prompt)
    for _ in range(12):
        with torch.inference_mode():
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    assert request.output == ids[len(request.prompt) :]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ragged_concurrent_logprobs_equal_the_plain_model(
    driver: Driver, reference: torch.nn.Module, temperature: float
) -> None:
    lengths = [3, 9, 17, 5, 30, 11, 2, 8, 21, 4]  # more than slots, ending at different times
    prompts = ragged_prompts(len(lengths))
    requests = driver.run(
        *(
            driver.make(prompt, SamplingParams(max_new_tokens=n, temperature=temperature, ignore_eos=True))
            for prompt, n in zip(prompts, lengths, strict=True)
        )
    )
    for request, length in zip(requests, lengths, strict=True):
        assert len(request.output) == len(request.logprobs) == length
        exact = reference_logprobs(reference, request, temperature)
        assert (torch.tensor(request.logprobs).double() - exact).abs().max() < 1e-4


def test_long_outputs_grow_the_cache_and_stay_exact(driver: Driver, reference: torch.nn.Module) -> None:
    params = SamplingParams(max_new_tokens=300, ignore_eos=True)
    requests = driver.run(driver.make([1, 2, 3], params), driver.make(list(range(150)), params))
    for request in requests:
        exact = reference_logprobs(reference, request)
        assert (torch.tensor(request.logprobs).double() - exact).abs().max() < 1e-4
    cache = driver.engine.runner.cache
    assert cache.nbytes <= 2 * 2 * 8 * 2 * 512 * 8 * 4  # layers, keys and values, slots, heads, context, head, bytes


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_company(driver: Driver) -> None:
    seeded = SamplingParams(max_new_tokens=20, ignore_eos=True, sampling_seed=11)
    (alone,) = driver.run(driver.make([5, 6, 7], seeded))
    crowd = [driver.make(prompt) for prompt in ragged_prompts(6)]
    together = driver.run(*crowd[:3], driver.make([5, 6, 7], seeded), *crowd[3:])[3]
    assert together.output == alone.output
    assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    (unlike,) = driver.run(driver.make([5, 6, 7], SamplingParams(max_new_tokens=20, ignore_eos=True, sampling_seed=12)))
    assert unlike.output != alone.output


def test_a_group_is_prefilled_once_and_its_samples_are_exact(driver: Driver, reference: torch.nn.Module) -> None:
    before = driver.engine.runner.prefills
    group = driver.run(*(driver.make([9, 8, 7, 6]) for _ in range(6)))
    assert driver.engine.runner.prefills == before + 1
    for request in group:
        exact = reference_logprobs(reference, request)
        assert (torch.tensor(request.logprobs).double() - exact).abs().max() < 1e-4


def test_prompt_logprobs_equal_the_plain_model_also_within_a_group(driver: Driver, reference: torch.nn.Module) -> None:
    prompt = ragged_prompts(3)[2]
    whole, tail, none = driver.run(
        driver.make(prompt, logprob_start=0), driver.make(prompt, logprob_start=4), driver.make(prompt)
    )
    with torch.inference_mode():
        rows = reference(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    exact = rows[:-1].gather(-1, torch.tensor(prompt)[1:, None]).squeeze(-1).tolist()
    assert whole.input_logprobs == pytest.approx(exact, abs=1e-4)
    assert tail.input_logprobs == pytest.approx(exact[3:], abs=1e-4)
    assert none.input_logprobs is None


def test_zero_new_tokens_only_score(driver: Driver) -> None:
    nothing, scored = driver.run(
        driver.make([1, 2], SamplingParams(max_new_tokens=0)),
        driver.make([1, 2, 3], SamplingParams(max_new_tokens=0), logprob_start=0),
    )
    assert nothing.output == scored.output == []
    assert scored.input_logprobs is not None and len(scored.input_logprobs) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reserved_cache_takes_no_memory_until_it_is_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    reserved = zeros((64, 8, 8192, 64), torch.bfloat16, torch.device("cpu"))  # 512 MiB
    assert resident() - before < 64 * 2**20
    reserved[3, :, :5] = 1.0
    assert float(reserved[3].sum()) == 8 * 5 * 64


def test_samples_with_the_same_tokens_are_decoded_once_and_stay_exact_after_they_part(
    driver: Driver, reference: torch.nn.Module
) -> None:
    cold = SamplingParams(max_new_tokens=30, temperature=0.02, ignore_eos=True)  # alike for some tokens, then not
    warm = SamplingParams(max_new_tokens=9, ignore_eos=True)
    twins = [driver.make(range(20), cold) for _ in range(6)]
    requests = driver.run(*twins, driver.make([3, 1, 4], warm), driver.make([3, 1, 5], warm))
    runner = driver.engine.runner
    assert len({tuple(request.output) for request in twins}) > 1, "all alike: the test does not see them part"
    steps = 6 * 29 + 2 * 8  # the first token of each comes from the prefill
    assert runner.decoded_rows < 0.8 * steps, "nothing was shared: the test shows nothing"
    for request in requests:
        exact = reference_logprobs(reference, request, request.params.temperature)
        assert (torch.tensor(request.logprobs).double() - exact).abs().max() < 1e-4 / request.params.temperature


def test_prompts_that_begin_alike_share_the_prefill(driver: Driver, reference: torch.nn.Module) -> None:
    system = list(range(40))
    prompts = [[*system, 7, 8, 9], [*system, 7, 1], [*system], [2, 3]]
    requests = driver.run(*(driver.make(prompt) for prompt in prompts))
    assert driver.engine.runner.prefilled_tokens == 40 + 3 + 1 + 2
    for request in requests:
        assert (torch.tensor(request.logprobs).double() - reference_logprobs(reference, request)).abs().max() < 1e-4


def test_what_earlier_prompts_began_with_is_not_computed_again(driver: Driver, reference: torch.nn.Module) -> None:
    system = list(range(40))
    runner = driver.engine.runner

    def computed(*prompts: list[int]) -> int:
        before = runner.prefilled_tokens
        requests = driver.run(*(driver.make(prompt) for prompt in prompts))
        for request in requests:
            assert (torch.tensor(request.logprobs).double() - reference_logprobs(reference, request)).abs().max() < 1e-4
        return runner.prefilled_tokens - before

    assert computed([*system, 7, 8], [*system, 9]) == 43
    assert computed([*system, 3, 1, 4], [*system, 5]) == 4
    assert computed(system) == 1, "one token is computed, for its logits"
    assert computed([2, 7, 1]) == 3, "another beginning"
    assert computed([*system[:20], 1, 2]) == 2, "a part of what is kept"
    assert computed([*system, 5], [2, 7, *range(20)]) == 1 + 22, "one of them begins otherwise"
    assert computed([2, 7, *range(20), 9], [*system[:30], 8, 8], [*system, 6]) == 1 + 2 + 1, (
        "each has its own beginning"
    )


def test_conversations_side_by_side_reuse_their_own_turns(driver: Driver, reference: torch.nn.Module) -> None:
    runner = driver.engine.runner
    prompts = [[seed * 30 + token for token in range(30)] for seed in range(5)]
    for turn in range(4):
        before = runner.prefilled_tokens
        requests = driver.run(*(driver.make(p, SamplingParams(max_new_tokens=5, ignore_eos=True)) for p in prompts))
        for request in requests:
            assert (torch.tensor(request.logprobs).double() - reference_logprobs(reference, request)).abs().max() < 1e-4
        new = runner.prefilled_tokens - before
        assert new == (5 * 30 if turn == 0 else 5 * 4), "the last token of each answer, and the new message"
        prompts = [[*p, *r.output, 7, 8, 200 + turn] for p, r in zip(prompts, requests, strict=True)]
