"""Pytest plugin that imports torchvision beside a CPU build of torch.

The wheel of the package index is built for CUDA: its compiled operators do not load here, and the import fails where it
describes them to torch. Video processors need none of them, so what describes them is left out.
"""

from collections.abc import Callable
from typing import Any

import torch

_register = torch.library.register_fake


def _others(name: Any, *args: Any, **options: Any) -> Any:
    if isinstance(name, str) and name.startswith("torchvision::"):
        unchanged: Callable[[Any], Any] = lambda described: described  # noqa: E731
        return unchanged
    return _register(name, *args, **options)


torch.library.register_fake = _others
try:
    import torchvision  # noqa: F401 # pyright: ignore
finally:
    torch.library.register_fake = _register
