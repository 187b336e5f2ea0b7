"""Computes the soft penalty for overlong answers of DAPO (arXiv:2503.14476), equation 13.

Guarantees: 0 up to ``max_length - cache`` tokens, then linearly down to -1 at ``max_length``, and -1 beyond; the same
numbers as ``trl.rewards.get_soft_overlong_punishment``, without importing ``trl``.
"""


def soft_overlong_penalty(length: int, *, max_length: int, cache: int) -> float:
    """Returns the penalty to add to an answer's reward.

    Args:
        length: Length of the answer in tokens.
        max_length: Length in tokens from which the penalty is -1; 20,480 in the paper.
        cache: Tokens before ``max_length`` over which the penalty grows; 4,096 in the paper. 0 makes it a step.

    Returns:
        A number in ``[-1, 0]``.

    Raises:
        ValueError: ``length`` is negative, or ``cache`` is not in ``0..max_length``.
    """
    if length < 0 or not 0 <= cache <= max_length:
        raise ValueError(f"length={length}, max_length={max_length}, cache={cache}: want 0 <= cache <= max_length")
    free = max_length - cache
    if length <= free:
        return 0.0
    return (free - length) / cache if length <= max_length else -1.0
