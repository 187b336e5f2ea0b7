"""Says what to change where a plan does not fit, and what each change alone would bring.

Guarantees: every remedy is a key or an option that exists, and is tried on the same estimate; a change that brings
nothing is not named. Where no single change is enough, those that together are, are named.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.plan.memory import GB, PAGED, server_memory, total, trainer_memory
from agentrl.plan.prediction import Prediction
from agentrl.plan.times import Case, at_a_time, microbatches

LEAST_TOKENS = 1024  # of a micro-batch that still keeps a card busy
WORTH = 0.98  # of the memory: a change that leaves more than this brings nothing
Change = tuple[str, dict[str, Any]]  # key=value as it is typed, and the keys of the trainer section


def remedies(case: Case, found: Prediction, gpus: int) -> list[str]:
    """Returns what to change so that a plan fits; nothing if it fits."""
    lines: list[str] = []
    if not found.trainer_fits:
        lines += _trainer(case, found)
    if not found.server_fits:
        lines += _server(case, found, gpus)
    return lines


def _trainer(case: Case, found: Prediction) -> list[str]:
    taken, room = _trainer_bytes(case.recipe, case, found), found.memory
    where = " beside a server" if found.layout.shared else ""
    lines = [f"a trainer rank needs {taken / GB:,.1f} GB{where}, there are {room / GB:,.1f}:"]
    enough, together = False, case.recipe
    used: list[str] = []
    for text, keys in _trainer_changes(case):
        alone = _trainer_bytes(_changed(case.recipe, keys), case, found)
        if alone > WORTH * taken:
            continue
        enough = enough or alone <= room
        lines.append(f"  {text}: {alone / GB:,.1f} GB{', fits' * (alone <= room)}")
        if _trainer_bytes(together, case, found) > room:
            together, used = _changed(together, keys), [*used, text]
    mesh = found.layout.mesh
    if mesh.owners > 1 and not mesh.reshard:
        freed = replace(found.layout, mesh=replace(mesh, reshard=True))
        alone = _trainer_bytes(case.recipe, case, replace(found, layout=freed))
        enough = enough or alone <= room
        lines.append(f"  trainer.reshard_after_forward=true: {alone / GB:,.1f} GB{', fits' * (alone <= room)}")
    if not enough and _trainer_bytes(together, case, found) <= room:
        lines.append(f"  together {' '.join(used)} fit")
    elif not enough:
        lines.append(
            "  none of these is enough: more cards for the trainer, trainer.tensor_parallel, or a smaller model"
        )
    return lines


def _trainer_changes(case: Case) -> Iterator[Change]:
    trainer = case.recipe.trainer
    if not trainer.gradient_checkpointing:
        yield "trainer.gradient_checkpointing=true", {"gradient_checkpointing": True}
    tokens = max(LEAST_TOKENS, case.recipe.inference.context_length)
    if trainer.tokens_per_microbatch > tokens:
        yield f"trainer.tokens_per_microbatch={tokens}", {"tokens_per_microbatch": tokens}
    if trainer.logprob_chunk > 256:
        yield "trainer.logprob_chunk=256", {"logprob_chunk": 256}
    if trainer.kl_coef > 0 and trainer.lora_rank is None:
        yield "trainer.kl_coef=0", {"kl_coef": 0.0}
    if not trainer.cpu_offload and case.recipe.launch.device != "cpu":
        yield "trainer.cpu_offload=true", {"cpu_offload": True}
    if trainer.lora_rank is None:
        yield "trainer.lora_rank=32", {"lora_rank": 32}


def _trainer_bytes(recipe: Recipe, case: Case, found: Prediction) -> float:
    mesh = found.layout.mesh
    rounds = microbatches(replace(case, recipe=recipe), mesh)
    return total(trainer_memory(recipe, case.decoder, mesh, case.known, updates=rounds)) + found.beside


def _changed(recipe: Recipe, keys: dict[str, Any], section: str = "trainer") -> Recipe:
    """Returns the recipe with other values; whether they go together with the rest is checked when it runs."""
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=keys)})


def _server(case: Case, found: Prediction, gpus: int) -> list[str]:
    taken, room, inference = total(found.server), found.server_room, case.recipe.inference
    lines = [f"a server's card needs {taken / GB:,.1f} GB, it may take {room / GB:,.1f}:"]
    cards = found.layout.server_cards

    def need(recipe: Recipe, cards: int) -> float:
        layout = replace(found.layout, server_cards=cards)
        here = at_a_time(replace(case, recipe=recipe), layout)
        return total(server_memory(recipe, case.decoder, cards, case.known, here, case.work.context))

    more = [2 * cards * 2**power for power in range(4) if 2 * cards * 2**power < gpus]
    for wider in more:
        if (alone := need(case.recipe, wider)) <= room:
            change = f"inference.tp={wider}" if inference.engine in PAGED else f"--server-gpus {wider}"
            lines.append(f"  {change}: {alone / GB:,.1f} GB, fits")
            break
    for key in ("max_running", "context_length"):
        least = 1 if key == "max_running" else case.recipe.sampling.max_new_tokens + 1
        value = getattr(inference, key)
        while value > least and need(_changed(case.recipe, {key: value}, "inference"), cards) > room:
            value = max(least, value // 2)
        alone = need(_changed(case.recipe, {key: value}, "inference"), cards)
        if value < getattr(inference, key) and alone <= WORTH * taken:
            lines.append(f"  inference.{key}={value}: {alone / GB:,.1f} GB{', fits' * (alone <= room)}")
    if len(lines) == 1:
        lines.append("  the weights alone are too large: cards with more memory, or a smaller model")
    return lines
