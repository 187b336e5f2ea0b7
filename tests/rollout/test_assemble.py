"""What a push does at servers of each kind: the text by which the first is checked, and how requests stop."""

from pathlib import Path

import pytest

from agentrl.config.load import load_recipe
from agentrl.core.message_shape import ImageRefused, in_shape
from agentrl.inference.template import ChatTemplate
from agentrl.launch.resolve import resolve
from agentrl.rollout.assemble import first_push_probe, make_settings, pause_mode
from agentrl.weights.first_push import TEXT
from tests.tiny_vision import build_tiny_vision, picture


@pytest.mark.parametrize(("engine", "checked"), [("sglang", True), ("vllm", True), ("embedded", False)])
def test_the_first_push_is_checked_where_the_server_reads_names_of_its_own(
    engine: str, checked: bool, tiny_model: Path
) -> None:
    recipe = resolve(load_recipe("arithmetic_grpo", [f"inference.engine={engine}"], device="cpu"), None)
    template = ChatTemplate.from_folder(tiny_model)
    ids = first_push_probe(recipe, template)
    assert template.text(ids) == TEXT if checked else ids == []


@pytest.mark.parametrize(("engine", "mode"), [("sglang", "retract"), ("vllm", "abort"), ("embedded", "retract")])
def test_a_push_ends_requests_with_images_where_the_servers_cannot_go_on_with_them(
    engine: str, mode: str, tiny_model: Path, tmp_path: Path
) -> None:
    settings = [f"inference.engine={engine}", "weights.pause_mode=retract"]
    recipe = resolve(load_recipe("arithmetic_grpo", settings, device="cpu"), None)
    assert pause_mode(recipe, ChatTemplate.from_folder(tiny_model)) == "retract"
    seeing = ChatTemplate.from_folder(build_tiny_vision(tmp_path))
    assert pause_mode(recipe, seeing) == mode


@pytest.mark.parametrize(("kind", "splits"), [("qwen2_vl", False), ("idefics3", True)])
def test_vllm_refuses_images_with_tokens_between_their_placeholders_before_a_run(
    kind: str, splits: bool, tmp_path: Path
) -> None:
    model = build_tiny_vision(tmp_path, kind)
    shown = in_shape({"role": "user", "content": [{"type": "image", "image": picture()}]}, images=True)
    for engine in ("vllm", "sglang"):
        recipe = resolve(load_recipe("arithmetic_grpo", [f"inference.engine={engine}"], device="cpu"), None)
        template = make_settings(recipe, model)[0]
        if splits and engine == "vllm":
            with pytest.raises(
                ImageRefused, match=r"engine=vllm take none whose placeholders .* \(Idefics3Processor\)"
            ):
                template.first([shown])
        else:
            assert template.first([shown])
