"""Shows a plan as text of 100 columns, or as plain data.

Guarantees: every assumption stands in it with its source; what does not fit is said before any time.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from agentrl.plan.assumptions import Assumptions
from agentrl.plan.memory import GB, PAGED, Item, cache_tokens, largest_context, largest_microbatch, total
from agentrl.plan.prediction import Prediction
from agentrl.plan.remedies import remedies
from agentrl.plan.times import Case, at_a_time, bound, decode_seconds

SHOWN = 5  # splits
LEFT_OUT = "left out: padding, imbalance between ranks, start-up; exchange between ranks is not hidden behind compute"


def lines(
    case: Case, chosen: Prediction, tried: Sequence[Prediction], model: str, card: str, gpus: int, recipe_name: str
) -> list[str]:
    """Returns the plan as lines of text.

    Args:
        case: Case that was planned.
        chosen: The best split.
        tried: All splits.
        model: Sentence that says where the model's sizes are from.
        card: Name of the card.
        gpus: Number of cards.
        recipe_name: The recipe, as it was named.
    """
    decoder, recipe = case.decoder, case.recipe
    active = f", {decoder.active / 1e9:.3g} 10^9 of them for a token" if decoder.experts else ""
    text = [
        f"model      {model}; {decoder.parameters / 1e9:.4g} x 10^9 parameters{active}",
        f"cards      {gpus} x {card}; trainer in {recipe.trainer.dtype} on float32 states, servers "
        f"({recipe.inference.engine}) in {recipe.inference.dtype}",
        f"step       {case.work.groups:g} groups of {case.work.members:g}, {case.work.sampled:,.0f} sampled tokens, "
        f"{case.work.computed:,.0f} computed in an update",
        "",
    ]
    text += [*_memory(case, chosen), *_limits(case, chosen), ""]
    if problems := remedies(case, chosen, gpus):
        text += ["does not fit", *(f"  {line}" for line in problems), ""]
    text += [*_parts(chosen), "", *_splits(chosen, tried), "", *assumption_lines(case.known), f"  {LEFT_OUT}", ""]
    return text + _next(case, chosen, recipe_name)


def split_text(found: Prediction) -> str:
    """Returns who gets which cards, in words."""
    layout = found.layout
    if layout.shared:
        return "1 card for a server and the trainer, in turns"
    each = f" of {layout.server_cards} cards" if layout.server_cards > 1 else ""
    servers = f"{layout.servers} server{'s' * (layout.servers > 1)}{each}"
    return f"{servers} + {layout.mesh.ranks} trainer ranks ({layout.mesh})"


def _size(nbytes: float) -> str:
    return f"{nbytes / GB:,.2f} GB"


def _items(name: str, items: Sequence[Item], room: float) -> list[str]:
    text = [f"{name}"]
    for item in items:
        where = ", in the host's memory" if item.host else ""
        text.append(f"  {item.what + where:<57.57} {item.dtype:<8}{_size(item.nbytes):>11}")
    full = total(items)
    return [*text, f"  {'sum, of ' + _size(room):<66}{_size(full):>11}" + " TOO MUCH" * (full > room)]


def _memory(case: Case, chosen: Prediction) -> list[str]:
    return [
        *_items(f"memory of a trainer rank ({chosen.layout.mesh})", chosen.trainer, chosen.memory),
        *_items("memory of a server's card", chosen.server, chosen.server_room),
    ]


def _limits(case: Case, chosen: Prediction) -> list[str]:
    layout, known = chosen.layout, case.known
    micro = largest_microbatch(case.recipe, case.decoder, layout.mesh, known, chosen.beside)
    context, why = largest_context(case.recipe, case.decoder, layout.mesh, layout.server_cards, known, chosen.beside)
    return [
        f"micro-batch  at most {micro // layout.mesh.context:,} tokens (trainer.tokens_per_microbatch="
        f"{case.recipe.trainer.tokens_per_microbatch:,})",
        f"context      at most {context:,} tokens: {why}",
        f"cache        {cache_tokens(case.recipe, case.decoder, layout.server_cards, known):,} tokens of keys and "
        "values on a server",
    ]


def _parts(chosen: Prediction) -> list[str]:
    text = [f"a step of {chosen.seconds:,.3g} s with {split_text(chosen)}"]
    names = {"serve": "servers", "train": "trainer"}
    for part in chosen.parts:
        text.append(f"  {names[part.side]:<8} {part.name:<11}{part.seconds:>10,.3g} s  {part.how}")
    serve, train = chosen.side("serve"), chosen.side("train")
    both = f"servers {serve:,.3g} s, trainer {train:,.3g} s"
    if chosen.overlap:
        slower = "servers" if serve >= train else "trainer"
        return [*text, f"  side by side: {both}; the {slower} set the step"]
    return [*text, f"  one after the other: {both}"]


def _splits(chosen: Prediction, tried: Sequence[Prediction]) -> list[str]:
    ordered = sorted(tried, key=lambda one: (not one.fits, one.seconds))[:SHOWN]
    if chosen not in ordered:
        ordered.append(chosen)
    width = max(42, *(len(split_text(one)) + 1 for one in ordered))
    text = [f"  {'split':<{width}}{'step':>10}{'servers':>10}{'trainer':>10}  fits"]
    for one in ordered:
        mark = "*" if one is chosen else " "
        numbers = f"{one.seconds:>8,.3g} s{one.side('serve'):>8,.3g} s{one.side('train'):>8,.3g} s"
        text.append(f"{mark} {split_text(one):<{width}}{numbers}  {'yes' if one.fits else 'no'}")
    return text


def assumption_lines(known: Assumptions) -> list[str]:
    """Returns the assumptions, each with the number of its source, and the sources below them."""
    sources = list(dict.fromkeys(one.source for one in known.all()))
    text = ["assumed (change with --assume NAME=VALUE)"]
    for one in known.all():
        value = f"{one.value:,.4g} {one.unit}".strip()
        text.append(f"  {one.name:<24}{value:<16} {one.meaning} [{sources.index(one.source) + 1}]")
    return [*text, *(f"  [{number}] {source}" for number, source in enumerate(sources, 1))]


def _next(case: Case, chosen: Prediction, name: str) -> list[str]:
    """Returns the simulation that plays the plan with the controller itself."""
    if chosen.layout.shared:
        return []
    return ["to play this with the controller itself, episode by episode:", f"  {sim_command(case, chosen, name)}"]


def sim_command(case: Case, chosen: Prediction, name: str) -> str:
    """Returns the ``agentrl sim`` command with this plan's lengths and speeds.

    Its servers have one device each; a server of several cards counts as one there.
    """
    layout, recipe, known = chosen.layout, case.recipe, case.known
    token, sequence = line_of(case, chosen)
    train = chosen.side("train") - chosen.parts[-1].seconds
    words = ["agentrl sim", name, f"--gpus {layout.servers + layout.mesh.ranks}"]
    words += [f"--mean {known['answer']:g} --sigma {known['sigma']:g}"]
    words += [f"--token-ms {token * 1e3:.3g} --sequence-ms {sequence * 1e3:.3g}"]
    words += [f"--train-seconds {train:.3g} --train-devices {layout.mesh.ranks}"]
    words += [f"--push-seconds {chosen.parts[-1].seconds:.3g}"]
    words += [f"rollout.{key}={getattr(recipe.rollout, key)}" for key in ("batch_size", "group_size", "max_concurrent")]
    words += [f"sampling.max_new_tokens={recipe.sampling.max_new_tokens}"]
    words += [f"inference.context_length={recipe.inference.context_length}"]
    slots = max(1, int(at_a_time(case, layout)))
    return " ".join(
        [*words, f"inference.max_running={slots if recipe.inference.engine in PAGED else recipe.inference.max_running}"]
    )


def line_of(case: Case, chosen: Prediction) -> tuple[float, float]:
    """Returns ``a`` and ``b`` of ``a + b * sequences``, the line through a quarter of the load and all of it."""
    full = max(2.0, at_a_time(case, chosen.layout))
    few, many = (decode_seconds(case, count, chosen.layout.server_cards) for count in (full / 4, full))
    slope = max(0.0, (many - few) / (full - full / 4))
    return max(0.0, many - slope * full), slope


def as_data(
    case: Case, chosen: Prediction, tried: Sequence[Prediction], model: str, card: str, gpus: int
) -> dict[str, Any]:
    """Returns the plan as plain data."""
    layout, known = chosen.layout, case.known
    context, why = largest_context(case.recipe, case.decoder, layout.mesh, layout.server_cards, known, chosen.beside)
    return {
        "model": {"source": model, "parameters": case.decoder.parameters, "active": case.decoder.active},
        "gpus": gpus,
        "card": card,
        "bound": bound(case.recipe),
        "best": _prediction(chosen),
        "tried": [_prediction(one) for one in tried],
        "largest_microbatch": largest_microbatch(case.recipe, case.decoder, layout.mesh, known, chosen.beside)
        // layout.mesh.context,  # as trainer.tokens_per_microbatch counts
        "largest_context": {"tokens": context, "because": why},
        "change": remedies(case, chosen, gpus),
        "assumptions": [asdict(one) for one in known.all()],
    }


def _prediction(one: Prediction) -> dict[str, Any]:
    return {
        "servers": one.layout.servers,
        "server_gpus": one.layout.server_cards,
        "mesh": asdict(one.layout.mesh),
        "shared": one.layout.shared,
        "step_seconds": one.seconds,
        "overlap": one.overlap,
        "parts": [asdict(part) for part in one.parts],
        "fits": one.fits,
        "trainer_bytes": [asdict(item) for item in one.trainer],
        "server_bytes": [asdict(item) for item in one.server],
    }
