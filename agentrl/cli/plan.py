"""``agentrl plan``: memory and step time of a recipe on so many cards, before it runs, and an account after."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.completion import complete_override, complete_recipe, complete_run

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe
    from agentrl.models.sizes import Decoder
    from agentrl.plan.assumptions import Assumptions


def plan(
    name: Annotated[
        str | None,
        typer.Argument(help="A recipe's name, or a path to its YAML file.", autocompletion=complete_recipe),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings, e.g. model.name=Qwen/Qwen3-8B.", metavar="[KEY=VALUE]...", autocompletion=complete_override
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file merged over the recipe.")] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Cards to split between servers and trainer; by default those of allocation=, or 8."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Card: h100 (default), h200, b200, a100, a100-40, l40s, 4090, mi300x, cpu."),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option("--assume", metavar="NAME=VALUE", help="Another value of an assumption; the plan lists them all."),
    ] = None,
    server_gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Cards of a server; by default inference.tp, or the fewest that hold the weights."),
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option("--from", help="Run whose prompts, lengths and times outside are taken.",
                                  autocompletion=complete_run)
    ] = None,
    probe: Annotated[
        float | None,
        typer.Option(min=5, help="Measure this machine for at most so many seconds, in place of what is assumed."),
    ] = None,
    explain: Annotated[
        Path | None,
        typer.Option(help="Run to compare with: prediction beside measurement.", autocompletion=complete_run),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line instead of text.")] = False,
) -> None:  # fmt: skip
    """Plan a recipe: memory of each process, time of a step by part, the best split of the cards.

    Needs the model's config.json alone, neither its weights nor torch (but for --probe). Every number that is assumed
    is printed with its source and can be set.
    """
    import json

    from agentrl.config.errors import ConfigError
    from agentrl.config.mesh import check_mesh

    if explain is not None:
        _explain(explain, gpu, assume or (), probe, as_json=as_json)
        return
    if name is None:
        raise ConfigError("name a recipe (agentrl recipe list), or a run to account for: agentrl plan --explain RUN")
    from agentrl.plan.cards import find_card
    from agentrl.plan.prediction import choose, layouts, predict
    from agentrl.plan.published import config_of
    from agentrl.plan.report import as_data, lines
    from agentrl.plan.times import Case
    from agentrl.plan.work import work_of

    gpu = gpu or "h100"
    card = find_card(gpu)
    recipe = _loaded(name, overrides or (), config, "cpu" if card.name == "cpu" else "cuda")
    decoder, source = _decoder(recipe)
    known = _assumptions(recipe, gpu, assume or (), probe, decoder, lengths)
    case = Case(recipe, decoder, work_of(recipe, known), known)
    gpus = gpus or _allocated(recipe)
    cards = _server_cards(case, gpus, server_gpus)
    most = recipe.rollout.batch_size * recipe.rollout.group_size
    machine = int(known["gpus_per_machine"])
    splits = layouts(gpus, cards, most, machine, recipe.trainer)
    check_mesh(recipe.trainer, config_of(recipe.model.name)[0])
    found = [predict(case, one) for one in splits]
    chosen = choose(found)
    if as_json:
        typer.echo(json.dumps(as_data(case, chosen, found, source, card.name, gpus)))
        return
    typer.echo("\n".join(lines(case, chosen, found, source, card.name, gpus, name)))


def _loaded(name: str, overrides: Any, config: Path | None, device: Any) -> "Recipe":
    """Loads a recipe for a device that need not be here, with its dtypes decided.

    Raises:
        ConfigError: It does not train on episodes.
    """
    from agentrl.config.errors import ConfigError
    from agentrl.config.load import load_recipe
    from agentrl.config.supervised import SUPERVISED
    from agentrl.host.compute_dtype import resolved_dtype

    settings = [*overrides, *_ranks_of_mesh(overrides)]
    recipe = load_recipe(name, settings, str(config) if config is not None else None, device)
    kind = recipe.trainer.type
    if kind is None or kind in SUPERVISED:
        raise ConfigError(f"{name} has trainer.type={kind}: agentrl plan is about training on episodes")
    dtypes = {
        "trainer": {"dtype": resolved_dtype(recipe.trainer.dtype, device)},
        "inference": {"dtype": resolved_dtype(recipe.inference.dtype, device)},
        "launch": {"device": device},
    }
    changed = {part: getattr(recipe, part).model_copy(update=keys) for part, keys in dtypes.items()}
    return recipe.model_copy(update=changed)


def _ranks_of_mesh(overrides: Sequence[str]) -> list[str]:
    """Returns the fewest ranks that fill a mesh that was asked for; the plan decides how many there are."""
    from math import lcm

    from agentrl.config.mesh import SIZES
    from agentrl.config.overrides import parse_override

    given = dict(map(parse_override, overrides))
    sizes = [given.get(f"trainer.{name}", 1) for name in SIZES]
    told = bool(given.keys() & {"trainer.nproc", "allocation"})
    if told or not all(isinstance(size, int) and size > 0 for size in sizes) or set(sizes) == {1}:
        return []  # what is no number is refused with the recipe
    replicas, context, tensor, expert = sizes
    return [f"trainer.nproc={lcm(replicas * context * tensor, replicas * expert)}"]


def _decoder(recipe: "Recipe") -> "tuple[Decoder, str]":
    from agentrl.config.errors import ConfigError
    from agentrl.models.sizes import decoder_of
    from agentrl.plan.published import config_of

    config, source = config_of(recipe.model.name)
    try:
        return decoder_of(config), source
    except ValueError as error:
        raise ConfigError(f"{source}: cannot be planned: {error}") from error


def _assumptions(
    recipe: "Recipe", gpu: str, assume: Any, probe: float | None, decoder: "Decoder", lengths: Path | None = None
) -> "Assumptions":
    """Returns what is assumed: published, then taken from a run, then measured, then set by hand."""
    from agentrl.plan.assumptions import assumed, parse_assumed
    from agentrl.plan.cards import find_card

    known, by_hand = assumed(find_card(gpu), recipe), parse_assumed(assume)
    if lengths is not None:
        known = known.replaced(_recorded(_folder(lengths), by_hand), f"as in {_folder(lengths)}")
    if probe is not None:
        from agentrl.config.device import detect_device
        from agentrl.config.errors import ConfigError
        from agentrl.launch.needed_packages import require_packages

        if recipe.launch.device == "cuda" and detect_device() != "cuda":
            raise ConfigError(
                "--probe measures this machine, and it has no GPU: use --gpu cpu, or probe where there is one"
            )
        require_packages(dict.fromkeys(("torch", "transformers", "tokenizers"), "agentrl plan --probe"))
        from agentrl.bench.machine_probe import measured
        from agentrl.plan.published import config_of

        here = known.replaced(by_hand, "--assume")  # lengths decide what is tried
        values, sources = measured(recipe, decoder, dict(config_of(recipe.model.name)[0]), here, probe)
        known = known.replaced(values, sources)
    return known.replaced(by_hand, "--assume")


def _recorded(folder: Path, by_hand: dict[str, float]) -> dict[str, float]:
    """Returns the lengths and times of a run's episodes; nothing where it has none and the lengths were told.

    Raises:
        ConfigError: It has none, and nobody told them.
    """
    from agentrl.config.errors import ConfigError
    from agentrl.plan.recorded import episode_figures

    try:
        return episode_figures(folder)
    except ConfigError:
        if {"prompt", "answer"} <= by_hand.keys():
            return {}
        raise


def _allocated(recipe: "Recipe") -> int:
    """Returns the cards that a recipe's ``allocation`` names; 8 without one."""
    if recipe.allocation is None:
        return 8
    return recipe.inference.servers * recipe.inference.ranks + recipe.trainer.ranks


