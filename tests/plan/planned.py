"""Cases of plans for tests."""

from typing import Any

from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.plan.assumptions import Assumptions, assumed
from agentrl.plan.cards import find_card
from agentrl.plan.decoder import Decoder, decoder_of
from agentrl.plan.published import PUBLISHED
from agentrl.plan.times import Case
from agentrl.plan.work import work_of

LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"


def recipe_for(*settings: str, device: Any = "cuda") -> Recipe:
    """``gsm8k_grpo`` for a device, in bfloat16."""
    made = load_recipe("gsm8k_grpo", [*settings, "trainer.dtype=bfloat16", "inference.dtype=bfloat16"], device=device)
    return made.model_copy(update={"launch": made.launch.model_copy(update={"device": device})})


def case_for(model: str = "Qwen/Qwen2.5-1.5B-Instruct", *settings: str, gpu: str = "h100", **values: float) -> Case:
    """A case on a card, with some assumptions set."""
    recipe = recipe_for(*settings, device="cpu" if gpu == "cpu" else "cuda")
    known = assumed(find_card(gpu), recipe).replaced(values, "test")
    return Case(recipe, decoder(model), work_of(recipe, known), known)


def decoder(model: str) -> Decoder:
    """The sizes of a published model."""
    return decoder_of(PUBLISHED[model])


def known_for(case: Case, **values: float) -> Assumptions:
    """The assumptions of a case with other values."""
    return case.known.replaced(values, "test")
