"""Writes the model of a training's checkpoint as a Hugging Face folder, without the training's processes.

Guarantees: the folder is complete or absent; every parameter comes from the checkpoint, and one that it lacks ends the
command; a checkpoint of adapters alone is refused. ``python -m agentrl.train.checkpoint_model CHECKPOINT TARGET``.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from agentrl.config.errors import UserError
from agentrl.core.image_reader import copy_processor
from agentrl.core.model_files import Unreadable, read_config, read_tokenizer
from agentrl.host.entry import begin, refuse
from agentrl.models.auto_class import auto_class
from agentrl.train.checkpoint_state import CHAT_TEMPLATE, EXPORTED, read_state

_PREFIX = "model.model."  # of a parameter's name: the checkpoint's part, and the policy's attribute


def write_model(checkpoint: Path, start: Path, target: Path) -> None:
    """Writes the model of a checkpoint.

    Args:
        checkpoint: Folder of the checkpoint, ``runs/<name>/checkpoints/step-<n>``.
        start: Folder of the starting policy, with the configuration and the tokenizer.
        target: Folder to write.

    Raises:
        UserError: The checkpoint holds no whole model of this kind.
    """
    run = checkpoint.parent.parent
    trust = _trusted(run / "config.json")
    config = read_config(start, trust=trust)
    dtype = getattr(config, "dtype", None) or torch.float32
    model: Any = auto_class(config).from_config(config, torch_dtype=dtype, trust_remote_code=trust)
    state = _read(checkpoint)
    missing, unknown = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    lacks = [name for name in missing if name not in tied and not any(name.endswith(one) for one in tied)]
    if lacks or unknown:
        wrong = ", ".join([*lacks, *unknown][:3])
        raise UserError(f"{checkpoint} does not hold the whole model of {start} ({wrong}): was an adapter trained?")
    model.tie_weights()
    partial = target.with_name(f".partial-{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        tokenizer = read_tokenizer(start, trust=trust)
        template = run / CHAT_TEMPLATE
        if template.is_file():
            tokenizer.chat_template = template.read_text()
        tokenizer.save_pretrained(partial)
        copy_processor(start, partial)
        (partial / EXPORTED).write_text(json.dumps({"step": read_state(checkpoint)["step"]}))
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _trusted(settings: Path) -> bool:
    """Whether the resolved recipe of a run lets code run that comes with its model."""
    return settings.is_file() and json.loads(settings.read_text())["model"].get("trust_remote_code", False)


def _read(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Reads the policy's parameters by their names in the model."""
    reader = FileSystemReader(str(checkpoint))
    found = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in found.items()
        if name.startswith(_PREFIX) and isinstance(one, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def main() -> int:
    """Writes the model of the checkpoint that the command line names, from the starting model, to a folder."""
    checkpoint, start, target = map(Path, sys.argv[1:])
    begin()
    try:
        write_model(checkpoint, start, target)
    except UserError as error:
        return refuse(error)
    except Unreadable as error:
        return refuse(UserError(str(error)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
