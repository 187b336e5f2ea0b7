"""Builds the workflow, the server connections and the chat sessions of a recipe's episodes.

Guarantees: nothing is started and no server is called; everything that depends on the kind of server comes from its
:class:`~agentrl.inference.kinds.kind.ServerKind`.
"""

from pathlib import Path
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.core.registry import load
from agentrl.core.workflow import RolloutWorkflow
from agentrl.inference.backend import Backend, PauseMode, SamplingParams
from agentrl.inference.client import ChatClient, EvaluationClient
from agentrl.inference.http import OPEN, SERVER_KEY, Access
from agentrl.inference.kinds.kind import TextApi, server_kind
from agentrl.inference.router import Router
from agentrl.inference.session import SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.inference.tool_parsers import PARSERS
from agentrl.weights.first_push import TEXT


def make_workflow(recipe: Recipe) -> RolloutWorkflow:
    """Builds the recipe's workflow; ``agent_env`` also gets the recipe's environment, agent and reward."""
    workflow = load("workflow", recipe.workflow.id)
    kwargs = dict(recipe.workflow.kwargs)
    if recipe.workflow.id == "agent_env":
        kwargs |= {
            "env": recipe.env.id,
            "env_kwargs": recipe.env.kwargs,
            "agent": recipe.agent.id,
            "agent_kwargs": recipe.agent.kwargs,
            "reward": recipe.reward.id,
            "reward_kwargs": recipe.reward.kwargs,
            "close_timeout": recipe.rollout.close_timeout,
        }
    elif recipe.reward.id is not None:
        raise ValueError(f"reward.id={recipe.reward.id} works with workflow.id=agent_env, not {recipe.workflow.id}")
    return workflow(**kwargs)


def access_to_servers(recipe: Recipe, key_env: str = SERVER_KEY) -> Access:
    """Returns key and trust of a recipe's servers.

    Args:
        recipe: Recipe; its ``inference`` section names the servers.
        key_env: Environment variable that holds the key; the launcher sets it for servers on machines of their own.
    """
    return Access.of(key_env, recipe.launch.tls.ca)


def make_backend(recipe: Recipe, url: str, key_env: str = SERVER_KEY) -> Backend:
    """Connects to one server of the recipe's kind; ``key_env`` as in :func:`access_to_servers`."""
    kind, access = server_kind(recipe.inference.engine), access_to_servers(recipe, key_env)
    if access == OPEN or not kind.capabilities.remote:
        return kind.backend(url, recipe.inference.request_timeout)
    return kind.backend(url, recipe.inference.request_timeout, access)


def make_client(recipe: Recipe, model: Path, urls: list[str]) -> ChatClient:
    """Builds a client for token-exact chat sessions on servers that return token ids.

    Args:
        recipe: Recipe; ``inference``, ``sampling``, ``model`` and ``trainer.type`` are read.
        model: Model folder with the tokenizer.
        urls: URLs of the servers.
    """
    inference = recipe.inference
    router = Router(
        [make_backend(recipe, url) for url in urls],
        probe_seconds=inference.probe_seconds,
        patience=inference.patience,
    )
    return ChatClient(router, *make_settings(recipe, model))


def first_push_probe(recipe: Recipe, template: ChatTemplate) -> list[int]:
    """Returns the ids of a text whose logprobs the first push must leave as they are; none where it is not checked."""
    if recipe.weights.names != "files" or not server_kind(recipe.inference.engine).capabilities.scoring:
        return []
    return template.encoder.ids(TEXT)


def pause_mode(recipe: Recipe, template: ChatTemplate) -> PauseMode:
    """Returns how a push stops requests: those with images must end where the servers could not go on with them."""
    goes_on = template.shown.reader is None or server_kind(recipe.inference.engine).capabilities.images_go_on
    return recipe.weights.pause_mode if goes_on else "abort"


def make_settings(recipe: Recipe, model: Path) -> tuple[ChatTemplate, SessionSettings, SessionSettings]:
    """Builds the chat template of a recipe's sessions, and the settings of training and of evaluation."""
    inference, sampling = recipe.inference, recipe.sampling
    template = ChatTemplate.from_folder(
        model,
        source=recipe.model.chat_template,
        policy=inference.history,
        variables=inference.chat_template_kwargs,
        trust=recipe.model.trust_remote_code,
    )
    can = server_kind(inference.engine).capabilities
    servers = f"servers of the kind inference.engine={inference.engine}"
    if not can.images:
        template.shown.refuse(f"{servers} take no images beside ids")
    reader = template.shown.reader
    if reader is not None and not reader.plain and not can.mixed_placeholders:
        template.shown.refuse(
            f"{servers} take only images for which nothing but placeholders stands, and {reader.name} puts marks "
            "around them or between rows; take another kind of server"
        )
    if not can.videos:
        template.shown.refuse_videos(f"{servers} take no frames beside ids")
    training = SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=template.stop_texts,
        stop_token_ids=template.stop_ids,
    )
    evaluation = SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.eval_temperature,
        stop=template.stop_texts,
        stop_token_ids=template.stop_ids,
    )

    def settings(params: SamplingParams, *, locked: bool, experts: bool = False) -> SessionSettings:
        return SessionSettings(
            params,
            inference.context_length,
            locked=locked,
            model=recipe.model.name,
            parser=PARSERS[inference.tool_parser] if inference.tool_parser else None,
            structured_output=server_kind(inference.engine).capabilities.structured_output,
            experts=experts,
        )

    locked = recipe.trainer.type is not None
    experts = locked and recipe.trainer.replay_routing
    return template, settings(training, locked=locked, experts=experts), settings(evaluation, locked=False)


def request_options(recipe: Recipe) -> dict[str, Any]:
    """Returns the options of each request to an external API where an agent sets none."""
    found: dict[str, Any] = {
        "temperature": recipe.sampling.eval_temperature,
        "max_tokens": recipe.sampling.max_new_tokens,
        **recipe.inference.options,
    }
    if "max_completion_tokens" in recipe.inference.options and "max_tokens" not in recipe.inference.options:
        del found["max_tokens"]  # two names of one limit
    return {name: value for name, value in found.items() if value is not None}


def make_text_client(recipe: Recipe, url: str) -> EvaluationClient:
    """Builds a text-only client for evaluation on a server that returns no token ids."""
    inference = recipe.inference
    api = TextApi(
        url=url,
        model=inference.model or recipe.model.name,
        api_key_env=inference.api_key_env,
        timeout=inference.request_timeout,
        defaults=request_options(recipe),
        max_concurrent=recipe.rollout.max_concurrent,
        retry_seconds=inference.retry_seconds,
    )
    return server_kind(inference.engine).text_client(api)
