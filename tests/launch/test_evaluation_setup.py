"""The evaluation's own temperature: sent as set, printed, and kept with the result."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console
from transformers import AutoTokenizer

from agentrl.config.load import load_recipe
from agentrl.inference.client import ChatClient
from agentrl.launch.evaluation import evaluate_recipe
from agentrl.rollout.assemble import make_client

CHOICE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "42"}}
ANSWER = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE]}


@pytest.mark.parametrize("temperature", ["0", "0.6"])
async def test_an_evaluation_is_sampled_as_set_and_says_so(temperature: str, tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        sent.append(json.loads(await request.read()))
        return web.json_response(ANSWER)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    out = io.StringIO()
    async with TestServer(app) as server:
        recipe = load_recipe(
            "arithmetic_grpo",
            [
                "trainer.type=null", "inference.engine=openai", f"inference.urls=['{server.make_url('/v1')}']",
                "sampling.temperature=1.3", f"sampling.eval_temperature={temperature}", "sampling.max_new_tokens=9",
                "eval.tasks=3", "eval.samples=2", "inference.model=m",
            ],
            device="cpu",
        )  # fmt: skip
        console = Console(file=out, width=140)
        found = await asyncio.to_thread(evaluate_recipe, recipe, tmp_path, console)
    assert (found.evaluation.n, len(found.episodes), found.failures) == (6, 6, {})
    assert len(sent) == 6 and {request["temperature"] for request in sent} == {float(temperature)}
    shown = "greedy (temperature 0)" if temperature == "0" else "temperature 0.6"
    assert f"sample  {shown}, up to 9 tokens an answer, 3 tasks, 2 samples a task" in out.getvalue()
    result = json.loads((tmp_path / "result.json").read_text())
    assert found.evaluation.per_task == result["per_task"] and found.evaluation.setup == result["setup"]
    assert found.evaluation["pass@1"].mean == result["eval/pass@1"]
    setup = result["setup"]
    assert setup.pop("tasks_digest") and setup.pop("data") and "Reply with" in setup.pop("prompt")[-1]["content"]
    assert setup == {
        "model": "m", "env": {"id": "arithmetic", "kwargs": {"digit_reward": 0.5}},
        "agent": {"id": "chat", "kwargs": {}},
        "workflow": {"id": "agent_env", "kwargs": {}}, "reward": {"id": None, "kwargs": {}}, "tasks": 3, "samples": 2,
        "temperature": float(temperature), "max_new_tokens": 9, "seed": 0,
    }  # fmt: skip
    assert "env     arithmetic digit_reward=0.5, agent chat" in out.getvalue()
    assert len(result["per_task"]["accuracy"]) == 3 and result["eval/pass@1_tasks"] == 3


def test_training_and_evaluation_each_have_their_own_temperature(tiny_model: Path) -> None:
    settings = ["sampling.temperature=1.3", "sampling.eval_temperature=0.6"]
    client = make_client(load_recipe("arithmetic_grpo", settings, device="cpu"), tiny_model, [])
    assert isinstance(client, ChatClient)
    found = {evaluation: client._settings[evaluation].sampling.temperature for evaluation in (False, True)}
    assert found == {False: 1.3, True: 0.6}


def test_both_stop_where_the_template_closes_a_turn(tiny_model: Path, tmp_path: Path) -> None:
    """A base model's own end is another token."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    closing, tokenizer.eos_token = tokenizer.eos_token_id, "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    for model, expected in ((tiny_model, ()), (tmp_path, (closing,))):
        client = make_client(load_recipe("arithmetic_grpo", [], device="cpu"), model, [])
        assert isinstance(client, ChatClient)
        assert [client._settings[one].sampling.stop_token_ids for one in (False, True)] == [expected, expected]
