"""Saves and restores the states of a rank's random number generators.

Guarantees: after :func:`load_random_state` torch (also on this rank's GPU), NumPy and Python's ``random`` draw what
they would have drawn after :func:`save_random_state`. The states are of one rank: those of a checkpoint are used only
by as many ranks as wrote them.
"""

import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save


def _file(folder: Path, rank: int, ranks: int) -> Path:
    return folder / f"random-{rank}-of-{ranks}.safetensors"


def save_random_state(folder: Path, rank: int, ranks: int) -> Path:
    """Writes this rank's states into a checkpoint's folder; returns the file."""
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    inner = numpy["state"]
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": _optional(gauss),
        "numpy": torch.tensor([*map(int, inner["key"]), int(inner["pos"]), int(numpy["has_gauss"])], dtype=torch.int64),
        "numpy_gauss": _optional(float(numpy["gauss"])),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    path = _file(folder, rank, ranks)
    path.write_bytes(save(states))  # an OSError where the disk is full
    return path


def load_random_state(folder: Path, rank: int, ranks: int) -> bool:
    """Restores this rank's states; returns whether the checkpoint has them: it was written by as many ranks."""
    path = _file(folder, rank, ranks)
    if not path.is_file():
        return False
    states = load_file(path)
    torch.set_rng_state(states["torch"])
    version, *words = states["python"].tolist()
    gauss = states["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *key, pos, has_gauss = states["numpy"].tolist()
    inner = {"key": np.array(key, np.uint32), "pos": pos}
    second = states["numpy_gauss"].tolist()[0]
    np.random.set_state({"bit_generator": "MT19937", "state": inner, "has_gauss": has_gauss, "gauss": second})
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    return True


def _optional(value: float | None) -> torch.Tensor:
    return torch.tensor([] if value is None else [value], dtype=torch.float64)
