"""Finds the chat template that a recipe names, and the end tokens that a model's folder names."""

import json
from pathlib import Path
from typing import Any

from agentrl.core.extras import install_hint
from agentrl.core.model_files import Unreadable, end_ids, read_tokenizer
from agentrl.core.template_marks import TemplateError


def template_text(source: str | None, folder: Path, *, trust: bool = False) -> str | None:
    """The Jinja text that ``source`` names, see :meth:`ChatTemplate.from_folder`; ``None`` for the model's own.

    Raises:
        TemplateError: ``source`` is ``training``, and TRL is missing or has no variant of the model's template.
    """
    if source is None:
        return None
    if source != "training":
        return built_in_templates().get(source, Path(source)).read_text()
    try:
        return training_template(read_tokenizer(folder, trust=trust))
    except Unreadable as error:
        raise TemplateError(str(error)) from error


def built_in_templates() -> dict[str, Path]:
    """Jinja files that come with agentrl, by name."""
    return {file.stem: file for file in (Path(__file__).parent / "templates").glob("*.jinja")}


def training_template(tokenizer: Any) -> str | None:
    """TRL's training variant of a tokenizer's template; ``None`` if the template needs no change.

    Raises:
        TemplateError: TRL is missing, or has no variant of this template.
    """
    try:
        from trl.chat_template_utils import get_training_chat_template
    except ImportError as error:
        raise TemplateError(f"model.chat_template=training needs TRL: {install_hint('train')}") from error
    try:
        return get_training_chat_template(tokenizer)
    except ValueError as error:
        raise TemplateError(f"model.chat_template=training: {error}") from error


def generation_end_ids(folder: Path) -> list[int]:
    """``eos_token_id`` of a model folder's generation config, as a list.

    Raises:
        TemplateError: The file is no JSON object, or the key holds no ids.
    """
    file = folder / "generation_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    except (ValueError, AttributeError) as error:
        raise TemplateError(f"{file} holds no JSON object ({error}): take the model's own") from error
    try:
        return end_ids(found, str(file))
    except Unreadable as error:
        raise TemplateError(str(error)) from error
