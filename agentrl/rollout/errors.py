"""The error with which the rollouts end a run."""


class RolloutError(RuntimeError):
    """The rollouts cannot go on; the message says why."""
