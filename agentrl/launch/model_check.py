"""Decides whether a run's model is checked in a process of its own while the servers load.

Guarantees: reads ``config.json`` alone and imports no torch. A model is left unchecked only if it is of a family whose
plain models tests have taken through the check, and nothing in its config departs from them; the trainer tries every
model again when it has loaded it.
"""

import json
from pathlib import Path

from agentrl.config.recipe import TrainerConfig
from agentrl.host.cpu_env import CPU_ENV
from agentrl.launch import commands
from agentrl.launch.supervisor import Supervisor
from agentrl.models.folder_check import is_plain

NICENESS = 19  # the servers load at the same time


def start_model_check(trainer: TrainerConfig, model: Path, run_dir: Path, supervisor: Supervisor) -> None:
    """Starts a process that fails if the model cannot be trained, which ends the run; none for a plain model.

    Args:
        trainer: The recipe's trainer section.
        model: Folder of the model.
        run_dir: Folder of the run.
        supervisor: Supervisor of the run's processes.
    """
    config = json.loads((model / "config.json").read_text())
    if trainer.lora_targets or not is_plain(config):
        command = commands.model_check(model, run_dir)
        supervisor.start("model-check", command, env=CPU_ENV, niceness=NICENESS, brief=True)