def _server_cards(case: Any, gpus: int, asked: int | None) -> int:
    """Returns the cards of a server: as asked for, as the recipe says, or the fewest that will do.

    The replicas of ``inference.dp`` share nothing, and count as servers.

    Raises:
        ConfigError: They cannot share the model's heads.
    """
    from agentrl.config.errors import ConfigError

    own = case.recipe.inference
    if asked is None and own.tp * own.pp == 1:
        return _fewest(case, gpus)
    cards = asked or own.tp * own.pp
    heads, key_heads, tensor = case.decoder.heads, case.decoder.kv_heads, asked or own.tp
    if heads % tensor or (tensor % key_heads and key_heads % tensor):
        raise ConfigError(
            f"{f'--server-gpus {asked}' if asked else f'inference.tp={tensor}'}: a server's cards share the model's "
            f"{heads} attention heads and {key_heads} key heads, and {tensor} does not divide them"
        )
    return cards


def _fewest(case: Any, gpus: int) -> int:
    """Returns the fewest cards of a server, a power of two, that hold the weights and a little more."""
    from agentrl.plan.memory import cache_tokens

    cards = 1
    while (
        cache_tokens(case.recipe, case.decoder, cards, case.known) < case.recipe.inference.context_length
        and 2 * cards < gpus
        and case.decoder.kv_heads % (2 * cards) == 0
    ):
        cards *= 2
    return cards


def _folder(run: Path) -> Path:
    return run if run.is_dir() else Path("runs") / run


def _explain(run: Path, gpu: str | None, assume: Any, probe: float | None, *, as_json: bool) -> None:
    import json

    from agentrl.config.load import recipe_of_run
    from agentrl.plan.explain import account, as_data, lines
    from agentrl.plan.recorded import read_steps

    folder = _folder(run)
    steps = read_steps(folder)
    recipe = recipe_of_run(folder)
    decoder, _ = _decoder(recipe)
    gpu = gpu or ("cpu" if recipe.launch.device == "cpu" else "h100")
    known = _assumptions(recipe, gpu, assume, probe, decoder, folder)
    found = account(recipe, decoder, known, steps)
    typer.echo(json.dumps(as_data(found)) if as_json else "\n".join(lines(found, folder)))
