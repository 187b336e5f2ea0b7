"""Location of the cache folder."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns ``$AGENTRL_CACHE``, else ``~/.cache/agentrl``."""
    return Path(os.environ.get("AGENTRL_CACHE") or "~/.cache/agentrl").expanduser()
