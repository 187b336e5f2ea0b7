"""What a backend promises, held against real servers over real HTTP."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from agentrl.core.agent import ContextOverflow
from agentrl.core.weight_manifest import SAMPLED, TensorSpec, WeightManifest
from agentrl.inference.backend import Backend, Generation, InferenceError, PauseMode, SamplingParams
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.assemble import make_backend
from agentrl.weights.broadcast_publisher import Sender
from tests.flat import flat_branches
from tests.servers.conftest import Reference, Server

PROMPT = [261, 5, 40, 7, 99, 31]
LONG = SamplingParams(max_new_tokens=400, temperature=0.0)
SECONDS = 60.0
References = tuple[Reference, Reference]


def close_to(reference: Reference, answer: Generation, temperature: float, prompt: list[int] = PROMPT) -> bool:
    expected = reference.logprobs(prompt, answer.token_ids, temperature)
    return (torch.tensor(answer.logprobs) - expected).abs().max().item() < 1e-3


async def interrupted(backend: Backend, mode: PauseMode) -> tuple["asyncio.Task[Generation]", int]:
    """A long request that a pause has met when some tokens were there; the request, and how many tries it took."""
    for attempt in range(1, 20):
        task = asyncio.create_task(backend.generate(PROMPT, LONG, request_id=f"long-{mode}-{attempt}"))
        await asyncio.sleep(0.05 * attempt)  # a server tells nobody that it is in the middle: tried until it was
        await backend.pause(mode)
        if mode != "abort":
            if not task.done():
                return task, attempt
        else:  # one that had ended by itself, however shortly before, was not met
            answer = await asyncio.wait_for(task, SECONDS)
            if answer.finish_reason == "abort" and answer.token_ids:
                return task, attempt
        await backend.resume()
        await asyncio.wait_for(task, SECONDS)
    raise AssertionError("no pause met the request")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    backend: Backend, references: References, temperature: float
) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=5)
    answer = await backend.generate(PROMPT, params, request_id=f"t{temperature}")
    assert 0 < len(answer.token_ids) <= 24 and answer.finish_reason in ("stop", "length")
    assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions)
    assert set(answer.versions) == {0}
    assert close_to(references[0], answer, temperature)


async def test_given_tokens_are_scored_at_temperature_one(backend: Backend, references: References) -> None:
    answer = [12, 7, 250, 40]
    for start in (1, len(PROMPT)):
        told = await backend.score(PROMPT + answer, start)
        expected = references[0].logprobs(PROMPT[:start], (PROMPT + answer)[start:], 1.0)
        assert len(told) == len(PROMPT + answer) - start
        assert (torch.tensor(told) - expected).abs().max().item() < 1e-3


async def test_requests_at_once_get_their_own_answers(backend: Backend, references: References) -> None:
    prompts = [PROMPT[: 2 + index] for index in range(5)]
    params = SamplingParams(max_new_tokens=8 + 3, temperature=1.0)
    answers = await asyncio.gather(
        *(backend.generate(prompt, params, request_id=f"many-{index}") for index, prompt in enumerate(prompts))
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert close_to(references[0], answer, 1.0, prompt)


async def test_a_stop_id_ends_the_answer_and_belongs_to_it(backend: Backend) -> None:
    free = await backend.generate(PROMPT, SamplingParams(max_new_tokens=12, temperature=0.0), request_id="free")
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    stop = free.token_ids[5]
    params = SamplingParams(max_new_tokens=12, temperature=0.0, stop_token_ids=(stop,))
    answer = await backend.generate(PROMPT, params, request_id="stopped")
    assert answer.finish_reason == "stop"
    assert answer.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


async def test_a_stop_text_ends_the_answer_and_belongs_to_it(backend: Backend, server: Server) -> None:
    tokenizer = AutoTokenizer.from_pretrained(server.first)
    free = await backend.generate(PROMPT, SamplingParams(max_new_tokens=60, temperature=0.0), request_id="free-text")
    texts = [tokenizer.decode(free.token_ids[:count]) for count in range(len(free.token_ids) + 1)]
    stop = next(letter for letter in texts[-1][4:] if letter != "\ufffd")
    params = SamplingParams(max_new_tokens=60, temperature=0.0, stop=(stop,))
    answer = await backend.generate(PROMPT, params, request_id="stop-text")
    end = next(count for count, text in enumerate(texts) if stop in text)
    assert (answer.token_ids, answer.finish_reason) == (free.token_ids[:end], "stop")
    assert len(answer.logprobs) == end


async def test_a_conversation_through_an_openai_client_is_trained_token_by_token(
    backend: Backend, server: Server, references: References
) -> None:
    template = ChatTemplate.from_folder(server.first)
    settings = SessionSettings(SamplingParams(max_new_tokens=20, seed=3), 480, locked=True, model="m")
    session = ChatSession(backend, template, settings)
    messages: list[Any] = []
    for turn in ("hello", "more"):
        messages.append({"role": "user", "content": turn})
        reply = await session.client().chat.completions.create(model="m", messages=messages)
        messages.append(reply.choices[0].message)
    (flat,) = flat_branches(session.trajectory)
    trained = [place for place, mask in enumerate(flat.loss_mask) if mask]
    expected = references[0].logprobs(flat.token_ids[:1], flat.token_ids[1:], 1.0)[[place - 1 for place in trained]]
    told = torch.tensor([flat.logprobs[place] for place in trained])
    assert len(trained) > 4 and (told - expected).abs().max().item() < 1e-3
    assert {flat.versions[place] for place in trained} == {0}


async def test_a_prompt_that_does_not_fit_is_a_context_overflow(backend: Backend) -> None:
    with pytest.raises(ContextOverflow):
        await backend.generate([5] * 600, SamplingParams(max_new_tokens=4), request_id="big")


async def test_a_server_tells_that_it_is_paused_and_another_client_may_end_it(backend: Backend, server: Server) -> None:
    """As the next run does for one that was killed; the embedded engine ends its pause itself when its lease ends."""
    assert await backend.paused() is False
    await backend.pause("retract")
    assert await backend.paused() is True
    other = make_backend(server.recipe, server.url)
    await other.resume()
    assert await backend.paused() is False
    await other.close()


async def test_new_weights_answer_with_their_version_and_are_verified(
    backend: Backend, server: Server, references: References
) -> None:
    params = SamplingParams(max_new_tokens=16, temperature=0.0)
    before = await backend.generate(PROMPT, params, request_id="before")
    await backend.pause("retract")
    assert await backend.alive()
    await backend.load(str(server.second), 7)
    assert await backend.version() == 7
    assert await backend.verify(manifest(server.second, 7)) == []
    assert await backend.verify(manifest(server.second, 8)) != [] or server.kind == "embedded"
    await backend.resume()
    after = await backend.generate(PROMPT, params, request_id="after")
    assert before.token_ids != after.token_ids
    assert set(after.versions) == {7}
    assert close_to(references[1], after, 1.0), "greedy answers carry logprobs at temperature 1"


async def test_other_values_than_those_that_were_sent_are_noticed(backend: Backend, server: Server) -> None:
    if server.kind == "vllm":
        pytest.skip("vLLM shows no values under the checkpoint's names: its version is all there is to compare")
    wrong = await backend.verify(manifest(server.second, 0))
    assert wrong and "weight_version" not in wrong


async def test_a_folder_that_is_not_there_is_an_error_and_the_old_weights_go_on(
    backend: Backend, tmp_path: Path
) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=0.0)
    before = await backend.generate(PROMPT, params, request_id="good")
    await backend.pause("abort")
    with pytest.raises(InferenceError):
        await backend.load(str(tmp_path / "nothing"), 3)
    await backend.resume()
    again = await backend.generate(PROMPT, params, request_id="still-good")
    assert (again.token_ids, set(again.versions)) == (before.token_ids, {0})


async def test_an_abort_by_a_pause_gives_what_was_sampled_and_new_requests_wait_for_the_end(
    backend: Backend, references: References
) -> None:
    task, _ = await interrupted(backend, "abort")
    part = task.result()
    assert part.finish_reason == "abort" and close_to(references[0], part, 1.0)
    held = asyncio.create_task(backend.generate(PROMPT, LONG, request_id="held"))
    done, _ = await asyncio.wait({held}, timeout=0.5)
    assert not done, "a request was answered during a pause"
    await backend.resume()
    whole = await asyncio.wait_for(held, SECONDS)
    assert whole.token_ids[: len(part.token_ids)] == part.token_ids
    rest = SamplingParams(max_new_tokens=LONG.max_new_tokens - len(part.token_ids), temperature=0.0)
    more = await backend.generate(PROMPT + part.token_ids, rest, request_id="rest")
    assert part.token_ids + more.token_ids == whole.token_ids, "the rest is not what would have come"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_request_over_a_push_tells_the_version_of_each_token(
    backend: Backend, server: Server, references: References, mode: PauseMode
) -> None:
    task, attempt = await interrupted(backend, mode)
    await backend.load(str(server.second), 9)
    await backend.resume()
    answer = await asyncio.wait_for(task, SECONDS)
    assert sorted(answer.versions) == answer.versions and set(answer.versions) <= {0, 9}, f"try {attempt}"
    old = answer.versions.count(0)
    assert len(answer.versions) == len(answer.token_ids) and old < len(answer.token_ids)
    head = Generation(answer.token_ids[:old], answer.logprobs[:old], answer.versions[:old], "abort")
    assert not old or close_to(references[0], head, 1.0)
    if mode == "retract":  # the cache was computed anew: the tail is as if the new weights had read all of it
        tail = Generation(answer.token_ids[old:], answer.logprobs[old:], answer.versions[old:], "length")
        assert close_to(references[1], tail, 1.0, PROMPT + answer.token_ids[:old])


async def test_a_prompt_from_before_a_push_in_place_is_read_by_the_new_weights(
    backend: Backend, references: References, server: Server
) -> None:
    """Although a request runs over the push, for which the server keeps its cache (NeMo-RL 4018)."""
    seen, params = (PROMPT * 50)[:280], SamplingParams(max_new_tokens=8, temperature=1.0, seed=2)  # blocks are 128 long
    await backend.generate(seen, params, request_id="seen-before")
    task, _ = await interrupted(backend, "in_place")
    await backend.load(str(server.second), 9)
    await backend.resume()
    answer = await backend.generate(seen, params, request_id="seen-after")
    await asyncio.wait_for(task, SECONDS)
    assert set(answer.versions) == {9}
    assert close_to(references[1], answer, 1.0, seen)


async def test_an_answer_can_be_held_to_a_schema_where_the_server_can(backend: Backend, server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    params = SamplingParams(max_new_tokens=100, temperature=1.0, json_schema=json.dumps(schema))
    if not server.can.structured_output:
        with pytest.raises(InferenceError, match="json_schema"):
            await backend.generate(PROMPT, params, request_id="json")
        return
    answer = await backend.generate(PROMPT, params, request_id="json")
    text = AutoTokenizer.from_pretrained(server.first).decode(answer.token_ids, skip_special_tokens=True)
    assert json.loads(text) in ({"a": "x"}, {"a": "y"}), text


async def test_broadcast_weights_arrive_twice_in_one_group(
    backend: Backend, server: Server, references: References
) -> None:
    if "broadcast" not in server.can.transports:
        pytest.skip("vLLM's own transfer engines run on NCCL only; the recipe refuses the combination")
    sender = Sender({backend.url: await backend.ranks()}, "gloo", SECONDS)
    params = SamplingParams(max_new_tokens=16, temperature=0.0)
    try:
        for version, (folder, reference) in enumerate(
            ((server.second, references[1]), (server.first, references[0])), start=4
        ):
            tensors = load_file(folder / "model.safetensors")
            specs = [TensorSpec(name=name, shape=tuple(tensor.shape)) for name, tensor in tensors.items()]
            plan = sender.plan((tuple(specs[:5]), tuple(specs[5:])))
            told = manifest(folder, version, transport="broadcast", path="", broadcast=plan)
            await backend.pause("retract")
            receiving = asyncio.create_task(backend.receive(told, plan))
            await asyncio.to_thread(send, sender, list(tensors.values()))
            await asyncio.wait_for(receiving, SECONDS)
            assert await backend.verify(told) == []
            await backend.resume()
            answer = await backend.generate(PROMPT, params, request_id=f"broadcast-{version}")
            assert set(answer.versions) == {version}
            assert close_to(reference, answer, 1.0)
    finally:
        sender.close()


def send(sender: Sender, tensors: list[torch.Tensor]) -> None:
    assert threading.current_thread() is not threading.main_thread()
    group = sender.connect()
    for tensor in tensors:
        group.broadcast(tensor)


def manifest(folder: Path, version: int, **more: Any) -> WeightManifest:
    """What a trainer would say of a folder's weights, without fingerprints."""
    tensors = load_file(folder / "model.safetensors")
    samples = {name: t.view(-1)[: min(SAMPLED, t.shape[-1])].tolist() for name, t in tensors.items() if t.dim() == 2}
    told: dict[str, Any] = {"transport": "disk", "path": str(folder), **more}
    return WeightManifest(version=version, dtype="F32", nbytes=0, fingerprints={}, samples=samples, **told)
