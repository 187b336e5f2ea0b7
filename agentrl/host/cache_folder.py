"""Where what is made once and used by later runs is kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$AGENTRL_CACHE``, else ``~/.cache/agentrl``."""
    return Path(os.environ.get("AGENTRL_CACHE") or "~/.cache/agentrl").expanduser()
