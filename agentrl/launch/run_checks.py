"""Checks of a recipe before a process of its run starts: components, certificates, the compiler, the disk."""

import os
import shutil
import ssl
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.config.supervised import NO_ENV
from agentrl.config.teacher import as_teacher
from agentrl.core.registry import nearest, require
from agentrl.inference.template_source import built_in_templates
from agentrl.inference.tool_parsers import PARSERS
from agentrl.launch.model_shape import shape_of_weights
from agentrl.launch.needed_packages import needed_packages, require_packages
from agentrl.launch.placement import server_problems
from agentrl.launch.resume import RunError
from agentrl.launch.server_checks import check_servers
from agentrl.launch.servers import server_python
from agentrl.models.folder_check import refused_folder
from agentrl.rollout.assemble import make_workflow

SAVED_BYTES = 12  # of a parameter in a checkpoint: itself and two moments, all float32, whatever the files hold


def check_components(recipe: Recipe) -> None:
    """Run :func:`check_names`, and find the interpreters of the servers that the run starts.

    Raises:
        UserError: A component or an interpreter is missing.
    """
    check_names(recipe)
    if not recipe.inference.urls:
        server_python(recipe.inference)
    if recipe.teacher.model is not None and not recipe.teacher.urls:
        server_python(as_teacher(recipe).inference, "teacher")


def check_names(recipe: Recipe) -> None:
    """Import the recipe's components, make one environment, and check the capabilities of its servers.

    Raises:
        UserError: A name is unknown, a file cannot be imported, arguments do not fit, or a kind of server lacks a
            capability.
    """
    check_servers(recipe)
    for problem in server_problems(recipe):
        raise RunError(problem)
    check_tls(recipe)
    require_packages(needed_packages(recipe))
    try:
        if recipe.env.id != NO_ENV:
            make_workflow(recipe)
        if recipe.trainer.type is not None:  # only looked up here, because importing them may need torch
            require("trainer", recipe.trainer.type)
            require("advantage", recipe.trainer.advantage)
            require("objective", recipe.trainer.objective)
    except (LookupError, ImportError, SyntaxError, TypeError, ValueError, TimeoutError) as error:
        raise RunError(str(error)) from error
    if recipe.trainer.compile and recipe.launch.device == "cpu" and not _has_compiler():
        raise RunError("trainer.compile needs a C++ compiler (g++, clang++ or $CXX) on a CPU, and none was found")
    parser, template = recipe.inference.tool_parser, recipe.model.chat_template
    if parser is not None and parser not in PARSERS:
        hint = nearest(parser, list(PARSERS))
        raise RunError(f"inference.tool_parser={parser}: unknown{hint}; known: {', '.join(PARSERS)}")
    ours = list(built_in_templates())
    if template not in (None, "training", *ours) and not Path(str(template)).is_file():
        raise RunError(
            f"model.chat_template={template}: no such file{nearest(str(template), ours)} (a Jinja file, training for "
            f"TRL's, or one of ours: {', '.join(ours)})"
        )


def check_tls(recipe: Recipe) -> None:
    """Refuse TLS files that are not there or do not belong together, on the machine of the command.

    Raises:
        RunError: A file cannot be read, or the key is not the certificate's.
    """
    tls = recipe.launch.tls
    try:
        if tls.certificate is not None and tls.key is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls.certificate, tls.key, password="")  # else OpenSSL asks at the terminal
        if tls.ca is not None:
            ssl.create_default_context(cafile=tls.ca)
    except OSError as error:
        raise RunError(
            f"launch.tls.certificate={tls.certificate} with launch.tls.key={tls.key} and launch.tls.ca={tls.ca} cannot "
            f"be used: {error}"
        ) from error


def _has_compiler() -> bool:
    return bool(os.environ.get("CXX")) or any(map(shutil.which, ("g++", "clang++", "c++")))


def check_folder(model: Path) -> None:
    """Refuse a model that no trainer can train, from its folder's JSON files.

    Raises:
        RunError: It is quantised, an encoder-decoder, or lacks files.
    """
    if why := refused_folder(model):
        raise RunError(f"the model cannot be trained: {why}")


def check_disk(recipe: Recipe, model: Path, run_dir: Path) -> None:
    """Refuse a run if the disk has too little space for its checkpoints.

    Raises:
        RunError: The disk has too little free space.
    """
    export = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    whole = (recipe.trainer.lora_rank is None) + (recipe.trainer.advantage == "gae")  # adapters are small
    saves = recipe.trainer.keep_checkpoints + 1  # one more while writing
    checkpoints = SAVED_BYTES * shape_of_weights(model).parameters * whole * saves
    needed = checkpoints + export
    free = shutil.disk_usage(run_dir).free
    if free < needed:
        raise RunError(
            f"{run_dir} has {free / 1e9:.1f} GB free, checkpoints and the exported model need up to "
            f"{needed / 1e9:.1f} GB: free some space, or choose another place with launch.run_dir=DIR"
        )
