"""Tells whether the Hugging Face hub can be reached.

Guarantees: an answer within about :data:`CONNECT_SECONDS`, never an exception. ``huggingface_hub`` itself retries
for 24 seconds before it reports that a machine is offline.
"""

import os
import socket
from urllib.parse import urlsplit

CONNECT_SECONDS = 3.0  # a working connection needs well under one


def endpoint() -> str:
    """Returns the hub's address, which like ``huggingface_hub`` it reads from ``HF_ENDPOINT``."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def unreachable() -> str | None:
    """Returns why the hub cannot be reached; ``None`` if it can."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} is set"
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return None  # a direct connection says nothing; the client goes through the proxy
    parts = urlsplit(endpoint())
    host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return f"no connection to {host}:{port} within {CONNECT_SECONDS:.0f} s ({error})"
    return None
