"""Finds the packages that a run needs and that are not installed, before anything starts.

Guarantees: nothing is imported; all missing packages are named at once, with the extra that brings them.
"""

from importlib.util import find_spec

from agentrl.config.errors import UserError
from agentrl.config.recipe import Recipe
from agentrl.config.supervised import SUPERVISED, evaluates
from agentrl.core.extras import extra_of, install_hint
from agentrl.inference.kinds.kind import server_kind

TOKENIZING = ("transformers", "huggingface_hub", "jinja2", "tokenizers")
SERVING = ("torch", *TOKENIZING, "filelock", "safetensors")  # the embedded engine
TRAINING = (*SERVING, "matplotlib")
SUPERVISING = (*TRAINING, "accelerate", "datasets", "trl")
SHOWN = 3  # names in a message


class MissingPackageError(UserError):
    """A package that a command needs is not installed; the message names its extra."""


def needed_packages(recipe: Recipe) -> dict[str, str]:
    """Returns the packages that a recipe's run imports, each with what needs it."""
    trainer, inference = recipe.trainer, recipe.inference
    needed: dict[str, str] = {}
    if trainer.type in SUPERVISED:
        needed |= dict.fromkeys(SUPERVISING, f"trainer.type={trainer.type}")
    elif trainer.type is not None:
        needed |= dict.fromkeys(TRAINING, "training")
    if trainer.type is not None and recipe.logging.tensorboard:
        needed["tensorboardX"] = "logging.tensorboard=true"
    if trainer.type is not None:
        needed |= {name: f"logging.trackers=[{name}]" for name in recipe.logging.trackers}
    if trainer.type is not None and trainer.lora_rank is not None:
        needed["peft"] = "trainer.lora_rank"
    if trainer.type not in SUPERVISED or evaluates(recipe):
        kind = server_kind(inference.engine)
        engine = f"inference.engine={inference.engine}"
        if kind.capabilities.token_logprobs:
            needed = dict.fromkeys(TOKENIZING, engine) | needed
        if kind.package is None and kind.capabilities.starts and not inference.urls:
            needed = dict.fromkeys(SERVING, engine) | needed
    return needed


def require_packages(needed: dict[str, str]) -> None:
    """Refuse to go on without some packages.

    Args:
        needed: Import names of packages, each with what needs it.

    Raises:
        MissingPackageError: Some are not installed; the message says how to install them.
    """
    missing = [package for package in needed if find_spec(package) is None]
    if not missing:
        return
    extra = extra_of(missing[-1])  # the last one's extra brings the others too: they build on one another
    more = f" and {len(missing) - SHOWN} more packages" if len(missing) > SHOWN else ""
    names = ", ".join(missing[:SHOWN]) + more
    raise MissingPackageError(f"{needed[missing[0]]} needs {names}, not installed: {install_hint(extra)}")
