"""``agentrl chat``: lets a person talk to a model as the trainer sees it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.recipe import complete_override, complete_recipe

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe

_SCHEMES = ("http://", "https://")
_PERSON = "a-person"  # stands for the environment while a recipe without one is validated


def chat(
    name: Annotated[
        str | None,
        typer.Argument(
            help="The model: a name or a folder as in model.name, or the URL of a running server. Default: the "
            "recipe's model.",
            metavar="[NAME|URL]",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings of a recipe, e.g. sampling.temperature=0 or model.chat_template=chatml_tools.",
            metavar="[KEY=VALUE]...",
            autocompletion=complete_override,
        ),
    ] = None,
    env: Annotated[
        str | None, typer.Option("--env", help="An environment's id: its messages and tools are the model's.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show each turn's ids, text and loss mask, and what was parsed of it.")
    ] = False,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="Take all settings from a recipe, its environment too (--env none: without).",
            autocompletion=complete_recipe,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="Kind of the server, as in inference.engine; a URL ending in /v1 is openai."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="With a URL: the folder with the tokenizer, or the API's name of the model."),
    ] = None,
) -> None:
    """Talk to a model through the session that training uses, or watch it act in an environment.

    Samples as in training: sampling.temperature=0 makes it greedy. The API key is read from $OPENAI_API_KEY, or the
    variable that inference.api_key_env names.
    """
    from agentrl.cli.chat_run import run_chat

    given = list(overrides or ())
    if name is not None and _is_setting(name):
        name, given = None, [name, *given]
    loaded = chat_recipe(name, given, env=env, recipe=recipe, engine=engine, model=model)
    raise typer.Exit(run_chat(loaded, tokens=tokens))


def chat_recipe(
    name: str | None,
    overrides: list[str],
    *,
    env: str | None = None,
    recipe: str | None = None,
    engine: str | None = None,
    model: str | None = None,
) -> "Recipe":
    """Builds the recipe of a chat: its ``inference.urls`` name a running server, its ``env.id`` may be ``none``.

    Args:
        name: Name or folder of the model, or the URL of a running server; ``None`` for the recipe's model.
        overrides: ``key=value`` settings, which win over the other arguments.
        env: Id of the environment.
        recipe: Recipe whose settings are used.
        engine: Kind of the server.
        model: With a URL, the folder with the tokenizer, or the API's name of the model.

    Raises:
        ConfigError: The arguments contradict each other, or a setting is wrong.
    """
    from agentrl.config.load import load_recipe
    from agentrl.config.overrides import parse_override
    from agentrl.config.recipe import ComponentConfig
    from agentrl.config.supervised import NO_ENV

    for text in overrides:
        parse_override(text)  # a wrong key is said before a missing model
    settings = ["trainer.type=null"]
    settings += _model_settings(name, model, engine, needed=recipe is None and not _sets(overrides, "model.name"))
    if env is not None and env != NO_ENV:
        settings.append(f"env.id={env}")
    elif recipe is None and not _sets(overrides, "env.id"):
        settings.append(f"env.id={_PERSON}")
    loaded = load_recipe(recipe, [*settings, *overrides]) if recipe else _without_recipe([*settings, *overrides])
    if env == NO_ENV or loaded.env.id == _PERSON:
        loaded = loaded.model_copy(update={"env": ComponentConfig(id=NO_ENV)})
    return loaded


def _model_settings(name: str | None, model: str | None, engine: str | None, *, needed: bool) -> list[str]:
    """Converts the arguments that name the model and the server to settings."""
    from agentrl.config.errors import ConfigError
    from agentrl.config.yaml12 import write_yaml

    kind = [f"inference.engine={engine}"] if engine is not None else []
    if name is None or not name.startswith(_SCHEMES):
        if name is not None and model is not None:
            raise ConfigError(f"{name} is the model already: --model {model} is for the URL of a running server")
        found = name or model
        if found is None and needed:
            raise ConfigError("name a model or the URL of a running server: agentrl chat NAME|URL, or give --recipe")
        return [*kind, *([f"model.name={write_yaml(found)}"] if found is not None else [])]
    in_text = engine == "openai" or (engine is None and name.rstrip("/").endswith("/v1"))
    if model is None and (needed or in_text):
        what = "NAME: the server's name of the model" if in_text else "FOLDER: the model, whose tokenizer is needed"
        raise ConfigError(f"{name} needs --model {what}")
    settings = [f"inference.urls={write_yaml([name])}"]
    settings += kind or [f"inference.engine={'openai' if in_text else 'embedded'}"]
    return settings + ([f"model.name={write_yaml(model)}"] if model is not None else [])


def _without_recipe(settings: list[str]) -> "Recipe":
    from agentrl.config.device import detect_device
    from agentrl.config.load import validate
    from agentrl.config.overrides import parse_override, set_key

    data: dict[str, object] = {"name": "chat", "launch": {"device": detect_device()}}
    for text in settings:
        data = set_key(data, *parse_override(text))
    return validate(data)


def _sets(overrides: list[str], key: str) -> bool:
    return any(text.startswith(f"{key}=") for text in overrides)


def _is_setting(text: str) -> bool:
    """Whether an argument in the model's place is ``key=value``."""
    return "=" in text and not text.startswith(_SCHEMES) and not Path(text).exists()
