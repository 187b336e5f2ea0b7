"""Environments around environments, by their public names; they stand in :mod:`agentrl.envkit.wrappers`."""

from agentrl.envkit.wrappers import *  # noqa: F403 - the public names
from agentrl.envkit.wrappers import __all__ as __all__
