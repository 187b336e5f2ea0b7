"""The error that ends a run from the rollouts' side."""


class RolloutError(RuntimeError):
    """The rollouts cannot go on; the message says why."""
