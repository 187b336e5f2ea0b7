"""Finds the teacher of a distillation, compares its vocabulary with the policy's, and starts its servers.

Guarantees: a teacher whose vocabulary differs from the policy's is refused before a process starts; servers that the
recipe names by URL are never started or stopped.
"""

from pathlib import Path

from rich.console import Console

from agentrl.config.errors import UserError
from agentrl.config.recipe import Recipe
from agentrl.config.teacher import as_teacher
from agentrl.data.models import find_file, resolve_model
from agentrl.data.vocabulary import TOKENIZER, disagreements
from agentrl.launch.servers import start_servers
from agentrl.launch.supervisor import Supervisor
from agentrl.observe.say import say

SHOWN = 3  # most differing tokens in the message


def find_teacher(recipe: Recipe, student: Path, console: Console) -> Path | None:
    """Find the teacher's model (or only its tokenizer, if it is served already) and compare vocabularies.

    Args:
        recipe: The recipe as loaded.
        student: Folder of the policy's model.
        console: Console to print the teacher's source to.

    Returns:
        The folder of the teacher's model; ``None`` if no teacher server is to be started.

    Raises:
        UserError: The teacher is not found, or its token ids differ from the policy's.
    """
    name = recipe.teacher.model
    if name is None:
        return None
    if recipe.teacher.urls:
        file, source = find_file(name, TOKENIZER)
        if file is None:
            raise UserError(f"teacher.model={name}: its {TOKENIZER} is needed to compare vocabularies ({source})")
        folder, teacher = None, file
    else:
        model = resolve_model(name, lambda text: say(console, text), "teacher.model")
        folder, teacher, source = model.path, model.path / TOKENIZER, model.source
    wrong = disagreements(student / TOKENIZER, teacher)
    if wrong:
        shown = ", ".join(f"{token!r} is {ours}, in the teacher {theirs}" for token, ours, theirs in wrong[:SHOWN])
        raise UserError(
            f"teacher.model={name} has another vocabulary than model.name={recipe.model.name}: {len(wrong)} tokens "
            f"differ ({shown}); a teacher can only score ids that stand for the same tokens in both models"
        )
    say(console, f"teacher {source}")
    return folder


def teacher_urls(recipe: Recipe, model: Path | None, processes: Path, supervisor: Supervisor) -> list[str]:
    """Returns the URLs of the teacher's servers, which are started if ``model`` is given; empty without a teacher."""
    if model is None:
        return list(recipe.teacher.urls)
    own = recipe.inference
    policy = 0 if own.urls or own.nodes else own.servers * own.ranks
    return start_servers(as_teacher(recipe), model, processes, supervisor, "teacher", gpus_before=policy)
