"""Chooses the device of a run if the recipe does not set it.

Guarantees: does not import torch or start a process; gives the same answer every time on one machine.
"""

import os
from pathlib import Path
from typing import Literal

Device = Literal["cpu", "cuda"]


def detect_device(devices: Path = Path("/dev")) -> Device:
    """Returns ``cuda`` if an NVIDIA GPU is present and visible, else ``cpu``.

    Args:
        devices: Folder of the device files, where the NVIDIA driver puts ``nvidia0``, ``nvidia1``, ...
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "none", "NoDevFiles"):
        return "cpu"
    return "cuda" if any(devices.glob("nvidia[0-9]*")) else "cpu"
