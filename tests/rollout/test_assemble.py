"""What a push does at servers of each kind: the text by which the first is checked, and how requests stop."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from agentrl.config.load import load_recipe
from agentrl.core.images import data_url
from agentrl.core.message_shape import ImageRefused
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


@pytest.mark.parametrize(("engine", "refused"), [("sglang", False), ("vllm", True), ("embedded", False)])
def test_marks_between_placeholders_are_refused_by_servers_that_would_end_at_them(
    engine: str, refused: bool, tmp_path: Path
) -> None:
    recipe = resolve(load_recipe("arithmetic_grpo", [f"inference.engine={engine}"], device="cpu"), None)
    seen = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(picture())}}]}]
    for kind in ("qwen2_vl", "idefics3"):
        template, _, _ = make_settings(recipe, build_tiny_vision(tmp_path / kind, kind))
        with pytest.raises(ImageRefused, match="marks around") if refused and kind == "idefics3" else nullcontext():
            template.shown.check(seen)
