"""What a run asks of its kinds of server and they cannot do, told before anything starts."""

from pathlib import Path

import pytest

from agentrl.config.errors import UserError
from agentrl.config.load import load_recipe
from agentrl.launch.run_checks import check_names
from tests.end_to_end import run

URL = "inference.urls=[http://h/v1]"
TEACHER = ["trainer.preset=distill", "teacher.model=big"]
RIGID = ["inference.engine=mine.py:Rigid"]
RETRACT = "weights.pause_mode=retract"
ADAPTER = ["trainer.lora_rank=8", "trainer.lora_push=adapter"]
KINDS = """
from agentrl.inference.kinds.kind import Capabilities, ServerKind

class Bare(ServerKind):
    capabilities = Capabilities(starts=True)

class Rigid(ServerKind):
    capabilities = Capabilities(
        starts=True, token_logprobs=True, pause_modes=("abort",), transports=("shm",),
        reasons={"disk": "it reads no files", "retract": "it has no queue"},
    )

class Versionless(ServerKind):
    capabilities = Capabilities(
        starts=True, token_logprobs=True, pause_modes=("abort", "retract"), transports=("shm", "disk"),
    )

not_a_kind = 3
"""


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["inference.engine=vlm"], ["inference.engine=vlm", "did you mean 'vllm'", "embedded, openai, sglang, vllm"]),
        ([*TEACHER, "teacher.engine=embeded"], ["teacher.engine=embeded", "did you mean 'embedded'"]),
        (["inference.engine=mine.py:Bar"], ["inference.engine=mine.py:Bar", "did you mean 'Bare'"]),
        (["inference.engine=yours.py:Bare"], ["inference.engine=yours.py:Bare", "no file yours.py"]),
        (["inference.engine=mine.py:not_a_kind"], ["inference.engine=mine.py:not_a_kind", "subclass of", "ServerKind"]),
        (["inference.engine=openai"], ["inference.engine=openai needs inference.urls=[URL]"]),
        (["inference.engine=openai", "trainer.type=null"], ["inference.engine=openai needs inference.urls=[URL]"]),
        (
            ["inference.engine=openai", URL],
            [
                "trainer.type=grpo needs token ids",
                "use inference.engine=embedded, sglang or vllm, or trainer.type=null",
            ],
        ),
        (["inference.engine=mine.py:Bare"], ["trainer.type=grpo needs token ids", "inference.engine=mine.py:Bare"]),
        (
            [*RIGID, "weights.pause_mode=abort", "trainer.replay_routing=true"],
            ["trainer.replay_routing needs the experts", "inference.engine=mine.py:Rigid", "embedded, sglang or vllm"],
        ),
        (
            ["inference.engine=vllm", "weights.transport=broadcast"],
            ["weights.transport=broadcast", "over NCCL only", "use weights.transport=shm or disk", "engine=vllm"],
        ),
        (
            ["inference.engine=mine.py:Rigid", "weights.transport=disk"],
            ["it reads no files", "use weights.transport=shm"],
        ),
        ([*RIGID, "inference.urls=[http://node7:1]"], ["mine.py:Rigid", "no way", "by shm"]),
        ([*RIGID, RETRACT], ["weights.pause_mode=retract", "it has no queue", "pause_mode=abort"]),
        (
            ["inference.engine=mine.py:Versionless", RETRACT],
            ["policy version of each token", "use weights.pause_mode=abort"],
        ),
        (
            [*ADAPTER, "inference.engine=sglang"],
            ["trainer.lora_push=adapter", "engine=sglang takes whole weights", "is for inference.engine=embedded,"],
        ),
        ([*ADAPTER, "inference.engine=vllm"], ["trainer.lora_push", "inference.engine=vllm"]),
        (
            [*TEACHER, "teacher.engine=openai"],
            [
                "teacher.engine=openai",
                "no token ids",
                "trainer.distill_coef=1",
                "teacher.engine=embedded, sglang or vllm",
            ],
        ),
        ([*TEACHER, "teacher.engine=mine.py:Rigid"], ["teacher.engine=mine.py:Rigid does not score"]),
    ],
)
def test_what_a_kind_cannot_do_is_refused_with_what_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], named: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(KINDS)
    with pytest.raises(UserError) as caught:
        check_names(load_recipe("arithmetic_grpo", settings, device="cpu"))
    assert all(part in str(caught.value) for part in named), str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("arithmetic_grpo", ["inference.engine=mine.py:Rigid", "weights.pause_mode=abort"]),
        ("arithmetic_grpo", ["inference.engine=mine.py:Versionless", "weights.pause_mode=abort"]),
        ("arithmetic_grpo", ["inference.engine=mine.py:Bare", "trainer.type=null"]),
        ("arithmetic_grpo", ["inference.engine=openai", URL, "trainer.type=null"]),
        ("arithmetic_grpo", ["inference.engine=vllm", *TEACHER, "teacher.engine=sglang"]),
        ("arithmetic_grpo", ["teacher.engine=openai"]),  # nobody asks it
        ("gsm8k_sft", ["inference.engine=openai", "supervised.evaluate=false"]),
    ],
)
def test_what_it_can_do_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(KINDS)
    check_names(load_recipe(name, settings, device="cpu"))


@pytest.mark.parametrize("engine", ["openai", "mine.py:Bare"])
def test_a_trainer_of_lines_evaluates_on_a_server_that_it_can_start_and_ask_in_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(KINDS)
    with pytest.raises(UserError, match=r"on a server that the run starts.*supervised\.evaluate=false"):
        check_names(load_recipe("gsm8k_sft", [f"inference.engine={engine}"], device="cpu"))


def test_a_dry_run_says_so_too(tiny_model: Path) -> None:
    result = run("recipe", "run", "arithmetic_grpo", f"model.name={tiny_model}", "inference.engine=sglan", "--dry-run")
    assert result.returncode == 2
    assert "did you mean 'sglang'" in result.stdout and "Traceback" not in result.stdout
