"""The text by which the first push is checked is encoded for servers that take the files' names, and for no others."""

from pathlib import Path

import pytest

from agentrl.config.load import load_recipe
from agentrl.inference.template import ChatTemplate
from agentrl.launch.resolve import resolve
from agentrl.rollout.assemble import first_push_probe
from agentrl.weights.first_push import TEXT


@pytest.mark.parametrize(("engine", "checked"), [("sglang", True), ("vllm", True), ("embedded", False)])
def test_the_first_push_is_checked_where_the_server_reads_names_of_its_own(
    engine: str, checked: bool, tiny_model: Path
) -> None:
    recipe = resolve(load_recipe("arithmetic_grpo", [f"inference.engine={engine}"], device="cpu"), None)
    template = ChatTemplate.from_folder(tiny_model)
    ids = first_push_probe(recipe, template)
    assert template.text(ids) == TEXT if checked else ids == []
